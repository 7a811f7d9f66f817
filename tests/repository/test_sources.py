"""Habits that keep the sources readable; each has a number or a pattern, so that they cannot fade."""

from __future__ import annotations

import re

from support.repository import ROOT, texts

# What only its author understands: places on one machine, numbers of a tracker, notes to self, documents elsewhere.
PRIVATE = re.compile(
    r"(?<![\w.])/(?:home|root|Users|work|mnt)/\w|\bissues? #?\d|\bTO"
    r"DO\b|\bFIX"
    r"ME\b|\bXX"
    r"X\b"
    r"|(?<!/)\b(?:DESIGN|STYLE|TEST"
    r"ING)\.md\b"  # with a slash before it, another project's
)


def test_nothing_in_the_texts_needs_its_author_to_be_understood() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert not found


def test_unit_tests_never_sleep() -> None:
    asleep = re.compile(r"\bsleep\((?!0\))")  # sleep(0) lets others run
    unit = sorted((ROOT / "tests" / "unit").rglob("*.py"))
    assert unit
    assert not [str(path.relative_to(ROOT)) for path in unit if asleep.search(path.read_text())]
