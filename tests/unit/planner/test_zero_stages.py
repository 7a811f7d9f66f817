"""ZeRO stages 2 and 3: what layers exchange for every microbatch, played, checked, solved, and of ZeRO's size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.core.errors import ConfigError
from dips.planner.candidates import data_parallel, plain
from dips.planner.cluster import read_setup
from dips.planner.costs import NS, Costs, Wire, uniform
from dips.planner.exchange import ShardExchange, check_shards, layered
from dips.planner.ir import Kind, Schedule, straight, wave
from dips.planner.problem import Problem, assumptions
from dips.planner.schedules.fixed import one_f_one_b, zb_h1, zb_v
from dips.planner.schedules.optimal import optimal
from dips.planner.simulate import Timeline, simulate, simulate_fleet, validate


def costs_of(
    places: tuple[int, ...], layers: int, gather: float, reduce: float, latency: float = 0.0, apart: bool = False
) -> Costs:
    """T_F = T_D = T_W = 1 for a device; gather and reduce of one layer in the same unit."""
    chunks = len(places) // (max(places) + 1)
    takes = round(gather * NS), round(reduce * NS), round(latency * NS) if gather else 0, round(latency * NS)
    shards = tuple(ShardExchange(device, layers, *takes) for device in places)
    return replace(uniform(len(places), chunks), shards=shards, overlapped=not apart)


def alone(*cells: str) -> Schedule:
    """A schedule of one device."""
    return Schedule.from_csv(",".join(cells) + "\n")


def spans(timeline: Timeline) -> list[tuple[bool, float, float]]:
    return [(one.before, one.start_ns / NS, one.ends_ns / NS) for one in timeline.shards]


# ---- by hand: one device ----


def test_weights_of_the_next_layer_come_while_a_layer_computes() -> None:
    """Two layers of 0.5 each: the first waits 0.3, then all is hidden; W needs no weights."""
    timeline = validate(alone("0F0", "0I0", "0W0"), costs_of((0,), 2, 0.3, 0))
    assert spans(timeline) == [(True, 0, 0.3), (True, 0.3, 0.6), (True, 0.8, 1.1), (True, 1.3, 1.6)]
    assert (timeline.starts[0][0], timeline.ends[0][0]) == (round(0.3 * NS), round(1.3 * NS))
    assert timeline.makespan_ns == round(3.3 * NS)
    assert timeline.exposed_ns == round(0.3 * NS)
    assert timeline.waited_ns == 0


def test_a_slow_network_sets_the_pace() -> None:
    """Weights of a layer take 0.8, the layer 0.5: layers begin 0.8 apart, and W of the end is computation alone."""
    timeline = validate(alone("0F0", "0I0", "0W0"), costs_of((0,), 2, 0.8, 0))
    assert [start / NS for start in timeline.starts[0]] == [0.8, 2.4, 3.7]
    assert [end / NS for end in timeline.ends[0]] == [2.1, 3.7, 4.7]
    assert timeline.waited_ns == round(0.6 * NS)
    assert timeline.bubble_fraction == pytest.approx(1 - 3 / 4.7)


def test_gradients_leave_in_the_background_and_hold_back_the_next_but_one() -> None:
    """Gradients of a layer take 0.7: those of the first leave at 2.5, of the second when these have arrived."""
    timeline = validate(alone("0F0", "0I0", "0W0"), costs_of((0,), 2, 0, 0.7))
    assert spans(timeline) == [(False, 2.5, 3.2), (False, 3.2, 3.9)]
    assert timeline.ends[0][-1] / NS == 3.2
    assert timeline.makespan_ns == round(3.9 * NS)


def test_latency_delays_and_apart_the_device_waits() -> None:
    timeline = validate(alone("0F0", "0B0"), costs_of((0,), 1, 0.25, 0.25, latency=2))
    assert spans(timeline) == [(True, 0, 2.25), (True, 2.25, 4.5), (False, 6.5, 8.75)]
    timeline = validate(alone("0F0", "0B0"), costs_of((0,), 2, 0.3, 0.2, apart=True))
    assert timeline.makespan_ns == round((3 + 4 * 0.3 + 2 * 0.2) * NS)


def test_parts_have_whole_layers() -> None:
    """Three layers in two parts: two and one, and the gradients of parts likewise; one layer goes with one part."""
    assert [layered(0, kind, 0, 2, ShardExchange(0, 3, 1, 1)).layers for kind in (Kind.F, Kind.B, Kind.W)] == [2, 2, 1]
    cells = ["0F0", "0F0.1", "0I0", "0I0.1", "0W0", "0W0.1"]
    for layers in (1, 3):
        timeline = validate(alone(*cells), costs_of((0,), layers, 0.1, 0.1))
        assert sum(before for before, _, _ in spans(timeline)) == 2 * layers
        assert len(timeline.shards) == 3 * layers


# ---- several devices ----


def test_all_ways_of_playing_agree() -> None:
    costs = costs_of(wave(2), 2, 0.4, 0.3, 0.1)
    wires = {(0, 1): Wire(1, NS // 2, NS), (1, 0): Wire(2, NS // 2, NS)}
    apart, meeting = (
        replace(costs, wires={**wires, **more}) for more in ({}, {(5, 6): Wire(1, 1, 0), (6, 5): Wire(2, 1, 0)})
    )
    one, two = simulate(zb_v(2, 4), apart), simulate(zb_v(2, 4), meeting)
    fleet = simulate_fleet([zb_v(2, 4)], apart).timelines[0]
    held = replace(costs, wires={pair: wire._replace(hold_ns=1) for pair, wire in wires.items()})
    blocking = simulate_fleet([zb_v(2, 4)], held).timelines[0]
    rows = [(found.starts, found.ends, sorted(found.shards)) for found in (one, two, fleet)]
    assert rows[0] == rows[1] == rows[2]
    assert len(blocking.shards) == len(one.shards)
    assert abs(blocking.makespan_ns - one.makespan_ns) < 100


def test_a_wrong_exchange_is_named() -> None:
    costs = costs_of((0, 1), 2, 0.2, 0.3)
    rows = simulate(one_f_one_b(2, 2), costs).shards
    check_shards(rows, costs.shards, 2)
    with pytest.raises(ConfigError, match="stage 0: 7 exchanges of weights instead of 8"):
        check_shards(rows[1:], costs.shards, 2)
    with pytest.raises(ConfigError, match="stages 0 and 0 exchange at the same time on one network"):
        check_shards([rows[0]._replace(freed_ns=NS), *rows[1:]], costs.shards, 2)
    with pytest.raises(ConfigError, match="shards of 1 stages for 2 stages"):
        replace(uniform(2, 1), shards=costs.shards[:1])


# ---- solved ----


@pytest.mark.parametrize(
    ("layers", "gather", "reduce", "latency", "apart"),
    [(1, 0.4, 0.4, 0, False), (2, 0.2, 1.0, 0.1, False), (2, 0.7, 0.3, 0, False), (3, 0, 0.5, 0, False),
     (2, 0.1, 0.1, 0, True)],
)  # fmt: skip
def test_no_schedule_is_below_the_solvers_bound(
    layers: int, gather: float, reduce: float, latency: float, apart: bool
) -> None:
    for make, places, n in ((zb_h1, straight(2), 3), (zb_v, wave(2), 2)):
        costs = costs_of(places, layers, gather, reduce, latency, apart)
        hint = make(2, n)
        found = optimal("best", places, n, costs, [4 << 20] * 2, hint)
        spans_ = [validate(schedule, costs).makespan_ns for schedule in (hint, found.schedule)]
        assert found.lower_bound_ns <= spans_[1] <= spans_[0]
        assert found.lower_bound_ns > simulate(found.schedule, replace(costs, shards=())).makespan_ns
    slow = costs_of((0,), 2, 5, 1)  # of two layers: weights twice, 5 each, gradients 1 each
    assert optimal("best", straight(1), 1, slow, [1 << 20]).lower_bound_ns == 22 * NS


# ---- of which size ----


def small(**changes: object) -> Problem:
    """CrossPipe's 405B setting with few microbatches, four replicas, and in the sites a network and enough memory."""
    setup = read_setup("crosspipe-405b")
    sites = tuple(site.model_copy(update={"network_gbps": 800.0, "memory_gib": 200}) for site in setup.sites)
    given = {"data": 4, "microbatches": 16, "extra_layers": 0, **changes}
    return Problem(replace(setup, sites=sites)).with_training(**given)


def carried_ns(problem: Problem) -> int:
    """The time that the network of device 5 carries exchanges in an iteration."""
    timeline = plain(problem, "zb_h1").timeline
    return sum(row.freed_ns - row.start_ns for row in timeline.all_exchanges if row.resource == 5)


def test_zero_3_sends_one_and_a_half_times_as_much_for_a_microbatch() -> None:
    """ZeRO (arXiv:1910.02054), section 7: 2 psi for stages 0 to 2, 3 psi for stage 3, of one microbatch."""
    one = small(microbatches=1)
    before = carried_ns(one.with_training(zero_stage=1))
    for stage, times in ((0, 1.0), (2, 1.0), (3, 1.5)):
        assert carried_ns(one.with_training(zero_stage=stage)) == pytest.approx(times * before, rel=1e-6)
    many = small()
    for stage, times in ((0, 2), (1, 2), (2, 17), (3, 48)):
        problem = many.with_training(zero_stage=stage)
        assert carried_ns(problem) == pytest.approx(times / 2 * before, rel=1e-6)
        assert problem.ring_passes == times


def test_stages_0_and_1_and_a_free_network_exchange_nothing_of_a_microbatch() -> None:
    for stage in (0, 1):
        assert small(zero_stage=stage).costs(small().uniform()).shards == ()
    setup = read_setup("crosspipe-405b")
    assert Problem(setup).with_training(zero_stage=3, data=4).costs(small().uniform()).shards == ()  # free inside


def test_two_whole_layers_are_in_memory() -> None:
    """Shards alone would be ZeRO's bytes; two layers' weights and gradients are whole at a time."""
    problem = small()
    division, unit = problem.uniform(), problem.units[20]
    whole = sum(u.whole_bytes for u in problem.units[16:24])
    assert unit.whole_bytes == 2 * problem.setup.model.layer_parameters(20) / problem.setup.training.tensor
    for stage, kept, layers in ((1, 2 + 12 / 2 / 4, 0), (2, 1 + (1 + 6) / 4, 2), (3, 8 / 4, 4)):
        at = problem.with_training(zero_stage=stage)
        assert len(at.units) == 126
        units = at.units[sum(division[:5]) : sum(division[:6])]
        whole = sum(u.whole_bytes for u in units)
        wanted = whole * kept + layers * units[0].whole_bytes
        assert at.state_bytes(division)[5] == pytest.approx(wanted, rel=1e-9)


def test_pipelines_at_each_site_share_the_link_evenly() -> None:
    problem = small(zero_stage=3, microbatches=4)
    found = data_parallel(problem)
    n, link = problem.setup.model.parameters(), problem.setup.links[0]
    whole = 3 * 4 * 2 * n / 2
    assert found.link_bytes == {(0, 1): pytest.approx(whole), (1, 0): pytest.approx(whole)}
    assert found.iteration_s > whole / link.bytes_per_s
    assert any("equal share of the link" in line for line in assumptions(problem))
