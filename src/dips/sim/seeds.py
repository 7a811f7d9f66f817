"""python -m dips.sim.seeds: simulate many seeds, or print the event history of one (docs/simulation.md).

Exit code 1 when a seed violates an invariant, when a fault that was planned never fired (every kind must, from 200
seeds on), when a transition was never taken that is not listed as out of reach with the reason (from 1000 seeds on),
and when no process was killed in some phase of the round (from 2000 on).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from dips.core.observe.seen import note
from dips.sim.seed_run import SeedOutcome, SeedRun
from dips.sim.totals import Totals, complaints, reasons_of, report

CHUNK = 10
"""Seeds that one worker process takes at a time."""

PROGRESS_EVERY = 500
"""Seeds between two lines on standard error."""


def run_one(seed: int) -> tuple[SeedOutcome, float]:
    """Run one seed; returns its result and the processor time, in seconds."""
    note()
    began_s = time.process_time()
    gc.disable()  # a run is short, with few megabytes of garbage: collecting it would cost a tenth of the time
    try:
        outcome = SeedRun(seed).run()
    except Exception as error:
        raise RuntimeError(f"the simulator itself failed in seed {seed}") from error
    finally:
        gc.enable()
    return outcome, time.process_time() - began_s


def run_some(seeds: Sequence[int]) -> list[tuple[SeedOutcome, float]]:
    return [run_one(seed) for seed in seeds]


def run_all(seeds: Sequence[int], jobs: int) -> Totals:
    """Run all seeds on `jobs` processes; the order of the results does not depend on them."""
    totals = Totals()
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if jobs <= 1:
        batches: Iterable[list[tuple[SeedOutcome, float]]] = map(run_some, chunks)
        _add_all(totals, batches)
        return totals
    with ProcessPoolExecutor(jobs) as pool:
        _add_all(totals, pool.map(run_some, chunks))
    return totals


def _add_all(totals: Totals, batches: Iterable[list[tuple[SeedOutcome, float]]]) -> None:
    for batch in batches:
        for outcome, took_s in batch:
            totals.add(outcome, took_s)
            if outcome.violations:
                print(f"seed {outcome.seed}: {outcome.violations[0]}", file=sys.stderr, flush=True)
            if totals.seeds % PROGRESS_EVERY == 0:
                print(f"{totals.seeds} seeds, {len(totals.failures)} failed", file=sys.stderr, flush=True)


def tell(seed: int, trace: bool) -> int:
    """Run and print one seed; with `trace`, all its events."""
    outcome = SeedRun(seed, tell=trace).run()
    for line in outcome.story:
        print(line)
    print(
        f"seed {seed} ({outcome.shape}): {outcome.published} versions in {outcome.rounds} rounds, "
        f"{outcome.virtual_s:.1f} s of virtual time, {outcome.events} events, trace {outcome.trace_hash}"
    )
    print("faults fired: " + (", ".join(f"{name} {n}" for name, n in outcome.fired.items()) or "none"))
    for kind, why in reasons_of(outcome.counts).items():
        print(f"planned, and not fired: {kind}: {why}")
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
    parser = argparse.ArgumentParser(prog="python -m dips.sim.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print its event history")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return tell(options.seed, options.trace)
    return run(options.seeds, options.first, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
