"""A long run of one master, two slaves and three clusters, as real processes, that is harmed again and again and judged
after each harm.

Directories are as `dips up` makes them, so that `dips verify` can judge the run while it goes on and at its end.
"""

from __future__ import annotations

import functools
import itertools
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from support.fault_proxy import Proxies
from support.fork_server import ForkedProcess, ForkServer
from support.tape_tail import TapeTail
from support.whole_run import option_words

from dips.core.errors import Refused, RetryLater
from dips.core.ids import Incarnation
from dips.core.keys import load_identity
from dips.core.messages import StatusReply
from dips.core.security import INSECURE, INSECURE_VARIABLE, KEYS_VARIABLE, Security
from dips.launch.operator_client import OperatorClient
from dips.launch.tapes import tape_path
from dips.master.directory import TAPE_NAME
from dips.sim.verify import verify_run

SLAVES = ("s0", "s1")
CLUSTERS = ("a", "b", "c")
NAMES = ("master", *SLAVES, *CLUSTERS)

HEARTBEAT_S, EVICT_AFTER_BEATS = 0.4, 4
STOPPED_S, BRIEFLY_S = 2.2, 0.7
"""How long a stopped process stays so: longer than it takes to be evicted, or shorter."""

STEP_S = 0.05
CHECKPOINT_EVERY_S = 0.2
POLL_S = 0.02
HEAL_S = 60.0
"""For everything to be back after a harm, on a machine that is busy with other things."""

ROUNDS_TO_HEAL = 2
"""A healed run publishes in the first or the second round that begins then."""

QUICK_S = 2.0
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""A life shorter than QUICK_S is followed by a pause that grows with their number."""

MAX_QUICK_DEATHS = 60
"""More of them in a row are a crash loop."""


LAST_PORT = 31_000
_ports = itertools.count(21_000 + (time.monotonic_ns() // 1000) % 8_000)
"""No two runs of one test run take the same."""


def free_port() -> int:
    """One below the range from which the system takes ports for connections, so that it stays ours between lives."""
    while (port := next(_ports)) < LAST_PORT:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@dataclass
class Recovery:
    """What became of one harm. Seconds: until everybody was back, and until a version was published after the harm."""

    fired_s: float
    phase: str
    healed_after_s: float
    published_after_s: float
    rounds: int


class FaultRun:
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
        slave_knobs: Mapping[str, object] | None = None,
        **master_knobs: object,
    ) -> None:
        """births: what failpoints do in the first lives of a process, one life after the other. proxies: put a relay
        before the control port for each peer (`NAME.control`) and before each slave's data port (`NAME.data`). keys:
        of an authority, with an identity for each process and for `operator`; None: nothing is encrypted."""
        self.directory = directory
        self.ports = {name: free_port() for name in ("master", *SLAVES)}
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
        self._slave_knobs = dict(slave_knobs or {})
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
        self._tape = TapeTail(directory / "master" / TAPE_NAME)

    # ---- its processes ----

    def __enter__(self) -> FaultRun:
        for name in ("logs", "tapes", "slaves", "checkpoints"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        if self._proxies is not None:
            for name in (*SLAVES, *CLUSTERS):
                self._proxies.add(f"{name}.control", ("127.0.0.1", self.ports["master"]))
            for name in SLAVES:
                self._proxies.add(f"{name}.data", ("127.0.0.1", self.ports[name]))
        for name in NAMES:
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait(30)

    def place(self, name: str) -> Path:
        """The directory that a process writes: journal, ring or checkpoints."""
        folder = "slaves" if name in SLAVES else "checkpoints"
        return self.directory / "master" if name == "master" else self.directory / folder / name

    def start(self, name: str) -> None:
        """A new life."""
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
        """What the environment says of keys."""
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
            return ["slave", *option_words({**knobs, **self._slave_knobs})]
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
        """Kill it, and leave it dead until release()."""
        self.will_end(name)
        self._held.add(name)
        self.kill(name)

    def release(self, name: str, *more: str) -> None:
        """Let it live again; more: words of its command in this life alone."""
        self._more[name] = list(more)
        self._held.discard(name)

    def kill(self, name: str) -> None:
        """SIGKILL, at whatever line it is; tend() starts it again."""
        self.children[name].kill()
        self.children[name].wait(30)

    def log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def log(self, name: str, length: int = 2000) -> str:
        return self.log_path(name).read_text()[-length:] if self.log_path(name).exists() else ""

    def fired_log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.failpoints"

    def will_end(self, name: str) -> None:
        """It is going to end, and to be started again."""
        self.may_die.add(name)
        self.ending[name] = self.lives[name]

    def at_birth(self, name: str, spec: str) -> None:
        """What failpoints do in its next life, from the start."""
        self._births.setdefault(name, []).append(spec)

    # ---- failpoints ----

    def arm(self, name: str, spec: str) -> None:
        """Tell a living process what its failpoints do from now on; "" ends it."""
        deadline_s = time.monotonic() + HEAL_S
        while True:
            self.tend()
            why_not = self._fork_server.arm(self.children[name], spec, self.fired_log(name))
            if not why_not:
                return
            assert time.monotonic() < deadline_s, f"{name} cannot be armed with {spec!r}: {why_not}"
            time.sleep(0.1)

    def fired(self, name: str) -> list[str]:
        """Lines `failpoint action pid` since the last mark()."""
        log = self.fired_log(name)
        return log.read_text()[self._seen_bytes.get(name, 0) :].splitlines() if log.exists() else []

    def fired_at_s(self, name: str) -> float:
        """The wall time of the last line."""
        return self.fired_log(name).stat().st_mtime

    def mark(self, name: str) -> None:
        log = self.fired_log(name)
        self._seen_bytes[name] = log.stat().st_size if log.exists() else 0

    # ---- what goes on ----

    def tend(self) -> None:
        """Start again what died and may, let go on what stood still long enough. Nobody else may end."""
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
        """At once; more slowly when it dies again and again, as a supervisor does."""
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

    def until(self, happened: Callable[[], bool], what: str, wait_s: float = HEAL_S) -> None:
        """Tend until it happened. Raises AssertionError, with where the run stands, after wait_s."""
        deadline_s = time.monotonic() + wait_s
        while not happened():
            assert time.monotonic() < deadline_s, f"{what}: {self.where_it_stands()}"
            self.tend()
            time.sleep(POLL_S)

    def status(self) -> StatusReply | None:
        """None while the master does not answer."""
        try:
            with self.operator(call_s=1.0) as client:
                return client.status()
        except (Refused, RetryLater):
            return None

    def operator(self, call_s: float = 5.0) -> OperatorClient:
        security: Security = INSECURE if self._keys is None else load_identity(self._keys / "operator")
        return OperatorClient(self.address, call_s=call_s, security=security)

    def incarnations(self) -> dict[str, Incarnation | None]:
        """Of clusters; empty while the master does not answer."""
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

    # ---- after a harm ----

    def began(self) -> None:
        """Wait until everybody is there and a version is published."""
        self.until(lambda: self.everyone_is_back({}), "not everybody came")
        self.until(lambda: self._tape.published_since(0.0), "nothing was published")

    def recovered(
        self, fired_s: float, away: Mapping[str, Incarnation | None], also: Callable[[], bool] = lambda: True
    ) -> Recovery:
        """Wait until everybody is back and a version was published since, in time. `also`: asked again and again until
        it is true, before the run counts as healed."""
        self.until(lambda: also() and self.everyone_is_back(away), "not everybody came back")
        healed_s = time.time()
        self.until(lambda: self._tape.published_since(healed_s), "nothing was published after everybody was back")
        rounds = self._tape.rounds_until_published(healed_s)
        assert rounds <= ROUNDS_TO_HEAL, f"{rounds} rounds until a version was published: {self.where_it_stands()}"
        published_s = self._tape.first_published(fired_s)
        return Recovery(fired_s, self._tape.phase_at(fired_s), healed_s - fired_s, published_s - fired_s, rounds)

    def healed(self, *slow: str) -> None:
        """From now on nobody ends by itself; `slow`: but for these, which may still be on their way to their end."""
        self.may_die = set(slow)
        self.ending.clear()

    def wait(self, for_s: float) -> None:
        """Tend for so long."""
        end_s = time.monotonic() + for_s
        self.until(lambda: time.monotonic() >= end_s, "time stands still")

    def until_versions(self, count: int) -> None:
        """Wait until so many more versions were published."""
        for _ in range(count):
            now_s = time.time()
            self.until(functools.partial(self.published_since, now_s), "nothing is published")

    def published_since(self, wall_s: float) -> bool:
        """Whether a version that was not there before was published after this."""
        return self._tape.published_since(wall_s)

    def phase_now(self) -> str:
        return self._tape.phase_at(time.time())

    def judged(self, may_skip: bool = False) -> int:
        """`dips verify --replay`, on the run as it is: every promise holds, and every version made anew from its seed
        and the pushes has the same bits. Returns how many versions were. may_skip: the journal was put back, so that
        there are versions that it cannot lead to."""
        report = verify_run(self.directory, replay=True)
        said = "; ".join(str(violation) for violation in report.violations)
        assert report.ok, f"dips verify: {report.verdict}; {said}; {report.unproven}"
        assert report.replayed is not None
        skipped = report.replayed.skipped
        assert may_skip or not skipped, f"versions that were not made anew: {'; '.join(skipped[:3])}"
        return report.replayed.versions

    def stop(self) -> None:
        """End the run as an operator does; every process ends with 0."""
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
        self.until(
            lambda: all(child.poll() is not None for child in self.children.values()), "the run did not end", 90.0
        )


def _state_of(pid: int) -> str:
    """The system's letter for what a process does; T: it is stopped."""
    try:
        return str(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    except (OSError, IndexError):
        return ""


def records(master: Path) -> list[dict[str, object]]:
    """The journal's records, archived ones among them."""
    from dips.master.journal import read_records

    return [json.loads(record.record_json) for record in read_records(master)]
