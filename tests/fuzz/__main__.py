"""python -m fuzz --minutes 5: every decoder, then the compiled loops; exits 1 on any violation."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Sequence

from fuzz import disk, loops, runner
from fuzz.catalog import targets

SHARES = {"decoders": 0.75, "loops": 0.25}
"""Of the time."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs; it is printed")
    parser.add_argument("--only", default="", help="a part: decoders or loops")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(f"make fuzz: {asked.minutes:g} minutes, seed {asked.seed}", flush=True)
    found: list[str] = []
    try:
        for part, share in SHARES.items():
            if asked.only in ("", part):
                seconds = 60 * asked.minutes * (1.0 if asked.only else share)
                found += _PARTS[part](seconds, asked.seed)
    finally:
        shutil.rmtree(disk.scratch(), ignore_errors=True)
    for sentence in found:
        print(f"VIOLATION {sentence}", flush=True)
    print(f"make fuzz: {len(found)} violations" if found else "make fuzz: no violation", flush=True)
    return 1 if found else 0


def _decoders(seconds: float, seed: int) -> list[str]:
    all_targets = targets()
    found = runner.feed_for(all_targets, seconds, seed)
    print(runner.table(all_targets), flush=True)
    return found


_PARTS = {"decoders": _decoders, "loops": loops.feed_for}

if __name__ == "__main__":
    sys.exit(main())
