"""`dips plan replan`: what it prints, its exit codes, and what it says to a person's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plan_command import refused, told

from dips.planner.cluster import read_setup
from dips.planner.plan import make_plan, plan_json
from dips.planner.problem import Problem


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    problem = Problem(read_setup("crosspipe-figure-8")).with_options(schedules=["1f1b"], division="uniform")
    told = plan_json(make_plan(problem, sensitivity=False))
    told["problem"]["tables"]["options"]["schedules"] = ["1f1b", "zb_h1", "cross_ud/1"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(told))
    return file


def measured(folder: Path, gbps: float, ms: float) -> str:
    link = {"sender": "dc1", "receiver": "dc2", "bandwidth_gbps": gbps, "latency_ms": ms}
    file = folder / "profile.json"
    file.write_text(json.dumps({"measured": {"source": "a test"}, "links": [link]}))
    return str(file)


def test_exit_code_1_is_a_swap_and_0_is_none(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = measured(tmp_path, 0.5, 2000)
    code, out, error = told(capsys, "replan", str(plan), "--profile", profile)
    assert (code, error) == (1, "")
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["present", "best now", "gain", "swap", "swap"]
    assert "only the order changes, 0 s" in lines[3]
    code, out, _ = told(capsys, "replan", str(plan), "--profile", profile, "--out", str(tmp_path / "new"), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["advised"]
    assert found["new"]["iteration_s"] < found["present"]["iteration_s"]
    assert found["break_even_iterations"] == 0
    second = tmp_path / "new" / "plan.json"
    code, out, _ = told(capsys, "replan", str(second), "--profile", profile)
    assert code == 0
    assert out.splitlines()[-1] == "keep: no faster schedule was found"
    code, out, _ = told(capsys, "replan", str(plan), "--profile", profile, "--least-gain", "99")
    assert code == 0
    assert "less than 99.00%" in out
    code, out, _ = told(capsys, "replan", str(plan), "--profile", profile, "--pause", "1e9", "--within", "3")
    assert code == 0
    assert "later than 3" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--least-gain", "100"], "--least-gain 100 is no part of an iteration"),
        (["--within", "0"], "--within 0 is no number of iterations"),
        (["--pause", "nan"], "--pause nan is no time"),
        (["--pause", "-1"], "--pause -1 is no time"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], sentence: str, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, "replan", str(plan), "--profile", measured(tmp_path, 1, 1), *options)


def test_a_file_of_odd_bytes_is_no_plan(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_bytes(b"\xff\xfe\x00")
    told = refused(capsys, "replan", str(plan), "--profile", measured(tmp_path, 1, 1))
    assert "plan.json cannot be read as a plan.json" in told
