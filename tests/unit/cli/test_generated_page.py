"""The pages of docs/ that a program writes: a stale one is told, and written anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.repository import ROOT

from dips.cli.docs import PAGES, main


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder with copies of the pages."""
    for name in PAGES:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    return tmp_path


def test_the_pages_of_the_repository_are_current() -> None:
    assert main([str(ROOT / "docs")]) == 0


@pytest.mark.parametrize("name", PAGES)
def test_a_stale_page_is_told_and_written_anew(name: str, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = docs / name
    whole = file.read_text()
    file.write_text(whole.replace("| 1 ", "| 7 ") if name == "protocol.md" else whole + "more\n")
    assert main([str(docs)]) == 1
    assert capsys.readouterr().err == f"{file} is not current: run `make docs`\n"
    assert main(["--write", str(docs)]) == 0
    assert file.read_text() == whole


def test_a_page_whose_text_is_kept_by_hand_must_be_there(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs / "protocol.md").unlink()
    assert main(["--write", str(docs)]) == 2
    assert "generated parts are not those that exist" in capsys.readouterr().err
    assert not (docs / "protocol.md").exists()
