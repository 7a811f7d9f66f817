"""`python -m dips.sim.search [--quick] [--list] [--name NAME]`: run searches, print what each saw."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dips.sim.search.explore import Result, Search
from dips.sim.search.searches import SEARCHES, Named, by_name
from dips.sim.search.wiring import Label


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every search is clean; 1: an invariant was violated; 2: no such search."""
    parser = argparse.ArgumentParser(prog="python -m dips.sim.search", description="Exhaustive search at small bounds.")
    parser.add_argument("--quick", action="store_true", help="only the searches that end within seconds")
    parser.add_argument("--list", action="store_true", help="name the searches, run none")
    parser.add_argument("--name", action="append", default=[], help="run this one (may be given again)")
    parser.add_argument("--max-states", type=int, help="stop each search there instead of at its own limit")
    options = parser.parse_args(arguments)
    try:
        chosen = [by_name(name) for name in options.name] or [s for s in SEARCHES if s.quick or not options.quick]
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    if options.list:
        for named in chosen:
            print(f"{named.name:24} {'quick' if named.quick else 'full':6} {named.words}")
        return 0
    results = [_run(named, options.max_states) for named in chosen]
    return 1 if any(result.violation for result in results) else 0


def _run(named: Named, max_states: int | None) -> Result:
    print(f"{named.name:24} {named.words}", flush=True)
    result = Search(named.bounds, max_states or named.max_states, named.max_seconds).run()
    print(
        f"{'':24} {result.words}: {result.states} states, {result.steps} steps, depth {result.depth}, "
        f"{result.ends} ends, {result.seconds:.1f} s",
        flush=True,
    )
    for line in story(result.story):
        print(f"{'':24} {line}")
    return result


def story(labels: Sequence[Label]) -> list[str]:
    """A way through the states, a line for each step."""
    return [f"{number:3}. {' '.join(str(word) for word in label)}" for number, label in enumerate(labels, 1)]


if __name__ == "__main__":
    sys.exit(main())
