"""python tests/under_load.py [FILE...]: each file of process tests three times in a row beside `stress-ng --cpu 2`.

A test that passes by luck fails here. Every time that a file passed is noted in `.under_load.json`, for the text that
the file had, and not made again by the next call: the work may be cut off at any time. Ends with the list of failures,
and with exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTES, LOGS = ROOT / ".under_load.json", ROOT / ".under_load"
FOLDERS = ("integration", "slow", "faults", "endurance")
TIMES = 3
LIMIT_S = 3 * 600
"""The ten minutes of a test, times three."""

NOTHING_RAN = 5
"""pytest's exit code where a file has no test for these options."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="else all files of process tests")
    parser.add_argument("--no-stress", action="store_true", help="the machine is loaded already")
    parser.add_argument("--long", action="store_true", help="also what has the mark `long`")
    parser.add_argument("--times", type=int, default=TIMES, help=f"in a row (default {TIMES})")
    parser.add_argument("--again", action="store_true", help="forget what passed before")
    wish = parser.parse_args()
    notes: dict[str, int] = {} if wish.again or not NOTES.exists() else json.loads(NOTES.read_text())
    files = [file.resolve() for file in wish.files] or sorted(
        file for folder in FOLDERS for file in (ROOT / "tests" / folder).glob("test_*.py")
    )
    failed = []
    with contextlib.nullcontext() if wish.no_stress else stress():
        for file in files:
            name = str(file.relative_to(ROOT))
            key = f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
            while (passed := notes.get(key, 0)) < wish.times:
                begun_s = time.monotonic()
                code = passes(file, ["--long"] if wish.long else [])
                print(
                    f"{name}: {'passed' if not code else 'FAILED'} after {time.monotonic() - begun_s:.0f} s", flush=True
                )
                if code:
                    failed.append(name)
                    break
                notes[key] = passed + 1
                NOTES.write_text(json.dumps(notes, indent=1))
    print("\n".join(["failed:", *failed]) if failed else f"{len(files)} files passed {wish.times} times")
    return 1 if failed else 0


def passes(file: Path, options: list[str]) -> int:
    """0, or pytest's exit code; what it said is in LOGS."""
    LOGS.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *options,
        "-p",
        "no:cacheprovider",
        f"--timeout={LIMIT_S}",
        str(file),
    ]
    with (LOGS / f"{file.stem}.log").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    return 0 if code == NOTHING_RAN else code


@contextlib.contextmanager
def stress() -> Iterator[None]:
    process = subprocess.Popen(["stress-ng", "--cpu", "2", "--quiet"])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
