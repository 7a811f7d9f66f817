"""`python -m search [--long | --short] [--list] [--name NAME]`: run searches and print their results.

Searches run in parallel, one for each core, the largest first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dips.core.machine import tables
from dips.lab.sim.counts import Seen, report
from search.explore import Result
from search.searches import SEARCHES, Named, Size, by_name, run_all
from search.wiring import StepLabel

MAX_STORY = 400
"""Most printed lines of a path; breadth-first search finds short ones."""

HEADER = """\
# What each exhausted search saw: name, states, steps, depth, ends. They change only with behaviour.
# `make model-check` compares; `make model-check ARGS=--write-counts` writes them again (docs/simulation.md).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: all is clean. 1: an invariant was violated, a planned fault never struck, a search that ends by
    itself was stopped, or its counts are not those of the file. 2: no such search.
    """
    options = _parser().parse_args(arguments)
    try:
        sizes = {Size.SHORT} if options.short else set(Size) if options.long else {Size.SHORT, Size.MIDDLE}
        chosen = [by_name(name) for name in options.name] or [named for named in SEARCHES if named.size in sizes]
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    if options.list:
        for named in chosen:
            print(f"{named.name:28} {named.size.value:6} {named.words}")
        return 0
    began = time.perf_counter()
    found: list[tuple[Named, Result]] = []
    for named, result in run_all(chosen, options.max_states, options.jobs):
        found.append((named, result))
        _print(named, result)
    code = _conclude(found, time.perf_counter() - began, stopped_by_hand=options.max_states is not None)
    if options.counts is None:
        return code
    return _hold_counts(options.counts, counts_of(found), options.write_counts) or code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m search", description="Exhaustive search at small bounds.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="only the searches that end within seconds")
    size.add_argument("--long", action="store_true", help="also those that take minutes each, or never end")
    parser.add_argument("--list", action="store_true", help="name the searches, run none")
    parser.add_argument("--name", action="append", default=[], help="run this one (may be given again)")
    parser.add_argument("--max-states", type=int, help="stop each search there instead of at its own limit")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="compare the counts of exhausted searches with it")
    parser.add_argument("--write-counts", action="store_true", help="write them to the file of --counts instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="searches at once (default: all cores)")
    return parser


def _print(named: Named, result: Result) -> None:
    print(
        f"{named.name:28} {named.words}\n{'':28} {result.words}: {result.states} states, {result.steps} steps, depth "
        f"{result.depth}, {result.ends} ends, {result.seconds:.1f} s",
        flush=True,
    )
    for line in story(result.story)[:MAX_STORY]:
        print(f"{'':28} {line}")


def _conclude(found: Sequence[tuple[Named, Result]], seconds: float, stopped_by_hand: bool) -> int:
    results = [result for _, result in found]
    struck: Counter[str] = Counter()
    for result in results:
        struck.update(result.faults)
    states, steps = sum(r.states for r in results), sum(r.steps for r in results)
    depth, peak_mb = max((r.depth for r in results), default=0), max((r.peak_mb for r in results), default=0)
    exhausted, cpu_s = sum(r.exhausted for r in results), sum(r.cpu_s for r in results)
    print(
        f"{len(results)} searches, {exhausted} exhausted: {states} states, {steps} steps, depth {depth}, "
        f"{seconds:.0f} s ({cpu_s:.0f} s of processor time), at most {peak_mb} MiB a process"
    )
    print("steps that are faults: " + (", ".join(f"{name} {n}" for name, n in sorted(struck.items())) or "none"))
    seen = Seen()
    for result in results:
        seen.add(result.seen)
    print("\n".join(report(seen, tables())))
    wrong = [f"{named.name}: {result.violation}" for named, result in found if result.violation]
    wrong += [f"{named.name}: {fault} never struck" for named, result in found for fault in never_struck(named, result)]
    if not stopped_by_hand:
        wrong += [
            f"{named.name} stopped at {result.stopped_at}: it is to be exhausted"
            for named, result in found
            if result.stopped_at and named.size is not Size.LONG
        ]
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


SearchCounts = dict[str, tuple[int, int, int, int]]
"""Counts of each search, by its name: states, steps, depth, ends."""


def counts_of(found: Sequence[tuple[Named, Result]]) -> SearchCounts:
    """The counts of all exhausted searches: only these do not depend on a limit."""
    return {named.name: (r.states, r.steps, r.depth, r.ends) for named, r in found if r.exhausted}


def read_counts(path: Path) -> SearchCounts:
    """The lines of a file of counts. Raises ValueError for an invalid line."""
    found: SearchCounts = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, states, steps, depth, ends = line.split()
            found[name] = (int(states), int(steps), int(depth), int(ends))
    return found


def _hold_counts(path: Path, counts: SearchCounts, write: bool) -> int:
    """Compare with the file, or write it; lines of searches that did not run stay. Returns the exit code."""
    known = read_counts(path) if path.exists() else {}
    if write:
        lines = [f"{name} {' '.join(map(str, numbers))}\n" for name, numbers in sorted((known | counts).items())]
        path.write_text(HEADER + "".join(lines))
        return 0
    wrong = [name for name, numbers in sorted(counts.items()) if known.get(name) != numbers]
    for name in wrong:
        before = known.get(name, "not there")
        print(f"FAILED {name}: states, steps, depth, ends are {counts[name]}; in {path} they are {before}")
    print(f"{len(counts)} counts compared with {path}: {len(wrong)} differ")
    return 1 if wrong else 0


def never_struck(named: Named, result: Result) -> list[str]:
    """Faults that a search was to play and that no step of it was, although it saw every state."""
    planned = [fault for fault, n in named.bounds.faults if n]
    return [fault for fault in planned if result.exhausted and fault not in result.faults]


def story(labels: Sequence[StepLabel]) -> list[str]:
    """The text of a path through the states, a line for each step."""
    return [f"{number:3}. {' '.join(str(word) for word in label)}" for number, label in enumerate(labels, 1)]


if __name__ == "__main__":
    sys.exit(main())
