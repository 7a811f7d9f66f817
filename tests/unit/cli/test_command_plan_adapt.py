"""`dips plan adapt`: what it prints, its exit codes, the files that it writes, and what it says to mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plan_command import told

from dips.planner.cluster import read_setup
from dips.planner.plan import make_plan, plan_json
from dips.planner.problem import Problem

MEASURED = '[measured]\nsource = "a test"\n'
LINK = '[[links]]\nsender = "group-{}"\nreceiver = "group-{}"\nbandwidth_gbps = {}\nlatency_ms = 5\n'
TRACE = '[trace]\nsource = "a test"\nduration_s = 30\n[[links]]\ntime_s = {}\npart_of_plan = {}\n'


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(plan_json(make_plan(Problem(read_setup("spantrain-adapter")), sensitivity=False))))
    return file


def measured(folder: Path, gbps: float) -> Path:
    file = folder / f"measured-{gbps}.toml"
    file.write_text(MEASURED + "".join(LINK.format(n, n + 1, gbps) for n in (1, 2, 3)))
    return file


def test_the_answer_goes_back_in_as_before(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "adapt", plan, "--measured", measured(tmp_path, 1.3), "--json")
    found = json.loads(out)
    assert (code, found["advised"], found["sequences"]) == (1, True, 32)
    assert [row["site"] for row in found["stages"]] == ["group-1", "group-2", "group-3", "group-4"]
    assert all(1 <= row["fill"] <= 32 for row in found["stages"])
    assert found["iteration_s"] < found["without_s"]
    assert found["iteration_low_s"] is None
    assert {border["level"] for border in found["borders"]} == {1}
    before = tmp_path / "before.json"
    before.write_text(out)
    between = measured(tmp_path, 1.5)
    assert told(capsys, "adapt", plan, "--measured", between, "--before", before)[0] == 0, "still late: the sizes stay"
    assert told(capsys, "adapt", plan, "--measured", between)[0] == 0, "not late yet: whole microbatches stay"
    assert told(capsys, "adapt", plan, "--measured", measured(tmp_path, 2.0), "--before", before)[0] == 1, (
        "back to whole ones"
    )


def test_a_trace_is_played_with_and_without(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out_folder = tmp_path / "trace.toml", tmp_path / "adapt"
    trace.write_text(TRACE.format("[0, 10]", "[2, 0.5]"))
    code, out, error = told(capsys, "adapt", plan, "--trace", trace, "--out", out_folder)
    assert (code, error) == (0, "")
    assert "times as fast; sizes changed" in out
    assert "stated cost: " in out
    assert "uncalibrated: " in out
    found = json.loads((out_folder / "adapt.json").read_text())
    assert found["late"]
    assert found["speedup"] > 1
    assert len(found["without"]) == len(found["with"]) == found["iterations"]
    assert (out_folder / "adapt.png").read_bytes().startswith(b"\x89PNG")
    assert "sequences a second" in (out_folder / "adapt.svg").read_text()
    trace.write_text(TRACE.format("[0]", "[2]"))
    code, out, _ = told(capsys, "adapt", plan, "--trace", trace)
    assert code == 0
    assert "no message came to be late: sizes stay as planned" in out
    code, out, _ = told(capsys, "adapt", plan, "--trace", trace, "--json")
    found = json.loads(out)
    assert (found["late"], found["changes"]) == (False, 0)
    assert found["with_s"] - found["without_s"] == pytest.approx(found["stated_cost_s"])


def test_mistakes_are_one_sentence(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, missing = measured(tmp_path, 2.0), tmp_path / "missing.toml"
    strange = tmp_path / "strange.toml"
    strange.write_text(MEASURED + LINK.format(1, 7, 2))
    for arguments, sentence in (
        ([], "give either --measured FILE, for an answer now, or --trace FILE, to play a trace"),
        (["--measured", good, "--trace", "burst"], "give either --measured FILE"),
        (["--trace", "burst", "--before", good], "--before goes with --measured, and --out with --trace"),
        (["--measured", good, "--out", tmp_path], "--out with --trace: leave it out"),
        (["--measured", missing], "missing.toml"),
        (["--measured", strange], "the plan has no link from group-1 to group-7: choose from"),
        (["--measured", good, "--before", good], "is not an answer of dips plan adapt"),
        (["--trace", missing], "is not a file that can be read, and none of the shipped traces (burst, constant"),
    ):
        code, out, error = told(capsys, "adapt", plan, *arguments)
        assert (code, out) == (2, ""), arguments
        assert sentence in error, arguments
        assert len(error.splitlines()) == 1, error
    code, _, error = told(capsys, "adapt", good, "--measured", good)
    assert code == 2
    assert "is not a plan.json" in error
