"""examples/04-plan-a-schedule: every command of its README, in its order, does what the README says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.documents import blocks
from support.repository import ROOT

from dips.cli import main

README = ROOT / "examples" / "04-plan-a-schedule" / "README.md"


def test_the_readmes_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(README)
    lines = block.text.splitlines()
    assert [line.split()[:2] for line in lines] == [["dips", "plan"]] * 4
    told = []
    for line in lines:
        assert main.run(tuple(shlex.split(line)[1:])) == 0, line
        told.append(capsys.readouterr().out)
    first, second, third, fourth = told
    for word in ("chosen: ", "iteration: ", "amsterdam to stockholm: ", "what would help", "1f1b"):
        assert word in first
    assert second.startswith(first.rstrip("\n"))
    assert {file.name for file in (tmp_path / "runs" / "plan").iterdir()} == {
        "plan.json", "plan.csv", "trace.json", "timeline.svg", "timeline.png",
    }  # fmt: skip
    assert len([line for line in third.splitlines() if line.lstrip()[:1].isdigit()]) == 8
    assert "wider" in fourth
    assert "cross_ud/1" in fourth
