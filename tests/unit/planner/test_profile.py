"""Profile files: what is read, written and merged, what a problem makes of them, and what a mistake is told."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.profiled import HEAD, OF_STAGE, OVERHEADS, PROFILE, files

from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.plan import make_plan, plan_json
from dips.planner.problem import Problem, read_problem, regrouped
from dips.planner.profile import LayerTime, ProfileFile, merged, read_profile, write_profile


def problem(folder: Path, *changes: tuple[str, str]) -> Problem:
    return Problem(read_setup(files(folder, *changes)))


def test_each_layer_has_its_time_on_each_kind_of_device(tmp_path: Path) -> None:
    found = problem(tmp_path)
    costs = found.costs((1, 1, 1, 1))
    assert [stage.f_ns / 1e6 for stage in costs.stages] == [11, 10, 30, 30]  # slow: between 20 with 1 and 60 with 5
    assert [stage.w_ns / 1e6 for stage in costs.stages] == [14, 12, 30, 30]
    backwards = found.costs((1, 1, 1, 1), places=(3, 2, 1, 0))
    assert [stage.f_ns / 1e6 for stage in backwards.stages] == [30, 30, 10, 23]


def test_measured_links_go_before_those_that_were_written(tmp_path: Path) -> None:
    wires = problem(tmp_path, ("send_us = 50", "send_us = 0")).costs((1, 1, 1, 1)).wires
    assert {pair: wire.latency_ns / 1e6 for pair, wire in wires.items()} == {(1, 2): 7, (2, 1): 8}
    assert wires[2, 1].busy_ns == 2 * wires[1, 2].busy_ns


def test_overheads_are_added_to_each_operation_and_each_message(tmp_path: Path) -> None:
    with_them = problem(tmp_path).costs((1, 1, 1, 1))
    without = problem(tmp_path, ("operation_us = 100", "operation_us = 0"), ("send_us = 50", "send_us = 0"))
    plain = without.costs((1, 1, 1, 1))
    assert with_them.stages == plain.stages
    assert with_them.compute_ns(0, "B", 1, 2) == plain.compute_ns(0, "B", 1, 2) + 100_000  # type: ignore[arg-type]
    assert with_them.wires[1, 2].latency_ns == plain.wires[1, 2].latency_ns + 50_000
    assert with_them.wires[0, 1].latency_ns == 50_000
    assert with_them.with_overheads(0, 0, (0, 1, 2, 3)) == plain


def test_a_file_of_overheads_alone_goes_with_any_times(tmp_path: Path) -> None:
    """Times of a stage, of each layer in the problem, or of the cost model."""
    no_times = (PROFILE, HEAD + OVERHEADS)
    stages = problem(tmp_path, no_times, ('file = "profile.toml"', 'file = "profile.toml"\n' + OF_STAGE))
    costs = stages.costs((1, 1, 1, 1))
    assert (costs.stages[0].f_ns, costs.operation_ns, costs.send_ns) == (10_000_000, 100_000, 50_000)
    assert stages.calibration_error == 0.03
    speed = [(f'device = "{kind}"\nsource', "sustained_tflops = 1\nsource") for kind in ("fast", "slow")]
    modelled = problem(tmp_path, no_times, *speed)
    plain = problem(tmp_path, *speed, ('[profile]\nfile = "profile.toml"\nsource = "a test"\n', ""))
    assert modelled.costs((1, 1, 1, 1)).stages == plain.costs((1, 1, 1, 1)).stages
    assert (modelled.costs((1, 1, 1, 1)).operation_ns, plain.costs((1, 1, 1, 1)).operation_ns) == (100_000, 0)
    assert plain.calibration_error is None


def test_calibrated_profiles(tmp_path: Path) -> None:
    since = ("memory_gib = 8", "memory_gib = 8\nsince = 2026-03-02")
    with pytest.raises(ConfigError, match=r"was measured at 2026-03-01 10:00, before .*problem.toml .*1 changed"):
        problem(tmp_path, (PROFILE, HEAD + OVERHEADS), since)
    later = OVERHEADS.replace("error", "at = 2026-03-03T00:00:00Z\nerror")
    assert problem(tmp_path, (PROFILE, HEAD + later), since).calibration_error == 0.03
    found = plan_json(make_plan(problem(tmp_path), sensitivity=False))
    assert found["calibration_error"] == 0.03
    for row in (found["chosen"], *found["candidates"]):
        assert row["iteration_low_s"] == pytest.approx(0.97 * row["iteration_s"])
        assert row["iteration_high_s"] == pytest.approx(1.03 * row["iteration_s"])
    plain = plan_json(make_plan(problem(tmp_path, (OVERHEADS, "")), sensitivity=False))
    assert (plain["calibration_error"], plain["chosen"]["iteration_low_s"]) == (None, None)
    assert plain["chosen"]["iteration_s"] < found["chosen"]["iteration_s"]


def test_extra_and_recomputed_layers_and_slower_replicas(tmp_path: Path) -> None:
    found = problem(tmp_path, ("microbatches = 4", "extra_layers = 2\nmicrobatches = 4"))
    assert [round(unit.forward_s * 1e3) for unit in found.units] == [1, 10, 10, 10, 20, 3]
    one = problem(tmp_path, ("microbatches = 4", "extra_layers = 1\nmicrobatches = 4"))
    assert [round(unit.forward_s * 1e3) for unit in one.units] == [1, 10, 10, 10, 23]
    found = problem(tmp_path, ("microbatches = 4", 'recompute = "full"\nmicrobatches = 4'))
    assert [unit.input_gradient_s for unit in found.units][1:3] == [pytest.approx(0.021)] * 2
    change = ("pipeline = 4", "pipeline = 2\ndata = 2")
    assert regrouped(problem(tmp_path, change), 2).setup.sites[0].device == "slow"


def test_a_plan_and_a_problem_keep_the_times(tmp_path: Path) -> None:
    plan = make_plan(problem(tmp_path), sensitivity=False)
    (tmp_path / "profile.toml").unlink()
    again = read_problem(json.loads(json.dumps(plan_json(plan)))["problem"], "plan.json")
    assert again.costs((1, 1, 1, 1)) == plan.problem.costs((1, 1, 1, 1))
    rows = "[[profile.layers]]\ncount = 4\nforward_ms = {}\ninput_gradient_ms = 2\nweight_gradient_ms = 3\n"
    found = problem(tmp_path, ('file = "profile.toml"\n', ""), ("[[sites]]", rows.format(1) + "\n[[sites]]"))
    assert [round(unit.forward_s * 1e3) for unit in found.units] == [1, 1, 1, 1]
    wrong = files(tmp_path, ('file = "profile.toml"\n', ""), ("[[sites]]", rows.format(-1) + "\n[[sites]]"))
    with pytest.raises(ConfigError, match=r"problem.toml \[profile\] \[\[layers\]\] 1: forward_ms = -1: .*or equal"):
        read_setup(wrong)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (PROFILE, "", r"profile.toml: the table \[measured\] is missing: make the file again with dips profile"),
        (PROFILE[PROFILE.index("[[layers]]") :], "", r"has no \[\[layers\]\], \[\[links\]\] or"),
        (PROFILE[PROFILE.index("[[layers]]") : PROFILE.index("[calibration]")],
         "[[links]]\nsender = \"here\"\nreceiver = \"there\"\nbandwidth_gbps = 1\nlatency_ms = 1\n",
         r"not measured the link from there to here"),
        (PROFILE[PROFILE.index("[[links]]") :], OVERHEADS.replace("100", "-1"), r"operation_us = -1: .* equal to 0"),
        (PROFILE[PROFILE.index("[[links]]") :], OVERHEADS.replace("50", "nan"), r"send_us = nan: .*finite number"),
        (PROFILE[PROFILE.index("[[links]]") :], OVERHEADS.replace("0.03", "inf"), r"error = inf: .*finite number"),
        (PROFILE[PROFILE.index("[[links]]") :], OVERHEADS.replace("error = 0.03", ""), r"\[calibration\]: error"),
        ('file = "profile.toml"', 'file = "profile.toml"\n' + OF_STAGE, r"has times of its own: remove one of them"),
        ("forward_ms = 10", "forward_ms = 0", r"layer 0 takes no time: give forward_ms and input_gradient_ms"),
        ('model = "four"', 'model = "five"', r"\[measured\]: model = 'five', but .*problem.toml has 'four': .*again"),
        ("count = 3", "count = 2", r"\[profile\]: layers has no times of layer 2 of 4: give those of every layer"),
        ("layer = 3", "layer = 4", r"has times of layer 4, the model has 4 layers, from 0 on: remove them"),
        ("layer = 3", "layer = 2", r"has the times of layer 2 with microbatch_sequences = 0 twice: remove one"),
        ('device = "fast"\nsource', 'device = "new"\nsource', r"device = 'new' was not measured, only fast, slow: run"),
        ('device = "fast"\nsource', "source", r"\[\[sites\]\] 1: device is not given, .* of fast, slow: give one"),
        ("microbatch_sequences = 2", "microbatch_sequences = 6", r"measured with 1, 5 sequences .*--microbatch 6"),
        ("pipeline = 4", "tensor = 2\npipeline = 2", r"times of whole layers on one device"),
        ('sender = "there"\nreceiver = "here"', 'sender = "here"\nreceiver = "there"', r"2: .*given before"),
        ('file = "profile.toml"', 'file = "no.toml"', r"no.toml is not a file: make it with dips profile device FILE"),
        ('file = "profile.toml"', "message_mb = 1", r"\[profile\]: times are given by forward_ms.*exactly one"),
        ('file = "profile.toml"', 'forward_ms = 1\nfile = "profile.toml"', r"give exactly one of the three"),
        ("memory_gib = 8", "memory_gib = 8\nsince = 2026-03-02", r"1 changed .since = 2026-03-02 00:00"),
        ("latency_ms = 5", "latency_ms = 5\nsince = 2026-03-01T11:00:00Z", r"1 changed .*: measure it again"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_one_sentence(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        read_setup(files(tmp_path, (before, after)))
    assert "\n" not in str(raised.value)


def test_a_newer_measurement_of_what_changed_is_enough(tmp_path: Path) -> None:
    since = ("latency_ms = 5", "latency_ms = 5\nsince = 2026-03-02T00:00:00+01:00")
    dated = [(f"latency_ms = {ms}\n", f"latency_ms = {ms}\nat = 2026-03-01T23:00:00Z\n") for ms in (7, 8)]
    assert read_setup(files(tmp_path, since, *dated)).links[0].latency_ms == 7


def test_what_is_written_is_read(tmp_path: Path) -> None:
    files(tmp_path)
    found = read_profile(tmp_path / "profile.toml")
    write_profile(found, tmp_path / "again.toml")
    assert replace(read_profile(tmp_path / "again.toml"), file=found.file) == found


def test_merged_files_keep_the_later_times_of_a_device_and_every_date(tmp_path: Path) -> None:
    files(tmp_path)
    old = read_profile(tmp_path / "profile.toml")
    later = datetime(2026, 4, 1, tzinfo=UTC)
    row = LayerTime(device="slow", count=4, forward_ms=1, input_gradient_ms=1, weight_gradient_ms=1)
    new = ProfileFile("new", old.head.model_copy(update={"at": later, "source": "another"}), layers=(row,))
    found = merged([old, new], "both")
    assert [(x.device, x.at) for x in found.layers] == [("fast", old.head.at)] * 4 + [("slow", later)]
    assert [link.at for link in found.links] == [old.head.at] * 2
    assert (found.head.source, found.head.at) == ("a test; another", old.head.at)
    assert found.calibration is not None
    assert (found.calibration.operation_us, found.calibration.at) == (100, old.head.at)


def test_files_of_different_models_are_not_merged(tmp_path: Path) -> None:
    files(tmp_path)
    old = read_profile(tmp_path / "profile.toml")
    other = replace(old, file="b.toml", head=old.head.model_copy(update={"layers": 5}))
    with pytest.raises(ConfigError, match=r"b.toml \[measured\]: layers = 5, .*profile.toml has 4: merge files of one"):
        merged([old, other], "both")
