"""Whole plans: what is chosen, what is told of it, stage divisions, files."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.plan_command import EXAMPLE
from support.spantrain import problem as problem_of
from support.two_stages import TWO

from dips.core.errors import ConfigError
from dips.planner.candidates import jeeves_with, replicas_of
from dips.planner.cluster import Profile, read_setup
from dips.planner.commands.plan_text import plan_text
from dips.planner.costs import NS
from dips.planner.division import divide, solve
from dips.planner.ir import Op, Schedule
from dips.planner.plan import Plan, make_plan, plan_json, read_plan, write_plan
from dips.planner.problem import Problem
from dips.planner.schedules.greedy import cross_ud
from dips.planner.simulate import simulate, validate
from dips.planner.sweep import GridPoint
from dips.planner.units import even_division


def small(name: str = "jeeves", replicas: int = 4) -> Problem:
    """JEEVES' setting with few replicas and a link as much narrower."""
    whole = Problem(read_setup(name))
    return whole.with_training(data=replicas, microbatches=16).with_links(bandwidth=replicas / whole.replicas)


# ---- plans ----


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(small(), sensitivity=False)


def test_the_fastest_is_chosen_and_the_others_are_told(plan: Plan) -> None:
    spans = [candidate.iteration_s for candidate in plan.candidates]
    assert spans == sorted(spans)
    names = {candidate.name for candidate in plan.candidates}
    assert {"1f1b", "zb_h1", "zb_v", "cross_ud/1", "cross_ud/4", "cross_wave", "jeeves", "dp/zb_v"} <= names
    assert {no.name for no in plan.refused} == {"gpipe", "interleaved_1f1b"}
    assert all("of activations" in no.why for no in plan.refused)
    assert plan.chosen.sharing == "coordinated"
    for candidate in plan.candidates:
        held = zip(candidate.activation_bytes, candidate.limit_bytes, strict=True)
        assert all(peak <= limit for peak, limit in held), candidate.name


def test_the_solver_s_order_is_simulated_with_one_message_at_a_time() -> None:
    """Alone: where replicas take turns, nothing else is left to choose from."""
    few = small(replicas=2).with_training(microbatches=4)  # the solver is done at once, long before its seconds end
    found = make_plan(few.with_options(schedules=["optimal_ud"], replicas="coordinated", solver_s=60.0))
    assert [(one.name, one.sharing, one.lower_bound_ns) for one in found.candidates] == [
        ("optimal_ud", "coordinated", None)
    ]


def test_bytes_of_each_link(plan: Plan) -> None:
    """One crossing each way for each microbatch of each replica; a wave crosses twice."""
    problem = plan.problem
    once = problem.message_bytes * problem.replicas * problem.n_microbatches
    for candidate in plan.candidates:
        if candidate.name.startswith("dp"):
            assert candidate.link_bytes[0, 1] == problem.setup.model.parameters() * 2.0
        else:
            times = 2 if candidate.name in ("zb_v", "cross_wave") else 1
            assert candidate.link_bytes == {(0, 1): times * once, (1, 0): times * once}


def test_no_long_link_no_question_of_sharing() -> None:
    setup = read_setup("jeeves")
    alone = replace(setup, sites=(setup.sites[0].model_copy(update={"devices": 4096}),), links=())
    plan = make_plan(Problem(alone))
    assert {candidate.sharing for candidate in plan.candidates} == {"alone"}
    assert "dp" not in {candidate.name for candidate in plan.candidates} | {no.name for no in plan.refused}
    assert [effect.change for effect in plan.effects if "sites" in effect.change] == []


def test_options_narrow_the_search() -> None:
    problem = small().with_options(schedules=["1f1b", "jeeves"], replicas="fair", division="uniform")
    plan = make_plan(problem, sensitivity=False)
    assert {(c.name, c.sharing) for c in plan.candidates} == {("1f1b", "fair"), ("jeeves", "fair")}
    both = make_plan(problem.with_options(replicas="coordinated"), sensitivity=False)
    assert {(c.name, c.sharing) for c in both.candidates} == {("1f1b", "coordinated"), ("jeeves", "coordinated")}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"schedules": ["1f2b"]}, r"\[options\]: schedules has '1f2b', which is unknown: choose from gpipe, 1f1b"),
        ({"schedules": ["optimal_ud"]}, r"\[options\]: optimal schedules need solver_s"),
        ({"schedules": ["gpipe"]}, r"no schedule is possible: gpipe: stage 0 would hold .* of activations"),
    ],
)
def test_options_that_cannot_be(options: dict[str, list[str]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(small().with_options(**options))


def test_memory_for_less_than_a_microbatch_says_so() -> None:
    sentence = (
        r"jeeves.toml \[profile\]: memory_microbatches leaves .* one microbatch of stage 0 needs 1.196 GiB: give more"
    )
    with pytest.raises(ConfigError, match=sentence):
        make_plan(small().with_memory(0.1))


def test_a_solver_is_asked_only_for_its_seconds_and_states_its_bound() -> None:
    problem = Problem(read_setup("crosspipe-figure-8")).with_options(solver_s=5.0, schedules=["optimal_ud", "zb_h1"])
    plan = make_plan(problem, sensitivity=False)
    best = plan.chosen
    assert best.name == "optimal_ud"
    assert best.lower_bound_ns is not None
    assert 27 * NS < best.lower_bound_ns <= best.makespan_ns


def test_a_whole_plan_by_hand(tmp_path: Path) -> None:
    """Two stages at two sites, 10 ms a pass, messages of 8 ms and 5 ms on their way: the first F is there at 23, its
    gradient goes at 53 and arrives at 66, the second one goes at 83 and arrives at 96, and B ends at 116.

    A layer has 1,020 parameters, the embedding 300, the output 310, 16 bytes each; 288 bytes of activations a token.
    """
    (tmp_path / "two.toml").write_text(TWO)
    found = plan_json(make_plan(Problem(read_setup(tmp_path / "two.toml"))))
    stages = [(21120, 57600), (21280, 28800)]
    assert found["chosen"] == {
        "schedule": "1f1b", "sharing": "alone", "iteration_s": 0.116,
        "iteration_low_s": pytest.approx(0.1044), "iteration_high_s": pytest.approx(0.1276),
        "sync_s": 0, "layers": [1, 1], "bubble_fraction": pytest.approx(1 - 120 / 232), "lower_bound_s": None,
        "stages": [
            {
                "device": device, "site": site, "layers": [1], "state_bytes": state, "activation_bytes": held,
                "activation_limit_bytes": 2**30 - state,
            }
            for device, (site, (state, held)) in enumerate(zip(("here", "there"), stages, strict=True))
        ],
        "links": [
            {"sender": sender, "receiver": receiver, "bytes": 2e6}
            for sender, receiver in (("here", "there"), ("there", "here"))
        ],
    }  # fmt: skip
    ms = [[[0, 10], [10, 20], [66, 86], [96, 116]], [[23, 33], [33, 53], [53, 63], [63, 83]]]
    assert found["timeline"] == [[[at * 10**6 for at in span] for span in row] for row in ms]
    assert found["schedule"]["orders"] == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    # GPipe runs both F first: the gradients arrive at 76 and 96, which is as long; of equal ones the first is chosen.
    assert [(one["schedule"], one["slower_by"]) for one in found["candidates"]] == [("1f1b", 0), ("gpipe", 0)]
    # The greedy takes 96 ms: half of 8 ms twice, or half of 5 ms twice.
    saved = {one["change"]: one["saves"] for one in found["sensitivity"]}
    assert saved["bandwidth between sites x 2"] == pytest.approx(8 / 96)
    assert saved["latency between sites / 2"] == pytest.approx(5 / 96)
    assert saved["memory of activations x 2"] == 0
    assert list(saved.values()) == sorted(saved.values(), reverse=True)


def test_fewer_stages_are_tried_where_each_site_keeps_one(tmp_path: Path) -> None:
    """The greedy takes 96 ms with two stages, as by hand above; with four a microbatch passes two more, 40 ms. Of two
    stages for 9 and 2 devices the second site would have none.
    """
    text = TWO.replace("layers = 2", "layers = 4").replace("devices = 1", "devices = 2")
    (tmp_path / "four.toml").write_text(text.replace("pipeline = 2", "pipeline = 4"))
    found = make_plan(Problem(read_setup(tmp_path / "four.toml")))
    saved = {effect.change: effect.saved for effect in found.effects}
    assert saved["2 stages, the other devices free"] == pytest.approx(40 / 136)
    uneven_text = text.replace("devices = 2", "devices = 9", 1).replace("pipeline = 2", "pipeline = 4")
    (tmp_path / "uneven.toml").write_text(uneven_text)
    uneven = make_plan(Problem(read_setup(tmp_path / "uneven.toml")))
    assert not [effect for effect in uneven.effects if "other devices free" in effect.change]


def test_what_is_said_of_waiting_without_links_is_what_1f1b_waits_on_one_site(tmp_path: Path) -> None:
    """Also where another schedule is chosen, which fills and drains in less time."""
    text = TWO.replace("layers = 2", "layers = 4").replace("devices = 1", "devices = 2")
    text = text.replace("pipeline = 2", "pipeline = 4").replace("microbatches = 2", "microbatches = 1")
    text = text.replace('"gpipe"', '"cross_ud/1"')
    (tmp_path / "four.toml").write_text(text)
    found = make_plan(Problem(read_setup(tmp_path / "four.toml")))
    said = "\n".join(line for line in plan_text(found) if isinstance(line, str))
    (tmp_path / "one.toml").write_text(text.replace("devices = 2", "devices = 100", 1).replace(', "cross_ud/1"', ""))
    alone = make_plan(Problem(read_setup(tmp_path / "one.toml"))).chosen
    assert (found.chosen.name, set(alone.site_of)) == ("cross_ud/1", {0})
    assert f"in 1f1b, 4 even stages without links would wait {alone.bubble_fraction:.1%} of an iteration" in said


# ---- stage division ----


def test_scarce_memory_moves_layers_away_from_the_first_stage() -> None:
    problem = small("jeeves-20ms").with_memory(0.5)
    found = divide(problem)
    assert sum(found.division) == sum(found.seed) == 96
    assert found.seed[0] < 12
    assert found.span_ns == jeeves_with(problem, found.division, coordinated=True).makespan_ns < 0.95 * found.uniform_ns
    assert sum(found.division[:4]) < sum(found.division[4:])


TIMES = Profile(forward_ms=10, input_gradient_ms=9, weight_gradient_ms=8, source="a test")


def nine_layers(latency_ms: float, held: float, three: bool = False, mb: float = 0.5) -> Problem:
    """Three stages at two sites or at three, memory for so many microbatches."""
    sites = (("here", 2, 3), ("middle", 2, 4), ("there", 2, 2)) if three else (("here", 4, 3), ("there", 2, 2))
    rows = [{"name": name, "devices": devices, "sustained_tflops": rate} for name, devices, rate in sites]
    links = [
        {"sender": a[0], "receiver": b[0], "bandwidth_gbps": 1 / n, "latency_ms": n * latency_ms}
        for n, (a, b) in enumerate(itertools.pairwise(sites), 1)
    ]
    profile = TIMES.model_copy(update={"message_mb": mb, "memory_microbatches": held})
    return Problem(replace(problem_of(rows, links, 9, 4, pipeline=3, data=2), profile=profile))


def every_division() -> list[tuple[int, int, int]]:
    return [(a, b - a, 9 - b) for a, b in itertools.combinations(range(1, 9), 2)]


@pytest.mark.parametrize(("latency_ms", "microbatches"), [(0, 3), (30, 3), (30, 1.5)])
def test_no_division_of_a_small_model_is_faster(latency_ms: float, microbatches: float) -> None:
    """Three stages and nine layers: all 28 divisions, JEEVES' greedy on each."""
    problem = nine_layers(latency_ms, microbatches)
    spans: dict[tuple[int, ...], int] = {}
    for division in every_division():
        with suppress(ConfigError):  # too little memory
            spans[division] = jeeves_with(problem, division, coordinated=True).makespan_ns
    found = divide(problem)
    assert found.span_ns == spans[found.division] == min(spans.values())
    assert found.uniform_ns == spans[3, 3, 3] > found.span_ns


@pytest.mark.parametrize("mb", [0.5, 12.0, 40.0])
@pytest.mark.parametrize(("latency_ms", "held"), [(0, 3), (9, 1), (40, 2), (40, 1)])
def test_the_solver_finds_the_least_of_the_papers_objective(latency_ms: float, held: float, mb: float) -> None:
    """JEEVES, section 3.2: the longer of the computation-dominant path (the first microbatch to the slowest stage, all
    of them there) and the communication-dominant one (all messages over one boundary); and, as often as the first
    stage's memory is full, the wait until the first microbatch is back, beyond what the last stage does meanwhile."""
    problem = nine_layers(latency_ms, held, True, mb)
    layer_ms = (27 / 3, 27 / 3 * 3 / 4, 27 / 3 * 3 / 2)
    busy_ms = [2 * mb * 8 * n for n in (1, 2)]  # of both replicas
    delay_ms = [2 * (busy + n * latency_ms) for n, busy in enumerate(busy_ms, 1)]

    def objective(division: tuple[int, ...]) -> float:
        each = [ms * layers for ms, layers in zip(layer_ms, division, strict=True)]
        computing = max(sum(each[:k]) + sum(delay_ms[:k]) + 4 * each[k] for k in range(3))
        sending = max(sum(each) + sum(delay_ms) + 3 * busy for busy in busy_ms)
        fits = min(4, int(3 * held) // division[0])
        if not fits:
            return float("inf")
        wait = max(0.0, sum(each) + sum(delay_ms) - fits * each[2])
        return max(computing, sending) + wait * (3 // fits)

    found = objective(solve(problem))
    assert found == pytest.approx(min(map(objective, every_division())), abs=0.1)


def test_jeeves_is_planned_where_even_stages_do_not_fit_the_memory() -> None:
    setup = read_setup("crosspipe-m70-2dc-recompute")
    small_site = setup.sites[1].model_copy(update={"memory_gib": 26.0})
    problem = Problem(replace(setup, sites=(setup.sites[0], small_site))).with_training(microbatches=8)
    with pytest.raises(ConfigError, match="26 of dc2 holds less than"):
        problem.limits(problem.uniform())
    (found,) = make_plan(problem.with_options(schedules=["jeeves"]), sensitivity=False).candidates
    assert sum(found.division) == 64
    assert max(found.division[4:]) < 8 < min(found.division[:4])
    with pytest.raises(ConfigError, match="26 of dc2 holds less"):
        make_plan(problem.with_options(schedules=["jeeves"], division="uniform"), sensitivity=False)


def test_a_slow_site_and_the_output_layer_get_fewer_layers() -> None:
    setup = read_setup(EXAMPLE)
    slow = setup.sites[1].model_copy(update={"sustained_tflops": 200.0})
    problem = Problem(replace(setup, sites=(setup.sites[0], slow)))
    division = problem.balanced(range(8))
    assert sum(division) == 32
    assert min(division[:4]) > max(division[4:])
    times = [[s.f_ns + s.d_ns + s.w_ns for s in problem.costs(d).stages] for d in (division, problem.uniform())]
    assert max(times[0]) < max(times[1])
    plan = make_plan(problem.with_options(schedules=["zb_h1"]), sensitivity=False)
    assert plan.chosen.division == division


# ---- parts as stages ----


@pytest.mark.parametrize("parts", [2, 4])
def test_a_runtime_without_parts_gets_stages(parts: int) -> None:
    case = GridPoint(4, 8, 2, 0.5, 0.25, 1)
    cut = cross_ud(4, 8, case.costs(), case.limits(), parts)
    whole = cut.with_parts_as_stages()
    assert (whole.n_stages, whole.parts, whole.n_devices) == (4 * parts, 1, 4)
    costs = GridPoint(4, 8, 2, 0.5, 0.25, 1).costs(parts)
    assert validate(whole, costs).makespan_ns == simulate(cut, case.costs()).makespan_ns
    assert cross_ud(4, 8, case.costs(), case.limits(), 1).with_parts_as_stages().parts == 1


# ---- files ----


def test_files_of_a_plan(tmp_path: Path) -> None:
    problem = small().with_options(schedules=["1f1b", "cross_ud/2"])
    plan = make_plan(problem)
    written = write_plan(plan, tmp_path / "plan")
    assert [file.name for file in written] == ["plan.json", "plan.csv", "trace.json", "timeline.svg", "timeline.png"]
    told = json.loads(written[0].read_text())
    assert told == json.loads(json.dumps(plan_json(plan)))
    assert told["chosen"]["iteration_s"] == plan.chosen.iteration_s
    assert [row["slower_by"] for row in told["candidates"]] == sorted(row["slower_by"] for row in told["candidates"])
    schedule, times = read_plan(written[0].read_text(), "plan.json")
    assert schedule == plan.chosen.schedules[0]
    assert [[start for start, _ in row] for row in times] == [list(row) for row in plan.chosen.timeline.starts]
    torch_rows = written[1].read_text().splitlines()
    assert Schedule.from_csv(written[1].read_text()).n_devices == 8
    assert all(Op.parse(cell).part == 0 for row in torch_rows for cell in row.split(","))
    events = json.loads(written[2].read_text())["traceEvents"]
    done = [event for event in events if event["ph"] == "X" and event["cat"] != "message"]
    assert len(done) == plan.chosen.schedules[0].n_ops
    assert {event["pid"] for event in done} == set(range(8))
    assert written[3].read_text().startswith("<?xml")
    assert written[4].read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn_ends_with_the_iteration(plan: Plan) -> None:
    """Of each candidate, also where replicas take turns on the link and the first one ends earlier than others."""
    for candidate in plan.candidates:
        drawn = replicas_of(plan.problem, candidate)
        assert len(drawn) == (plan.problem.replicas if candidate.sharing == "coordinated" else 1)
        assert drawn[0].starts == candidate.timeline.starts
        span_ns = max(one.end_ns for one in drawn) - min(one.begin_ns for one in drawn)
        assert span_ns == candidate.makespan_ns, candidate.name
    assert any(c.timeline.makespan_ns < c.makespan_ns for c in plan.candidates)


@pytest.mark.parametrize(("slowness", "division"), [((1, 3), (9, 3)), ((3, 1, 1, 1), (1, 3, 3, 3)), ((2, 2), (6, 6))])
def test_devices_get_layers_in_proportion_to_their_speed(slowness: tuple[int, ...], division: tuple[int, ...]) -> None:
    """A device that is three times as fast gets three times the layers, so that stage times are equal: not nine times,
    as it did when the sum of squared times was least."""
    n_layers = sum(division)
    assert even_division([1.0] * n_layers, slowness) == division
