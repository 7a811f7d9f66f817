"""`dips plan calibrate`: from a plan and its run to a profile, and to plans with intervals; and mistakes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.plan_command import example, refused, told

from dips.planner.api import make
from dips.planner.calibration import measured_json
from dips.planner.commands.plan_run import CASE, PlanSource, scaled, source_of
from dips.planner.plan import plan_json
from dips.planner.simulate import simulate

OPTIONS = '\n[options]\nschedules = ["1f1b", "cross_ud/1"]\n'
PROBLEM = example(("data = 4", "data = 1"), ("pipeline = 8", "pipeline = 4")) + OPTIONS
OVERHEADS_NS = 400_000, 250_000


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, error = told(capsys, *arguments, "--json")
    assert (code, error) == (0, "")
    return json.loads(out)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("planned") / "sites.toml"
    file.write_text(PROBLEM)
    return json.dumps(plan_json(make(file, sensitivity=False)))


@pytest.fixture
def problem(tmp_path: Path, planned: str) -> Path:
    """A problem whose plan was made, plan/plan.json, and run with overheads, measured.json."""
    file = tmp_path / "sites.toml"
    file.write_text(PROBLEM)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(planned)
    write_run(tmp_path, source_of(str(tmp_path / "plan" / "plan.json"), dict.fromkeys(CASE)))
    return file


def write_run(folder: Path, source: PlanSource, forward_ms: float | None = 80.0) -> None:
    costs = source.costs if forward_ms is None else scaled(source.costs, source.schedule.n_devices, forward_ms)
    ran = simulate(source.schedule, costs.with_overheads(*OVERHEADS_NS, source.schedule.device_of_stage))
    (folder / "measured.json").write_text(json.dumps(measured_json("a test", forward_ms, [ran] * 3)))


def test_overheads_go_into_later_plans(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, run, profile = tmp_path / "plan" / "plan.json", tmp_path / "measured.json", tmp_path / "profile.toml"
    assert "(uncalibrated), bubble" in told(capsys, problem, "--no-sensitivity", "--system", "crosspipe")[1]
    code, out, _ = told(capsys, "calibrate", plan, run, "--out", profile)
    assert code == 0
    assert "overhead: 400 us for each operation, 250 us for each message" in out
    assert 'file = "profile.toml" in [profile] of the problem' in out
    table = tomllib.loads(profile.read_text())["calibration"]
    assert (table["operation_us"], table["send_us"]) == (pytest.approx(400, abs=1), pytest.approx(250, abs=2))
    before = said(capsys, problem, "--system", "crosspipe")
    problem.write_text(PROBLEM + '\n[profile]\nfile = "profile.toml"\nsource = "measured"\n')
    after = said(capsys, problem, "--system", "crosspipe")
    assert before["calibration_error"] is None
    assert after["calibration_error"] == table["error"]
    assert after["chosen"]["iteration_s"] > before["chosen"]["iteration_s"]
    assert after["chosen"]["iteration_low_s"] <= after["chosen"]["iteration_s"] <= after["chosen"]["iteration_high_s"]
    assert (after["costs"]["operation_ns"], after["costs"]["send_ns"]) == (
        round(table["operation_us"] * 1e3),
        round(table["send_us"] * 1e3),
    )


def test_a_run_may_be_fitted_again_from_a_plan(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overheads that a plan has already are fitted again, not on top; what the profile has of links and dates stays."""
    profile = tmp_path / "profile.toml"
    problem.write_text(PROBLEM + '\n[profile]\noperation_us = 9\nsend_us = 9\nerror = 0.1\nsource = "a guess"\n')
    assert told(capsys, problem, "--out", tmp_path / "plan", "--no-sensitivity")[0] == 0
    plan = tmp_path / "plan" / "plan.json"
    write_run(tmp_path, source_of(str(plan), dict.fromkeys(CASE)), forward_ms=None)
    found = said(capsys, "calibrate", plan, tmp_path / "measured.json", "--out", profile)
    assert found["overhead_per_op_s"] == pytest.approx(400e-6, abs=1e-6)
    assert found["separated"]
    text = profile.read_text()
    profile.write_text(text.replace("[calibration]", LINKS + "[calibration]"))
    assert told(capsys, "calibrate", plan, tmp_path / "measured.json", "--out", profile)[0] == 0
    tables = tomllib.loads(profile.read_text())
    assert tables["links"][0]["bandwidth_gbps"] == 7
    assert tables["measured"] == tomllib.loads(text)["measured"]


LINKS = '[[links]]\nsender = "amsterdam"\nreceiver = "stockholm"\nbandwidth_gbps = 7\nlatency_ms = 1\n\n'


def test_a_sweep_counts_a_profiles_overheads(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.toml"
    told(capsys, "calibrate", tmp_path / "plan" / "plan.json", tmp_path / "measured.json", "--out", profile)
    profile.write_text(profile.read_text().replace("error = ", "error = 0.05 # "))
    (plain, *_) = said(capsys, "sweep", "--latency", "0")
    (row, *_) = said(capsys, "sweep", "--latency", "0", "--profile", profile, "--operation-ms", "4")
    assert "makespan_low" not in plain
    assert row["schedule"] == plain["schedule"] == "gpipe"
    # 8 + 3 forward and as many backward operations follow each other, and 6 messages, in units of 4 ms
    assert row["makespan"] == pytest.approx(plain["makespan"] + (22 * 0.4 + 6 * 0.25) / 4, abs=0.01)
    assert row["makespan_low"] == pytest.approx(0.95 * row["makespan"])
    assert row["makespan_high"] == pytest.approx(1.05 * row["makespan"])
    assert "\nuncalibrated: " in told(capsys, "sweep", "--latency", "0")[1]
    text = told(capsys, "sweep", "--latency", "0", "--profile", profile, "--operation-ms", "4")[1]
    assert "\ncalibrated: predicted times are meant +- 5.00%" in text


@pytest.mark.parametrize("error", [-0.1, "much", True, float("nan"), 11])
def test_no_error_of_a_calibration(
    error: object, problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan" / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"calibration_error": error}))
    for command in (["show", plan], ["run", plan], ["calibrate", plan, tmp_path / "measured.json"]):
        code, _, said = told(capsys, *command)
        assert code == 2
        assert f"plan.json: calibration_error = {error!r}: make the plan again with dips plan FILE --out" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["calibrate", "no.json", "RUN"], "no.json cannot be read as a plan.json: No such file or directory: make one"),
        (["calibrate", "CSV", "RUN"], "is not a plan.json, which says what was planned for: name one of dips plan"),
        (["calibrate", "PLAN", "no.json"], "no.json cannot be read as a measured.json: No such file or directory"),
        (["calibrate", "PLAN", "CSV"], "is not the measured.json of a run (JSONDecodeError"),
        (["calibrate", "PLAN", "OTHER"], "orders are not those of the plan: name the plan that ran, or run this one"),
        (["calibrate", "PLAN", "SLOW"], "s with the best overheads, which do not explain them: correct forward_ms"),
        (["calibrate", "PLAN", "RUN", "--out", "FOREIGN"], "[measured]: model = 'other', but "),
        (["calibrate", "PLAN", "RUN", "--out", "CSV/p.toml"], "cannot be written: "),
        (["sweep", "--profile", "FOREIGN"], "need --profile and --operation-ms, the time of T_F: give both or none"),
        (["sweep", "--profile", "FOREIGN", "--operation-ms", "0"], "--operation-ms 0 is no time of T_F: give more"),
        (["sweep", "--profile", "FOREIGN", "--operation-ms", "4"], "has no [calibration]: fit it with dips plan"),
    ],
)
def test_a_mistake_is_one_sentence(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    run = json.loads((tmp_path / "measured.json").read_text())
    texts = {
        "CSV": "0F0,0B0\n",
        "OTHER": json.dumps(run | {"orders": run["orders"][::-1]}),
        "SLOW": json.dumps(run | {"forward_ms": 8000.0}),
        "FOREIGN": '[measured]\nsource = "a"\nat = 2026-03-01\nmodel = "other"\nlayers = 1\nsequence_tokens = 1\n'
        + LINKS,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    places = {name: tmp_path / name for name in texts} | {
        "PLAN": tmp_path / "plan" / "plan.json",
        "RUN": tmp_path / "measured.json",
        "CSV/p.toml": tmp_path / "CSV" / "p",
    }
    assert sentence in refused(capsys, *(places.get(word, word) for word in arguments))
