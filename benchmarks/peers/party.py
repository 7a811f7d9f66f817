"""A system under measurement: its processes, and the turns that its clusters take together."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quiet import Foreign, Gate, processor_s

from dips.local.child import wrapped
from peers.stages import Clocks, Cut, Stage, stages_of

HERE = Path(__file__).parent
START_S = 180.0
"""Until every cluster is ready: imports, the first parameters, and memory that is touched once."""

TURN_S = 120.0
END_S = 20.0
WATCH_S = 0.25
LEAD_S = 0.2
"""Between the order to exchange and the exchange: all clusters have read the order by then."""

NO_GATE = Gate(wait_s=0.0, limit=math.inf)
KINDS = {"c": "clusters", "s": "slaves", "": "others"}
"""Kinds of processes, by the first letter of names with a number."""

WHOLE = "the whole round"


class Failed(Exception):
    """A process of a system ended or did not answer; says which, and the end of its log."""


@dataclass(frozen=True)
class Turn:
    """One round. took_s: of each cluster, from the end of its inner loop until its new parameters are in place.

    cpu_s: of all processes of the system meanwhile. foreign: processors that other work kept busy. spans: when each
    cluster began and ended (CLOCK_MONOTONIC). told: the stages that each cluster itself has told, with their ends.
    """

    took_s: tuple[float, ...]
    cpu_s: float
    samples: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[int, ...]
    foreign: float
    spans: tuple[tuple[float, float], ...]
    told: tuple[tuple[Cut, ...], ...]
    clocks: Clocks

    @property
    def slowest(self) -> int:
        """The cluster that took the longest."""
        return self.took_s.index(max(self.took_s))


@dataclass
class Party:
    """A context manager: start() of a subclass starts servers and clusters; leaving it ends them all."""

    name: str
    directory: Path
    clusters: int
    params: int
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    model_bytes: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tensor_of: list[int] = field(default_factory=list)
    """Of which tensor each sampled element is."""

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True)
        try:
            self.start()
            self._await_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self) -> None:
        raise NotImplementedError

    # ---- processes ----

    def spawn(self, name: str, command: Sequence[object], variables: Mapping[str, str] | None = None) -> None:
        """Start a process; its standard error is added to NAME.log. One thread a process unless it says otherwise."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(variables or {})}
        with (self.directory / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                wrapped([str(word) for word in command]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env=environment,
            )  # fmt: skip

    def spawn_cluster(
        self, number: int, script: str, python: Path | str, *more: object, variables: Mapping[str, str] | None = None
    ) -> None:
        command = [python, HERE / script, "--cluster", number, "--clusters", self.clusters, "--params", self.params]
        self.spawn(f"c{number}", [*command, *more], variables)

    def read(self, name: str, wait_s: float) -> str:
        """A line that a process prints. Raises Failed when any process has ended, or nothing comes for so long."""
        out = self.processes[name].stdout
        assert out is not None
        end_s = time.monotonic() + wait_s
        # One line answers one order, so nothing waits in the buffer that select() does not see.
        while not select.select([out], [], [], WATCH_S)[0]:
            for other, process in self.processes.items():
                if process.poll() is not None:
                    raise Failed(f"{self.name}: {other} has ended; its log ends:\n{self.log(other)}")
            if time.monotonic() > end_s:
                raise Failed(f"{self.name}: {name} said nothing for {wait_s:g} s; its log ends:\n{self.log(name)}")
        line = out.readline()
        if not line:
            raise Failed(f"{self.name}: {name} has ended; its log ends:\n{self.log(name)}")
        return line

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-2000:]

    def end(self) -> None:
        """Close every standard input, which ends clusters; then SIGTERM, and SIGKILL for who does not go."""
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for number in range(self.clusters):
            _await_end(self.processes.get(f"c{number}"))
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            _await_end(process)

    def pids(self) -> dict[str, list[int]]:
        """Each process with its descendants."""
        return {name: tree(process.pid) for name, process in self.processes.items()}

    def resident_bytes(self) -> dict[str, int]:
        """What each process and its descendants hold now; memory that several share is split between them."""
        return {name: sum(_proportional_bytes(pid) for pid in pids) for name, pids in self.pids().items()}

    # ---- turns ----

    def turn(self, number: int, pause_s: float, gate: Gate = NO_GATE) -> Turn:
        """All clusters move, rest for pause_s (as if they computed), and exchange at the same moment.

        gate: how long the rest may be longer, until the machine is quiet.
        """
        self.tell(do="move", turn=number)
        for cluster in range(self.clusters):
            self.read(f"c{cluster}", TURN_S)
        pids = self.pids()
        time.sleep(max(0.0, pause_s - LEAD_S))
        gate.wait(lambda: sum(_by_kind(pids).values()))
        at_s = time.monotonic() + min(pause_s, LEAD_S)
        self.tell(do="sync", at_s=at_s)
        time.sleep(max(0.0, at_s - time.monotonic() - 0.05))
        foreign = Foreign(lambda: sum(_by_kind(pids).values()))
        with Clocks(lambda: _by_kind(pids)) as clocks:
            answers = [json.loads(self.read(f"c{cluster}", TURN_S)) for cluster in range(self.clusters)]
        return Turn(
            tuple(answer["took_s"] for answer in answers),
            sum(clocks.total().values()),
            tuple(_flat(answer["sample"]) for answer in answers),
            tuple(answer["peak_bytes"] for answer in answers),
            foreign.cores(),
            tuple((answer["began_s"], answer["ended_s"]) for answer in answers),
            tuple(tuple((name, ended_s) for name, ended_s in answer["stages"]) for answer in answers),
            clocks,
        )

    def stages(self, turn: Turn) -> list[Stage]:
        """Where the time of a turn's slowest cluster went, as far as this system tells; else one stage, the whole."""
        began_s, ended_s = turn.spans[turn.slowest]
        return stages_of(began_s, turn.told[turn.slowest] or [(WHOLE, ended_s)], turn.clocks)

    def _await_ready(self) -> None:
        for cluster in range(self.clusters):
            answer = json.loads(self.read(f"c{cluster}", START_S))
            self.model_bytes.append(answer["model_bytes"])
            self.first = list(_flat(answer["sample"]))
            self.tensor_of = [tensor for tensor, part in enumerate(answer["sample"]) for _ in part]

    def tell(self, **order: Any) -> None:
        """An order to every cluster."""
        for cluster in range(self.clusters):
            pipe = self.processes[f"c{cluster}"].stdin
            assert pipe is not None
            print(json.dumps(order), file=pipe, flush=True)


def python() -> str:
    return sys.executable


def end_in_order() -> None:
    """Have SIGTERM end this program as ctrl-C does, so that no process of a system stays behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _await_end(process: subprocess.Popen[str] | None) -> None:
    if process is None:
        return
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tree(pid: int) -> list[int]:
    """A process with its descendants."""
    out = [pid]
    for task in _listed(Path(f"/proc/{pid}/task")):
        for child in _text(task / "children").split():
            out += tree(int(child))
    return out


def _by_kind(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """Processor seconds so far of clusters (c0, c1, ...), slaves (s0, ...) and the others."""
    found = dict.fromkeys(KINDS.values(), 0.0)
    for name, several in pids.items():
        kind = KINDS[name[0] if name[1:].isdigit() else ""]
        found[kind] += sum(map(processor_s, several))
    return found


def _proportional_bytes(pid: int) -> int:
    lines = [line for line in _text(Path(f"/proc/{pid}/smaps_rollup")).splitlines() if line.startswith("Pss:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []  # it has ended


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _flat(sample: list[list[float]]) -> tuple[float, ...]:
    return tuple(value for part in sample for value in part)
