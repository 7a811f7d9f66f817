"""python tests/under_load.py [FILE...]: each file of process tests passes three times beside `stress-ng --cpu 2`.

A test that passes by luck fails here. What passed is noted in tests/under_load.txt, for the text that a file has, and
is not made again: the work may be cut off at any time, and go on another day. Ends with the files that failed, and with
exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTES, LOGS = ROOT / "tests" / "under_load.txt", ROOT / ".under_load"
FOLDERS = ("integration", "slow", "faults", "endurance", "foreign")
TIMES = 3
LIMIT_S = 3 * 600
"""The ten minutes of a test, times three."""

NOTHING_RAN = 5
"""pytest's exit code where a file has no test for these options."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="else all files of process tests")
    options = parser.parse_args()
    files = sorted(file for folder in FOLDERS for file in (ROOT / "tests" / folder).glob("test_*.py"))
    texts = {str(file.relative_to(ROOT)): hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}
    if shutil.which("stress-ng") is None:
        parser.error("stress-ng is not installed: apt-get install stress-ng")
    chosen = [str(file.resolve().relative_to(ROOT)) for file in options.files] or list(texts)
    stress = subprocess.Popen(["stress-ng", "--cpu", "2", "--quiet"])
    try:
        failed = [name for name in chosen if not passes(name, texts)]
    finally:
        stress.terminate()
        stress.wait()
    print("\n".join(["failed:", *failed]) if failed else f"{len(chosen)} files passed {TIMES} times")
    return 1 if failed else 0


def passes(name: str, texts: dict[str, str]) -> bool:
    """Whether the file passed so many times, now or before; each time is noted."""
    rows = [line.split() for line in NOTES.read_text().splitlines()] if NOTES.exists() else []
    passed = {file: int(times) for times, text, file in rows if texts.get(file) == text}
    while passed.get(name, 0) < TIMES:
        begun_s, log = time.monotonic(), LOGS / f"{Path(name).stem}.log"
        LOGS.mkdir(exist_ok=True)
        with log.open("w") as out:
            options = ("-q", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}")
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *options, name], cwd=ROOT, stdout=out, stderr=out, check=False
            ).returncode
        good = code in (0, NOTHING_RAN)
        print(f"{name}: {'passed' if good else 'FAILED'} after {time.monotonic() - begun_s:.0f} s", flush=True)
        if not good:
            return False
        passed[name] = TIMES if code == NOTHING_RAN else passed.get(name, 0) + 1
        NOTES.write_text("".join(f"{passed[file]} {texts[file]} {file}\n" for file in sorted(passed)))
    return True


if __name__ == "__main__":
    sys.exit(main())
