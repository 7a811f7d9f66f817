"""A process that imports and collects tests once, and forks children that run some of them, with a fault or without.

A child works in a folder of its own and writes there what it is doing (running) and what came out (result.json). It is
ended when the test that it runs takes far more processor time than was recorded, or when it rests for far longer.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import io
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from support.repository import ROOT

from mutants.faults import Fault, codes_of, faulty_code, faulty_default

CPU_FACTOR, CPU_MORE_S = 10, 5
REST_FACTOR, REST_MORE_S = 10, 25
"""A test with a fault may take so many times what was recorded, and so much more."""

MEMORY_MORE = 8 << 30
FILE_BYTES = 1 << 30
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Test:
    """One that passes without a fault, with what it took."""

    name: str
    cpu_s: float = 60.0
    rest_s: float = 30.0


@dataclass
class End:
    """How a child ended: done, cpu, rest or died; what it wrote; which test it was running."""

    how: str
    result: dict[str, Any]
    running: str
    cpu_s: float


@dataclass
class _Child:
    pid: int
    folder: Path
    then: Callable[[End], None]
    how: str = ""
    rest_since: dict[str, tuple[float, float]] = field(default_factory=dict)


class Reports:
    """Plugin: what came out of the test that runs."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.when}: {report.longreprtext}")
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self.passed = True


class Warm:
    """Plugin: instead of running what was collected, calls `work`, which forks children."""

    def __init__(self, work: Callable[[Warm], None], at_once: int) -> None:
        self._work, self._at_once = work, at_once
        self.reports = Reports()
        self.items: dict[str, pytest.Item] = {}
        self.broken_files: list[str] = []
        self._waiting: list[tuple[Callable[[Path], None], Callable[[End], None]]] = []
        self._children: list[_Child] = []
        self._functions: dict[tuple[str, int, str], list[FunctionType]] = {}
        self.caches: list[Any] = []
        self._folder = Path()

    # ---- pytest's hooks ----

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken_files.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-", dir=memory if roomy else None))
        session.config.pluginmanager.register(self.reports)
        try:
            with contextlib.redirect_stdout(sys.__stdout__):
                self._work(self)
        finally:
            self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)
        return True

    # ---- children ----

    def submit(self, inside: Callable[[Path], None], then: Callable[[End], None]) -> None:
        """Calls `inside` in a child, with its folder, and `then` here afterwards, which may submit more."""
        self._waiting.append((inside, then))

    def run(self, until_s: float = math.inf, submit_another: Callable[[], bool] = lambda: False) -> None:
        """Until all that was submitted has ended; at that time of time.monotonic(), the rest is given up.

        submit_another: called when a child could begin and nothing waits, so that what is submitted is tried before
        more is prepared; False: there is no more.
        """
        more = True
        while self._children or self._waiting or more:
            if time.monotonic() > until_s:
                self._waiting.clear()
                self._end_all()
                more = False
            elif not self._waiting and len(self._children) < self._at_once:
                more = more and submit_another()
            while self._waiting and len(self._children) < self._at_once:
                self._fork(*self._waiting.pop(0))
            time.sleep(0.005)
            for child in list(self._children):
                self._look_after(child)

    def _fork(self, inside: Callable[[Path], None], then: Callable[[End], None]) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        pid = os.fork()
        if pid:
            self._children.append(_Child(pid, folder, then))
            return
        try:  # whatever happens, this process must never return into the parent's loop
            _settle(folder)
            inside(folder)
            os._exit(0)
        except BaseException:
            (folder / "error").write_text(traceback.format_exc())
            os._exit(1)

    def _look_after(self, child: _Child) -> None:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid == 0:
            if not child.how and self._rests_too_long(child):
                child.how = "rest"
                _kill_group(child.pid)
            return
        self._children.remove(child)
        _kill_group(child.pid)
        if not child.how:
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            child.how = "cpu" if by == signal.SIGXCPU else "done" if status == 0 else "died"
        result = child.folder / "result.json"
        told = json.loads(result.read_text()) if child.how == "done" and result.exists() else {}
        if (child.folder / "error").exists():
            told["error"] = (child.folder / "error").read_text()
        running = _text(child.folder / "running").rpartition("\n")[0]
        shutil.rmtree(child.folder, ignore_errors=True)
        child.then(End(child.how, told, running, usage.ru_utime + usage.ru_stime))

    def _rests_too_long(self, child: _Child) -> bool:
        """Neither computes nor waits for a processor, as at a lock that is never freed."""
        name, _, limit = _text(child.folder / "running").rpartition("\n")  # a name may have several lines
        if not limit:
            return False
        try:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            busy_s = (int(fields[11]) + int(fields[12])) / TICKS + waited_s(child.pid)
        except OSError:
            return False
        began, busy_then = child.rest_since.setdefault(name, (time.monotonic(), busy_s))
        return time.monotonic() - began - (busy_s - busy_then) > float(limit)

    def _end_all(self) -> None:
        for child in self._children:
            _kill_group(child.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        self._children.clear()

    # ---- faults ----

    def look_at_functions(self, files: Iterable[str]) -> None:
        """Imports the modules and remembers every function of the product that lives, whoever holds it."""
        for file in sorted(set(files)):
            module = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        gc.unfreeze()
        source = str(ROOT / "src")
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename.startswith(source):
                code = found.__code__
                self._functions.setdefault((code.co_filename, code.co_firstlineno, code.co_qualname), []).append(found)
            elif type(found) is functools._lru_cache_wrapper:
                if _file_of(found).startswith(str(ROOT)):
                    self.caches.append(found)
        gc.freeze()

    def put(self, fault: Fault) -> bool:
        """Gives every function of the module its code with the fault; whether any living one has it now."""
        file = str(ROOT / fault.path)
        text = Path(file).read_text()
        right = codes_of(compile(text, file, "exec", dont_inherit=True))
        wrong = codes_of(faulty_code(text, fault, file))
        changed = False
        for key, codes in right.items():
            others = wrong.get(key, [])
            if len(others) != len(codes) or codes == others:
                continue
            for function in self._functions.get((file, *key), []):
                for code, other in zip(codes, others, strict=True):
                    if function.__code__ == code and code != other:
                        function.__code__ = other
                        changed = True
                        break
        default = faulty_default(text, fault)
        if default is not None:
            changed = self._put_default(file, *default) or changed
        for cache in self.caches:
            if _file_of(cache).startswith(str(ROOT / "src")):
                cache.cache_clear()
        return changed

    def _put_default(self, file: str, name: str, where: int | str, value: object) -> bool:
        changed = False
        for (path, _, qualified), functions in self._functions.items():
            for function in functions if (path, qualified) == (file, name) else []:
                if isinstance(where, str):
                    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), where: value}
                elif function.__defaults__:
                    kept = list(function.__defaults__)
                    kept[where] = value
                    function.__defaults__ = tuple(kept)
                changed = True
        return changed

    # ---- tests, in a child ----

    def try_tests(self, tests: Sequence[Test], fault: Fault | None, as_python: bool) -> Callable[[Path], None]:
        """What a child does: one test after the other, until one fails."""

        def inside(folder: Path) -> None:
            if as_python:
                run_kernels_as_python()
            if fault is not None and not self.put(fault):
                _write(folder, {"outcome": "not reachable"})
                return
            for test, following in zip(tests, [*tests[1:], None], strict=True):
                (folder / "running").write_text(f"{test.name}\n{REST_FACTOR * test.rest_s + REST_MORE_S}")
                used_s = resource.getrusage(resource.RUSAGE_SELF)
                limit = int(used_s.ru_utime + used_s.ru_stime + CPU_FACTOR * test.cpu_s + CPU_MORE_S) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
                self.run_one(test.name, None if following is None else following.name)
                if self.reports.failed:
                    _write(folder, {"outcome": "failed", "test": test.name, "why": self.reports.failed[0][-4000:]})
                    return
            _write(folder, {"outcome": "passed"})

        return inside

    def run_one(self, name: str, following: str | None) -> None:
        self.reports.failed.clear()
        self.reports.passed = False
        item = self.items[name]
        nextitem = None if following is None else self.items[following]
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except BaseException as error:
            self.reports.failed.append(f"{type(error).__name__}: {error}")


def run_kernels_as_python() -> None:
    """Whoever calls a compiled function runs its source, with what checked_memory has in the place of intrinsics."""
    from numba.core.dispatcher import Dispatcher
    from support.checked_memory import Memory, Twins

    class Unchecked(Memory):
        def check(self, place: int, n_bytes: int, *, write: bool = False) -> None:
            """The tests' own buffers are not known."""

    twins = Twins(Unchecked())

    def call(self: Any, *given: Any, **named: Any) -> Any:
        return twins.of(self)(*inspect.signature(self.py_func).bind(*given, **named).args)

    Dispatcher.__call__ = call  # type: ignore[assignment, method-assign]


def waited_s(pid: int | str) -> float:
    """How long a process was ready, but had no processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def pytest_main(files: Sequence[str], plugin: Warm) -> int:
    """Collects without a word, and without threads of libraries, which no child would have."""
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    options = ["-q", "-s", "--timeout=0", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = int(pytest.main([*options, "--continue-on-collection-errors", *files], plugins=[plugin]))
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        print(told.getvalue(), file=sys.stderr)
    return code


# ---- a child's own ----


def _settle(folder: Path) -> None:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ.update({"TMPDIR": str(temporary), "PYTEST_DEBUG_TEMPROOT": str(temporary)})
    tempfile.tempdir = None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_MORE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _file_of(cache: Any) -> str:
    code = getattr(cache.__wrapped__, "__code__", None)
    return "" if code is None else str(code.co_filename)


def _write(folder: Path, result: Mapping[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(result))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
