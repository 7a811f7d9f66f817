"""python -m dips.lab.sim.seeds: simulate many seeds, or print the event history of one (docs/simulation.md).

Exit code 1 when a seed violates an invariant, when a fault that was planned never fired (every kind must, from 500
seeds on), when a transition was never taken that is not listed as out of reach with the reason (from 1000 seeds on),
and when no process was killed in some phase of the round (from 2000 on).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from dips.core.machine import TransitionTable, tables
from dips.lab.sim.counts import NO_MASTER, RECOVERY, STARTING, Arrow, RunCounts, Seen, arrows_of, by_phase
from dips.lab.sim.counts import report as seen_report
from dips.lab.sim.faults import register
from dips.lab.sim.seed_run import SeedOutcome, SeedRun
from dips.master.state.records import RoundPhase

# ---- totals ----------------------------------------------------------------------------------------------------------
#
# Adds up the results of many simulated runs, reports them, and decides what makes them a failure.
#
# The numbers count what really happened. Runs must never pass that did not show what they should: a fault that was
# planned and never struck, a phase of the round in which no process was killed, a step that no machine took.


SEEDS_FOR_FAULTS = 500
SEEDS_FOR_PHASES = 2000
SEEDS_FOR_ARROWS = 1000
PLANNED_ENOUGH = 10
"""A kind that was planned so often must have struck, also with few seeds."""

PHASES = (NO_MASTER, STARTING, RECOVERY, *(phase.value for phase in RoundPhase))

_IN_TIME = "who leaves finishes its push first, if there is time for it"
_DONATION = "a donation that fails just there, of a cluster that was just there; tests/unit/worker take it by hand"
_FINISH = "FinishPush is refused only in ways that ask for a new attempt; kept for a master of another release"
_JOB = "no job of this release fails so: what can fail there names a time to try again"

UNREACHED: Mapping[Arrow, str] = {
    ("push", "SEALED", "aborted", "DECIDED"): "a master that commits takes over another history: two disks",
    ("recovery", "DONATING", "no donor is left", "GATHERING"): "the last donor goes meanwhile; one seed in a thousand",
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
    ("session", "TRANSFERRING", "leave", "LEAVING"): _IN_TIME,
    ("session", "FINISHING_PUSH", "leave", "LEAVING"): _IN_TIME,
    ("slave link", "PROMISING", "welcome", "PROMISING"): "a Welcome comes twice while the promise is being saved",
    ("slave shard", "MOVING", "failed", "EMPTY"): "the disk of a slave that is added fails while blocks move to it",
    ("slave link", "DETACHED", "unlinked", "DETACHED"): "every stream that ends was open: the dialler says so first",
    ("slave shard", "COMMITTING", "failed", "PREPARED"): _JOB,
    ("slave shard", "LISTING", "failed", "READY"): "a list is read from memory",
    ("slave shard", "MEASURING", "failed", "READY"): _JOB,
}
"""(table, from, input, to) -> why few runs or none take it. Seeds that take one all the same are no failure."""


@dataclass
class Totals:
    """The totals of all seeds."""

    seeds: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    counts: RunCounts = field(default_factory=RunCounts)
    shapes: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    seen: Seen = field(default_factory=Seen)
    published: int = 0
    rounds: int = 0
    virtual_s: float = 0.0
    events: int = 0
    took_s: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    longest: tuple[int, int] = (0, 0)  # rounds of the longest run, and its seed

    def add(self, outcome: SeedOutcome, took_s: float) -> None:
        self.seeds += 1
        self.failures += [(outcome.seed, outcome.violations[0])] if outcome.violations else []
        self.counts.add(outcome.counts)
        self.shapes[outcome.shape] += 1
        self.facts.update(outcome.facts)
        self.seen.add(outcome.seen)
        self.published += outcome.published
        self.rounds += outcome.rounds
        self.virtual_s += outcome.virtual_s
        self.events += outcome.events
        self.took_s += took_s
        self.slowest = max(self.slowest, (took_s, outcome.seed))
        self.longest = max(self.longest, (outcome.rounds, outcome.seed))


def simulated_tables() -> list[TransitionTable]:  # type: ignore[type-arg]
    """Every table of the real state machines that the simulator runs."""
    return [table for table in tables() if not table.name.startswith("test")]


# ---- report ----


def report(totals: Totals) -> list[str]:
    """The lines of the report."""
    shapes = ", ".join(f"{n} {name}" for name, n in totals.shapes.most_common())
    return [
        f"{totals.seeds} seeds ({shapes}): {len(totals.failures)} failed",
        f"{totals.published} versions published in {totals.rounds} rounds, {totals.events} events, "
        f"{totals.virtual_s / 3600:.1f} h of virtual time; longest run: seed {totals.longest[1]} "
        f"({totals.longest[0]} rounds); slowest: seed {totals.slowest[1]} ({totals.slowest[0]:.2f} s); "
        f"{totals.seeds / max(totals.took_s, 1e-9):.1f} seeds for each second of a processor",
        *_planned(totals.counts),
        *_kinds(totals.counts),
        *_phases(totals.counts),
        *_bounds(totals),
    ]


def _planned(counts: RunCounts) -> list[str]:
    """The line about planned faults: how many struck, and why the others did not."""
    planned, idle = sum(counts.planned.values()), Counter[str]()
    for (_, why), n in counts.idle.items():
        idle[why] += n
    reasons = "; ".join(f"{n}: {why}" for why, n in idle.most_common())
    return [f"faults planned: {planned}, struck: {planned - idle.total()}" + (f", not: {reasons}" if reasons else "")]


def _kinds(counts: RunCounts) -> list[str]:
    """The lines about kinds of faults: how often each struck, and how often it was planned, by group."""
    lines = []
    for group in dict.fromkeys(register.GROUP_OF.values()):
        kinds = sorted(kind for kind, of in register.GROUP_OF.items() if of == group)
        seen = (kind for kind in kinds if counts.fired[kind] or counts.planned[kind])
        said = (
            f"{kind} {counts.fired[kind]}" + (f" ({counts.planned[kind]})" if kind in register.FAULTS else "")
            for kind in seen
        )
        lines.append(f"  {group}: " + (", ".join(said) or "none"))
    return ["faults that struck, by kind (in brackets: how often it was planned)", *lines]


def _phases(counts: RunCounts) -> list[str]:
    """The table of the phases of the round in which kills and faults happened, one column for each role and group."""
    groups = list(dict.fromkeys(register.GROUP_OF.values()))
    columns = [("kills of master", "master"), ("of slaves", "slave"), ("of clusters", "cluster")]
    kills, struck = by_phase(counts.kills, {}), by_phase(counts.fired_in, register.GROUP_OF)
    total = sum(counts.kills.values())
    lines = [f"kills: {total}; phase of the round in which each kill and each fault happened"]
    lines.append(f"  {'':<10}" + "".join(f"{name:>16}" for name, _ in columns) + "".join(f"{g:>12}" for g in groups))
    for phase in PHASES:
        killed, hit = kills.get(phase, Counter()), struck.get(phase, Counter())
        row = "".join(f"{killed[role]:>16}" for _, role in columns) + "".join(f"{hit[group]:>12}" for group in groups)
        lines.append(f"  {phase:<10}{row}")
    return lines


def _bounds(totals: Totals) -> list[str]:
    counts = totals.counts
    worst = ", ".join(f"{name} {value:.2f}" for name, value in sorted(counts.worst.items()))
    fills = sorted(counts.fills.items(), key=lambda item: -item[1][0] / max(1, item[1][1]))
    full = ", ".join(f"{name} {size} of {most}" for name, (size, most) in fills)
    judged = ", ".join(f"{name} {count}" for name, count in sorted(totals.facts.items()))
    total = sum(len(table.arrows()) for table in simulated_tables())
    return [
        f"I15, at most: {worst or 'nothing was judged'}",
        f"I16, fullest: {full or 'nothing was judged'}",
        f"facts judged: {judged or 'none'}",
        *seen_report(totals.seen, simulated_tables()),
        f"transitions taken: {len(totals.seen.arrows)} of {total}, {len(UNREACHED)} are listed as out of reach",
    ]


# ---- failures ----


def _option(name: str, values: tuple[int, ...]) -> str:
    return f" {name} {' '.join(map(str, values))}" if values else ""


@dataclass(frozen=True)
class Wish:
    """What the command line asks of all runs. pushers, later: as SimulatedRunPlan's pushers and later_pushers."""

    pushers: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    takes_over: bool = False

    def run_of(self, seed: int, tell: bool = False) -> SeedRun:
        return SeedRun(seed, tell, pushers=self.pushers, later_pushers=self.later, takes_over=self.takes_over)

    def options(self) -> str:
        """As typed."""
        ranks = _option("--pushers", self.pushers) + _option("--later-pushers", self.later)
        return ranks + " --take-over" * self.takes_over


NOTHING_MORE = Wish()


def complaints(totals: Totals, wish: Wish = NOTHING_MORE) -> list[str]:
    """Sentences about what makes the runs a failure."""
    said = [
        f"seed {seed}: {sentence}\n    its event history: python -m dips.lab.sim.seeds --seed {seed} --trace"
        f"{wish.options()}"
        for seed, sentence in totals.failures
    ]
    said += _faults_that_never_fired(totals, wish)
    if totals.seeds >= SEEDS_FOR_PHASES:
        killed_in = {phase for (_, phase), n in totals.counts.kills.items() if n}
        said += [f"no process was killed in phase {phase} of the round" for phase in PHASES if phase not in killed_in]
    if totals.seeds >= SEEDS_FOR_ARROWS:
        never = sorted(set(arrows_of(simulated_tables())) - set(totals.seen.arrows) - set(UNREACHED))
        said += [f"never taken: {table}: {a} -> {b} upon {name}" for table, a, name, b in never]
    return said


def _faults_that_never_fired(totals: Totals, wish: Wish) -> list[str]:
    counts, many = totals.counts, totals.seeds >= SEEDS_FOR_FAULTS
    said = []
    for name in register.names(ranks=max((*wish.pushers, *wish.later), default=1) > 1):
        planned = counts.planned[name]
        usual = many and (wish.takes_over or name not in register.OF_STANDBY)  # few of the first seeds have a standby
        if not counts.fired[name] and (usual or planned >= PLANNED_ENOUGH):
            said.append(f"fault {name} never fired ({planned} were planned)")
    return said


# ---- seeds -----------------------------------------------------------------------------------------------------------


CHUNK = 10
"""Seeds that one worker process takes at a time."""

PROGRESS_EVERY = 500
"""Seeds between two lines on standard error."""


def run_one(seed: int, wish: Wish = NOTHING_MORE) -> tuple[SeedOutcome, float]:
    """Run one seed; returns its result and the processor time, in seconds."""
    began_s = time.process_time()
    gc.disable()  # a run is short, with few megabytes of garbage: collecting it would cost a tenth of the time
    try:
        outcome = wish.run_of(seed).run()
    except Exception as error:
        raise RuntimeError(f"the simulator itself failed in seed {seed}") from error
    finally:
        gc.enable()
    return outcome, time.process_time() - began_s


def run_some(wish: Wish, seeds: Sequence[int]) -> list[tuple[SeedOutcome, float]]:
    return [run_one(seed, wish) for seed in seeds]


def run_all(seeds: Sequence[int], jobs: int, wish: Wish = NOTHING_MORE) -> Totals:
    """Run all seeds on `jobs` processes; the order of the results does not depend on them."""
    totals = Totals()
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    work = partial(run_some, wish)
    with ExitStack() as stack:
        batches = stack.enter_context(ProcessPoolExecutor(jobs)).map(work, chunks) if jobs > 1 else map(work, chunks)
        for outcome, took_s in chain.from_iterable(batches):
            totals.add(outcome, took_s)
            if outcome.violations:
                print(f"seed {outcome.seed}: {outcome.violations[0]}", file=sys.stderr, flush=True)
            if totals.seeds % PROGRESS_EVERY == 0:
                print(f"{totals.seeds} seeds, {len(totals.failures)} failed", file=sys.stderr, flush=True)
    return totals


def tell(seed: int, trace: bool, wish: Wish = NOTHING_MORE) -> int:
    """Run and print one seed; with `trace`, all its events."""
    outcome = wish.run_of(seed, trace).run()
    for line in outcome.story:
        print(line)
    print(
        f"seed {seed} ({outcome.shape}): {outcome.published} versions in {outcome.rounds} rounds, "
        f"{outcome.virtual_s:.1f} s of virtual time, {outcome.events} events, trace {outcome.trace_hash}"
    )
    print("faults fired: " + (", ".join(f"{name} {n}" for name, n in outcome.fired.items()) or "none"))
    for kind, why in dict(sorted(outcome.counts.idle)).items():
        print(f"planned, and not fired: {kind}: {why}")
    for sentence in outcome.violations:
        print(f"VIOLATED: {sentence}")
    return 1 if outcome.violations else 0


def run(seeds: int, first: int = 0, jobs: int = 2, wish: Wish = NOTHING_MORE) -> int:
    """Simulate `seeds` seeds and print what they showed; returns the exit code."""
    began_s = time.monotonic()
    totals = run_all(range(first, first + seeds), jobs, wish)
    print("\n".join(report(totals)))
    print(f"took {time.monotonic() - began_s:.0f} s on {jobs} processes", flush=True)
    wrong = complaints(totals, wish)
    if wrong:
        print("\n".join(wrong), flush=True)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dips.lab.sim.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument(
        "--pushers",
        type=int,
        nargs="+",
        default=(),
        choices=range(1, 9),
        metavar="N",
        help="ranks of each cluster, cluster by cluster and again from the first (1)",
    )
    parser.add_argument(
        "--later-pushers",
        type=int,
        nargs="+",
        default=(),
        choices=range(1, 9),
        metavar="N",
        help="ranks of a cluster that begins again, life by life and again from the first (as in its first life)",
    )
    parser.add_argument("--take-over", action="store_true", help="every run has a standby that takes over")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print its event history")
    options = parser.parse_args(arguments)
    wish = Wish(tuple(options.pushers), tuple(options.later_pushers), options.take_over)
    if options.seed is not None:
        return tell(options.seed, options.trace, wish)
    return run(options.seeds, options.first, options.jobs, wish)


if __name__ == "__main__":
    sys.exit(main())
