"""`dips plan`: what it prints, and what it says to a person's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plan_command import refused, told
from support.repository import ROOT

from dips.cli import plan as command_plan
from dips.planner.schedules.fixed import zb_h1
from dips.planner.validation.checks import PaperCheck


def test_show_draws_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(zb_h1(4, 8).to_csv())
    code, out, _ = told(capsys, "show", str(file))
    lines = out.splitlines()
    assert code == 0
    assert [line[:5] for line in lines[:4]] == ["  0 |", "  1 |", "  2 |", "  3 |"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4] == "makespan 27 T_F, bubble 11.1%"


def test_show_as_json_gives_every_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    code, out, _ = told(capsys, "show", str(file), "--latency", "1", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["makespan"] == 8
    assert found["devices"][1] == [{"op": "1F0", "start": 2.0, "end": 3.0}, {"op": "1B0", "start": 3.0, "end": 5.0}]


# ---- plans ----

EXAMPLE = ROOT / "examples" / "04-plan-a-schedule"
FEW = "crosspipe-figure-8"
"""A shipped setting that is planned at once."""


def test_a_file_alone_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    systems = ("--system", "jeeves", "--system", "crosspipe")
    code, out, error = told(capsys, str(EXAMPLE / "sites.toml"), "--no-sensitivity", *systems)
    assert (code, error) == (0, "")
    assert "chosen: cross_ud" in out
    assert "amsterdam to stockholm: 4 GiB an iteration" in out
    for name in ("1f1b", "zb_v", "jeeves", "dp/", "assumed: "):
        assert name in out
    assert "what would help" not in out


def test_published_numbers_beside_ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [PaperCheck("the setting", "a ratio", 3.05, 2.9, 2.7, 3.2), PaperCheck("the setting", "another", 1.0, 2.0)]
    monkeypatch.setattr(command_plan, "all_checks", lambda paper, optimal_s: checks)
    code, out, _ = told(capsys, "validate")
    assert code == 0
    assert "the setting" in out
    assert "-4.9%" in out
    checks.append(PaperCheck("another setting", "a miss", 1.0, 0.5, 0.9, 1.1))
    code, out, _ = told(capsys, "validate", "--json")
    assert code == 1
    assert [row["missed"] for row in json.loads(out)] == [False, False, True]
    assert "MISSED" in told(capsys, "validate")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", FEW], "takes at least two files: name another one"),
        (["validate", "--paper", "dapple"], "--paper 'dapple' is unknown: choose one of jeeves, crosspipe, "),
        (["validate", "--seconds", "0"], "--seconds 0 is no time"),
    ],
)
def test_a_mistake_about_plans_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("system", "said"), [("scaleacross", "cases played"), ("spantrain", "what SpanTrain does not see or say:")]
)
def test_a_system_that_is_asked_alone_says_all_of_it(
    system: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = told(
        capsys, "spantrain-setting-1" if system == "spantrain" else str(EXAMPLE / "sites.toml"), "--system", system
    )
    assert code == 0
    assert said in out
    assert f"{system} cannot see: " in out
    assert "chosen: " not in out


def test_one_system_can_be_asked_alone(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "examples" / "04-plan-a-schedule" / "sites.toml")
    code, out, _ = told(capsys, file, "--system", "jeeves", "--no-sensitivity", "--json")
    found = json.loads(out)
    assert code == 0
    assert [row["system"] for row in found["systems"]] == [found["use"]] == ["jeeves"]
    assert {row["schedule"] for row in found["candidates"]} == {"jeeves"}
    assert found["systems"][0]["iteration_s"] == found["chosen"]["iteration_s"]
    code, out, error = told(capsys, file, "--system", "compass")
    assert code == 2
    assert "compass" in error


def test_asynchronous_clusters_alone_have_no_plan_to_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(ROOT / "examples" / "04-plan-a-schedule" / "sites.toml")
    code, out, error = told(capsys, file, "--system", "dips", "--out", str(tmp_path / "plan"))
    assert (code, out) == (2, "")
    assert "no plan of the file's pipelines to write: neither jeeves nor crosspipe was asked" in error
    code, out, _ = told(capsys, file, "--system", "dips")
    assert code == 0
    assert "a round of 64 steps" in out


def test_all_systems_are_compared_and_one_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, str(ROOT / "examples" / "04-plan-a-schedule" / "sites.toml"), "--no-sensitivity")
    shown = " ".join(out.split())
    assert code == 0
    assert out.startswith("take: separate clusters under Di-PS, 35 billion tokens a day (worth 23.3 billion); one ")
    assert "differ by 0.6%" in shown
    assert "where all sites train, use dips: 2 clusters, H 64" in shown
    assert "crosspipe has the shortest iteration of those that train synchronously" in shown
    for system in ("scaleacross", "jeeves", "spantrain"):
        assert f"{system} takes " in shown
        assert f"{system} cannot see: " in shown
    assert "clusters need more of them than a pipeline for the same loss, by the file 1.5 times as many" in shown
    assert "cases played" not in shown
