"""The pages of docs/ that a program writes: a stale one is told, and written again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from generate_docs import PAGES, main
from support.repository import ROOT


def test_the_pages_of_the_repository_are_current() -> None:
    assert main([str(ROOT / "docs")]) == 0


@pytest.mark.parametrize("name", PAGES)
def test_a_stale_page_is_told_and_written_anew(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))
    file = docs / name
    whole = file.read_text()
    file.write_text(whole.replace("| 1 ", "| 7 ") if name == "protocol.md" else whole + "more\n")
    assert main([str(docs)]) == 1
    assert capsys.readouterr().err == f"{file} is not current: run `make docs`\n"
    assert main(["--write", str(docs)]) == 0
    assert file.read_text() == whole
