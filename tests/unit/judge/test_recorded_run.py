"""A run that an earlier version recorded: it stays readable, and whatever is changed in its files is named.

tests/frozen/recorded_run.tar.xz was made by tests/support/recorded_run.py; recorded_run.json is what
`dips verify --replay` said of it on that day.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.corruptions import CORRUPTIONS, Corruption, judged, tape_of
from support.recorded_run import NUMBERS, numbers_of, unpacked

from dips.judge.verify import EXIT_UNREADABLE, verify_run

PINNED = json.loads(NUMBERS.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("recorded"))


def test_every_promise_is_proven_and_every_version_computed_again_as_on_the_day_it_was_recorded(recorded: Path) -> None:
    assert numbers_of(recorded) == PINNED


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda item: f"{item.kind}: {item.name}")
def test_each_corruption_is_said_by_name(recorded: Path, tmp_path: Path, corruption: Corruption) -> None:
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    corruption.apply(run)
    code, said = judged(run)
    assert code != 0
    assert corruption.finds in said


def test_what_breaks_off_is_noted_and_what_cannot_be_opened_is_a_problem(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    assert verify_run(run).notes == []
    tape = tape_of(run, "s0")
    tape.write_bytes(b"".join(tape.read_bytes().splitlines(keepends=True)[:-1]))
    (run / "s1" / "manifest-9.json").mkdir()
    report = verify_run(run)
    assert ["tape of slave s0 does not end with the line of an orderly end" in note for note in report.notes] == [True]
    assert ["manifest-9.json cannot be read" in problem for problem in report.problems] == [True]
    assert report.exit_code == EXIT_UNREADABLE
