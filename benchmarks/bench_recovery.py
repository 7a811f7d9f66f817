"""How long a run needs to get over a fault, at the default settings: real processes, killed and stopped here.

A master, two slaves and three clusters without torch, with keys, kept alive by the supervisor of `dips up`. First they
run in calm; then, cycle by cycle, each of these happens at a random moment of the round:

    slave     kill -9; until a version is published by a run that has the slave again. load: what its snapshot took
    master    kill -9; until a version is published by the next master
    cluster   kill -9; until its next life has made a step. load: what its pull took
    silent    SIGSTOP of a cluster, until the master evicts it; then SIGCONT
    hung      SIGSTOP of a slave, until the master counts it as gone; then SIGCONT, until a version is published

gap: the longest time that a cluster which was not touched made no step, from the fault until all is well again; the
ratio is to the longest one of the calm run. Times in seconds. Nothing here judges a number; targets are printed with
them.

    python benchmarks/bench_recovery.py [--cycles C] [--elems N] [--data own|leased] [--calm S] [--rest S] [--quick]
                                        [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from recovery.run import Record, Shape, Watched

SETTLE_S = 5.0
"""After each recovery, while gaps are still this fault's."""

REST_S = 75.0
"""Until the next fault: long enough that a life which ended was no quick one, and that what is usual is known again: a
cluster's patience is that of its last 32 exchanges (worker/state/waiting.py), of which a round makes one each 2 s."""

FAULTS = ("slave", "master", "cluster", "silent", "hung")

TARGETS = {
    "slave": "5 s + load",
    "master": "5 s",
    "cluster": "5 s + load",
    "silent": "10 s",
    "hung": "",
}


@dataclass(frozen=True)
class Fault:
    """One fault. seconds: until it was over; load_s: the part of it that depends on the model's size."""

    kind: str
    victim: str
    phase: str
    seconds: float
    load_s: float
    gap_s: float

    @property
    def beyond_load_s(self) -> float:
        return self.seconds - self.load_s


@dataclass(frozen=True)
class Row:
    """All faults of a kind: least, median, most of the seconds beyond the load; the longest gap, and its ratio."""

    kind: str
    n: int
    least_s: float
    median_s: float
    most_s: float
    load_s: float
    gap_s: float
    gap_ratio: float
    target: str


class Faults:
    """Makes faults, one after the other, and waits until each is over."""

    def __init__(self, run: Watched, rng: random.Random, rest_s: float) -> None:
        self._run = run
        self._rest_s = rest_s
        self._rng = rng
        self.found: list[Fault] = []

    def make(self, kind: str) -> None:
        """One fault of this kind, at a random moment of a round."""
        run = self._run
        published = run.published()
        round_s = published[-1][0] - published[-2][0]
        run.rest(self._rng.uniform(0.0, min(round_s, 10.0)))
        maker: Callable[[], tuple[str, float, float]] = getattr(self, f"_{kind}")
        phase, at_s = self._phase(), time.monotonic()
        victim, seconds, load_s = maker()
        untouched = [name for name in run.shape.clusters if name != victim]
        run.rest(SETTLE_S)
        gap_s = max(run.gap_s(name, at_s, time.monotonic()) for name in untouched)
        self.found.append(Fault(kind, victim, phase, seconds, load_s, gap_s))
        run.rest(self._rest_s)

    def _slave(self) -> tuple[str, float, float]:
        victim, run = self._rng.choice(run_slaves(self._run)), self._run
        at_s = self._kill(victim)
        ready_s = self._after(lambda: run.master.of("slave_ready", since_s=at_s), "the slave is ready")
        over_s = self._published_after(ready_s)
        load_s = max((r["took_s"] for r in run.tapes[victim].of("configured", since_s=at_s)), default=0.0)
        return victim, over_s - at_s, load_s

    def _master(self) -> tuple[str, float, float]:
        at_s = self._kill("master")
        again_s = self._after(lambda: self._run.master.of("master-started", since_s=at_s), "the master is back")
        return "master", self._published_after(again_s) - at_s, 0.0

    def _cluster(self) -> tuple[str, float, float]:
        run, victim = self._run, self._rng.choice(self._run.shape.clusters)
        at_s = self._kill(victim)
        begun = len(run.steps(victim))
        run.watch(lambda: len(run.steps(victim)) > begun, f"cluster {victim} trains again")
        pulls = [r["pull_s"] for r in run.tapes[victim].of("installed", since_s=at_s)]
        return victim, float(run.steps(victim)[begun]) - at_s, pulls[0]

    def _silent(self) -> tuple[str, float, float]:
        victim = self._rng.choice(self._run.shape.clusters)
        seconds = self._stopped(victim, lambda since_s: self._run.master.of("evict", since_s=since_s))
        return victim, seconds, 0.0

    def _hung(self) -> tuple[str, float, float]:
        victim = self._rng.choice(run_slaves(self._run))
        seconds = self._stopped(victim, lambda since_s: self._run.master.of("slave_lost", since_s=since_s))
        self._published_after(time.monotonic())
        return victim, seconds, 0.0

    # ---- parts ----

    def _kill(self, victim: str) -> float:
        os.kill(self._pid(victim), signal.SIGKILL)
        return time.monotonic()

    def _stopped(self, victim: str, noticed: Callable[[float], object]) -> float:
        """Seconds until a victim that stands still is noticed; then it goes on."""
        pid, at_s = self._pid(victim), time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            return self._after(lambda: noticed(at_s), f"{victim} is given up") - at_s
        finally:
            os.kill(pid, signal.SIGCONT)

    def _pid(self, name: str) -> int:
        self._run.watch(lambda: self._run.pid(name) is not None, f"{name} runs")
        pid = self._run.pid(name)
        assert pid is not None, "it was waited for"
        return pid

    def _after(self, records: Callable[[], object], what: str) -> float:
        """When the first of these records was written."""
        found: list[Record] = []

        def there() -> bool:
            found[:] = list(records())  # type: ignore[call-overload]
            return bool(found)

        self._run.watch(there, what)
        return float(found[0]["monotonic_s"])

    def _published_after(self, since_s: float) -> float:
        """When the first new version after this moment was published."""
        run = self._run
        newer: Callable[[], list[float]] = lambda: [at_s for at_s, _ in run.published() if at_s > since_s]  # noqa: E731
        run.watch(lambda: bool(newer()), "a version is published")
        return newer()[0]

    def _phase(self) -> str:
        """The phase that the master's round was in last."""
        rounds = list(self._run.master.of("round"))
        return str(rounds[-1]["phase"]) if rounds else "IDLE"


def run_slaves(run: Watched) -> list[str]:
    return [f"s{i}" for i in range(run.shape.slaves)]


def calm(run: Watched, calm_s: float) -> tuple[float, float]:
    """Let it run; the longest gap of any cluster, and the median time between two versions."""
    run.watch(lambda: len(run.published()) > 6, "the run begins")
    begin_s = time.monotonic()
    run.rest(calm_s)
    end_s = time.monotonic()
    times = [at_s for at_s, _ in run.published() if at_s >= begin_s]
    between = [after - before for before, after in itertools.pairwise(times)]
    return max(run.gap_s(name, begin_s, end_s) for name in run.shape.clusters), statistics.median(between)


def rows(found: Sequence[Fault], calm_gap_s: float) -> list[Row]:
    out: list[Row] = []
    for kind in FAULTS:
        mine = [fault for fault in found if fault.kind == kind]
        if not mine:
            continue
        beyond = sorted(fault.beyond_load_s for fault in mine)
        gap_s = max(fault.gap_s for fault in mine)
        load_s = statistics.median(fault.load_s for fault in mine)
        times = (beyond[0], statistics.median(beyond), beyond[-1])
        out.append(Row(kind, len(mine), *times, load_s, gap_s, gap_s / calm_gap_s, TARGETS[kind]))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=3, help="faults of each kind (default 3: half an hour)")
    parser.add_argument("--elems", type=int, default=4_000_000, help="parameters (default 4 million)")
    parser.add_argument("--data", choices=("own", "leased"), default="own")
    parser.add_argument("--calm", type=float, default=120.0, help="seconds without a fault, at first (default 120)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which kinds, with commas (default all)")
    parser.add_argument("--rest", type=float, default=REST_S, help="seconds between two faults (default 75)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="where the run is kept; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="1 cycle, 6 s of calm, no rest")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cycles, calm_s = (1, 6.0) if arguments.quick else (arguments.cycles, arguments.calm)
    kinds = arguments.faults.split(",")
    if wrong := sorted(set(kinds) - set(FAULTS)):
        parser.error(f"no such fault: {', '.join(wrong)}; choose from {', '.join(FAULTS)}")
    shape = replace(Shape(), n_elems=arguments.elems, data=arguments.data)
    with tempfile.TemporaryDirectory() as folder:
        with Watched(arguments.directory or Path(folder) / "run", shape) as run:
            calm_gap_s, round_s = calm(run, calm_s)
            faults = Faults(run, random.Random(arguments.seed), 0.0 if arguments.quick else arguments.rest)
            for _ in range(cycles):
                for kind in kinds:
                    faults.make(kind)
    setting = {
        "elems": shape.n_elems, "data": shape.data, "cycles": cycles, "calm_s": calm_s,
        "rest_s": arguments.rest, "cpus": os.cpu_count(), "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 1), "calm_gap_s": round(calm_gap_s, 3), "calm_round_s": round(round_s, 3),
    }  # fmt: skip
    table = rows(faults.found, calm_gap_s)
    if arguments.json:
        found = [asdict(fault) for fault in faults.found]
        print(json.dumps({"setting": setting, "rows": [asdict(r) for r in table], "faults": found}, indent=2))
        return 0
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(f"{'fault':<9}{'n':>3}{'least':>8}{'median':>8}{'most':>8}{'load':>8}  {'target':<12}{'gap':>7} of calm")
    for r in table:
        times = f"{r.least_s:>8.2f}{r.median_s:>8.2f}{r.most_s:>8.2f}{r.load_s:>8.3f}"
        print(f"{r.kind:<9}{r.n:>3}{times}  {r.target:<12}{r.gap_s:>7.2f}{r.gap_ratio:>8.0%}")
    for fault in faults.found:
        took = f"{fault.seconds:6.2f} s, gap {fault.gap_s:5.2f} s"
        print(f"  {fault.kind:<8} {fault.victim:<7} in {fault.phase:<8} {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
