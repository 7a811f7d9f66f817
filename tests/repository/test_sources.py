"""Habits that keep the sources readable; each has a number or a pattern, so that they cannot fade."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.repository import ROOT, modules, texts

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# What only its author understands: places on one machine, numbers of a tracker, and notes to self.
PRIVATE = re.compile(
    r"(?<![\w.])/(?:home|root|Users|work|mnt)/\w|\bissues? #?\d|\bTO" r"DO\b|\bFIX" r"ME\b|\bXX" r"X\b"
)

# Documents that are not here, and a document's path, which must be.
ELSEWHERE = re.compile(r"\bDESIGN(?:\.md|\b[\s,']+(?:s|\d|I\d|section|appendix))|\b(?:STYLE|TEST" r"ING)\.md\b")
DOCUMENT = re.compile(r"\bdocs/[\w/-]+\.md\b")

MODULES = modules()
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def functions(path: Path) -> Iterator[FunctionNode]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FunctionNode):
            yield node


def test_the_package_is_looked_at() -> None:
    assert {path.parent.name for path in MODULES} >= {"core", "master", "slave", "worker", "planner", "launch"}


@each_module
def test_a_module_says_why_it_exists(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


@each_module
def test_every_function_is_annotated(path: Path) -> None:
    bare = []
    for function in functions(path):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        missing = [a.arg for a in named if a and not a.annotation and a.arg not in ("self", "cls")]
        # Like mypy: a constructor's result needs no word.
        if missing or (function.returns is None and function.name != "__init__"):
            bare.append(f"{function.name} (line {function.lineno})")
    assert not bare


def test_nothing_in_the_texts_needs_its_author_to_be_understood() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found


def matches(pattern: re.Pattern[str]) -> Iterator[tuple[Path, int, str]]:
    """Every place in the project's texts, this file apart, where a pattern stands: file, line, words."""
    for path in texts():
        if path != Path(__file__).resolve():
            text = path.read_text(errors="replace")
            yield from ((path, text.count("\n", 0, found.start()) + 1, found[0]) for found in pattern.finditer(text))


def test_no_text_leads_to_a_document_that_is_not_here() -> None:
    assert not [f"{path.relative_to(ROOT)}:{line}: {words}" for path, line, words in matches(ELSEWHERE)]
    named = list(matches(DOCUMENT))
    assert named
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {words}" for path, line, words in named if not (ROOT / words).exists()
    ]


@pytest.mark.parametrize("words", ["DESIGN.md", "(DESIGN 7)", "DESIGN\n7", "DESIGN's", "DESIGN section 5", "STYLE.md"])
def test_words_that_lead_elsewhere_are_noticed(words: str) -> None:
    assert ELSEWHERE.search(words)


def test_unit_tests_never_sleep() -> None:
    asleep = re.compile(r"\bsleep\(")
    unit = sorted((ROOT / "tests" / "unit").rglob("*.py"))
    assert unit
    assert not [str(path.relative_to(ROOT)) for path in unit if asleep.search(path.read_text())]
