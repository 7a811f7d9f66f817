"""A long run of one master, two slaves and three clusters, as real processes, that is harmed again and again and judged
after each harm.

Directories are as `dips up` makes them, so that `dips verify` can judge the run while it goes on and at its end.
"""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support import live
from support.fault_proxy import Proxies
from support.fork_server import ForkedProcess, ForkServer
from support.ports import own_port
from support.waiting import until
from support.whole_run import option_words

from dips.core.errors import Refused, RetryLater
from dips.core.ids import Incarnation
from dips.core.messages import StatusReply
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE, INSECURE_VARIABLE, KEYS_VARIABLE, Security
from dips.local.log_files import tape_path
from dips.local.operator_client import OperatorClient
from dips.master.directory import TAPE_NAME
from dips.master.page.history import TapeTail
from dips.master.state.records import RoundPhase

SLAVES = ("s0", "s1")
CLUSTERS = ("a", "b", "c")
NAMES = ("master", *SLAVES, *CLUSTERS)

HEARTBEAT_S, EVICT_AFTER_BEATS = 0.4, 4
STOPPED_S, BRIEFLY_S = 2.2, 0.7
"""How long a stopped process stays so: longer than it takes to be evicted, or shorter."""

STEP_S = 0.05
CHECKPOINT_EVERY_S = 0.2
ROUNDS_TO_HEAL = 8
"""A healed run publishes in the first or the second round that begins then; a busy machine may abort some."""

QUICK_S = 2.0
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""A life shorter than QUICK_S is followed by a pause that grows with their number."""

MAX_QUICK_DEATHS = 60
"""More of them in a row are a crash loop."""


class FaultRun(live.Run):
    """Use as a context manager. Harms are arm() or whatever a test does to files and links; then recovered()."""

    def __init__(
        self,
        directory: Path,
        fork_server: ForkServer,
        *,
        n_elems: int = 600,
        step_s: float = STEP_S,
        proxies: Proxies | None = None,
        keys: Path | None = None,
        births: Mapping[str, Sequence[str]] | None = None,
        **master_knobs: object,
    ) -> None:
        """births: what failpoints do in the first lives of a process, one life after the other. proxies: put a relay
        before the control port for each peer (`NAME.control`) and before each slave's data port (`NAME.data`). keys:
        of an authority, with an identity for each process and for `operator`; None: nothing is encrypted."""
        self.directory = directory
        self.ports = {name: own_port() for name in ("master", *SLAVES)}
        self.address = f"127.0.0.1:{self.ports['master']}"
        self.children: dict[str, ForkedProcess] = {}
        self.lives: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.may_die: set[str] = set()
        self.ending: dict[str, int] = {}
        """Processes that were told to end or killed, and their lives so far: they come back with one more."""
        self.ends_with_run = False
        self.stopped_s = STOPPED_S
        """How long a stopped process stays so, from now on."""
        self._fork_server = fork_server
        self._n_elems, self._step_s = n_elems, step_s
        self._proxies = proxies
        self._keys = keys
        self._births = {name: list(specs) for name, specs in (births or {}).items()}
        self._master_knobs = {
            "sync_every": 4, "grace_s": 0.2, "heartbeat_s": HEARTBEAT_S, "evict_after_beats": EVICT_AFTER_BEATS,
            "round_timeout_s": 4.0, "verdict_wait_s": 10.0, "linger_s": 2.0, "journal_records": 16, **master_knobs,
        }  # fmt: skip
        self._held: set[str] = set()
        self._more: dict[str, list[str]] = {}
        self._born_s: dict[str, float] = {}
        self._quick_deaths: dict[str, int] = dict.fromkeys(NAMES, 0)
        self._stopped: dict[int, float] = {}
        self.woken: dict[str, int] = dict.fromkeys(NAMES, 0)
        self._seen_bytes: dict[str, int] = {}
        self._tape = Published(TapeTail(directory / "master" / TAPE_NAME))

    # ---- its processes ----

    def _begin(self) -> None:
        for name in ("logs", "tapes", "slaves", "checkpoints"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        if self._proxies is not None:
            for name in (*SLAVES, *CLUSTERS):
                self._proxies.add(f"{name}.control", ("127.0.0.1", self.ports["master"]))
            for name in SLAVES:
                self._proxies.add(f"{name}.data", ("127.0.0.1", self.ports[name]))
        for name in NAMES:
            self.start(name)

    def _end(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait(30)

    def place(self, name: str) -> Path:
        folder = "slaves" if name in SLAVES else "checkpoints"
        return self.directory / "master" if name == "master" else self.directory / folder / name

    def start(self, name: str) -> None:
        self.lives[name] += 1
        self._born_s[name] = time.monotonic()
        environment = self._security_of(name)
        births = self._births.get(name)
        if births:
            environment["DIPS_FAILPOINTS"] = births.pop(0)
            environment["DIPS_FAILPOINTS_ENABLED"] = "1"
            environment["DIPS_FAILPOINT_LOG"] = str(self.fired_log(name))
        arguments = [*self._arguments(name), *self._more.pop(name, [])]
        self.children[name] = self._fork_server.start(name, arguments, self.log_path(name), environment)

    def _security_of(self, name: str) -> dict[str, str]:
        return {INSECURE_VARIABLE: "1"} if self._keys is None else {KEYS_VARIABLE: str(self._keys / name)}

    def _arguments(self, name: str) -> list[str]:
        if name == "master":
            knobs = {"run_id": "test", "directory": self.place(name), "slaves": len(SLAVES), "listen": self.address}
            return ["master", *option_words({**knobs, **self._master_knobs})]
        control = self._dialled(f"{name}.control", self.address)
        if name in SLAVES:
            knobs = {
                "run_id": "test", "slave_id": name, "directory": self.place(name), "master": control,
                "data_port": self.ports[name], "advertise": self._dialled(f"{name}.data", self._bound(name)),
                "tape": tape_path(self.directory, name), "record_pushes": True, "compute_threads": 1, "data_threads": 1,
            }  # fmt: skip
            return ["slave", *option_words(knobs)]
        cluster = {
            "tape": tape_path(self.directory, name), "checkpoints": self.place(name),
            "checkpoint_every_s": CHECKPOINT_EVERY_S, "elems": self._n_elems, "step_s": self._step_s,
        }  # fmt: skip
        return ["cluster", name, control, *option_words(cluster)]

    def _bound(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def _dialled(self, relay: str, direct: str) -> str:
        return direct if self._proxies is None else self._proxies[relay].address

    def hold(self, name: str) -> None:
        self.will_end(name)
        self._held.add(name)
        self.kill(name)

    def release(self, name: str, *more: str) -> None:
        self._more[name] = list(more)
        self._held.discard(name)

    def kill(self, name: str) -> None:
        self.children[name].kill()
        self.children[name].wait(30)

    def log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def log(self, name: str, length: int = 2000) -> str:
        return self.log_path(name).read_text()[-length:] if self.log_path(name).exists() else ""

    def fired_log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.failpoints"

    def will_end(self, name: str) -> None:
        self.may_die.add(name)
        self.ending[name] = self.lives[name]

    def at_birth(self, name: str, spec: str) -> None:
        self._births.setdefault(name, []).append(spec)

    def arm(self, name: str, spec: str) -> None:
        """Tell a living process what its failpoints do from now on; "" ends it."""
        why_not = ""

        def armed() -> bool:
            nonlocal why_not
            why_not = self._fork_server.arm(self.children[name], spec, self.fired_log(name))
            return not why_not

        self.until(armed, f"{name} takes {spec!r}", lambda: why_not)

    def fired(self, name: str) -> list[str]:
        log = self.fired_log(name)
        return log.read_text()[self._seen_bytes.get(name, 0) :].splitlines() if log.exists() else []

    def fired_at_s(self, name: str) -> float:
        return self.fired_log(name).stat().st_mtime

    def mark(self, name: str) -> None:
        log = self.fired_log(name)
        self._seen_bytes[name] = log.stat().st_size if log.exists() else 0

    def tend(self) -> None:
        """Start again what died and may, let go on what stood still long enough. No other may end."""
        for name, child in list(self.children.items()):
            self._wake(name, child)
            code = child.poll()
            if code is None or (self.ends_with_run and code == 0):
                continue
            if name not in self.may_die:
                raise AssertionError(f"{name} ended with {code} by itself: {self.log(name)}")
            if name not in self._held:
                self._start_again(name)

    def _start_again(self, name: str) -> None:
        lived_s = time.monotonic() - self._born_s[name]
        quick = self._quick_deaths[name] + 1
        if lived_s < min(LONGEST_PAUSE_S, quick * PAUSE_S):
            return
        self._quick_deaths[name] = quick if lived_s < QUICK_S else 0
        assert quick < MAX_QUICK_DEATHS, f"{name} dies again and again: {self.log(name)}"
        self.start(name)

    def _wake(self, name: str, child: ForkedProcess) -> None:
        if child.returncode is not None:
            return
        since_s = self._stopped.get(child.pid)
        if since_s is None:
            if _state_of(child.pid) == "T":
                self._stopped[child.pid] = time.monotonic()
        elif time.monotonic() - since_s > self.stopped_s:
            del self._stopped[child.pid]
            self.woken[name] += 1
            child.send_signal(signal.SIGCONT)

    def until(self, happened: Callable[[], bool], what: str, state: Callable[[], str] | None = None) -> None:
        def look() -> bool:
            self.tend()
            return happened()

        until(look, what, state or self.where_it_stands)

    def status(self) -> StatusReply | None:
        try:
            with self.operator(call_s=1.0) as client:
                return client.status()
        except (Refused, RetryLater):
            return None

    def operator(self, call_s: float = 5.0) -> OperatorClient:
        security: Security = INSECURE if self._keys is None else load_identity(self._keys / "operator")
        return OperatorClient(self.address, call_s=call_s, security=security)

    def incarnations(self) -> dict[str, Incarnation | None]:
        status = self.status()
        return {} if status is None else {cluster.cluster_id: cluster.incarnation for cluster in status.clusters}

    def everyone_is_back(self, away: Mapping[str, Incarnation | None]) -> bool:
        """All processes live, all slaves serve, all clusters take part; those of `away` as newer incarnations."""
        if self._stopped or any(child.poll() is not None for child in self.children.values()):
            return False
        if any(self.lives[name] <= before for name, before in self.ending.items()):
            return False
        status = self.status()
        if status is None or status.recovery or status.paused:
            return False
        slaves = {slave.slave_id for slave in status.slaves if slave.alive and slave.phase == "READY"}
        clusters = {item.cluster_id: item for item in status.clusters if item.alive and "draining" not in item.note}
        joined = all(name not in clusters or clusters[name].incarnation != before for name, before in away.items())
        return slaves == set(SLAVES) and set(clusters) == set(CLUSTERS) and joined

    def where_it_stands(self) -> str:
        status = self.status()
        if status is None:
            stands = "no status"
        else:
            slaves = [(item.slave_id, item.alive, item.phase) for item in status.slaves]
            clusters = [(item.cluster_id, item.alive, item.phase, item.note) for item in status.clusters]
            stands = f"version {status.published}, phase {status.phase}, waiting for {status.waiting_for!r}, recovery "
            stands += f"{status.recovery!r}, paused {status.paused}, slaves {slaves}, clusters {clusters}"
        logs = "\n".join(f"--- {name}\n{self.log(name, 1500)}" for name in NAMES)
        return f"{stands}; lives {self.lives}\n{logs}"

    def began(self) -> None:
        self.until(lambda: self.everyone_is_back({}), "not everybody came")
        self.until(lambda: self._tape.published_since(0.0), "nothing was published")

    def recovered(
        self, away: Mapping[str, Incarnation | None] | None = None, also: Callable[[], bool] = lambda: True
    ) -> None:
        """Waits until every process is back and a version was published since. away: as of everyone_is_back(). also:
        asked until it is true, before the run counts as healed."""
        self.until(lambda: also() and self.everyone_is_back(away or {}), "not every process came back")
        healed_s = time.time()
        self.until(lambda: self._tape.published_since(healed_s), "nothing was published after every process was back")
        rounds = self._tape.rounds_until_published(healed_s)
        assert rounds <= ROUNDS_TO_HEAL, f"{rounds} rounds until a version was published: {self.where_it_stands()}"

    def healed(self, *slow: str) -> None:
        self.may_die = set(slow)
        self.ending.clear()

    def wait(self, for_s: float) -> None:
        end_s = time.monotonic() + for_s
        self.until(lambda: time.monotonic() >= end_s, "time stands still")

    def until_versions(self, count: int) -> None:
        for _ in range(count):
            now_s = time.time()
            self.until(functools.partial(self.published_since, now_s), "nothing is published")

    def published_since(self, wall_s: float) -> bool:
        """Whether a version that was not there before was published after this."""
        return self._tape.published_since(wall_s)

    def stop(self) -> None:
        self.ends_with_run = True

        def asked() -> bool:
            try:
                with self.operator() as client:
                    client.stop("the test is over")
            except (Refused, RetryLater):
                return False
            return True

        self.until(asked, "the run cannot be stopped")
        self.wait_for_end()

    def wait_for_end(self) -> None:
        self.until(lambda: all(child.poll() is not None for child in self.children.values()), "the run did not end")


def _state_of(pid: int) -> str:
    """The system's letter for what a process does; T: it is stopped."""
    try:
        return str(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    except (OSError, IndexError):
        return ""


BEGINS = frozenset({RoundPhase.WINDOW.value, RoundPhase.SEALED.value})


class Published:
    """Reads what was added since the last look. Times are the master's wall clock."""

    def __init__(self, tail: TapeTail) -> None:
        self._tail = tail
        self._phase = RoundPhase.IDLE.value
        self._published: list[float] = []
        self._versions: set[str] = set()
        """A master that starts again publishes once more what stands: that is no new version."""
        self._rounds: list[tuple[float, str]] = []
        """When a round left IDLE, and its name."""

    def published_since(self, wall_s: float) -> bool:
        self._look()
        return bool(self._published) and self._published[-1] >= wall_s

    def first_published(self, since_s: float) -> float:
        self._look()
        return next(at_s for at_s in self._published if at_s >= since_s)

    def rounds_until_published(self, since_s: float) -> int:
        """How many rounds began from here to the next published version, the one that made it among them; one that was
        under way already is no new one."""
        end_s = self.first_published(since_s)
        return len({name for at_s, name in self._rounds if since_s <= at_s <= end_s})

    def _look(self) -> None:
        while lines := self._tail.lines():
            for line in lines:
                self._take(json.loads(line))

    def _take(self, event: dict[str, object]) -> None:
        at_s = event["wall_s"]
        assert isinstance(at_s, float)
        if event["kind"] == "epoch":
            self._phase = RoundPhase.IDLE.value
        elif event["kind"] == "round":
            phase = str(event["phase"])
            if phase in BEGINS and self._phase == RoundPhase.IDLE.value:
                self._rounds.append((at_s, str(event["round"])))
            self._phase = phase
        elif event["kind"] == "publish" and str(event["version"]) not in self._versions:
            self._versions.add(str(event["version"]))
            self._published.append(at_s)
