"""The planner from Python: the same words and the same answers as the command's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.documents import blocks
from support.repository import ROOT

from dips import planner
from dips.cli import main
from dips.planner.plan import Plan

FEW = "crosspipe-figure-8"
"""A shipped setting that is planned at once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api") / "plan"


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return planner.make(FEW, out=folder)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    assert main.run(("plan", *arguments, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def test_make_is_what_the_command_plans(plan: Plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, FEW)
    assert isinstance(found, dict)
    assert found["chosen"]["schedule"] == plan.chosen.name
    assert found["chosen"]["iteration_s"] == plan.chosen.iteration_s
    written = json.loads((folder / "plan.json").read_text())
    assert {key: value for key, value in found.items() if key in written} == written
    assert len(plan.effects) == len(found["sensitivity"])


def test_compare_and_sweep_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    files = [FEW, "crosspipe-m8"]
    expected = {"files": files, "iteration_s": planner.compare(files), "calibration_error": [None, None]}
    assert expected == said(capsys, "compare", *files)
    rows = planner.sweep_rows([2, 4], [8], [2], latency=[0, 1], bandwidth=[0.5])
    found = said(capsys, "sweep", "--stages", "2,4", "--latency", "0,1", "--bandwidth", "0.5")
    assert isinstance(found, list)
    assert [(row.schedule, row.makespan) for row in rows] == [(row["schedule"], row["makespan"]) for row in found]


def test_the_documents_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [block for block in blocks(ROOT / "docs" / "planner.md") if block.language == "python"]
    (block,) = [block for block in found if "from dips import planner" in block.text]
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {})
    assert (tmp_path / "runs" / "plan" / "plan.csv").is_file()
