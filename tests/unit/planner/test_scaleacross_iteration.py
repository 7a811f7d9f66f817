"""DoraPP, interleaved ZBV, and the time of an iteration rebuilt from its kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.scaleacross import read

from dips.planner.costs import NS, Costs, StageCost, Wire, uniform
from dips.planner.errors import PlanError
from dips.planner.ir import Kind
from dips.planner.scaleacross import traffic
from dips.planner.scaleacross.iteration import (
    Case,
    Outermost,
    Pipelining,
    Sharding,
    Split,
    check_places,
    ends_of,
    kernels_of,
    layer_costs,
    memory_of,
    places_of,
    program_for,
    rebuild,
    ways_of,
)
from dips.planner.scaleacross.search import fastest_of, present_case
from dips.planner.scaleacross.topology import Topology, read_topology
from dips.planner.schedules.scaleacross import dora_pp, interleaved_zb_v, zigzag
from dips.planner.simulate import simulate
from dips.planner.validate import peaks, validate


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return read(tmp_path)


SPLIT = Split(8, 1, 1, 2, 4, 2)


def case_of(outermost: Outermost, pipelining: Pipelining, chunks: int = 4, together: int = 4) -> Case:
    return Case(SPLIT, outermost, Sharding.FSDP, pipelining, chunks, together)


# ---- schedules ----


@pytest.mark.parametrize("n_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_schedule_is_complete_and_ends(n_devices: int, chunks: int, n: int, group: int) -> None:
    for schedule in (
        dora_pp(n_devices, n, chunks, group),
        interleaved_zb_v(n_devices, n, chunks, group),
        interleaved_zb_v(n_devices, n, chunks, group, delay=8),
    ):
        costs = uniform(schedule.n_stages, chunks)
        timeline = validate(schedule, costs)
        assert timeline.makespan_ns >= 3 * n * NS * 0.999
        assert max(peaks(schedule, costs)) <= n * (1 << 20)


def test_dora_pp_deals_chunks_round_robin() -> None:
    schedule = dora_pp(2, 4, 3, 2)
    assert [schedule.stages_of(device) for device in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
    forward = [(op.stage, op.microbatch) for op in schedule.orders[0] if op.kind is Kind.F]
    assert forward[:6] == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]


def test_interleaved_zbv_goes_forth_and_back() -> None:
    assert zigzag(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_crossings_of_a_microbatch(chunks: int) -> None:
    """What each schedule sends over the boundary of two sites is the formula."""
    n = 4
    for schedule, wanted in (
        (dora_pp(2, n, chunks, 2), traffic.crossings_in_a_loop(chunks)),
        (interleaved_zb_v(2, n, chunks, 2), traffic.crossings_in_a_v(chunks)),
    ):
        costs = uniform(schedule.n_stages, chunks, wires={(0, 1): Wire(0, 1, 0), (1, 0): Wire(1, 1, 0)})
        assert len(simulate(schedule, costs).messages) == n * wanted


def test_interleaved_zbv_with_two_chunks_is_zbv() -> None:
    """ZB-V's own length, 25.5, for 4 devices and 8 microbatches; DoraPP without delay is shorter than interleaved 1F1B,
    which has 28.5."""
    assert validate(interleaved_zb_v(4, 8, 2, 8), uniform(8, 2)).makespan_ns == 25.5 * NS
    assert validate(dora_pp(4, 8, 2, 4), uniform(8, 2)).makespan_ns < 28.5 * NS


def test_an_order_for_slow_messages_is_shorter_with_them() -> None:
    wires = {pair: Wire(number, NS, NS) for number, pair in enumerate([(0, 1), (1, 0)])}
    costs = uniform(8, 4, wires=wires)
    quick, slow = (simulate(interleaved_zb_v(2, 16, 4, 8, delay), costs).makespan_ns for delay in (0, 32))
    assert slow < quick


# ---- Algorithm 1 ----


def simulated_ns(case: Case, topology: Topology, division: list[int]) -> int:
    """The same with the planner's simulator, without collectives."""
    program = program_for(topology, case)
    kernels = kernels_of(topology, case, np.array([division]))
    f, d, w = (row[:, 0].tolist() for row in (kernels.forward, kernels.input_gradient, kernels.weight_gradient))
    stages = tuple(StageCost(*times, 0, 0) for times in zip(f, d, w, strict=True))
    wires = {pair: Wire(10 * pair[0] + pair[1], *cost) for pair, cost in kernels.messages.items()}
    return simulate(program.schedule, Costs(stages, wires)).makespan_ns


@pytest.mark.parametrize("outermost", list(Outermost))
@pytest.mark.parametrize("pipelining", [Pipelining.DORA, Pipelining.ZBV])
@pytest.mark.parametrize("oversubscription", [1, 16, 2000])
def test_with_links_it_is_the_simulator(
    topology: Topology, outermost: Outermost, pipelining: Pipelining, oversubscription: int
) -> None:
    topology = topology.with_routes(oversubscription=oversubscription)
    case, division = case_of(outermost, pipelining), [4, 5, 3, 4, 4, 4, 6, 2]
    kernels = kernels_of(topology, case, np.array([division]))
    quiet = kernels._replace(gather=kernels.gather * 0, reduce=kernels.reduce * 0)
    program = program_for(topology, case)
    shared = int(ends_of(program, quiet, links=True)[0])
    assert shared == simulated_ns(case, topology, division)
    assert int(ends_of(program, quiet, links=False)[0]) <= shared


def test_without_contention_a_full_way_costs_too_little(topology: Topology) -> None:
    """As printed, Algorithm 1 lets any number of messages share a way; with links each adds its time."""
    far, case = topology.with_routes(oversubscription=2000), case_of(Outermost.PP, Pipelining.DORA)
    rows = np.array([[4] * 8])
    printed, shared = (float(rebuild(far, case, rows, links).seconds[0]) for links in (False, True))
    n, crossings = case.split.microbatches(far), traffic.crossings_in_a_loop(case.chunks)
    busy_s = traffic.message_bytes(far.model, 8192, 2, 8, 1) / ways_of(far, *case[1:3], SPLIT).hops[0].bytes_per_s
    assert printed < shared
    assert shared >= n * crossings / 2 * busy_s


def test_columns_do_not_depend_on_each_other(topology: Topology) -> None:
    case = case_of(Outermost.PP, Pipelining.ZBV)
    rows = np.array([[4] * 8, [2, 5, 4, 4, 4, 5, 4, 4], [5, 5, 5, 5, 4, 3, 3, 2]])
    together = rebuild(topology, case, rows, True)
    for number, row in enumerate(rows):
        alone = rebuild(topology, case, row[None], True)
        assert (alone.seconds[0], alone.used_bytes[0]) == (together.seconds[number], together.used_bytes[number])


def test_collectives_of_a_stage_go_one_after_another(topology: Topology) -> None:
    """With hardly any bandwidth between buildings an iteration is its collectives: 2 of each chunk."""
    far = topology.with_routes(oversubscription=10_000)
    case = case_of(Outermost.DP, Pipelining.DORA)
    kernels = kernels_of(far, case, np.array([[4] * 8]))
    sent = kernels.gather[[0, 2, 4, 6]].sum() + kernels.reduce[[0, 2, 4, 6]].sum()
    whole = int(ends_of(program_for(far, case), kernels, True)[0])
    assert sent <= whole < 1.2 * sent
    assert traffic.collectives(case.chunks) == 8


def test_hsdp_sends_less_between_buildings_and_holds_more(topology: Topology) -> None:
    fsdp = case_of(Outermost.DP, Pipelining.DORA)
    hsdp = fsdp._replace(sharding=Sharding.HSDP)
    far, rows = topology.with_routes(oversubscription=100), np.array([[4] * 8])
    assert rebuild(far, hsdp, rows, True).seconds[0] < rebuild(far, fsdp, rows, True).seconds[0]
    used = [memory_of(topology, case, program_for(topology, case), rows)[0] for case in (fsdp, hsdp)]
    assert used[0] < used[1]


# ---- placement ----


def test_what_crosses_the_buildings(topology: Topology) -> None:
    long = topology.way(0, 32)
    pp = ways_of(topology, Outermost.PP, Sharding.FSDP, SPLIT)
    assert (pp.hops, pp.leaders) == ((long, long), None)
    assert pp.ring.bytes_per_s == topology.way(0, 16).bytes_per_s  # replicas of a stage are in both zones
    dp = ways_of(topology, Outermost.DP, Sharding.FSDP, SPLIT)
    assert dp.ring == long
    assert dp.hops[0] == topology.way(0, 16)
    hsdp = ways_of(topology, Outermost.DP, Sharding.HSDP, SPLIT)
    assert hsdp.leaders == long
    assert hsdp.ring == topology.way(0, 8)


def test_groups_stay_in_a_zone(topology: Topology) -> None:
    check_places(topology, case_of(Outermost.PP, Pipelining.DORA))
    sentence = r"PP-out: the buildings have room for 0 \+ 0 stages of 8 groups of 8 accelerators, 1 are wanted"
    with pytest.raises(PlanError, match=sentence):
        check_places(topology, Case(Split(8, 1, 1, 1, 8, 1), Outermost.PP, Sharding.FSDP, Pipelining.DORA, 1, 1))
    with pytest.raises(PlanError, match=r"room for 0 \+ 0 replicas of 1 groups of 32 accelerators, 2 are wanted"):
        check_places(topology, Case(Split(8, 4, 1, 1, 2, 1), Outermost.DP, Sharding.FSDP, Pipelining.DORA, 1, 1))


def test_small_microbatches_use_less_of_an_accelerator(topology: Topology) -> None:
    given = topology.accelerators.model_copy(update={"half_speed_tokens": 8192.0})
    slow = replace(topology, accelerators=given)
    for m, factor in ((1, 2.0), (3, 4 / 3)):
        split = SPLIT._replace(microbatch_sequences=m)
        ratio = layer_costs(slow, split).weight_gradient_s / layer_costs(topology, split).weight_gradient_s
        assert ratio == pytest.approx(factor)


def test_a_tensor_group_of_several_servers_sends_over_their_network(topology: Topology) -> None:
    """16 of 8 a server: 15/16 of the activations at 50 GB/s instead of 450, and 15 steps of 5 us, four times."""
    small, large = (layer_costs(topology, SPLIT._replace(tensor=tensor, data=1)) for tensor in (8, 16))
    width, tokens = topology.model.hidden, topology.batch.sequence_tokens * SPLIT.microbatch_sequences
    sent = [4 * (n - 1) / n * tokens * width * 2 for n in (8, 16)]
    spent = small.forward_s[1] - sent[0] / 450e9, large.forward_s[1] - sent[1] / 50e9 - 4 * 15 * 5e-6
    assert spent[1] == pytest.approx(spent[0] / 2)


def test_the_large_workload_is_played_quickly_and_fits() -> None:
    """98,304 accelerators: places and ways of 768 groups."""
    large = read_topology("scaleacross-100k-dense")
    case, division = present_case(large)
    assert case.split.microbatches(large) == 16
    assert division == [1] * 128
    assert places_of(large, Outermost.PP, case.split).shape == (16, 48)
    choice = fastest_of(large, case, division, links=False)
    assert 0 < choice.printed_s < float("inf")
