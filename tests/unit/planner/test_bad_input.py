"""What a person can get wrong in a file, a schedule or on the command line: each is one sentence and exit code 2, at
once, and no number comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.plan_command import example, refused

from dips.cli import main
from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.plan import make_plan, read_plan, write_plan
from dips.planner.problem import Problem

LINK = '\n[[links]]\nsender = "{}"\nreceiver = "{}"\nbandwidth_gbps = 99\nlatency_ms = 1\nsource = "a test"\n'


@pytest.mark.parametrize("ends", [("amsterdam", "stockholm"), ("stockholm", "amsterdam")])
def test_two_links_with_the_same_ends_are_refused_since_one_would_be_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: tuple[str, str]
) -> None:
    file = tmp_path / "sites.toml"
    file.write_text(example() + LINK.format(*ends))
    assert f"[[links]] 2: from {ends[0]} to {ends[1]} goes [[links]] 1 already: remove one" in refused(
        capsys, str(file)
    )


def test_two_links_in_different_directions_are_both_used(tmp_path: Path) -> None:
    file = tmp_path / "sites.toml"
    one_way = example(("latency_ms = 12", "latency_ms = 12\nboth_ways = false"))
    file.write_text(one_way + LINK.format("stockholm", "amsterdam") + "both_ways = false\n")
    setup = read_setup(file)
    assert setup.link("amsterdam", "stockholm").bandwidth_gbps == 25
    assert setup.link("stockholm", "amsterdam").bandwidth_gbps == 99


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "the table [model] is missing: add it"), (b"[model\nx = 1", "is not TOML: Expected ']'")],
)
def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, sentence: str) -> None:
    file = tmp_path / "sites.toml"
    file.write_bytes(content)
    assert sentence in refused(capsys, str(file))
    assert "is not a file that can be read" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize("arguments", [("crosspipe-figure-8",), ("sweep",)])
def test_a_folder_that_cannot_be_written_is_told_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "taken").write_text("")
    for name in ("make_plan", "swept"):
        monkeypatch.setattr(f"dips.planner.api.{name}", lambda *_: pytest.fail("it computed"))
    told = refused(capsys, *arguments, "--out", str(tmp_path / "taken" / "plan"))
    assert "taken/plan: no file can be written there: Not a directory: choose another --out" in told


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "the schedule cannot end: device 0 waits at cell 2 (0B0), device 1"),
        (bytes(range(256)), "it is not text: give a plan.json or a schedule like plan.csv"),
        (b"0F0\0,0B0\n", r"line 1, column 1: '0F0\x00' is not an operation"),
        (b"", "no device runs stage 0"),
        (b"0F999999,0B999999\n", "1 stages x 1000000 microbatches are 1000000, at most 262144"),
        (b"999999F0,999999B0\n", "no device runs stage 0"),
        (b"0F0,0F0.2,0B0,0B0.2\n", "stage 0 has 2 F, 0 I, 0 W and 2 B of microbatch 0: it needs 3 F"),
    ],
)
def test_a_schedule_that_cannot_be_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, sentence: str
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_bytes(content)
    told = refused(capsys, "show", str(file))
    assert sentence in told
    assert str(file) in told


def test_a_schedule_of_an_editor_that_marks_its_files_is_read(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n")
    assert main.run(("plan", "show", str(file), "--json")) == 0


def test_a_file_without_end_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has more than 67108864 bytes, so it is not a schedule" in refused(capsys, "show", "/dev/zero")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    few = Problem(read_setup("crosspipe-figure-8")).with_options(schedules=["1f1b"])
    file, *_ = write_plan(make_plan(few, sensitivity=False), tmp_path_factory.mktemp("bad"))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def first_time(*pair: object, device: int = 0) -> Callable[[Any], object]:
    return lambda plan: plan["timeline"][device].__setitem__(0, pair)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda plan: plan.pop("schedule"), "is not a plan.json (KeyError: 'schedule'): make one with dips plan FILE"),
        (lambda plan: plan.update(format=99), "format is 99, not 1: make the plan again"),
        (first_time(float("nan"), 1), "is not a plan.json (ValueError"),
        (first_time(0, float("inf")), "is not a plan.json (OverflowError"),
        (first_time(500, 1), "timeline of device 0 goes back in time"),
        (first_time(-5, 1), "timeline of device 0 goes back in time"),
        (first_time(500, 1, device=1), "timeline of device 1 goes back in time"),
        (lambda plan: plan["timeline"][0].pop(), "timeline and schedule have unequal lengths"),
        (lambda plan: plan["schedule"]["orders"].__setitem__(0, "0F0,zz"), "column 2: 'zz' is not an operation"),
        (lambda plan: plan.update(timeline=[[[0, 0]] * len(row) for row in plan["timeline"]]), "no time"),
    ],
)  # fmt: skip
def test_a_plan_that_was_harmed(written: dict[str, Any], harm: Callable[[Any], object], sentence: str) -> None:
    plan = json.loads(json.dumps(written))
    read_plan(json.dumps(plan), "whole.json")
    harm(plan)
    with pytest.raises(ConfigError) as caught:
        read_plan(json.dumps(plan), "plan.json")
    assert "plan.json" in str(caught.value)
    assert sentence in str(caught.value)


def test_a_plan_nested_without_end() -> None:
    with pytest.raises(ConfigError, match=r"plan\.json is not a plan.json"):
        read_plan('{"a":' + "[" * 100_000, "plan.json")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--microbatches", "1000000000"], "4 stages x 1000000000 microbatches are 4000000000, at most 262144 can be"),
        (["--stages", "1000000000", "--sites", "1"], "at most 262144 can be planned: give fewer"),
        (["--latency", "0," * 2000 + "0", "--bandwidth", "0," * 2000 + "0"], "in all combinations together would take"),
        (["--stages", "-4"], "-4 stages and 8 microbatches: both are at least 1"),
        (["--stages", "9" * 5000], "--stages '9999"),
        (["--memory", "nan"], "nan is not a number that can be planned with: give one up to 1e+06"),
        (["--latency", "1e9"], "1e+09 is not a number that can be planned with"),
        (["--sites", "0"], "4 devices do not divide into 0 equal sites"),
        (["--seconds", "nan"], "nan seconds are not a valid time for a solver"),
        (["--over", "zbh1"], "'zbh1' is not a schedule that 4 stages and 8 microbatches can be compared with: choose"),
    ],
)
def test_a_grid_that_cannot_be(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    told = refused(capsys, "sweep", *arguments)
    assert sentence in told
    assert len(told) < 300


def test_equal_numbers_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(("plan", "sweep", "--latency", "0,0.0", "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)) == 10
