"""A run's directory belongs to one run and one launcher, and a person's files are never deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.local.run_directory import DEMO, UP, Mark, claim, read_mark

DEMO_MARK = Mark("demo", DEMO, "dips demo")
UP_MARK = Mark("mine", UP, "dips up mine.toml")


def test_a_new_or_an_empty_directory_is_made_and_marked(tmp_path: Path) -> None:
    for path in (tmp_path / "runs" / "demo", tmp_path / "empty"):
        if path.name == "empty":
            path.mkdir()
        with claim(path, DEMO_MARK) as directory:
            assert (directory.replaced, directory.resumed) == (False, False)
            assert read_mark(directory.path) == DEMO_MARK


def test_a_demo_replaces_an_earlier_demo_but_no_files_of_a_person(tmp_path: Path) -> None:
    with claim(tmp_path, DEMO_MARK) as directory:
        (directory.path / "slaves" / "s0").mkdir(parents=True)
        directory.report.write_text("{}")
        (tmp_path / "my-model.safetensors").write_text("mine")
    with claim(tmp_path, DEMO_MARK) as directory:
        assert directory.replaced
        assert not (directory.path / "slaves" / "s0").exists()
        assert not directory.report.exists()
        assert (tmp_path / "my-model.safetensors").read_text() == "mine"


def test_up_goes_on_with_its_own_run(tmp_path: Path) -> None:
    with claim(tmp_path, UP_MARK) as directory:
        directory.master.mkdir()
        (directory.master / "journal.sqlite3").write_text("kept")
    with claim(tmp_path, UP_MARK) as directory:
        assert directory.resumed
        assert (directory.master / "journal.sqlite3").read_text() == "kept"


@pytest.mark.parametrize(
    ("first", "second"),
    [(UP_MARK, DEMO_MARK), (DEMO_MARK, UP_MARK), (UP_MARK, Mark("other", UP, "dips up other.toml"))],
)
def test_another_run_is_refused_and_loses_nothing(tmp_path: Path, first: Mark, second: Mark) -> None:
    with claim(tmp_path, first) as directory:
        directory.report.write_text("{}")
    with pytest.raises(ConfigError, match=f"belongs to run '{first.run_id}' .*choose another directory"):
        claim(tmp_path, second)
    assert (tmp_path / "report.json").exists()
    assert read_mark(tmp_path) == first


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        claim(tmp_path, DEMO_MARK)
    assert (tmp_path / "thesis.tex").read_text() == "important"


def test_two_launchers_cannot_share_a_directory(tmp_path: Path) -> None:
    with claim(tmp_path, DEMO_MARK) as first:
        first.report.write_text("{}")
        with pytest.raises(ConfigError, match="another dips process runs in"):
            claim(tmp_path, DEMO_MARK)
        assert first.report.exists()
    with claim(tmp_path, DEMO_MARK):
        pass


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        claim(tmp_path / "file", DEMO_MARK)
    with pytest.raises(ConfigError, match="cannot be made"):
        claim(tmp_path / "file" / "below", DEMO_MARK)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_id": "x"}'])
def test_a_damaged_mark_is_told_and_nothing_is_deleted(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        claim(tmp_path, DEMO_MARK)
    assert (tmp_path / "report.json").exists()
