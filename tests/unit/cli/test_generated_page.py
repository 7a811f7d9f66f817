"""The pages of docs/ that programs write: a stale one is told, and written anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.repository import ROOT

from dips.cli import assumptions_doc, metrics_doc, protocol_doc

PAGES = {
    "assumptions.md": assumptions_doc.main,
    "metrics.md": metrics_doc.main,
    "protocol.md": protocol_doc.main,
}


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A copy of the page, and its name."""
    file: Path = tmp_path / request.param
    file.write_bytes((ROOT / "docs" / request.param).read_bytes())
    monkeypatch.setattr(sys, "argv", ["doc", str(file)])
    return file, request.param


def test_the_page_of_the_repository_is_current(page: tuple[Path, str]) -> None:
    assert PAGES[page[1]]() == 0


def test_a_stale_page_is_told_and_written_anew(
    page: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, name = page
    main: Callable[[], int] = PAGES[name]
    whole = file.read_text()
    file.write_text(whole.replace("| 1 ", "| 7 ") if name == "protocol.md" else whole + "more\n")
    assert main() == 1
    assert "run `make docs`" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["doc", "--write", str(file)])
    assert main() == 0
    assert file.read_text() == whole


def test_a_page_whose_text_is_kept_by_hand_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["doc", "--write", str(tmp_path / "protocol.md")])
    assert protocol_doc.main() == 2
    assert "generated parts are not those that exist" in capsys.readouterr().err
    assert not (tmp_path / "protocol.md").exists()
