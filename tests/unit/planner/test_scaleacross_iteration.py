"""DoraPP, interleaved ZBV, and the time of an iteration rebuilt from its kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.scaleacross import read

from dips.core.errors import ConfigError
from dips.planner.costs import NS, Costs, StageCost, Wire, uniform
from dips.planner.model import Model
from dips.planner.scaleacross.iteration import (
    Case,
    KernelTimes,
    Outermost,
    Pipelining,
    Sharding,
    Split,
    check_places,
    collective_s,
    ends_of,
    kernels_of,
    layer_costs,
    program_for,
    program_of,
    rebuild,
    ways_of,
)
from dips.planner.scaleacross.topology import Topology
from dips.planner.schedules.fixed import one_f_one_b
from dips.planner.schedules.scaleacross import dora_pp, interleaved_zb_v
from dips.planner.simulate import peaks, simulate, validate
from dips.planner.units import layer_work, output_work


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


def test_orders_with_two_chunks_and_slow_messages() -> None:
    """ZB-V's own length, 25.5, for 4 devices and 8 microbatches; DoraPP without delay is shorter than interleaved 1F1B,
    which has 28.5."""
    assert validate(interleaved_zb_v(4, 8, 2, 8), uniform(8, 2)).makespan_ns == 25.5 * NS
    assert validate(dora_pp(4, 8, 2, 4), uniform(8, 2)).makespan_ns < 28.5 * NS
    wires = {pair: Wire(number, NS, NS) for number, pair in enumerate([(0, 1), (1, 0)])}
    costs = uniform(8, 4, wires=wires)
    quick, slow = (simulate(interleaved_zb_v(2, 16, 4, 8, delay), costs).makespan_ns for delay in (0, 32))
    assert slow < quick


def test_a_case_has_the_schedule_of_its_name(topology: Topology) -> None:
    """SPLIT has eight microbatches. Interleaved ZBV's order is made for its longest message: of 0.1, 0.8, 1.1, 5.9 and
    195 quarters of a pass."""
    case = case_of(Outermost.PP, Pipelining.ZBV, 4, 3)
    assert program_for(topology, case._replace(pipelining=Pipelining.PLAIN, chunks=1)).schedule == one_f_one_b(2, 8)
    assert program_for(topology, case._replace(pipelining=Pipelining.DORA)).schedule == dora_pp(2, 8, 4, 3)
    for ratio, km, delay in ((1, 0, 0), (8, 0, 1), (8, 200, 2), (1, 4000, 8), (2000, 0, 64)):
        found = program_for(topology.with_routes(ratio, km), case).schedule
        assert found == interleaved_zb_v(2, 8, 4, 3, delay)
    four = case._replace(split=Split(8, 1, 1, 4, 2, 2), chunks=2)
    assert program_for(topology, four).schedule == interleaved_zb_v(4, 16, 2, 3, 2)


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


def test_columns_do_not_depend_on_each_other(topology: Topology) -> None:
    case = case_of(Outermost.PP, Pipelining.ZBV)
    rows = np.array([[4] * 8, [2, 5, 4, 4, 4, 5, 4, 4], [5, 5, 5, 5, 4, 3, 3, 2]])
    together = rebuild(topology, case, rows, True)
    for number, row in enumerate(rows):
        alone = rebuild(topology, case, row[None], True)
        assert (alone.seconds[0], alone.used_bytes[0]) == (together.seconds[number], together.used_bytes[number])


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
    with pytest.raises(ConfigError, match=sentence):
        check_places(topology, Case(Split(8, 1, 1, 1, 8, 1), Outermost.PP, Sharding.FSDP, Pipelining.DORA, 1, 1))
    with pytest.raises(ConfigError, match=r"room for 0 \+ 0 replicas of 1 groups of 32 accelerators, 2 are wanted"):
        check_places(topology, Case(Split(8, 4, 1, 1, 2, 1), Outermost.DP, Sharding.FSDP, Pipelining.DORA, 1, 1))


def test_small_microbatches_use_less_of_an_accelerator(topology: Topology) -> None:
    given = topology.accelerators.model_copy(update={"half_speed_tokens": 8192.0})
    slow = replace(topology, accelerators=given)
    for m, factor in ((1, 2.0), (3, 4 / 3)):
        split = SPLIT._replace(microbatch_sequences=m)
        ratio = layer_costs(slow, split).weight_gradient_s / layer_costs(topology, split).weight_gradient_s
        assert ratio == pytest.approx(factor)


# ---- by hand: 1000 tokens of 1000 numbers, servers of two at 1 GB/s, a network of 0.1 GB/s and 1 ms ----

MODEL = Model(
    name="m", layers=3, hidden=1000, heads=10, kv_heads=2, mlp_width=200, vocabulary=50, experts=4, experts_per_token=2,
    expert_width=100, dense_layers=1, source="a test",
)  # fmt: skip


@pytest.fixture
def plain(topology: Topology) -> Topology:
    given = {"per_server": 2, "server_gbps": 8.0, "network_gbps": 0.8, "network_latency_us": 1e3, "sustained_tflops": 1}
    return replace(
        topology,
        model=MODEL,
        accelerators=topology.accelerators.model_copy(update=given),
        batch=topology.batch.model_copy(update={"sequences": 4, "sequence_tokens": 1000}),
    )


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "sends_ms", "to_experts_ms"),
    [
        (1, 1, 1, 0, 0),
        (2, 1, 1, 4, 0),  # four times half of 2 MB
        (4, 1, 1, 60 + 4 * 3, 0),  # four times three quarters of it, in three steps each
        (1, 2, 1, 0.4, 0),  # keys and values of 500 tokens, 400 numbers each
        (1, 4, 1, 3 * (2 + 1), 0),  # of 250 tokens, to three others over the network
        (2, 2, 1, 2 + (2 + 1), 0),
        (1, 1, 2, 0, 4),  # a half of 4 MB to the peer in the server, and back
        (1, 1, 4, 0, 2 + 2 * (20 + 1)),  # a quarter to one peer in the server and to two in another
        (2, 1, 2, 4, 2),
    ],
)
def test_what_groups_send_by_hand(
    plain: Topology, tensor: int, context: int, expert: int, sends_ms: float, to_experts_ms: float
) -> None:
    """Forward and backward wait for it, layers without experts only for tensor and context; W sends nothing."""
    found = layer_costs(plain, Split(tensor, context, expert, 1, 1, 1))
    for layer in (0, 1):
        work, speed = layer_work(MODEL, layer, 1000, 1000), 1e12 * tensor * context
        sent_s = (sends_ms + (to_experts_ms if layer else 0)) / 1e3
        assert found.forward_s[layer] == pytest.approx(work.forward / speed + sent_s)
        assert found.input_gradient_s[layer] == pytest.approx(work.input_gradient / speed + sent_s)
        assert found.weight_gradient_s[layer] == pytest.approx(work.weight_gradient / speed)
        assert found.total_s[layer] == pytest.approx(sum(work) / speed + 2 * sent_s)
    output, last = output_work(MODEL, 1000), layer_work(MODEL, 2, 1000, 1000)
    assert found.weight_gradient_s[2] * speed == pytest.approx(last.weight_gradient + output.weight_gradient)
    alone = plain.accelerators.model_copy(update={"per_server": 64})
    one = layer_costs(replace(plain, accelerators=alone), Split(4, 1, 1, 1, 1, 1))
    assert one.forward_s[0] == pytest.approx(layer_work(MODEL, 0, 1000, 1000).forward / 4e12 + 6e-3)
    assert Split(2, 4, 1, 1, 1, 3).message_bytes(plain) == 2 * 500 * 250 * 3
    assert Split(2, 4, 1, 1, 2, 1).microbatches(plain) == 2
    spread = layer_costs(replace(plain, accelerators=alone), Split(1, 1, 4, 1, 1, 1))
    assert spread.forward_s[1] == pytest.approx(layer_work(MODEL, 1, 1000, 1000).forward / 1e12 + 6e-3)


def test_what_layers_hold_and_exchange_by_hand(plain: Topology) -> None:
    """Attention has 2.4 million, a dense MLP 0.6, an expert 0.3; norms 2,000, the router 4,000, the vocabulary 50,000.
    Exchanged are (4 H^2 + 3 H F) / 2 numbers of two bytes."""
    found = layer_costs(plain, Split(2, 1, 4, 1, 4, 1))
    assert found.dense_parameters.tolist() == [3.052e6 / 2, 2.406e6 / 2, 2.457e6 / 2]
    assert found.expert_parameters.tolist() == [0, 3e5, 3e5]
    assert layer_costs(plain, Split(2, 1, 1, 1, 4, 1)).expert_parameters.tolist() == [0, 6e5, 6e5]
    assert found.exchanged_bytes.tolist() == pytest.approx([4.6e6 + 5e4, 4.3e6, 4.3e6 + 5.1e4])
    once, twice = (
        layer_costs(replace(plain, batch=plain.batch.model_copy(update={"recompute": how})), Split(2, 1, 1, 1, 4, 1))
        for how in ("none", "full")
    )
    spared = layer_work(MODEL, 0, 1000, 1000).forward / 2e12
    assert twice.input_gradient_s[0] - once.input_gradient_s[0] == pytest.approx(spared)
    assert twice.activation_bytes.tolist() == [1e6] * 3


def test_memory_by_hand(plain: Topology) -> None:
    """Of a parameter weights and gradients have 4 bytes, the optimizer 12 that replicas share: four of the dense ones,
    two of each expert. With HSDP two share, experts nothing, and a leader holds gradients twice."""
    split, rows = Split(2, 1, 4, 1, 4, 1), np.array([[3]])
    fsdp = Case(split, Outermost.DP, Sharding.FSDP, Pipelining.PLAIN, 1, 1)
    layers = layer_costs(plain, split)
    held, dense, experts = layers.activation_bytes.sum(), 3.9575e6, 6e5
    assert rebuild(plain, fsdp, rows, True).used_bytes[0] == pytest.approx(held + dense * 7 + experts * 10)
    hsdp = fsdp._replace(sharding=Sharding.HSDP)
    assert rebuild(plain, hsdp, rows, True).used_bytes[0] == pytest.approx(held + dense * 12 + experts * 18)
    # The parts of a sequence share the optimizer's state as replicas do.
    wide = fsdp._replace(split=Split(2, 2, 1, 1, 2, 1))
    each = layer_costs(plain, wide.split)
    whole = (each.dense_parameters + each.expert_parameters).sum() * (4 + 12 / 4) + each.activation_bytes.sum()
    assert rebuild(plain, wide, rows, True).used_bytes[0] == pytest.approx(whole)
    # Two stages: the first one holds two microbatches of its two layers.
    two = fsdp._replace(split=split._replace(pipeline=2, data=2))
    whole = layers.dense_parameters[:2].sum() * (4 + 12 / 2) + layers.expert_parameters[1] * (4 + 12)
    used = rebuild(plain, two, np.array([[2, 1]]), True)
    assert used.used_bytes[0] == pytest.approx(whole + 2 * layers.activation_bytes[:2].sum())
    tight = plain.accelerators.model_copy(update={"memory_gib": used.used_bytes[0] / 2**30})
    assert rebuild(replace(plain, accelerators=tight), two, np.array([[2, 1]]), True).fits[0]
    less = plain.accelerators.model_copy(update={"memory_gib": used.used_bytes[0] / 2**30 * (1 - 1e-9)})
    assert rebuild(replace(plain, accelerators=less), two, np.array([[2, 1]]), True).seconds[0] == np.inf


@pytest.mark.parametrize("links", [False, True])
def test_kernels_end_by_hand(links: bool) -> None:
    """Each chunk waits for its weights, gradients leave one after another, the last ones end the iteration."""
    rows = [10, 20], [30, 40], [50, 60], [5, 100], [7, 8]
    f, d, w, gather, reduce = (np.array(row)[:, None] for row in rows)
    messages = {(0, 1): (4, 1), (1, 0): (4, 1)}
    # F 5-15, at 20 there but weights at 100: F 100-120, B -220; at 225 back: B -305, gradients -312.
    program = program_of(one_f_one_b(2, 1))
    assert ends_of(program, KernelTimes(f, d, w, gather, reduce, messages), links).tolist() == [312]
    # The last stage's gradients go when its only B has ended.
    slow = np.array([[7], [500]])
    assert ends_of(program, KernelTimes(f, d, w, gather, slow, messages), links).tolist() == [720]
    # One device: F 5-15, weights at 105: F -125, D -165, W -225, gradients -425 (200), while D, W -305; then -432.
    reduce = np.array([[7], [200]])
    assert ends_of(program_of(dora_pp(1, 1, 2, 1)), KernelTimes(f, d, w, gather, reduce, {}), links).tolist() == [432]


def test_collectives_and_messages_by_hand(topology: Topology) -> None:
    """1 GB: in a building over 50 GB/s and 5 us, between buildings over 6.25 GB/s and 1005 us."""
    case, sizes = case_of(Outermost.DP, Pipelining.DORA), np.array([1e9])

    def both(case: Case) -> list[float]:
        ways = ways_of(topology, case.outermost, case.sharding, case.split)
        return [float(one[0]) for one in collective_s(topology, case, ways, sizes)]

    assert both(case) == pytest.approx([3 * (0.04 + 1005e-6)] * 2)
    inside, leaders = 0.01 + 5e-6, 0.08 + 1005e-6  # of two each
    assert both(case._replace(sharding=Sharding.HSDP)) == pytest.approx([inside, 3 * inside + 2 * leaders])
    assert both(case._replace(split=SPLIT._replace(data=2))) == pytest.approx([leaders] * 2)
    assert both(case._replace(split=SPLIT._replace(data=1))) == [0, 0]
    # A replica alone: the ring of its two groups of eight, in a zone.
    alone = case._replace(split=Split(8, 2, 1, 1, 1, 2))
    assert both(alone) == pytest.approx([inside] * 2)
    pp = case_of(Outermost.PP, Pipelining.ZBV)
    cost = round(2 * 512 * 8192 * 2 / 6.25), 1_005_000
    rows = np.array([[4] * 8])
    kernels = kernels_of(topology, pp, rows)
    assert kernels.messages == {(0, 1): cost, (1, 0): cost}
    given = topology.accelerators.model_copy(update={"zbv_overhead": 0.5})
    slower = kernels_of(replace(topology, accelerators=given), pp, rows)
    layers = layer_costs(topology, SPLIT)
    for name in ("forward", "input_gradient", "weight_gradient"):
        chunks_ns = 1e9 * getattr(layers, f"{name}_s").reshape(8, 4).sum(axis=1)
        assert getattr(kernels, name)[:, 0] == pytest.approx(chunks_ns, abs=1)
        assert getattr(slower, name)[:, 0] == pytest.approx(1.5 * chunks_ns, abs=1)
    size = layers.exchanged_bytes.reshape(8, 4).sum(axis=1)
    hsdp = kernels_of(topology, case._replace(sharding=Sharding.HSDP), rows)
    inside_s, leaders_s = size / 2 / 50e9 + 5e-6, size / 2 / 6.25e9 + 1005e-6
    assert hsdp.gather[:, 0] == pytest.approx(1e9 * inside_s, abs=1)
    assert hsdp.reduce[:, 0] == pytest.approx(1e9 * (3 * inside_s + 2 * leaders_s), abs=1)
    # Four stages, two in each building: each way has its own cost, also the one round.
    four = kernels_of(topology, pp._replace(split=Split(8, 1, 1, 4, 2, 2)), np.array([[2] * 16]))
    short = round(2 * 512 * 8192 * 2 / 25), 10_000
    ways = {(0, 1): short, (1, 2): cost, (2, 3): short, (3, 0): cost}
    assert four.messages == ways | {(b, a): each for (a, b), each in ways.items()}
    with pytest.raises(ConfigError, match="more than 131072"):
        program_for(topology, pp._replace(split=SPLIT._replace(data=1, microbatch_sequences=1), chunks=1025))
