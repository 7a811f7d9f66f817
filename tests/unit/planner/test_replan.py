"""A plan that runs, what was measured of it, and whether another one is worth the swap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.documents import blocks
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.costs import NS
from dips.planner.plan import Plan, make_plan, plan_json
from dips.planner.problem import Problem, problem_json, read_problem, regrouped
from dips.planner.replan import (
    Limits,
    ReplanVerdict,
    Running,
    decide,
    layers_moved,
    read_measured,
    read_running,
    replan,
    swap_cost,
    with_measured_links,
    with_measured_stages,
)

FILE = "crosspipe-m70-2dc"
LINKS = """
[[links]]
sender = "dc1"
receiver = "dc2"
bandwidth_gbps = {gbps}
latency_ms = {ms}
"""


def planned(*schedules: str, file: str = FILE) -> Plan:
    problem = Problem(read_setup(file)).with_options(schedules=list(schedules))
    return make_plan(problem, sensitivity=False)


def running_of(plan: Plan, **options: object) -> Running:
    """As it is read back; options: those with which it is planned again."""
    running = read_running(json.dumps(plan_json(plan)), "plan.json")
    return replace(running, problem=running.problem.with_options(**options)) if options else running


def profile(folder: Path, text: str, name: str = "profile.toml") -> Path:
    file = folder / name
    file.write_text('[measured]\nsource = "a test"\n' + text if name.endswith(".toml") else text)
    return file


def stages(times_ms: list[tuple[float, float, float]]) -> str:
    return "".join(
        f"[[stages]]\nstage = {n}\nforward_ms = {f}\ninput_gradient_ms = {d}\nweight_gradient_ms = {w}\n"
        for n, (f, d, w) in enumerate(times_ms)
    )


def as_planned(running: Running) -> list[tuple[float, float, float]]:
    costs = regrouped(running.problem, running.groups).costs(running.division, running.places)
    return [(s.f_ns / 1e6, s.d_ns / 1e6, s.w_ns / 1e6) for s in costs.stages]


# ---- the decision, by hand ----


@pytest.mark.parametrize(
    ("now_s", "new_s", "swap_s", "answer"),
    [
        (10.0, 9.0, 0.0, (0, True)),
        (10.0, 9.0, 4.5, (5, True)),  # 4.5 s at 1 s an iteration
        (10.0, 9.0, 50.5, (51, False)),  # later than 50
        (10.0, 9.9, 0.0, (0, False)),  # 1 % is less than 2 %
        (10.0, 10.0, 0.0, (None, False)),
        (10.0, 11.0, 0.0, (None, False)),
    ],
)
def test_a_swap_must_gain_enough(now_s: float, new_s: float, swap_s: float, answer: tuple[int | None, bool]) -> None:
    break_even, advised, why = decide(now_s, new_s, swap_s, Limits(least_gain=0.02, within=50))
    assert (break_even, advised) == answer
    assert why


def test_layers_that_change_their_device() -> None:
    even, other = ((2, 2), (0, 1)), ((1, 3), (0, 1))
    assert layers_moved(even, even) == []
    assert layers_moved(even, other) == [(1, 0, 1)]
    assert layers_moved(even, ((1, 1, 1, 1), (0, 1, 1, 0))) == [(1, 0, 1), (3, 1, 0)]


# ---- whole plans ----


def test_plans_are_read_back_as_they_were_made() -> None:
    plan = planned("1f1b", "cross_ud/2")
    running = running_of(plan)
    assert running.schedules == plan.chosen.schedules
    assert running.division == plan.chosen.division
    assert running.iteration_s(running.problem) == plan.chosen.iteration_s
    assert running.problem.setup.model == plan.problem.setup.model
    assert running.problem.setup.links == plan.problem.setup.links
    problem = Problem(read_setup("jeeves")).with_training(data=4, microbatches=16).with_links(bandwidth=4 / 64)
    plan = make_plan(problem.with_options(schedules=["jeeves"], replicas="coordinated"), sensitivity=False)
    running = running_of(plan)
    assert running.schedules == plan.chosen.schedules
    assert running.iteration_s(running.problem) == plan.chosen.iteration_s


def test_a_pipeline_at_each_site_is_replanned_as_one(tmp_path: Path) -> None:
    """The link between the sites carries gradients: half as wide, an iteration takes nearly twice as long."""
    problem = Problem(read_setup("crosspipe-405b")).with_training(microbatches=16).with_options(schedules=["dp"])
    plan = make_plan(problem, sensitivity=False)
    running = running_of(plan, schedules=["1f1b", "zb_v"])
    text = LINKS.format(gbps=16, ms=4) + stages(as_planned(running))
    verdict = replan(running, read_measured(profile(tmp_path, text)), Limits())
    assert verdict.planned_s == plan.chosen.iteration_s
    assert 1.8 < verdict.now_s / verdict.planned_s < 2
    assert verdict.new.name.startswith("dp/")
    again = running_of(verdict.plan)
    assert again.groups == 2
    assert again.iteration_s(regrouped(again.problem, 2)) == verdict.new.iteration_s


def test_what_was_planned_and_measured_alike_stays(tmp_path: Path) -> None:
    running = running_of(planned("1f1b", "zb_h1", "cross_ud/1"))
    link = running.problem.setup.links[0]
    text = LINKS.format(gbps=link.bandwidth_gbps, ms=link.latency_ms) + stages(as_planned(running))
    verdict = replan(running, read_measured(profile(tmp_path, text)), Limits())
    assert not verdict.advised
    assert verdict.now_s == pytest.approx(verdict.planned_s, rel=1e-6)
    assert verdict.new.iteration_s == pytest.approx(verdict.planned_s, rel=1e-6)
    assert (verdict.swap.layers, verdict.swap.seconds) == (0, 0)


def later(tmp_path: Path, **options: object) -> tuple[Running, ReplanVerdict]:
    """1F1B was planned; the link got eight times the latency."""
    running = running_of(planned("1f1b"), schedules=["1f1b", "zb_h1", "cross_ud/1"], **options)
    link = running.problem.setup.links[0]
    text = LINKS.format(gbps=link.bandwidth_gbps, ms=8 * link.latency_ms)
    return running, replan(running, read_measured(profile(tmp_path, text)), Limits())


def test_a_later_link_makes_another_order_worth_it_at_once(tmp_path: Path) -> None:
    running, verdict = later(tmp_path, division="uniform")
    assert verdict.now_s > verdict.planned_s
    assert verdict.advised
    assert verdict.new.name == "cross_ud/1"
    assert verdict.break_even == 0
    assert verdict.swap.layers == 0
    assert verdict.gain_s == pytest.approx(verdict.now_s - verdict.new.iteration_s)
    again = replan(running_of(verdict.plan), read_measured(tmp_path / "profile.toml"), Limits())
    assert not again.advised
    assert again.gain_s == 0
    assert running.problem.setup.links[0].latency_ms == 9.5


def test_a_slow_device_gives_layers_away_and_that_costs_a_move(tmp_path: Path) -> None:
    """Where others have the memory for them."""
    running = running_of(planned("zb_h1", file=f"{FILE}-twice"))
    times = as_planned(running)
    times[5] = (times[5][0] * 2, times[5][1] * 2, times[5][2] * 2)
    file = profile(tmp_path, stages(times))
    verdict = replan(running, read_measured(file), Limits())
    assert verdict.advised
    assert verdict.new.division[5] < running.division[5]
    assert verdict.swap.layers > 0
    link = running.problem.setup.links[0]
    for size in verdict.swap.link_bytes.values():
        assert verdict.swap.seconds >= size / link.bytes_per_s + link.latency_ms / 1e3 - 1e-9
    assert verdict.break_even is not None
    assert verdict.break_even * verdict.gain_s >= verdict.swap.seconds > (verdict.break_even - 1) * verdict.gain_s
    paused = replan(running, read_measured(file), Limits(within=1, pause_s=1e6))
    assert not paused.advised
    assert "later than 1" in paused.why


def test_what_moves_is_weights_and_optimizer_once() -> None:
    """14 bytes a parameter over the link that the layer crosses; layers that stay cost nothing."""
    running = running_of(planned("zb_h1"))
    chosen = planned("zb_h1").chosen
    division = list(running.division)
    division[3], division[4] = division[3] - 1, division[4] + 1  # one layer from dc1 to dc2
    swap = swap_cost(running.problem, running, replace(chosen, division=tuple(division)))
    layer = running.problem.setup.model.layer_parameters(10)
    assert swap.link_bytes == {("dc1", "dc2"): 14.0 * layer}
    link = running.problem.setup.links[0]
    assert swap.seconds == pytest.approx(14 * layer / link.bytes_per_s + link.latency_ms / 1e3)
    assert swap.layers == 1


def test_measured_paces_are_kept_in_the_next_plan(tmp_path: Path) -> None:
    running = running_of(planned("zb_h1"))
    times = [(f, d * 3, w) for f, d, w in as_planned(running)]
    verdict = replan(running, read_measured(profile(tmp_path, stages(times))), Limits())
    again = running_of(verdict.plan)
    assert again.problem.paces == verdict.plan.problem.paces
    assert again.problem.paces[0] == pytest.approx((1, 3, 1), rel=1e-6)
    assert again.iteration_s(again.problem) == verdict.new.iteration_s
    assert problem_json(again.problem)["paces"] == [list(pace) for pace in again.problem.paces]


def test_stages_on_one_device_share_its_pace(tmp_path: Path) -> None:
    """ZB-V: of a device with two stages, what both take together counts."""
    running = running_of(planned("zb_v"))
    times = as_planned(running)
    times[0] = (2 * times[0][0], 2 * times[0][1], 2 * times[0][2])
    found = read_measured(profile(tmp_path, stages(times)))
    problem = with_measured_stages(running.problem, running.division, running.places, found)
    assert problem.paces[0] == pytest.approx((1.5, 1.5, 1.5), rel=1e-6)
    assert set(problem.paces[1:]) == {(1.0, 1.0, 1.0)}


def test_json_profiles_are_read_as_toml_is(tmp_path: Path) -> None:
    row = {"sender": "dc1", "receiver": "dc2", "bandwidth_gbps": 10, "latency_ms": 3}
    text = json.dumps({"measured": {"source": "a test"}, "links": [row]})
    one = read_measured(profile(tmp_path, text, "profile.json"))
    two = read_measured(profile(tmp_path, LINKS.format(gbps=10, ms=3)))
    assert (one.links, one.run) == (two.links, two.run)
    (text,) = [block.text for block in blocks(ROOT / "docs" / "planner.md") if block.text.startswith("[measured]")]
    file = tmp_path / "profile.toml"
    file.write_text(text)
    found = read_measured(file)
    assert (len(found.stages), len(found.links), found.run.iterations) == (1, 1, 20)


def test_one_way_of_a_link_alone(tmp_path: Path) -> None:
    running = running_of(planned("1f1b"))
    text = LINKS.format(gbps=1, ms=3) + "both_ways = false\n"
    problem = with_measured_links(running.problem, read_measured(profile(tmp_path, text)))
    was = running.problem.setup.links[0]
    assert problem.setup.link("dc1", "dc2").bandwidth_gbps == 1
    assert problem.setup.link("dc2", "dc1").bandwidth_gbps == was.bandwidth_gbps
    forth, back = (problem.costs(running.division).wires[pair] for pair in ((3, 4), (4, 3)))
    assert forth.busy_ns == round(problem.message_bytes * 8 / 1e9 * NS)
    assert forth.busy_ns > back.busy_ns


# ---- mistakes ----


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has neither .* nor .*: give what was measured"),
        (LINKS.format(gbps=-1, ms=3), r"\[\[links\]\] 1: bandwidth_gbps = -1"),
        (LINKS.format(gbps=1, ms=3).replace("gbps", "mbps"), r"\[\[links\]\] 1: 'bandwidth_mbps' is not a setting"),
        ("[[stages]]\nstage = 0\nforward_ms = 0\n", r"\[\[stages\]\] 1: forward_ms = 0"),
    ],
)
def test_a_profile_that_is_none(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_measured(profile(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a profile: write an object"),
        ('{"stages": []}', r"the table \[measured\] is missing"),
        ('{"measured": {"source": ""}}', "source"),
        ('{"measured": {"source": "x"}, "link": []}', "'link' is unknown"),
    ],
)
def test_a_json_profile_that_is_none(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_measured(profile(tmp_path, text, "profile.json"))
    with pytest.raises(ConfigError, match="cannot be read as a profile"):
        read_measured(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LINKS.format(gbps=1, ms=3).replace("dc2", "dc9"), r"\[\[links\]\] 1: the plan has no link from dc1 to dc9"),
        (LINKS.format(gbps=1, ms=3) * 2, r"\[\[links\]\] 2: from dc1 to dc2 was given before: remove one"),
        (stages([(1, 1, 1)] * 3), r"\[\[stages\]\] are \[0, 1, 2\], the plan has 0 to 7: give each once"),
    ],
)
def test_a_profile_of_another_plan(tmp_path: Path, text: str, sentence: str) -> None:
    running = running_of(planned("1f1b"))
    with pytest.raises(ConfigError, match=sentence):
        replan(running, read_measured(profile(tmp_path, text)), Limits())


def test_a_file_that_is_no_plan() -> None:
    good = plan_json(planned("1f1b"))
    with pytest.raises(
        ConfigError, match=r"mine.json is not a plan.json .*: make one with dips plan FILE --out FOLDER"
    ):
        read_running("{", "mine.json")
    with pytest.raises(ConfigError, match=r"mine\.json is not a plan.json"):
        read_running("[]", "mine.json")
    old = {key: value for key, value in good.items() if key != "problem"}
    for other in (old, {**good, "format": 2}):
        with pytest.raises(ConfigError, match="was made by another release of dips: make it again"):
            read_running(json.dumps(other), "mine.json")
    apart = {**good, "chosen": {**good["chosen"], "layers": [1] * 8}}
    with pytest.raises(ConfigError, match="its schedule and its problem do not match"):
        read_running(json.dumps(apart), "mine.json")
    with pytest.raises(ConfigError, match=r"mine\.json"):
        read_problem({"tables": {"model": {}}, "paces": [], "released": 0.5}, "mine.json")
    with pytest.raises(ConfigError, match="is not what dips plan writes"):
        read_problem({}, "mine.json")
    with pytest.raises(ConfigError, match="paces of 1 devices for 8"):
        read_problem({**good["problem"], "paces": [[1, 1, 1]]}, "mine.json")
