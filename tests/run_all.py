"""python tests/run_all.py: runs files of tests side by side, in processes forked from one that has imported everything.

    python tests/run_all.py tests/unit tests/integration/test_whole_run.py -k lease
    python tests/run_all.py --tier first|landing|long        the parts of a tier (tests/tiers.py)

Arguments that are not listed below are pytest's. Each child runs pytest on one long file or on some short ones, and
tells its parent of each test as it begins and ends; a child that dies names its test and fails. The longest files begin
first (tests/seconds.txt), so that no processor waits for another's last file. What pytest prints is shown where
something failed. A test gets one try only. The last line is `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tiers

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".tests"
"""Not in the repository: which parts passed, for RESUME=1."""

SECONDS = ROOT / "tests" / "seconds.txt"
"""Processor and waiting seconds of files of tests and of a tier's commands: what is not listed takes UNLISTED_S."""

UNLISTED_S = 0.3
BATCH_S = 5.0
"""Short files share a child up to this: pytest takes some tenths of a second to begin."""

MEMORY = Path("/dev/shm")
ROOM_BYTES = 2 << 30
"""A file system in memory is where unit tests write, if it has so much room: they wait for no disk."""

SEEN_LOG = "DIPS_SEEN_LOG"
"""Names the file in which processes of tests note which refusals and transitions they see (tests/seen.py)."""

INTERRUPTED = 130
NO_TESTS = 5  # pytest's exit code


@dataclass
class Job:
    """One child's work: files of tests, or a command."""

    name: str
    seconds: float
    files: Sequence[str] = ()
    arguments: Sequence[str] = ()
    command: Sequence[str] = ()
    patient: bool = False
    """It only computes: it gets the processors that others leave (nice)."""


@dataclass
class Outcome:
    """What one job told, and its output."""

    job: Job
    began: float
    output: Path
    folder: Path
    running: str = ""
    ended: bool = False
    """Whether pytest came to its end: a child that a test ends with exit code 0 has passed nothing."""
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    code: int | None = None


class Teller:
    """A plugin of a child's pytest: one line of JSON for each test that begins, and for each part that ends."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        xfailed = hasattr(report, "wasxfail")
        counts = report.when == "call" or report.outcome != "passed"
        self._tell("report", report.nodeid, "xfailed" if xfailed else report.outcome, counts, report.duration)
        if report.skipped and not xfailed:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self._tell("skipped", report.nodeid, str(why).removeprefix("Skipped: "))

    def pytest_sessionfinish(self) -> None:
        self._tell("ended")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell("report", report.nodeid, "failed", True, 0.0)

    def _tell(self, *words: object) -> None:
        os.write(self._pipe, (json.dumps(words) + "\n").encode())


class Importer:
    """A plugin of the parent's pytest: imports the package while pytest rewrites the modules of plugins, or children
    would find these imported without it, and refuse."""

    def pytest_sessionstart(self) -> None:
        import dips

        for module in pkgutil.walk_packages(dips.__path__, "dips."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def warm_up(files: Sequence[str]) -> None:
    """Imports what tests import, once for all children. Starts no thread: a fork would lose it."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes begin, and each would compile the same
    sys.dont_write_bytecode = False
    import pytest

    with tempfile.TemporaryFile("w+") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files[:1]], plugins=[Importer()])
        said.seek(0)
        words = said.read()
    if code not in (0, NO_TESTS):
        print(words, f"{files[0]}: pytest cannot collect it (exit code {code:d})", sep="\n")
    gc.collect()
    gc.freeze()


def in_child(job: Job, outcome: Outcome, pipe: int, arguments: Sequence[str]) -> int:
    """pytest on the files of a job, with its output in a file; its exit code."""
    import pytest

    handle = os.open(outcome.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if job.patient:
        os.nice(19)
    options = ["-p", "no:cacheprovider", f"--basetemp={outcome.folder}", *job.arguments, *arguments]
    return int(pytest.main([*options, *job.files], plugins=[Teller(pipe)]))


def fork(job: Job, outcome: Outcome, arguments: Sequence[str]) -> tuple[int, int]:
    """Starts a child; its pid and the pipe on which it tells."""
    mine, its = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(its)
        return pid, mine
    code = 70
    try:
        os.close(mine)
        code = in_child(job, outcome, its, arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def start(job: Job, outcome: Outcome) -> tuple[int, int]:
    """Starts a command in a process group of its own: its pid, and a pipe that ends with it."""
    mine, its = os.pipe()
    os.set_inheritable(its, True)
    with open(outcome.output, "w") as output:
        command = ["nice", "-n", "19", *job.command] if job.patient else list(job.command)
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[its],
            process_group=0,
        )  # fmt: skip
    os.close(its)
    process.returncode = 0  # the caller waits for it
    return process.pid, mine


class Run:
    """Jobs side by side, the longest first."""

    def __init__(self, jobs: Sequence[Job], arguments: Sequence[str], passed: Passed, *, at_once: int) -> None:
        self.left = sorted(jobs, key=lambda job: job.seconds)
        self.total = len(jobs)
        self.arguments = arguments
        self.passed = passed
        self.at_once = at_once
        self.done: list[Outcome] = []
        self.stopped = False
        self._selector = selectors.DefaultSelector()
        self._live: dict[int, tuple[Outcome, int, bytearray]] = {}
        # Tests make sockets in their folders: the paths must stay short.
        self._disk = Path(tempfile.mkdtemp(prefix="tests-"))
        self._memory = self._disk if not MEMORY.is_dir() else Path(tempfile.mkdtemp(prefix="tests-", dir=MEMORY))

    def go(self) -> None:
        """Runs all; a first ctrl-C ends what runs, and starts nothing more."""
        try:
            while self._live or (self.left and not self.stopped):
                try:
                    self._step()
                except KeyboardInterrupt:
                    self._stop()
        finally:
            for _, pid, _ in self._live.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self._memory, ignore_errors=True)
            if not any(outcome.failed for outcome in self.done) and not self.stopped:
                shutil.rmtree(self._disk, ignore_errors=True)

    def begin(self, *, commands_only: bool = False) -> None:
        """Starts the longest jobs for which there is a place: at_once, and one more for what only computes."""
        for job in [] if self.stopped else self.left[::-1]:
            patient = sum(outcome.job.patient for outcome, _, _ in self._live.values())
            places = self.at_once - (len(self._live) - patient)
            if job.patient and all(left.patient for left in self.left):
                places = self.at_once - len(self._live)
            elif job.patient:
                places = 1 - patient
            if places > 0 and not (commands_only and job.files):
                self.left.remove(job)
                self._begin(job)

    def _step(self) -> None:
        self.begin()
        for key, _ in self._selector.select():
            outcome, pid, words = self._live[key.fd]
            if got := os.read(key.fd, 1 << 16):
                words += got
                *lines, rest = words.split(b"\n")
                words[:] = rest
                for line in lines:
                    heard(outcome, json.loads(line))
                continue
            self._selector.unregister(key.fd)
            del self._live[key.fd]
            os.close(key.fd)
            outcome.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._end(outcome)

    def _begin(self, job: Job) -> None:
        number = self.total - len(self.left)
        roomy = shutil.disk_usage(self._memory).free > ROOM_BYTES
        folder = self._memory if roomy and tiers.fits_memory(job.files) else self._disk
        outcome = Outcome(job, time.monotonic(), self._disk / f"{number}.log", folder / str(number))
        pid, pipe = start(job, outcome) if job.command else fork(job, outcome, self.arguments)
        self._live[pipe] = outcome, pid, bytearray()
        self._selector.register(pipe, selectors.EVENT_READ)

    def _end(self, outcome: Outcome) -> None:
        judge(outcome)
        self.done.append(outcome)
        took = time.monotonic() - outcome.began
        if outcome.job.command:
            outcome.seconds[outcome.job.name] = took
        counts = ", ".join(f"{n} {word}" for word, n in sorted(outcome.counts.items()) if n)
        print(f"{len(self.done):4}/{self.total} {took:6.1f} s  {outcome.job.name}: {counts or 'no test'}", flush=True)
        if outcome.failed or "-s" in self.arguments or "-v" in self.arguments:
            print(outcome.output.read_text(errors="replace"), flush=True)
        if not outcome.failed:
            self.passed.add(outcome.job.name)
            shutil.rmtree(outcome.folder, ignore_errors=True)

    def _stop(self) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        print("stops: ctrl-C once more kills what still runs", flush=True)
        for outcome, pid, _ in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                if outcome.job.command:
                    os.killpg(pid, signal.SIGTERM)
                else:
                    os.kill(pid, signal.SIGINT)


def heard(outcome: Outcome, words: Sequence[object]) -> None:
    match words:
        case ["began", str(test)]:
            outcome.running = test
        case ["report", str(test), str(result), bool(counts), float(seconds)]:
            if counts:
                outcome.counts[result] += 1
            outcome.seconds[test.partition("::")[0]] += seconds
            if result == "failed" and test not in outcome.failed:
                outcome.failed.append(test)
        case ["skipped", str(test), str(why)]:
            outcome.skipped.append((test, why))
        case ["ended"]:
            outcome.ended = True


def judge(outcome: Outcome) -> None:
    """What the exit code adds to what was told."""
    code = outcome.code
    if outcome.job.command:
        outcome.counts["failed" if code else "passed"] += 1
        if code:
            outcome.failed.append(f"{outcome.job.name} (exit code {code})")
    elif code is not None and code < 0:
        outcome.counts["failed"] += 1
        outcome.failed.append(f"{outcome.running or outcome.job.name} (its process died: {signal.Signals(-code).name})")
    elif code not in (0, 1, NO_TESTS) or not outcome.ended or (code == 1 and not outcome.failed):
        outcome.counts["failed"] += 1
        outcome.failed.append(f"{outcome.running or outcome.job.name} (its process ended with exit code {code})")


class Passed:
    """The names of the parts that passed at this state of the tree, for RESUME=1."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.names = set(path.read_text().splitlines()) if path is not None and path.exists() else set()

    def add(self, name: str) -> None:
        if self.path is not None and name not in self.names:
            self.names.add(name)
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.write(name + "\n")


def tree_hash() -> str:
    """Of every file that git does not ignore, with its name."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.decode().split("\0"))):
        path = ROOT / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def read_seconds(path: Path = SECONDS) -> dict[str, float]:
    """Name -> seconds; a line is a number, two spaces and a name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: float(number) for number, _, name in (line.partition("  ") for line in lines if line)}


def write_seconds(measured: Mapping[str, float], path: Path = SECONDS) -> None:
    """Files that were removed go; times under UNLISTED_S are not listed."""
    known = {**read_seconds(path), **measured}
    kept = {n: s for n, s in known.items() if s > UNLISTED_S and (not n.endswith(".py") or (ROOT / n).is_file())}
    path.write_text("".join(f"{kept[name]:.1f}  {name}\n" for name in sorted(kept)))


def files_of(paths: Iterable[str]) -> Iterator[str]:
    """Files of tests below folders, relative to the root; a test's name (file::test) stays as it is."""
    for path in paths:
        if "::" in path or path.endswith(".py"):
            yield path
        else:
            found = (file.relative_to(ROOT).as_posix() for file in (ROOT / path).rglob("test_*.py"))
            yield from sorted(found)


def batches(files: Sequence[str], seconds: Mapping[str, float]) -> Iterator[Job]:
    """Long files alone, short ones of one folder together."""
    together: list[str] = []
    sum_s = 0.0
    folder = ""

    def batch() -> Job:
        more = f" and {len(together) - 1} more" if len(together) > 1 else ""
        return Job(f"{together[0]}{more}", sum_s, tuple(together))

    for file in dict.fromkeys(files):
        takes = seconds.get(file, UNLISTED_S)
        if takes >= BATCH_S:
            yield Job(file, takes, (file,))
            continue
        if together and (sum_s + takes > BATCH_S or Path(file).parent.as_posix() != folder):
            yield batch()
            together, sum_s = [], 0.0
        folder = Path(file).parent.as_posix()
        together.append(file)
        sum_s += takes
    if together:
        yield batch()


def jobs_of_tier(tier: str, seconds: Mapping[str, float]) -> list[Job]:
    """The jobs of a tier of tests/tiers.py; those of the landing and long tier are one for each file, so that a run can
    go on where it stopped."""
    commands = [
        Job(name, seconds.get(name, 60.0), command=command, patient=name.startswith(tiers.PATIENT))
        for name, command in tiers.COMMANDS[tier].items()
    ]
    files = tiers.files(tier)
    if tier == "first":
        return [*commands, *batches(files, seconds)]
    jobs = commands
    for file in files:
        patient = file.startswith(tiers.COMPUTES)
        jobs.append(Job(file, seconds.get(file, UNLISTED_S), (file,), tiers.OPTIONS[tier], patient=patient))
    if tier == "long":
        # What is marked long in files of the other tiers.
        for file in tiers.files("first") + tiers.files("landing"):
            if tiers.has_long_tests(file):
                name = f"{file}, what is marked long"
                jobs.append(Job(name, seconds.get(name, 60.0), (file,), (*tiers.OPTIONS[tier], "-m", "long")))
    return jobs


def part_of(jobs: Sequence[Job], part: int) -> list[Job]:
    """One of tiers.PARTS parts that take about equally long together."""
    parts: list[list[Job]] = [[] for _ in range(tiers.PARTS)]
    for job in sorted(jobs, key=lambda job: (-job.seconds, job.name)):
        min(parts, key=lambda jobs: sum(job.seconds for job in jobs)).append(job)
    return parts[part - 1]


def report(run: Run, began: float, *, skips_fail: bool) -> int:
    """Prints what failed, the longest files, and the counts; the exit code. In a tier a test is skipped only for what a
    machine cannot have (tiers.MAY_SKIP): anything else that is missing fails."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for outcome in run.done:
        for name, taken in outcome.seconds.items():
            seconds[name] += taken
        for word, n in outcome.counts.items():
            counts[word] += n
    print(f"\nlongest, in seconds, of {sum(seconds.values()):.0f} in all ({time.monotonic() - began:.0f} s passed):")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]:
        print(f"{seconds[name]:7.1f}  {name}")
    failed = [name for outcome in run.done for name in outcome.failed]
    reasons: dict[str, list[str]] = defaultdict(list)
    for test, why in (skip for outcome in run.done for skip in outcome.skipped):
        reasons[why].append(test)
    for why, tests in sorted(reasons.items()):
        print(f"skipped: {len(tests)}, {tests[0]}{' and others' if len(tests) > 1 else ''}: {why}")
        if skips_fail and not any(word in why for word in tiers.MAY_SKIP):
            failed += [f"{test} (skipped, and no machine may: {why})" for test in tests]
    if failed:
        print(f"\nfailed: {len(failed)}", *(f"  {name}" for name in failed), sep="\n")
    if run.stopped or run.left:
        print(f"\nstopped: {len(run.left)} of {run.total} parts were not begun")
    print(f"\n{counts['passed'] + counts['xfailed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if run.stopped:
        return INTERRUPTED
    if not counts["passed"]:
        print("no test passed: this run shows nothing", file=sys.stderr)
        return NO_TESTS
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/run_all.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=tiers.TIERS, action="append", default=[])
    parts = ("tree", *map(str, range(1, tiers.PARTS + 1)))
    parser.add_argument("--part", choices=parts, help="of the long tier; tree: the hash of all files chooses")
    parser.add_argument("--resume", action="store_true", help="leave out what passed at this state of all files")
    parser.add_argument("--seen", action="store_true", help="then name refusals and transitions that no test saw")
    parser.add_argument("--list", action="store_true", help="only print the parts and their expected seconds")
    parser.add_argument("--note-seconds", action="store_true", help="write what files took to tests/seconds.txt")
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)), help="children at the same time")
    options, others = parser.parse_known_args(arguments)
    began = time.monotonic()
    paths = [word for word in others if not word.startswith("-") and (ROOT / word.partition("::")[0]).exists()]
    pytest_arguments = [word for word in others if word not in paths]
    passed = Passed(None)
    if options.tier:
        tree = tree_hash()
        KEPT.mkdir(exist_ok=True)
        os.environ.setdefault(SEEN_LOG, str(KEPT / f"seen-{tree}.log"))
        # tests/sitecustomize.py begins the notes of every process.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
        if not pytest_arguments:
            passed = Passed(KEPT / f"passed-{tree}")
        jobs = jobs_of(options, tree, passed)
    elif paths:
        jobs = list(batches(list(files_of(paths)), read_seconds()))
    else:
        parser.error("name files or folders of tests, or a tier")
    if options.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `head` ends others
        for job in sorted(jobs, key=lambda job: -job.seconds):
            print(f"{job.seconds:7.1f}  {job.name}")
        return 0
    code = 0
    if jobs:
        run = Run(jobs, pytest_arguments, passed, at_once=options.at_once)
        run.begin(commands_only=True)
        if files := [file for job in jobs for file in job.files]:
            warm_up(files)
        run.go()
        code = report(run, began, skips_fail=bool(options.tier))
        if options.note_seconds:
            note_seconds(run)
    if options.seen and code == 0:
        print("refusals that no test raises, and transitions that no test takes, in any tier", flush=True)
        code = subprocess.call([sys.executable, str(ROOT / "tests" / "seen.py"), os.environ[SEEN_LOG]])
    return code


def jobs_of(options: argparse.Namespace, tree: str, passed: Passed) -> list[Job]:
    """Of the tiers that were asked for, without what need not run again: with --resume all that passed, and where the
    records of all tiers are joined, also what passed of the other tiers."""
    jobs: list[Job] = []
    for tier in options.tier:
        of_tier = jobs_of_tier(tier, read_seconds())
        if tier == "long" and options.part:
            number = int(tree, 16) % tiers.PARTS + 1 if options.part == "tree" else int(options.part)
            of_tier = part_of(of_tier, number)
            print(f"part {number} of {tiers.PARTS} of the long tier: LONG_PART={number} repeats it", flush=True)
        before = [job for job in of_tier if job.name in passed.names]
        if before and (options.resume or (options.seen and tier != "long")):
            print(f"{tier}: {len(before)} of {len(of_tier)} parts passed before, at this state of files", flush=True)
            of_tier = [job for job in of_tier if job not in before]
        jobs += of_tier
    return jobs


def note_seconds(run: Run) -> None:
    """A job that is one file, or a part of one, keeps its own name; batches are split into their files."""
    measured: dict[str, float] = defaultdict(float)
    for outcome in run.done:
        for file, taken in outcome.seconds.items():
            measured[file if len(outcome.job.files) > 1 else outcome.job.name] += taken
    write_seconds(measured)


if __name__ == "__main__":
    # A shell starts its background jobs with SIGINT ignored, and every child of a process inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
