"""`make mutants`: each kind of fault on a small function, and what is left alone."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import pytest
from mutants import warm
from mutants.faults import changed_text, faults_of, faulty, faulty_default

PATH = "src/dips/core/some.py"


def faults_in(body: str, head: str = "def f(a, b, *rest) -> None") -> dict[str, str]:
    """What the faults make of a function's body, by operator; of several of one kind the last."""
    text = f"{head}:\n{textwrap.indent(body, '    ')}\n"
    made = {}
    for fault in faults_of(PATH, text):
        lines = ast.unparse(faulty(text, fault)).splitlines()[1:]
        made[fault.operator] = "; ".join(line.strip() for line in lines)
    return made


@pytest.mark.parametrize(
    ("body", "operator", "becomes"),
    [
        ("a.x = b < 3", "comparison", "a.x = b <= 3"),
        ("a.x = b is None", "comparison", "a.x = b is not None"),
        ("a.x = 0 < b <= 3", "comparison", "a.x = 0 < b < 3"),
        ("a.x = b[0]", "off-by-one", "a.x = b[1]"),
        ("a.x = b[a.n:]", "off-by-one", "a.x = b[a.n + 1:]"),
        ("a.x = list(range(b))", "off-by-one", "a.x = list(range(b + 1))"),
        ("a.x = b * 1000", "unit", "a.x = b * 1"),
        ("a.x = b / 1e-3", "unit", "a.x = b / 1.0"),
        ("a.x = a and b", "and-or", "a.x = a or b"),
        ("a.x = not b", "negated", "a.x = b"),
        ("a.x = 1 if b.ready() else 2", "negated", "a.x = 1 if not b.ready() else 2"),
        ("a.x = a - b", "arithmetic", "a.x = a + b"),
        ("a.x += b", "arithmetic", "a.x -= b"),
        ("a.x = b(True)", "boolean", "a.x = b(False)"),
        ("a.x = min(a, b)", "min-max", "a.x = max(a, b)"),
        ("a.x = b(a, rest)", "arguments", "a.x = b(rest, a)"),
        ("a.close()", "dropped", "if 0:; a.close()"),
        ("a = b.next()", "dropped", "if 0:; a = b.next()"),
        ("if a.old:\n    return", "check-removed", "if 0:; if a.old:; return"),
        ("while a.more():\n    b.take()", "loop-ends", "while a.more():; b.take(); break"),
        ("a.one()\na.two()\na.three()", "early-return", "a.one(); return; a.three()"),
    ],
)
def test_each_kind_of_fault(body: str, operator: str, becomes: str) -> None:
    assert faults_in(body)[operator] == becomes


def test_an_await_is_left_out() -> None:
    assert faults_in("a.x = await b", "async def f(a, b)")["await"] == "a.x = b"


def test_an_answer_that_may_be_nothing_is_nothing() -> None:
    assert faults_in("return b.found", "def f(a, b) -> int | None")["early-return"] == "return None"


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError(f'{a + 1}', 2)",
        "a.log.warning('%s', b + 1)",
        "assert a < 2",
        "a: Literal[2]",
        "local = b",  # without it nothing would work, which no test needs to find
        "if TYPE_CHECKING:\n    a.x = 1",
        "return f'{a + 1}'",
    ],
)
def test_messages_types_and_what_breaks_at_once_are_left_alone(body: str) -> None:
    assert faults_in(body) == {}


def test_code_outside_of_functions_and_functions_that_numba_alone_calls_are_left_alone() -> None:
    assert faults_of(PATH, "SIZE = 1 << 20\n@callback(1)\ndef f(a):\n    return a < 1\n") == []


def test_defaults_of_parameters() -> None:
    text = "class C:\n    def f(self, a, n=1, *, deep=False): ...\n"
    found = [faulty_default(text, fault) for fault in faults_of(PATH, text)]
    assert found == [("C.f", 0, 2), ("C.f", "deep", True)]


def test_a_place_says_where_and_what_and_who_meets_it() -> None:
    text = "def f(a):\n    def g(b):\n        if (\n            b < 2\n        ):\n            return 1\n    return g\n"
    fault = next(fault for fault in faults_of(PATH, text) if fault.operator == "comparison")
    assert (fault.place, fault.function) == (f"{PATH}:4:12:comparison", "f.<locals>.g")
    assert (fault.first, fault.last) == (3, 5)
    assert changed_text(text, fault) == "b < 2 -> b <= 2"


SOURCE = """
from functools import lru_cache

class C:
    @property
    def more(self):
        return self.n + 1

def outer(n):
    def inner(m, by=1):
        return n * m
    return inner

@lru_cache
def cached(n):
    return n < 2
"""


def test_a_fault_reaches_every_function_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "src" / "dips" / "core" / "some.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    monkeypatch.setattr(warm, "ROOT", tmp_path)
    some: dict[str, Any] = {"__name__": "some"}
    exec(compile(SOURCE, str(path), "exec", dont_inherit=True), some)
    thing, cached = some["C"](), some["cached"]
    thing.n = 2
    parent = warm.Warm(lambda _: None, 1)
    parent.look_at_functions([])

    def seen() -> list[object]:
        return [thing.more, some["outer"](2)(6), cached(2)]

    assert seen() == [3, 12, False]
    faults = [fault for fault in faults_of(PATH, SOURCE) if fault.operator in ("arithmetic", "comparison")]
    assert all(parent.put(fault) for fault in faults)
    assert seen() == [1, 0, True]
