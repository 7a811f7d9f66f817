"""Which small faults are tried in a change that is too big for the time, and that they are tried one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mutants import draw
from mutants.faults import Fault
from mutants.warm import End, Warm


def fault(module: str, function: str, line: int) -> Fault:
    return Fault(f"src/dips/{module}.py", line, 0, "negated", 0, function, line, line, False)


FAULTS = [
    fault(f"{area}/{module}", function, 10 * at + line)
    for area in ("master", "worker")
    for module in ("a", "b")
    for at, function in enumerate(("f", "g", "h"))
    for line in range(1 + 5 * at)
]
FUNCTIONS = {(one.path, one.function) for one in FAULTS}


def test_every_function_has_its_turn_before_one_has_a_second() -> None:
    order = draw.evenly(FAULTS, 1)
    assert sorted(one.place for one in order) == sorted(one.place for one in FAULTS)
    assert {(one.path, one.function) for one in order[: len(FUNCTIONS)]} == FUNCTIONS
    assert order != draw.evenly(FAULTS, 2)


def files_of(one: Fault) -> list[str]:
    """A file of the package, and one of the module's own."""
    package, module = one.path.split("/")[2:]
    return [f"{package}.py", f"{package}_{module}"]


def test_all_files_of_tests_of_what_is_drawn_are_taken() -> None:
    drawn, files = draw.that_fit(draw.evenly(FAULTS, 1), math.inf, math.inf, lambda file: 1.0, files_of)
    assert len(drawn) == len(FAULTS)
    assert sorted(files) == sorted({file for one in FAULTS for file in files_of(one)})
    for room_s in (0.0, 2.0, 3.0, 5.0):
        drawn, files = draw.that_fit(draw.evenly(FAULTS, 1), math.inf, room_s, lambda file: 1.0, files_of)
        assert set(files) == {file for one in drawn for file in files_of(one)}
        assert len(files) <= max(2.0, room_s), "those of the first one are taken in any case"
        modules = {one.path for one in drawn}
        assert sorted(one.place for one in drawn) == sorted(one.place for one in FAULTS if one.path in modules)
    drawn, _ = draw.that_fit(draw.evenly(FAULTS, 1), 7.5, math.inf, lambda file: 1.0, files_of)
    assert len(drawn) == 8


def test_a_fault_is_tried_once_all_of_its_files_are_recorded_and_what_lacks_least_comes_first() -> None:
    recordings = draw.Recordings([("worker.py", False), ("worker_b.py", False)], files_of)
    queue = draw.evenly(FAULTS, 1)
    ready = [recordings.pop(queue) for one in FAULTS if one.path == "src/dips/worker/b.py"]
    assert {one.path for one in ready} == {"src/dips/worker/b.py"}
    assert all(recordings.is_ready(one) for one in ready)
    lacks_one = recordings.pop(queue)
    assert lacks_one.path == "src/dips/worker/a.py"
    assert recordings.wait_for(lacks_one) == [("worker_a.py", False)]
    also = recordings.pop(queue)
    assert recordings.wait_for(also) == [], "it is begun already"
    kernel = replace(also, compiled=True)
    assert recordings.wait_for(kernel) == [("worker.py", True), ("worker_a.py", True)]
    assert recordings.done(("worker_a.py", True)) == [lacks_one, also], "with kernels as Python is more"
    assert recordings.done(("worker_a.py", False)) == []
    assert recordings.done(("worker.py", True)) == [kernel]


def test_a_fault_is_tried_before_the_next_but_one_is_prepared(tmp_path: Path) -> None:
    """Preparing takes time, too: faults that were all prepared first were never tried."""
    warm, told = Warm(lambda warm: None, at_once=1), list[str]()
    warm._folder = tmp_path
    numbers = iter(range(4))

    def submit_another() -> bool:
        number = next(numbers, None)
        if number is not None:
            told.append(f"prepared {number}")
            warm.submit(lambda folder: None, ended(number))
        return number is not None

    def ended(number: int) -> Callable[[End], None]:
        return lambda end: told.append(f"{end.how} {number}")

    warm.run(submit_another=submit_another)
    assert told == [f"{what} {number}" for number in range(4) for what in ("prepared", "done")]
