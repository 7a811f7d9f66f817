"""Which unit test executes which line, and what it takes: recorded once for each file of tests, in forked children.

A file's record holds as long as the file, the helpers that it imports and the modules that its tests execute stay as
they are. Lines are kept as the bits of a number. Only tests that pass are recorded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_all import read_seconds
from support.repository import ROOT, TESTS

from mutants.faults import Fault
from mutants.warm import End, Test, Warm, run_kernels_as_python, waited_s

FOLDER = ROOT / ".mutants"
WITH_PROCESSES = {f"test_{name}.py" for name in ("own_loop", "warm_up", "whole_run")}
"""Live runs, whose processes no fault reaches."""
SLOW_FILE_S = 20.0
"""A file of tests/slow/unit that takes longer is not used."""

PYTHON_FORM_S, PYTHON_FILE_S = 3.0, 60.0
"""A test whose kernels take longer as Python is not used for faults in kernels, nor what remains of its file then."""

PYTHON_REST_S, REST_S = 20.0, 200.0
"""A test that rests for longer while it is recorded is not used."""

FOLDERS = {"lab": ("sim", "compare"), "protos": ("core",)}
"""Of tests/unit, where they have another name than the package."""

DECIDE = ("master", "slave", "worker")
WHOLE_RUNS = {f"tests/unit/{name}.py" for name in ("test_golden", "sim/test_sim_bounds", "sim/test_sim_seeds")}
"""Runs of the roles' own decisions under a virtual clock: every promise is checked after every step."""

Lines = dict[str, int]
Say = Callable[[str], None]


# ---- files of tests ----


def test_files() -> list[str]:
    """Those of tests/unit and tests/integration that start no processes, and short ones of tests/slow/unit that
    simulate no runs."""
    found = [path for folder in ("unit", "integration") for path in (TESTS / folder).rglob("test_*.py")]
    names = sorted(str(path.relative_to(ROOT)) for path in found if path.name not in WITH_PROCESSES)
    slow = [file for file, took_s in read_seconds().items() if is_slow(file) and took_s <= SLOW_FILE_S]
    return names + [file for file in slow if not any(name.startswith("dips.lab") for name in imported_by(ROOT / file))]


def is_slow(file: str) -> bool:
    """Whether it is a unit test of the long tier: a sample uses it, and lines of a change leave no time for it."""
    return file.startswith("tests/slow/unit/")


def may_be_python(file: str) -> bool:
    """In integration tests kernels have threads of their own, which Python code would stop."""
    return file.startswith("tests/unit/")


def belongs(file: str, area: str) -> bool:
    """Of the package's own folder; or, as an integration test, importing something of it (of core all do); or whole
    runs of the roles."""
    if file in WHOLE_RUNS and area in DECIDE:
        return True
    if file.startswith("tests/integration/"):
        return area != "core" and any(name.startswith(f"dips.{area}.") for name in imported_by(ROOT / file))
    return file.split("/")[2] in FOLDERS.get(area, (area,))


@functools.cache
def imported_by(path: Path) -> frozenset[str]:
    """The modules that a file imports itself, by their dotted names."""
    found = set()
    for module, names, alone in re.findall(
        r"^\s*(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", path.read_text(), re.MULTILINE
    ):
        found |= {alone} if alone else {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return frozenset(found)


@functools.cache
def helpers_of(file: str) -> frozenset[Path]:
    """The modules of tests/ that a file imports, directly or not, and every conftest above it."""
    path = ROOT / file
    found = {folder / "conftest.py" for folder in path.parents if folder.is_relative_to(TESTS)}
    found = {path for path in found if path.exists()}
    todo = [path, *found]
    while todo:
        for module in imported_by(todo.pop()):
            new = TESTS.joinpath(*module.split(".")).with_suffix(".py")
            if new not in found and new.exists():
                found.add(new)
                todo.append(new)
    return frozenset(found)


def reaches(file: str, module: str) -> bool:
    """Whether a file imports the module, or, by itself or by a helper, the command line, which runs every module of
    commands."""
    if module in imported_by(ROOT / file):
        return True
    is_command = bool({"cli", "commands"} & set(module.split("."))) and not is_slow(file)
    return is_command and any("dips.cli.main" in imported_by(path) for path in (ROOT / file, *helpers_of(file)))


def module_of(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def stamp(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


# ---- the record ----


class Record:
    """Of all files of tests that were recorded, here or in an earlier run."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Any]] = {}
        self.at_import: Lines = {}

    def has(self, file: str, as_python: bool) -> bool:
        if file not in self._files:
            kept = self._path(file)
            if not kept.exists():
                return False
            read = json.loads(kept.read_text())
            if any(stamp(ROOT / path) != mark for path, mark in read["stamps"].items()):
                return False
            self._files[file] = read
        return not as_python or "python" in self._files[file]

    def tests_of(self, fault: Fault, names: Iterable[str]) -> list[Test]:
        """Those of the names that execute the place, the cheapest first."""
        wanted = set(names)
        lines = ((1 << fault.last + 1) - 1) ^ ((1 << fault.first) - 1)
        form = "python" if fault.compiled else "tests"
        found = [
            Test(name, test["cpu_s"], test["rest_s"])
            for record in self._files.values()
            for name, test in record.get(form, {}).items()
            if name in wanted and int(test["lines"].get(fault.path, "0"), 16) & lines
        ]
        return sorted(found, key=lambda test: (test.cpu_s + test.rest_s / 4, test.name))

    def runs_at_import(self, fault: Fault) -> bool:
        lines = ((1 << fault.last + 1) - 1) ^ ((1 << fault.first) - 1)
        return bool(self.at_import.get(fault.path, 0) & lines)

    def record(self, warm: Warm, file: str, as_python: bool, say: Say, done: Callable[[], None]) -> None:
        """Has children record a file, also with its kernels as Python if asked for; what dies or rests is said, and is
        not used. done: called at the end."""
        names = [name for name in warm.items if name.partition("::")[0] == file]

        def then(tests: dict[str, Any]) -> None:
            executed = {path for test in tests.values() for path in test["lines"]}
            used = {ROOT / path for path in executed} | helpers_of(file) | {ROOT / file}
            stamps = {str(path.relative_to(ROOT)): stamp(path) for path in sorted(used)}
            self._keep(file, {"stamps": stamps, "tests": tests})
            again() if as_python else done()

        def again() -> None:
            kernels = [name for name, test in self._files[file]["tests"].items() if test["kernels"]]
            self._try(warm, _in_turns(kernels) if may_be_python(file) else [], True, say, then_python)

        def then_python(tests: dict[str, Any]) -> None:
            self._keep(file, {**self._files[file], "python": tests})
            done()

        if self.has(file, False):
            again()
        else:
            self._try(warm, names, False, say, then)

    def _try(self, warm: Warm, names: Sequence[str], as_python: bool, say: Say, then: Callable[[Any], None]) -> None:
        """Records the tests; where one ends the child or rests, the others of the file without it."""
        if not names:
            return then({})

        def ended(end: End) -> None:
            if end.how == "done" and "tests" in end.result:
                if end.result["failed"] and not as_python:
                    say(f"do not pass as they are: {', '.join(end.result['failed'])}")
                return then(end.result["tests"])
            if not as_python:
                say(f"not recorded ({end.how}): {end.running} {end.result.get('error', '')}")
            function = end.running.partition("[")[0]
            others = [name for name in names if name.partition("[")[0] != function]
            self._try(warm, others if end.running else [], as_python, say, then)

        warm.submit(_recording(warm, names, as_python), ended)

    def _keep(self, file: str, record: dict[str, Any]) -> None:
        self._files[file] = record
        path = self._path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))

    def _path(self, file: str) -> Path:
        return self._folder / "record" / f"{file.replace('/', '+')}.json"


def _in_turns(names: Iterable[str]) -> list[str]:
    """The first case of each test function, then the second of each."""
    seen: Counter[str] = Counter()

    def turn(name: str) -> int:
        function = name.partition("[")[0]
        seen[function] += 1
        return seen[function]

    return sorted(names, key=turn)


# ---- in a child ----


def coverage_of(root: Path = ROOT) -> Any:
    import coverage

    omit = [str(root / "src" / "dips" / "protos" / "*")]
    source = [str(root / "src" / "dips")]
    made = coverage.Coverage(data_file=None, config_file=False, source=source, omit=omit, messages=False)
    made.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "module-not-imported"])
    return made


def lines_of(cover: Any) -> dict[str, Lines]:
    """By context."""
    data = cover.get_data()
    found: dict[str, Lines] = defaultdict(dict)
    for file in data.measured_files():
        path = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                found[context][path] = found[context].get(path, 0) | 1 << line
    return found


class _Fixtures:
    """Plugin: what a fixture for several tests executes counts for each of them."""

    def __init__(self, cover: Any) -> None:
        self._cover, self._contexts = cover, [""]
        self.used: dict[str, set[str]] = defaultdict(set)

    def test(self, name: str) -> None:
        self._contexts = [name]
        self._cover.switch_context(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        self._contexts.append(f"fixture {fixturedef.baseid} {fixturedef.argname}")
        self._cover.switch_context(self._contexts[-1])
        try:
            return (yield)
        finally:
            self._contexts.pop()
            self._cover.switch_context(self._contexts[-1])

    def of(self, item: Any) -> list[str]:
        found = item._fixtureinfo.name2fixturedefs
        return [f"fixture {one.baseid} {one.argname}" for several in found.values() for one in several]


def _recording(warm: Warm, names: Sequence[str], as_python: bool) -> Callable[[Path], None]:
    def inside(folder: Path) -> None:
        kernels = {"called": False}
        if as_python:
            run_kernels_as_python()
            signal.signal(signal.SIGPROF, _too_slow)
        else:
            _watch_kernels(kernels)
        cover = coverage_of()
        fixtures = _Fixtures(cover)
        tests: dict[str, dict[str, Any]] = {}
        failed: list[str] = []
        made_by: dict[int, set[str]] = defaultdict(set)
        also: dict[str, set[str]] = defaultdict(set)
        cover.start()
        if names:
            warm.items[names[0]].config.pluginmanager.register(fixtures)
        for name, following in zip(names, [*names[1:], None], strict=True):
            if as_python and time.process_time() > PYTHON_FILE_S:
                break
            (folder / "running").write_text(f"{name}\n{PYTHON_REST_S if as_python else REST_S}")
            before = [cache.cache_info() for cache in warm.caches]
            kernels["called"] = False
            fixtures.test(name)
            if as_python:
                signal.setitimer(signal.ITIMER_PROF, PYTHON_FORM_S)
            began, began_cpu = time.monotonic() - waited_s("self"), time.process_time()
            warm.run_one(name, following)
            wall_s, cpu_s = time.monotonic() - waited_s("self") - began, time.process_time() - began_cpu
            signal.setitimer(signal.ITIMER_PROF, 0)
            for index, (cache, was) in enumerate(zip(warm.caches, before, strict=True)):
                now = cache.cache_info()
                if now.misses > was.misses:
                    made_by[index].add(name)
                if now.hits > was.hits:
                    also[name] |= made_by[index] - {name}
            if warm.reports.failed:
                failed.append(name)
            elif warm.reports.passed:
                tests[name] = {"cpu_s": round(cpu_s, 4), "rest_s": round(max(0.0, wall_s - cpu_s), 4)}
                tests[name]["kernels"] = kernels["called"] or as_python
        fixtures.test("after all")
        cover.stop()
        found = lines_of(cover)
        for name, test in tests.items():
            lines: Lines = {}
            for context in (name, *fixtures.of(warm.items[name]), *also[name]):
                for path, bits in found.get(context, {}).items():
                    lines[path] = lines.get(path, 0) | bits
            test["lines"] = {path: f"{bits:x}" for path, bits in lines.items()}
        (folder / "result.json").write_text(json.dumps({"tests": tests, "failed": failed}))

    return inside


def _too_slow(*_: object) -> None:
    raise TimeoutError("takes too long as Python")


def _watch_kernels(seen: dict[str, bool]) -> None:
    try:
        from numba.core.dispatcher import Dispatcher, _DispatcherBase
    except ImportError:
        return

    def call(self: Any, *given: Any, **named: Any) -> Any:
        seen["called"] = True
        return _DispatcherBase.__call__(self, *given, **named)

    Dispatcher.__call__ = call  # type: ignore[assignment, method-assign]
