"""A whole run of processes that are killed, by us or by a failpoint, and started again until the run has ended.

Directories are as `dips up` makes them, so that `dips verify` can judge the run afterwards.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster_process import command as cluster_command
from support.fork_server import ForkedProcess
from support.repository import ROOT
from support.whole_run import LEASED, WholeRun, option_words, wait_until

from dips.core.errors import Refused, RetryLater
from dips.core.net.security import INSECURE
from dips.core.observe.tape import read_tape
from dips.local.log_files import tape_path
from dips.local.operator_client import OperatorClient
from dips.master.directory import TAPE_NAME
from dips.master.journal import read_records
from dips.master.state.records import RoundPhase

RUN_WAIT_S = 300.0
"""For a whole run with its kills on a machine that is busy with other things."""

CLUSTERS = ("a", "b")
SLAVES = ("s0", "s1")
TK_MAX = 120_000
"""Two clusters push 4 steps of 1000 tokens: fifteen rounds when both are in each, thirty when each is alone."""

LAST_KILL = 5
"""Kills at random moments come up to this version, long before the end: a run may be faster than a process's start."""

STEP_S = 0.005
STOPPED_S = 5.0
"""How long a stopped process stays so: longer than evict_after_beats heartbeats."""

MAX_LIVES = 40
"""More lives of one process in one run are a crash loop, not a recovery."""


@dataclass(frozen=True)
class Kill:
    """One planned death. failpoint: the victim dies by itself when it reaches it for the n-th time; else we kill it
    when version n is published and `share` of a round has passed."""

    victim: str
    n: int
    failpoint: str = ""
    share: float = 0.0


@dataclass(frozen=True)
class Death:
    """One death that happened. phase: that of the master's round at the time."""

    victim: str
    how: str
    wall_s: float


Order = Callable[[OperatorClient], object]


class KillRun(WholeRun):
    """Use as a context manager, then play()."""

    def __init__(self, directory: Path, kills: Sequence[Kill] = (), actions: Mapping[str, str] | None = None) -> None:
        """actions: what failpoints do besides, by process name, in the language of DIPS_FAILPOINTS; armed until one
        has done something."""
        super().__init__(
            directory, len(SLAVES), LEASED, tk_max=TK_MAX, grace_s=0.2, linger_s=60.0, round_timeout_s=5.0,
            evict_after_beats=6, verdict_wait_s=10.0, journal_records=16,
        )  # fmt: skip
        self.deaths: list[Death] = []
        self.lives: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self._woken: set[int] = set()
        self._by_hand = sorted((kill for kill in kills if not kill.failpoint), key=lambda kill: (kill.n, kill.share))
        self._spec = dict(actions or {})
        for kill in kills:
            if kill.failpoint:
                term = f"{kill.failpoint}={kill.n - 1}*off->kill" if kill.n > 1 else f"{kill.failpoint}=kill"
                self._spec[kill.victim] = "; ".join(filter(None, (self._spec.get(kill.victim, ""), term)))

    # ---- its processes ----

    def __enter__(self) -> KillRun:
        for name in ("logs", "tapes", "slaves"):
            (self.directory / name).mkdir(parents=True)
        super().__enter__()
        for name in CLUSTERS:
            self.start_cluster(name)
        return self

    def start_master(self) -> None:
        """Start it until it serves; a failpoint may end its first life before that."""
        knobs = {"run_id": "test", "directory": self.directory / "master", "slaves": self.n_slaves, **self._master}
        where = self.directory / "master" / "master.json"
        while True:
            self._spawn("master", ["master", "--insecure", *option_words(knobs)])
            process = self.processes["master"]
            wait_until(functools.partial(self._up_or_dead, where, process), "no master came up", RUN_WAIT_S)
            if process.poll() is None:
                self.address = json.loads(where.read_text())["address"]
                return
            fired = self._last_fired("master", process.pid)
            assert fired is not None, f"the master ended with {process.returncode} by itself: {self.log('master')}"
            self._died("master", fired, self.fired_log("master").stat().st_mtime)
            assert self.lives["master"] < MAX_LIVES, f"the master dies again and again: {self.log('master')}"

    def _up_or_dead(self, where: Path, process: subprocess.Popen[bytes] | ForkedProcess) -> bool:
        self._wake_stopped()
        serves = where.exists() and json.loads(where.read_text())["pid"] == process.pid
        return serves or process.poll() is not None

    def start_slave(self, name: str, **more: object) -> None:
        knobs = {
            "run_id": "test", "slave_id": name, "directory": self.directory / "slaves" / name, "master": self.address,
            "tape": tape_path(self.directory, name), "record_pushes": True, "insecure": True, **more,
        }  # fmt: skip
        self._spawn(name, ["slave", *option_words(knobs)])

    def start_cluster(self, name: str) -> None:
        tape, checkpoints = tape_path(self.directory, name), self.directory / "checkpoints" / name
        self._popen(name, cluster_command(name, self.address, tape=tape, checkpoints=checkpoints, step_s=STEP_S))

    def log(self, name: str) -> str:
        return self._log_path(name).read_text()[-3000:]

    def _log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        self._popen(name, [sys.executable, "-m", "dips.cli", *arguments])

    def _popen(self, name: str, command: Sequence[str]) -> None:
        self.lives[name] = self.lives.get(name, 0) + 1
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), environment.get("PYTHONPATH", "")))
        if name in self._spec and not self._fired(name):
            environment["DIPS_FAILPOINTS"] = self._spec[name]
            environment["DIPS_FAILPOINTS_ENABLED"] = "1"
            environment["DIPS_FAILPOINT_LOG"] = str(self.fired_log(name))
        with self._log_path(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(list(command), stdout=log, stderr=log, env=environment)

    def _fired(self, name: str) -> bool:
        """Whether a failpoint of this process has done its harm; a life that we ended before that was too short."""
        return self.fired_log(name).exists() and bool(self.fired_log(name).read_text())

    def fired_log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.failpoints"

    # ---- a run ----

    def play(self, orders: Sequence[tuple[int, Order]] = (), wait_s: float = RUN_WAIT_S) -> None:
        """Let the run go on to its end; kill as planned and start again what dies.

        orders: (version, what an operator asks for once it is published), asked again until it is granted.
        """
        waiting = list(orders)
        deadline_s = time.monotonic() + wait_s
        version, since_s = -1, time.monotonic()
        while set(self.ended) < set(CLUSTERS):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"the run did not end in {wait_s:g} s: {self._where_it_stands()}")
            self._bury()
            self._wake_stopped()
            if self._by_hand or waiting:
                now = self.version()
                if now > version:
                    version, since_s = now, time.monotonic()
            if self._by_hand:
                self._kill_by_hand(version, time.monotonic() - since_s)
            if waiting and version >= waiting[0][0] and self._ordered(waiting[0][1]):
                waiting.pop(0)
            time.sleep(0.02)
        assert not waiting, f"the run ended before {len(waiting)} of the operator's wishes"

    def _ordered(self, order: Order) -> bool:
        try:
            with OperatorClient(self.address, security=INSECURE) as client:
                order(client)
        except (Refused, RetryLater):
            return False  # the master dies just now, or the cluster is away
        return True

    def _wake_stopped(self) -> None:
        """A process that a failpoint stopped goes on after longer than every heartbeat."""
        for name, process in self.processes.items():
            log = self.fired_log(name)
            stopped = log.exists() and f" stop {process.pid}\n" in log.read_text()
            if stopped and process.pid not in self._woken and time.time() - log.stat().st_mtime > STOPPED_S:
                self._woken.add(process.pid)
                self._died(name, "stop", log.stat().st_mtime)
                process.send_signal(signal.SIGCONT)

    def _kill_by_hand(self, version: int, passed_s: float) -> None:
        kill = self._by_hand[0]
        due = version > kill.n or (version == kill.n and passed_s >= kill.share)
        process = self.processes[kill.victim]
        if not due or process.poll() is not None:
            if kill.victim in self.ended:
                self._by_hand.pop(0)
            return
        self._by_hand.pop(0)
        process.kill()
        self._died(kill.victim, "random", time.time())
        process.wait()
        self._start_again(kill.victim)

    def _bury(self) -> None:
        """Notice who died."""
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None or name in self.ended:
                continue
            if code == 0 and name in CLUSTERS:
                self.ended[name] = code
                continue
            fired = self._last_fired(name, process.pid)
            if fired is None:
                raise AssertionError(f"{name} ended with {code} by itself: {self.log(name)}")
            self._died(name, fired, self.fired_log(name).stat().st_mtime)
            self._start_again(name)

    def _last_fired(self, name: str, pid: int) -> str | None:
        """The failpoint that ended this process."""
        if not self.fired_log(name).exists():
            return None
        lines = [line.split() for line in self.fired_log(name).read_text().splitlines()]
        mine = [words[0] for words in lines if words[2] == str(pid) and words[1] in ("kill", "crash", "error", "stop")]
        return mine[-1] if mine else None

    def _died(self, name: str, how: str, wall_s: float) -> None:
        self.deaths.append(Death(name, how, wall_s))

    def _start_again(self, name: str) -> None:
        assert self.lives[name] < MAX_LIVES, f"{name} dies again and again: {self.log(name)}"
        if name == "master":
            self.start_master()
        elif name in SLAVES:
            self.start_slave(name)
        else:
            self.start_cluster(name)

    def _where_it_stands(self) -> str:
        try:
            status = self.status()
            stands = f"version {status.published}, phase {status.phase}, waiting for {status.waiting_for!r}"
        except Exception as error:  # the master may be the one that is away
            stands = f"no status ({error})"
        logs = "\n".join(f"--- {name}\n{self.log(name)[-1200:]}" for name in self.processes)
        return f"{stands}; lives {self.lives}; deaths {self.deaths}; ended {self.ended}\n{logs}"

    # ---- what it left ----

    def phase_of(self, death: Death) -> str:
        """The phase of the master's round in which a process died."""
        if death.how in PHASE_OF_FAILPOINT:
            return PHASE_OF_FAILPOINT[death.how]
        phase = RoundPhase.IDLE.value
        for event in read_tape(self.directory / "master" / TAPE_NAME):
            if event["wall_s"] > death.wall_s:
                break
            if event["kind"] == "epoch":
                phase = RoundPhase.IDLE.value
            elif event["kind"] == "round":
                phase = event["phase"]
        return str(phase)

    def tokens_of_journal(self) -> int:
        """Tokens of the pushes that the journal says are applied."""
        return sum(
            participant["tokens"]
            for record in self.records()
            if record["kind"] == "COMMIT"
            for participant in record["participants"]
            if participant["verdict"] == "APPLIED"
        )

    def records(self) -> Iterator[dict[str, Any]]:
        for record in read_records(self.directory / "master"):
            yield json.loads(record.record_json)


ROUND_FAILPOINTS: tuple[str, ...] = (
    "round.IDLE.push_admitted",
    "round.WINDOW.window_closed",
    "round.SEALED.checks_passed",
    "round.MEASURE.all_measured",
    "round.JUDGE.accepted",
    "round.PREPARE.all_prepared",
    "round.COMMIT.all_flipped",
    "round.PUBLISH.verdicts_sent",
)
"""One arrow out of each phase of a round that succeeds; the master dies just before it."""

PHASE_OF_FAILPOINT: dict[str, str] = {
    **{name: name.split(".")[1] for name in ROUND_FAILPOINTS},
    "slave_shard.READY.measure": "MEASURE",
    "slave_shard.MEASURING.done": "MEASURE",
    "slave_shard.PREPARING.done": "PREPARE",
    "slave_shard.PREPARED.commit": "COMMIT",
    "slave_shard.COMMITTING.done": "COMMIT",
}
"""Known without looking at the time. (A file's time, by which others are placed, is a few milliseconds coarse.)"""

OTHERS_FAILPOINTS: tuple[tuple[str, str], ...] = (
    ("slave", "slave_shard.READY.measure"),
    ("cluster", "session.BEGINNING_PUSH.ticket"),
    ("slave", "slave_shard.MEASURING.done"),
    ("cluster", "session.TRANSFERRING.sent"),
    ("slave", "slave_shard.PREPARING.done"),
    ("cluster", "session.FINISHING_PUSH.admitted"),
    ("slave", "slave_shard.PREPARED.commit"),
    ("cluster", "session.AWAITING.verdict"),
    ("slave", "slave_shard.COMMITTING.done"),
    ("cluster", "session.PULLING.installed"),
)


def planned(seed: int) -> list[Kill]:
    """Four kills for a seed: two at failpoints, two at random moments; every role is hit."""
    rng = random.Random(seed)
    role, failpoint = OTHERS_FAILPOINTS[seed % len(OTHERS_FAILPOINTS)]
    armed = rng.choice(SLAVES if role == "slave" else CLUSTERS)
    other = rng.choice(CLUSTERS if role == "slave" else SLAVES)
    return [
        Kill("master", rng.randint(1, 4), ROUND_FAILPOINTS[seed % len(ROUND_FAILPOINTS)]),
        Kill(armed, rng.randint(1, 4 if role == "slave" else 2), failpoint),  # a slow cluster has a part in few rounds
        Kill(other, rng.randint(1, LAST_KILL), share=rng.random() * 0.5),
        Kill(rng.choice(["master", *SLAVES, *CLUSTERS]), rng.randint(1, LAST_KILL), share=rng.random() * 0.5),
    ]


def judge(run: KillRun, verify: Callable[[Path], None]) -> None:
    """Every promise that can be seen from outside. To be called once all processes have ended."""
    records = list(run.records())
    last = [record for record in records if record["kind"] == "COMMIT"][-1]
    tokens = last["tokens"]
    assert isinstance(tokens, int)
    assert tokens >= TK_MAX, "the run ended before its tokens"
    assert run.tokens_of_journal() == tokens, "the tokens of the applied pushes do not add up to the run's"
    verify(run.directory)


def verified(directory: Path) -> None:
    """`dips verify` has nothing to say against the run."""
    command = [sys.executable, "-m", "dips.cli", "verify", "--replay", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_WAIT_S)
    assert result.returncode == 0, f"dips verify: {result.stdout}\n{result.stderr}"
