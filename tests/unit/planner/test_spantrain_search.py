"""SpanTrain's first level: Algorithm 1 against brute force, the simulation, the out-of-order variant."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from support.spantrain import Row, all_links, brute_force, candidates, drawn, grouped, problem

from dips.core.config import SettingsFile
from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile, Profile, divisors, setup_of
from dips.planner.costs import NS
from dips.planner.ir import Kind
from dips.planner.problem import Problem, problem_json
from dips.planner.simulate import peaks, simulate, validate
from dips.planner.spantrain.flowing import ITERATIONS, flow
from dips.planner.spantrain.inside import DEFAULT_RULES, SecondLevelRules
from dips.planner.spantrain.search import FirstLevelChoice, Level, costs_of, least_s, search, simulated
from dips.planner.spantrain.work import work_of


def far(*sites: Row, gbps: float = 0.1, layers: int = 6, batch: int = 8, **training: object) -> ClusterFile:
    """Sites that are a group each."""
    named = [{"name": f"s{number}", "sustained_tflops": 1} | site for number, site in enumerate(sites)]
    links = all_links([str(site["name"]) for site in named], lambda a, b: gbps)
    return problem(named, links, layers, batch, **training)


def level_of(setup: ClusterFile, sequences: int, rules: SecondLevelRules = DEFAULT_RULES) -> Level:
    batch = setup.training.microbatches * setup.training.microbatch_sequences
    return Level(work_of(setup, sequences), grouped(setup), batch, rules)


# ---- Equation 1 ----


def test_the_work_of_a_problem_by_hand() -> None:
    """A stage of four layers takes 40, 80 and 20 ms for a microbatch; a third site is half as fast."""
    rows: list[Row] = [
        {"name": "a", "devices": 2, "network_gbps": 8, "network_latency_us": 30, "sustained_tflops": 4},
        {"name": "b", "devices": 1, "network_latency_us": 20, "sustained_tflops": 4, "memory_gib": 3},
        {"name": "c", "devices": 3, "network_gbps": 4, "sustained_tflops": 2},
    ]
    rates = {("a", "b"): 1.0, ("a", "c"): 2.0, ("b", "c"): 0.5}
    setup = problem(rows, all_links("abc", lambda a, b: rates[a, b]), layers=4)
    profile = Profile(
        forward_ms=40, input_gradient_ms=80, weight_gradient_ms=20, message_mb=1, memory_microbatches=9, source="a test"
    )
    work = work_of(replace(setup, profile=profile), 1)
    for site, slower in ((0, 1), (1, 1), (2, 2)):
        for units in range(5):
            assert work.times_s[site][units] == pytest.approx(
                (units * 0.01 * slower, units * 0.02 * slower, units * 0.005 * slower)
            )
    assert work.times_s[2][4].total_s == pytest.approx(0.28)
    layer, embedding = setup.model.layer_parameters(0), setup.model.embedding_parameters()
    assert work.weight_bytes[:2] == pytest.approx((0, 2 * (layer + embedding)))
    assert work.state_bytes[1] == pytest.approx(16 * (layer + embedding))
    assert work.state_bytes[2] - work.state_bytes[1] == pytest.approx(16 * layer)
    assert work.memory_bytes == (24 * 2**30, 3 * 2**30, 24 * 2**30)
    assert (work.units, work.message_bytes, work.sequences) == (4, 1e6, 1)
    assert work.ways[0][0] == (1e9, 30e-6, 0, 0, 0)
    assert work.ways[1][1] == (math.inf, 20e-6, 4, 1, 1)
    assert work.ways[0][2] == (0.25e9, 1e-3, 2, 0, 2)
    assert work.ways[2][0][2] == 6
    assert work.ways[0][2].busy_s(1e6) == pytest.approx(4e-3)
    assert work.slowest((0, 1), (2,)) == work.ways[1][2]
    assert work.slowest_within((0, 2), (2, 3)) == work.ways[0][2]
    assert work.slowest_within((0,), (2,)) == work.ways[0][0]
    for other, changes, sentence in (
        (2, {}, "times of a stage for microbatch_sequences = 1, not for 2"),
        (1, {"tensor": 2}, "on tensor x context = 2 devices"),
    ):
        training = setup.training.model_copy(update=changes)
        with pytest.raises(ConfigError, match=sentence):
            work_of(replace(setup, profile=profile, training=training), other)


# ---- Algorithm 1 ----


@pytest.mark.parametrize("seed", range(8))
def test_the_beam_finds_the_least_of_equation_1(seed: int) -> None:
    setup = drawn(seed)
    for size in divisors(setup.training.microbatches)[:2]:
        level = level_of(setup, size)
        least = min((level.seconds(one) for one in candidates(level)), default=math.inf)
        found = level_of(setup, size).best(random.Random(seed))
        assert (level.seconds(found[0]) if found else math.inf) <= least * 1.03


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_the_search_finds_the_best_plan(seed: int) -> None:
    setup = drawn(seed)
    best = brute_force(setup).iteration_s
    assert best is not None
    found = search(setup, grouped(setup), [setup.training.microbatches]).simulated[0]
    assert best <= found.iteration_s * (1 + 1e-9)
    assert found.iteration_s <= best * 1.03


def test_seeds_batches_and_samples() -> None:
    setup = drawn(3)
    first, second = (search(setup, grouped(setup), [setup.training.microbatches], seed=7) for _ in range(2))
    assert [one.chain for one in first.simulated] == [one.chain for one in second.simulated]
    assert (first.evaluated, first.compared) == (second.evaluated, second.compared)
    setup = far({}, {}, gbps=0.02)
    found = search(setup, grouped(setup), [4, 32])
    assert found.simulated[0].chain.batch == 32
    assert {one.chain.batch for one in found.simulated} == {4, 32}


def test_groups_that_cannot_hold_the_layers() -> None:
    setup = far({}, {"memory_gib": 0.05})
    with pytest.raises(ConfigError, match=r"no device of group 2 \(s1\) holds a layer with its gradients"):
        search(setup, grouped(setup), [8])
    setup = far({}, {}, {}, layers=2)
    with pytest.raises(ConfigError, match="3 groups are more than 2 layers"):
        search(setup, grouped(setup), [8])
    setup = far({"memory_gib": 0.85}, {"memory_gib": 0.4}, layers=10)
    with pytest.raises(ConfigError, match="the groups together do not hold all layers"):
        search(setup, grouped(setup), [8])


def test_sizes_that_cannot_be_are_refused() -> None:
    """A million devices and eight sequences: nothing that grows with the devices is computed before the refusal."""
    setup = far({}, {})
    found = search(setup, grouped(setup), [8], [3, 4])
    assert [(one.sequences, one.why) for one in found.refused] == [
        (3, "microbatches of 3 sequences do not divide a batch of 8: give a divisor")
    ]
    assert {one.chain.sequences for one in found.simulated} == {4}
    with pytest.raises(ConfigError, match=r"batches \[0\] and microbatches None are not at least 1"):
        search(setup, grouped(setup), [0])
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    setup = far({"devices": 4, "network_gbps": 10}, {})
    found = search(setup, grouped(setup), [1 << 16], [1, 64])
    assert [one.sequences for one in found.refused] == [1]
    assert "at most 65536 stages x microbatches can be planned" in found.refused[0].why
    rows: list[Row] = [{"devices": 1_000_000, "network_gbps": 1e3}, {}]
    setup = far(*rows, batch=8)
    with pytest.raises(ConfigError, match=r"microbatches of 1: the 1000000 devices of group 1 .*; .* microbatches of"):
        search(setup, grouped(setup), [8])


def test_times_of_layers_are_those_of_each_device() -> None:
    """Measured times: one kind of device is three times as slow in all layers, at two sizes."""
    setup = far({"device": "slow"}, {"device": "fast"}, layers=8)
    rows = [
        {
            "device": kind, "layer": 0, "count": 8, "microbatch_sequences": size, "forward_ms": 30 * slow * size,
            "input_gradient_ms": 30 * slow * size, "weight_gradient_ms": 30 * slow * size,
        }
        for kind, slow in (("slow", 3), ("fast", 1))
        for size in (2, 4)
    ]  # fmt: skip
    tables = problem_json(Problem(setup).with_training(microbatch_sequences=2))["tables"]
    measured = setup_of(SettingsFile("problem.toml", tables | {"profile": {"source": "a test", "layers": rows}}))
    found = search(measured, grouped(measured), [16])
    assert {(one.sequences, "was measured with 2, 4" in one.why) for one in found.refused} == {
        (1, True), (8, True), (16, True),
    }  # fmt: skip
    chain = found.simulated[0].chain
    layers = dict(zip(chain.candidate.order, chain.candidate.layers, strict=True))
    assert layers == {0: 2, 1: 6}


# ---- simulation ----


def test_a_simulated_chain_is_valid_within_memory_and_above_its_bound() -> None:
    setup = drawn(20)
    for one in search(setup, grouped(setup), [setup.training.microbatches]).simulated[:5]:
        schedule = one.timeline.schedule
        assert validate(schedule, one.costs, one.limits).makespan_ns == one.timeline.makespan_ns
        assert all(peak <= limit for peak, limit in zip(peaks(schedule, one.costs), one.limits, strict=True))
    level = level_of(drawn(4), 2)
    chains = [chain for chain in map(level.chain, candidates(level)) if chain is not None][:40]
    assert chains
    assert all(least_s(level.work, chain) <= simulated(level.work, chain).iteration_s + 1e-9 for chain in chains)


def test_stages_share_the_link_between_their_sites() -> None:
    """Two sites whose own networks are slow, with two devices each: four groups, two messages on one link."""
    rows: list[Row] = [{"devices": 2, "network_gbps": 0.05}, {"devices": 2, "network_gbps": 0.05}]
    level = level_of(far(*rows), 2)
    assert len(level.groups) == 4
    chain = level.chain(FirstLevelChoice((0, 2, 1, 3), (2, 1, 1, 2)))
    assert chain is not None
    costs, _ = costs_of(level.work, chain)
    assert costs.wires[0, 1].resource == costs.wires[2, 3].resource
    assert costs.wires[1, 2].resource == costs.wires[3, 2].resource
    assert costs.wires[0, 1].resource != costs.wires[1, 2].resource


def test_senders_that_wait_and_overheads_of_a_calibration() -> None:
    """blocking: a link is free again after a round trip more. Overheads are added to operations and messages."""
    setup = far({}, {}, gbps=0.02)
    blocking = replace(setup, options=setup.options.model_copy(update={"blocking": True}))
    profile = Profile(operation_us=1000, send_us=2000, error=0.05, source="a test")
    found = []
    for one in (setup, blocking, replace(setup, profile=profile)):
        level = level_of(one, 1)
        chain = level.chain(FirstLevelChoice((0, 1), (3, 3)))
        assert chain is not None
        found.append(costs_of(level.work, chain)[0])
    plain, waits, longer = found
    wire = plain.wires[0, 1]
    assert (wire.latency_ns, wire.hold_ns) == (1_000_000, 0)
    assert waits.wires[0, 1] == wire._replace(hold_ns=2_000_000)
    assert longer.wires[0, 1] == wire._replace(latency_ns=3_000_000)
    assert (longer.operation_ns, longer.stages) == (1_000_000, plain.stages)


# ---- the out-of-order variant ----


def test_staleness_by_hand() -> None:
    """One device holds as many microbatches as an iteration has: the first F of the second iteration follows the first
    W, so it lacks the gradients of three microbatches, and the weights of a whole iteration."""
    setup = problem([{"name": "a", "sustained_tflops": 1}], [], 4, 4)
    found = search(setup, grouped(setup), [4], [1])
    out = flow(found.simulated[0])
    (order,) = out.timeline.schedule.orders
    assert [str(op) for op in order[:9]] == ["0F0", "0F1", "0F2", "0F3", "0I0", "0I1", "0I2", "0I3", "0W0"]
    assert str(order[9]) == "0F4"
    (stale,) = out.staleness
    assert stale == (1, 3, 0.0)
    assert out.iteration_s == pytest.approx(found.simulated[0].iteration_s)
    assert sum(op.kind is Kind.F for op in order) == 4 * ITERATIONS
    assert simulate(out.timeline.schedule, replace(found.simulated[0].costs, exchanges=())).makespan_ns


def test_microbatches_go_back_through_other_weights() -> None:
    """Where messages take long, a stage's weights change between F and D of the same microbatch."""
    setup = far({}, {}, gbps=0.02)
    out = flow(search(setup, grouped(setup), [8], [1]).simulated[0])
    assert out.staleness[0].mixed > 0 == out.staleness[1].mixed
    assert out.staleness[0].iterations == 1


def test_iterations_do_not_overtake_their_all_reduce() -> None:
    setup = far({"sustained_tflops": 50}, {"sustained_tflops": 50}, gbps=0.3, layers=4)
    one = search(setup, grouped(setup), [4], [4], rules=SecondLevelRules(second_level=False)).simulated[0]
    (exchange,) = one.costs.exchanges
    out = flow(one)
    assert out.iteration_s == pytest.approx((exchange.reduce_ns + exchange.reduce_latency_ns) / NS)
    assert out.staleness[0].iterations == 1  # the last gradients are on their way when the next iteration begins
