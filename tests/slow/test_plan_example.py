"""examples/04-plan-a-schedule: every command of its README, in its order, does what the README says.

And a cluster whose pipeline runs in the order of a plan takes part in a run, beside one of one process.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from support.dips_command import dips
from support.documents import blocks
from support.repository import ROOT
from support.up_run import TORCHRUN, UpRun, endless

from dips.cli import main

README = ROOT / "examples" / "04-plan-a-schedule" / "README.md"
PLANNED = README.with_name("planned_cluster.py")

ZERO_BUBBLE_V = "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0I1,0W0,0W1\n1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1\n"
"""Four stages on two ranks: the first and the last on one, those between on the other."""


def test_the_readmes_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    block, _ = blocks(README)
    lines = block.text.splitlines()
    assert [line.split()[:2] for line in lines] == [["dips", "plan"]] * 7
    told = []
    for line in lines:
        assert main.run(tuple(shlex.split(line)[1:])) == int("replan" in line), line
        told.append(capsys.readouterr().out)
    first, second, third, fourth, groups, explored, replanned = told
    for word in ("chosen: ", "iteration: ", "amsterdam to stockholm: ", "what would help", "1f1b"):
        assert word in first
    assert second.startswith(first.rstrip("\n"))
    assert {file.name for file in (tmp_path / "runs" / "plan").iterdir()} == {
        "plan.json", "plan.csv", "trace.json", "timeline.svg", "timeline.png",
    }  # fmt: skip
    assert len([line for line in third.splitlines() if line.lstrip()[:1].isdigit()]) == 8
    assert "wider" in fourth
    assert "cross_ud/1" in fourth
    assert "group 2: 32 devices" in groups
    assert "32 accelerators in 2 buildings, 64 sequences an iteration" in explored
    assert "swap: it gains " in replanned


def test_a_planned_pipeline_is_a_cluster_like_any_other(tmp_path: Path) -> None:
    plan, planned = tmp_path / "plan.csv", endless(PLANNED, tmp_path, "STEPS = 32, 16, 32, 200")
    plan.write_text(ZERO_BUBBLE_V)
    with UpRun(tmp_path, {"a": (*TORCHRUN, planned, plan), "b": (sys.executable, planned)}) as run:
        run.until_version(4)
        run.stop()
    told = dips("verify", run.directory, "--replay", "--json")
    report = json.loads(told.stdout)
    assert (told.returncode, report["verdict"]) == (0, "ok"), told.stdout
    assert report["replayed"]["versions"] >= 3
    assert report["replayed"]["wrong"] == report["replayed"]["skipped"] == []
