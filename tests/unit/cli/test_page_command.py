"""`dips page`: the address that the master wrote, or why there is none."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import pytest

from dips.cli import main
from dips.master.directory import LOCK_NAME, MasterAddress, write_address
from dips.master.page.access import ADDRESS_NAME, write_page_address

URL = "http://127.0.0.1:29480/"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "master").mkdir()
    return tmp_path


def serves(run_dir: Path, page: bool, pid: int | None = None) -> None:
    write_address(run_dir / "master", MasterAddress("127.0.0.1:1", "mine", pid or os.getpid(), 1))
    if page:
        write_page_address(run_dir / "master", URL, os.getpid())


@pytest.mark.parametrize("below", ["", "master"])
def test_the_address_is_printed(run_dir: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    serves(run_dir, page=True)
    assert main.run(["page", str(run_dir / below)]) == 0
    assert capsys.readouterr().out == f"{URL}\n"


@pytest.mark.parametrize(("opens", "code"), [(True, 0), (False, 2)])
def test_a_browser_is_started_or_it_says_that_there_is_none(
    run_dir: Path, opens: bool, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serves(run_dir, page=True)
    asked: list[str] = []

    def opened(url: str) -> bool:
        asked.append(url)
        return opens

    monkeypatch.setattr(webbrowser, "open", opened)
    assert main.run(["page", str(run_dir), "--open"]) == code
    assert asked == [URL]
    out, error = capsys.readouterr()
    assert out == f"{URL}\n"
    assert ("no browser can be started here" in error) == (not opens)


def test_a_run_without_a_page_or_without_a_master_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["page", str(run_dir / "nowhere")]) == 2
    assert "neither a directory nor" in capsys.readouterr().err
    assert main.run(["page", str(run_dir)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (run_dir / "master" / LOCK_NAME).touch()
    assert main.run(["page", str(run_dir)]) == 4
    assert "no master runs in" in capsys.readouterr().err
    serves(run_dir, page=True, pid=2**22 + 1)  # no process has such a number: the master was killed
    assert main.run(["page", str(run_dir)]) == 4
    assert "no master runs in" in capsys.readouterr().err
    (run_dir / "master" / ADDRESS_NAME).unlink()
    serves(run_dir, page=False)
    assert main.run(["page", str(run_dir)]) == 2
    assert "serves no page" in capsys.readouterr().err
