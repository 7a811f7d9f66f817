"""What replicas exchange: played, checked, solved, and of the size that the papers give it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.core.errors import ConfigError
from dips.planner.candidates import data_parallel
from dips.planner.cluster import read_setup
from dips.planner.costs import NS, Costs, Wire, uniform
from dips.planner.exchange import Exchange, check_exchanges
from dips.planner.ir import Schedule, straight, wave
from dips.planner.model import read_model
from dips.planner.problem import Problem, assumptions, regrouped
from dips.planner.schedules.fixed import one_f_one_b, zb_v
from dips.planner.schedules.optimal import optimal
from dips.planner.simulate import Timeline, simulate, simulate_fleet, validate

SHARED = 99


def costs_of(
    places: tuple[int, ...],
    gather: float,
    reduce: float,
    latency: float = 0.0,
    shared: bool = False,
    apart: bool = False,
) -> Costs:
    """T_F = T_D = T_W = 1 for a device; what its stages exchange in the same unit, each on its device or all on one
    network."""
    chunks = len(places) // (max(places) + 1)
    latency_ns = round(latency * NS)
    takes = round(gather * NS), round(reduce * NS), latency_ns if gather else 0, latency_ns
    exchanges = tuple(Exchange(SHARED if shared else device, *takes) for device in places)
    return replace(uniform(len(places), chunks), exchanges=exchanges, overlapped=not apart)


def spans(timeline: Timeline) -> list[tuple[int, bool, float, float]]:
    return [(one.stage, one.before, one.start_ns / NS, one.ends_ns / NS) for one in timeline.exchanges]


def test_weights_come_first_and_gradients_last() -> None:
    """Each device its own network: everything 2 later, and the gradients of stage 0 at the end."""
    timeline = validate(one_f_one_b(2, 2), costs_of((0, 1), 2, 1))
    assert timeline.makespan_ns == 12 * NS
    assert spans(timeline) == [(0, True, 0, 2), (1, True, 0, 2), (1, False, 9, 10), (0, False, 11, 12)]
    assert timeline.exposed_ns == 3 * NS
    assert timeline.starts[0][0] == 2 * NS


def test_what_is_hidden_and_what_is_not() -> None:
    timeline = validate(one_f_one_b(2, 2), costs_of((0, 1), 2, 4, latency=0.5, shared=True))
    assert spans(timeline)[:2] == [(0, True, 0, 2.5), (1, True, 2, 4.5)]
    assert timeline.makespan_ns == round(19 * NS)  # stage 0 is ready at 12.5, its network is free at 14.5
    timeline = validate(one_f_one_b(2, 2), costs_of((0, 1), 0, 1, shared=True))
    assert spans(timeline) == [(1, False, 7, 8), (0, False, 9, 10)]
    assert timeline.makespan_ns == 10 * NS
    timeline = validate(one_f_one_b(2, 2), costs_of((0, 1), 2, 1, shared=True, apart=True))
    assert spans(timeline) == [(0, True, 0, 2), (1, True, 2, 4), (0, False, 13, 14), (1, False, 14, 15)]
    assert timeline.makespan_ns == 15 * NS


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_both_ways_of_playing_agree(latency: float) -> None:
    """Following the dependencies, and following time where a link has two senders."""
    exchanging = costs_of(wave(2), 0.5, 1, latency)
    wires = {(0, 1): Wire(1, NS // 2, NS), (1, 0): Wire(2, NS // 2, NS)}
    apart, meeting = (
        replace(exchanging, wires={**wires, **more}) for more in ({}, {(5, 6): Wire(1, 1, 0), (6, 5): Wire(2, 1, 0)})
    )
    schedule = zb_v(2, 4)
    one, two = validate(schedule, apart), validate(schedule, meeting)
    assert (one.starts, one.ends, one.exchanges) == (two.starts, two.ends, two.exchanges)
    fleet = simulate_fleet([schedule], apart)
    assert fleet.timelines[0].starts == one.starts
    assert fleet.makespan_ns == one.makespan_ns


def test_waits_and_deadlocks() -> None:
    """Two replicas over one link: those of the later one decide. The pauses that stand for weights are no cells."""
    costs = replace(costs_of((0, 1), 1, 1), wires={(0, 1): Wire(7, NS, 0), (1, 0): Wire(8, NS, 0)})
    fleet = simulate_fleet([one_f_one_b(2, 2)] * 2, costs)
    alone = simulate(one_f_one_b(2, 2), costs)
    last = max(end for timeline in fleet.timelines for row in timeline.ends for end in row)
    assert fleet.makespan_ns == last + NS > alone.makespan_ns
    assert fleet.timelines[0].exchanges == fleet.timelines[1].exchanges
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ConfigError, match=r"device 0 waits at cell 2 \(0B0\), device 1 waits at cell 1 \(1F1\)"):
        simulate(schedule, costs_of((0, 1), 2, 1))


def test_a_wrong_exchange_is_named() -> None:
    costs = costs_of((0, 1), 2, 1, shared=True)
    done = list(simulate(one_f_one_b(2, 2), costs).exchanges)
    first, last = [2 * NS, 4 * NS], [12 * NS, 10 * NS]
    check_exchanges(done, costs.exchanges, first, last)
    with pytest.raises(ConfigError, match="3 exchanges between replicas instead of 4"):
        check_exchanges(done[1:], costs.exchanges, first, last)
    with pytest.raises(ConfigError, match="stage 1 needs its weights at 3000000000 ns, they arrive at 4000000000 ns"):
        check_exchanges(done, costs.exchanges, [2 * NS, 3 * NS], last)
    with pytest.raises(ConfigError, match="stage 0 has gradients to send at 13000000000 ns, they leave at 12000000000"):
        check_exchanges(done, costs.exchanges, first, [13 * NS, 10 * NS])
    with pytest.raises(ConfigError, match=r"stage 0: its exchange .* does not have its cost"):
        check_exchanges([done[0]._replace(freed_ns=NS), *done[1:]], costs.exchanges, first, last)
    early = done[1]._replace(start_ns=NS, freed_ns=3 * NS, ends_ns=3 * NS)
    with pytest.raises(ConfigError, match="stages 0 and 1 exchange at the same time on one network"):
        check_exchanges([done[0], early, *done[2:]], costs.exchanges, first, last)
    with pytest.raises(ConfigError, match="exchanges of 1 stages for 2 stages"):
        replace(uniform(2, 1), exchanges=(Exchange(0, 1, 1),))


@pytest.mark.parametrize(("gather", "reduce"), [(0.0, 1.0), (0.5, 4.0), (1.0, 2.0), (3.0, 0.5)])
@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_buckets_travel_while_their_neighbours_are_computed(gather: float, reduce: float, buckets: int) -> None:
    """Against each bucket by itself: F computes a layer when its weights are there, a layer's gradients leave after its
    part of B. A stage waits longer at most."""
    one = costs_of((0,), gather, reduce, latency=0.25)
    one = replace(one, exchanges=(one.exchanges[0]._replace(buckets=buckets),))
    latency, now = 0.25 * (gather > 0), 0.0
    for bucket in range(buckets):
        now = max(now, (bucket + 1) * gather / buckets + latency) + 1 / buckets
    begun = network = now
    for bucket in range(buckets):
        network = max(network, begun + (bucket + 1) * 2 / buckets) + reduce / buckets
    timeline = validate(Schedule.from_csv("0F0,0B0\n"), one)
    assert timeline.ends[0][0] == pytest.approx(now * NS)
    assert timeline.end_ns == pytest.approx((network + 0.25) * NS)
    apart = validate(timeline.schedule, replace(one, overlapped=False))
    assert apart.end_ns == pytest.approx((gather + latency + 3 + reduce + 0.25) * NS)


def test_no_order_is_better_than_the_solver_says_with_buckets() -> None:
    whole = costs_of((0, 1), 1, 4)
    costs = replace(whole, exchanges=tuple(one._replace(buckets=4) for one in whole.exchanges))
    found = optimal("best", straight(2), 2, costs, [2 << 20] * 2)
    played_ns = [validate(schedule, costs).makespan_ns for schedule in (found.schedule, one_f_one_b(2, 2))]
    assert (
        found.lower_bound_ns <= min(played_ns) < optimal("whole", straight(2), 2, whole, [2 << 20] * 2).lower_bound_ns
    )


@pytest.mark.parametrize(
    ("gather", "shared", "apart", "best"),
    [(0, False, False, 11), (0, True, False, 15), (2, False, True, 13), (2, True, True, 19)],
)
def test_two_stages_and_two_microbatches_by_hand(gather: int, shared: bool, apart: bool, best: int) -> None:
    """No stage can end before 7 (six operations and one before them; the last gradient comes back at 5). Then 4 of
    gradients, one after the other where they share a network; and before all, where they are apart, 2 of weights."""
    costs = costs_of((0, 1), gather, 4, shared=shared, apart=apart)
    found = optimal("best", straight(2), 2, costs, [2 << 20] * 2)
    assert found.proved
    assert found.lower_bound_ns == validate(found.schedule, costs, [2 << 20] * 2).makespan_ns == best * NS


def test_a_stage_waits_for_its_own_weights_only() -> None:
    # Weights of the second stage arrive at 5, of the first one at 1: it need not wait for both.
    costs = replace(uniform(2, 1), exchanges=(Exchange(7, NS, 0), Exchange(8, 5 * NS, 0)))
    assert optimal("best", straight(2), 2, costs, [2 << 20] * 2).lower_bound_ns == 11 * NS


def small(**changes: object) -> Problem:
    """CrossPipe's 405B setting with few microbatches."""
    return Problem(read_setup("crosspipe-405b")).with_training(microbatches=16, **changes)


def test_across_sites_appendix_e() -> None:
    """2 (alpha + N beta) between two sites, two bytes a parameter; hidden it takes no longer, and at least the link."""
    problem = small()
    link, n = problem.setup.links[0], problem.setup.model.parameters()
    apart = data_parallel(problem.with_options(overlap=False))
    assert apart.sync_ns / NS == pytest.approx(2 * (0.004 + n / link.bytes_per_s), rel=1e-6)
    hidden = data_parallel(problem)
    assert 2 * n / link.bytes_per_s < hidden.iteration_s < apart.iteration_s
    assert hidden.sync_ns < apart.sync_ns
    assert hidden.link_bytes == {(0, 1): pytest.approx(2 * n), (1, 0): pytest.approx(2 * n)}


def test_without_zero_one_all_reduce_is_as_long_as_both() -> None:
    problem = regrouped(small(), 2)
    other = regrouped(small(zero_stage=0), 2)
    for one, two in zip(_exchanges(problem), _exchanges(other), strict=True):
        assert (two.gather_ns, two.gather_latency_ns) == (0, 0)
        assert (two.reduce_ns, two.reduce_latency_ns) == (2 * one.reduce_ns, 2 * one.reduce_latency_ns)
        assert one.gather_ns == one.reduce_ns


def _exchanges(problem: Problem) -> tuple[Exchange, ...]:
    return problem.costs(problem.uniform()).exchanges


def test_inside_a_site_it_costs_what_its_network_says() -> None:
    """Nothing is known of the network: nothing is counted, and that is said. Else (n - 1) / n of the stage's weights,
    two bytes each, of which every device sends its part over its own network, and n - 1 latencies."""
    problem = small(data=4, extra_layers=0)
    assert _exchanges(problem) == ()
    assert any("inside a site without network_gbps costs no time" in line for line in assumptions(problem))
    setup = problem.setup
    sites = tuple(
        s.model_copy(update={"network_gbps": 800.0 / setup.training.tensor, "network_latency_us": 10.0})
        for s in setup.sites
    )
    counted = replace(problem, setup=replace(setup, sites=sites))
    division = counted.uniform()
    weights = sum(setup.model.layer_parameters(layer) for layer in range(division[0])) * 2
    first = weights + setup.model.embedding_parameters() * 2
    found = _exchanges(counted)
    assert found[0].gather_ns == found[0].reduce_ns == pytest.approx(first * 3 / 4 / 100, abs=1)
    assert found[1].reduce_ns == pytest.approx(division[1] / division[0] * weights * 3 / 4 / 100, abs=1)
    assert {one.reduce_latency_ns for one in found} == {30_000}
    assert [one.resource for one in found] == list(range(16))
    assert not any("network_gbps" in line for line in assumptions(counted))


def test_experts_are_exchanged_among_fewer() -> None:
    problem = Problem(read_setup("crosspipe-405b"))
    mixture = replace(problem.setup, model=read_model("mixtral-8x7b"))
    whole = replace(problem, setup=mixture).with_training(extra_layers=0, pipeline=8, data=8)
    spread = whole.with_training(expert=8)
    assert spread.units[3].inside_bytes < whole.units[3].inside_bytes / 8
    assert spread.units[3].weight_bytes == whole.units[3].weight_bytes
