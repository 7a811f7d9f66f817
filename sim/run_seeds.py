"""python -m dips.sim.run_seeds: simulate many seeds, or tell the story of one (docs/simulation.md).

Exit code 1 when a seed violates an invariant, when a kind of fault never fired (from 200 seeds on), or when a
transition was never taken that is not listed in UNREACHED with the reason (from 1000 seeds on).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from dips.core.machine import TransitionTable, tables
from dips.sim import faults
from dips.sim.world import Outcome, World

Arrow = tuple[str, str, str, str]

SEEDS_FOR_FAULTS = 200
SEEDS_FOR_ARROWS = 1000
CHUNK = 20
"""Seeds that one worker process takes at a time."""

_DONATION = "a donation that fails just there, of a cluster that was just there; tests/unit/worker take it by hand"
_FINISH = "FinishPush is refused only in ways that ask for a new attempt; kept for a master of another release"
_JOB = "no job of this release fails so: what can fail there names a time to try again"

UNREACHED: Mapping[Arrow, str] = {
    ("push", "SEALED", "aborted", "DECIDED"): "a master that commits takes over another history: two disks",
    ("session", "BEGINNING_PUSH", "undecided", "AWAITING"): "a lost transfer whose push was admitted behind its back",
    ("session", "BEGINNING_PUSH", "verdict", "BEGINNING_PUSH"): "a seed that is aborted between two of its attempts",
    ("session", "FINISHING_PUSH", "push refused", "PULLING"): _FINISH,
    ("session", "FINISHING_PUSH", "push refused", "TRAINING"): _FINISH,
    ("session", "AWAITING", "donate", "BEGINNING_PUSH"): "a version that is lost while its pusher awaits a verdict",
    ("session", "AWAITING", "not donated", "AWAITING"): _DONATION,
    ("session", "AWAITING", "not donated", "PULLING"): _DONATION,
    ("session", "AWAITING", "not donated", "TRAINING"): _DONATION,
    ("session", "BEGINNING_PUSH", "not donated", "AWAITING"): _DONATION,
    ("session", "BEGINNING_PUSH", "not donated", "PULLING"): _DONATION,
    ("session", "BEGINNING_PUSH", "not donated", "TRAINING"): _DONATION,
    ("session", "FINISHING_PUSH", "not donated", "AWAITING"): _DONATION,
    ("session", "FINISHING_PUSH", "not donated", "PULLING"): _DONATION,
    ("session", "FINISHING_PUSH", "not donated", "TRAINING"): _DONATION,
    ("slave link", "DETACHED", "unlinked", "DETACHED"): "every stream that ends was open: the dialler says so first",
    ("slave shard", "COMMITTING", "failed", "PREPARED"): _JOB,
    ("slave shard", "MEASURING", "failed", "READY"): _JOB,
}
"""(table, from, input, to) -> why few runs or none take it. Seeds that take one all the same are no failure."""


@dataclass
class Totals:
    """What all seeds together showed."""

    seeds: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    arrows: set[Arrow] = field(default_factory=set)
    published: int = 0
    rounds: int = 0
    virtual_s: float = 0.0
    events: int = 0
    slowest: tuple[float, int] = (0.0, 0)

    def add(self, outcome: Outcome, took_s: float) -> None:
        self.seeds += 1
        self.failures += [(outcome.seed, outcome.violations[0])] if outcome.violations else []
        self.fired.update(outcome.fired)
        self.facts.update(outcome.facts)
        self.arrows |= outcome.arrows
        self.published += outcome.published
        self.rounds += outcome.rounds
        self.virtual_s += outcome.virtual_s
        self.events += outcome.events
        self.slowest = max(self.slowest, (took_s, outcome.seed))


def run_one(seed: int) -> tuple[Outcome, float]:
    """One seed, and the processor time that it took, in seconds."""
    began_s = time.process_time()
    gc.disable()  # a run is short, and its garbage few megabytes: collecting within it costs a tenth of the time
    try:
        outcome = World(seed).run()
    finally:
        gc.enable()
    return outcome, time.process_time() - began_s


def run_some(seeds: Sequence[int]) -> list[tuple[Outcome, float]]:
    return [run_one(seed) for seed in seeds]


def run_all(seeds: Sequence[int], jobs: int) -> Totals:
    """All seeds, on `jobs` processes; the order of the results does not depend on them."""
    totals = Totals()
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if jobs <= 1:
        batches: Iterable[list[tuple[Outcome, float]]] = map(run_some, chunks)
        _add_all(totals, batches)
        return totals
    with ProcessPoolExecutor(jobs) as pool:
        _add_all(totals, pool.map(run_some, chunks))
    return totals


def _add_all(totals: Totals, batches: Iterable[list[tuple[Outcome, float]]]) -> None:
    for batch in batches:
        for outcome, took_s in batch:
            totals.add(outcome, took_s)


def simulated_tables() -> list[TransitionTable]:  # type: ignore[type-arg]
    """Every table of the real state machines that the simulator runs."""
    return [table for table in tables() if not table.name.startswith("test")]


def never_taken(taken: set[Arrow]) -> list[Arrow]:
    """Arrows of all tables that no seed took and that UNREACHED does not explain."""
    every = {
        (table.name, start.value, name, end.value)
        for table in simulated_tables()
        for start, name, end in table.arrows()
    }
    return sorted(every - taken - set(UNREACHED))


def report(totals: Totals) -> list[str]:
    """For people, line by line."""
    took_s, slowest = totals.slowest
    lines = [
        f"{totals.seeds} seeds: {len(totals.failures)} failed; {totals.published} versions published in "
        f"{totals.rounds} rounds, {totals.events} events, {totals.virtual_s / 3600:.1f} h of virtual time; "
        f"slowest: seed {slowest} ({took_s:.2f} s)",
        "faults fired: " + ", ".join(f"{name} {count}" for name, count in sorted(totals.fired.items())),
    ]
    if totals.facts:
        lines.append("facts judged: " + ", ".join(f"{name} {count}" for name, count in sorted(totals.facts.items())))
    total = sum(len(table.arrows()) for table in simulated_tables())
    lines.append(f"transitions taken: {len(totals.arrows)} of {total}, {len(UNREACHED)} are listed as out of reach")
    return lines


def complaints(totals: Totals) -> list[str]:
    """What makes the run a failure."""
    said = [
        f"seed {seed}: {sentence}\n    its story: python -m dips.sim.run_seeds --seed {seed} --trace"
        for seed, sentence in totals.failures
    ]
    if totals.seeds >= SEEDS_FOR_FAULTS:
        said += [f"fault {name} never fired" for name in faults.names() if not totals.fired[name]]
    if totals.seeds >= SEEDS_FOR_ARROWS:
        said += [f"never taken: {table}: {a} -> {b} upon {name}" for table, a, name, b in never_taken(totals.arrows)]
    return said


def tell(seed: int, trace: bool) -> int:
    """One seed; with `trace`, everything that happened in it."""
    outcome = World(seed, tell=trace).run()
    for line in outcome.story:
        print(line)
    print(
        f"seed {seed}: {outcome.published} versions in {outcome.rounds} rounds, {outcome.virtual_s:.1f} s of virtual "
        f"time, {outcome.events} events, trace {outcome.trace_hash}"
    )
    print("faults fired: " + (", ".join(f"{name} {n}" for name, n in outcome.fired.items()) or "none"))
    for sentence in outcome.violations:
        print(f"VIOLATED: {sentence}")
    return 1 if outcome.violations else 0


def run(seeds: int, first: int = 0, jobs: int = 2) -> int:
    """Simulate `seeds` seeds and print what they showed; returns the exit code."""
    began_s = time.monotonic()
    totals = run_all(range(first, first + seeds), jobs)
    print("\n".join(report(totals)))
    print(f"took {time.monotonic() - began_s:.0f} s on {jobs} processes", flush=True)
    wrong = complaints(totals)
    if wrong:
        print("\n".join(wrong), flush=True)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dips.sim.run_seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell its story")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return tell(options.seed, options.trace)
    return run(options.seeds, options.first, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
