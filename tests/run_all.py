"""python tests/run_all.py: pytest, and one more try, alone, for tests of real processes that failed.

Files of tests run side by side, one for each processor: much of a test of real processes is waiting. The longest come
first (tests/longest_first.txt), so that no processor waits for another's last file; a run tells its longest at its end.
Not with --faults and --endurance, which want the machine for themselves, nor where -n is given.

A machine that runs everything at once may starve a process of time, and a second try tells that from a broken test; but
it also hides what is wrong with the test, or with the program. So a test that needs one is named at the end, and noted
in the file that DIPS_SECOND_TRIES names, if it does. `python tests/run_all.py --second-tries FILE` judges such a file,
and .ci/run ends with that: tests/second_tries.txt lists what may need a second try with the reason, and more than
BY_CHANCE others are no chance.
Unit, simulation and repository tests get no second try: they have no excuse. The names of what failed stand at the very
end, so that the end of a log tells. Arguments are pytest's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from dips.core.threads import usable_processors

OF_PROCESSES = ("tests/integration/", "tests/slow/", "tests/faults/", "tests/endurance/")
WITHOUT_PROCESSES = ("tests/slow/unit/",)
WISHES = ("--faults", "--endurance")

LISTED = Path(__file__).with_name("second_tries.txt")
"""Tests that may need a second try: on each line a name, two spaces, # and the reason. Lines that begin with # are for
readers."""

NOTED = "DIPS_SECOND_TRIES"

BY_CHANCE = 3
"""Of more than a thousand tests of real processes, so many may once be starved on a machine that others use as well."""

LONGEST = 15
"""Files that are told with their seconds."""


class Notes:
    """The names of tests and files that fail, in their order, and how long each file took."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report.nodeid, report.failed)
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report.nodeid, report.failed)

    def _note(self, name: str, failed: bool) -> None:
        if failed and name not in self.names:
            self.names.append(name)


def main(arguments: Sequence[str], of_processes: Sequence[str] = OF_PROCESSES) -> int:
    keep_bytecode()
    # Compiled once and kept, before processes that wait for each other all compile at the same moment.
    subprocess.check_call([sys.executable, "-m", "dips.cli", "warm-up"])
    notes = Notes()
    code = int(pytest.main(["--require-passed", *_beside_each_other(arguments), *arguments], plugins=[notes]))
    say_longest(notes.seconds)
    names = notes.names
    if code != pytest.ExitCode.TESTS_FAILED:
        return code
    if names and all(_may_be_starved(name, of_processes) for name in names):
        say("failed; now once more, alone", names)
        wish = [option for option in WISHES if option in arguments]  # without it they would be left out
        code = subprocess.call([sys.executable, "-m", "pytest", "--require-passed", *wish, *names])
        if code == 0:
            note_second_tries(names)
            say("PASSED ONLY AT THE SECOND TRY, alone: find out why, a second try hides it", names)
        else:
            say("failed, and failed again alone", names)
    else:
        say("failed", names)
    return code


def _may_be_starved(name: str, of_processes: Sequence[str]) -> bool:
    return name.startswith(tuple(of_processes)) and not name.startswith(WITHOUT_PROCESSES)


def _beside_each_other(arguments: Sequence[str]) -> list[str]:
    if any(argument in WISHES or argument.startswith("-n") for argument in arguments) or usable_processors() == 1:
        return []
    # As conftest.py orders them: xdist by itself begins with the files that have most tests, which are not the longest.
    return ["-n", str(usable_processors()), "--dist", "loadfile", "--no-loadscope-reorder"]


def keep_bytecode() -> None:
    """Containers often forbid it. Here hundreds of processes begin, and each would compile the same modules again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def say_longest(seconds: Mapping[str, float]) -> None:
    print(f"\nlongest files, in seconds, of {sum(seconds.values()):.0f} in all:")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:LONGEST]:
        print(f"{seconds[name]:7.1f}  {name}", flush=True)


def note_second_tries(names: Iterable[str]) -> None:
    """For who judges the whole of several runs at their end."""
    if path := os.environ.get(NOTED):
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)


def listed(path: Path = LISTED) -> dict[str, str]:
    """Test -> why it may need a second try. Raises ValueError for a line without a reason."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = (part.strip() for part in line.partition("  #"))
            if not reason:
                raise ValueError(f"{path}: {name}: write two spaces, # and the reason")
            found[name] = reason
    return found


def judge_second_tries(noted: Path, known: Path = LISTED) -> int:
    """Say which tests needed a second try; 1 if more than BY_CHANCE of them are not listed with a reason."""
    names = noted.read_text(encoding="utf-8").splitlines() if noted.exists() else []
    reasons = listed(known)
    wrong = sorted({name for name in names if name not in reasons})
    print(f"second tries: {len(names)}, of {len(reasons)} tests that are listed with a reason")
    for name in sorted({*names} - {*wrong}):
        print(f"  {name}: {reasons[name]}")
    if wrong:
        say(
            f"passed only at the second try, and not listed in {known.name} (more than {BY_CHANCE} fail): find out why",
            wrong,
        )
    return 1 if len(wrong) > BY_CHANCE else 0


def say(what: str, names: Sequence[str]) -> None:
    print(f"\n{what}: {len(names)}", *(f"  {name}" for name in names), sep="\n", flush=True)


if __name__ == "__main__":
    # A shell starts its background jobs with SIGINT ignored, and every child of a process inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] == ["--second-tries"]:
        sys.exit(judge_second_tries(Path(sys.argv[2])))
    sys.exit(main(sys.argv[1:]))
