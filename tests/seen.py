"""python tests/seen.py LOG: which refusals and transitions no test saw, of all that `.ci/run` noted in LOG.

DIPS_SEEN_LOG=LOG makes every process of the tests note what it sees (support/seen_notes.py). A refusal that no test
raises in any tier is one that was never checked: it gets a test, or it goes, its number reserved. The same
holds for transitions, of which every table says that they happen. Exit code 1 names them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from support.seen_notes import read_log

import dips.lab.sim.seed_run  # imports every state machine, and so every table  # noqa: F401
from dips.core.machine import tables
from dips.lab.sim.counts import arrows_of, codes, report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/seen.py", description=__doc__)
    parser.add_argument("log", type=Path, help="the file that DIPS_SEEN_LOG named")
    options = parser.parse_args(arguments)
    if not options.log.is_file():
        print(f"{options.log} is not there: run the tests with DIPS_SEEN_LOG={options.log}", file=sys.stderr)
        return 2
    seen = read_log(options.log.read_text())
    print("in how many processes each was seen:")
    print("\n".join(report(seen, tables())))
    refusals = [f"refusal {code}" for code in codes() if code not in seen.refusals]
    arrows = [f"transition {': '.join(arrow)}" for arrow in arrows_of(tables()) if arrow not in seen.arrows]
    for name in refusals + arrows:
        print(f"no test saw {name}: write one, or take it out")
    return 1 if refusals or arrows else 0


if __name__ == "__main__":
    sys.exit(main())
