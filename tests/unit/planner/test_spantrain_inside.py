"""SpanTrain's second level: the paper's examples, and how a group's devices share its layers."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from support.spantrain import Row, all_links, grouped, problem

from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile
from dips.planner.spantrain.inside import (
    DATA,
    DEFAULT_RULES,
    GRID,
    SYMMETRIC,
    Inside,
    Planner,
    SecondLevelRules,
    Team,
    TeamStage,
    grid_of,
    held_by,
    inside_of,
    sync_s,
    tensor_s,
    tightest,
    tiles,
    times_of,
    whole_shares,
)
from dips.planner.spantrain.work import Work, work_of

THIRD, TWO_THIRDS = Fraction(1, 3), Fraction(2, 3)


def lan(*sites: Row, layers: int = 6, gbps: float = 1, **training: Any) -> ClusterFile:
    """Sites that are one group."""
    named = [{"name": f"s{number}"} | site for number, site in enumerate(sites)]
    links = all_links([str(site["name"]) for site in named], lambda a, b: gbps)
    return problem(named, links, layers, **training)


def planned(
    setup: ClusterFile, sequences: int, microbatches: int = 4, rules: SecondLevelRules = DEFAULT_RULES
) -> Planner:
    work = work_of(setup, sequences)
    return Planner(work, grouped(setup), microbatches, rules)


def whole(planner: Planner) -> Inside:
    found = planner.inside(0, 0, planner.work.units)
    assert found is not None
    return found


def test_tiles_follow_the_powers_and_other_powers_are_no_grid() -> None:
    """The nearest grid would give a device more than 12 % too much; three devices have no grid at all."""
    found = tiles([4, 1, 2, 2])
    assert found is not None
    assert [tile.data * tile.tensor * 9 for tile in found] == [4, 1, 2, 2]
    found = tiles([1, 2, 3, 2, 4, 6])
    assert found is not None
    assert [tile.data * tile.tensor * 18 for tile in found] == [1, 2, 3, 2, 4, 6]
    assert sum((tile.data * tile.tensor for tile in found), Fraction()) == 1
    assert tiles([1, 1, 1, 4]) is None
    assert tiles([1, 2, 4]) is None
    assert grid_of([1.0] * 13) is None
    assert grid_of([1, 2, 2, 4.2]) is not None
    assert tiles([1, 1, 1, 4], alike=2) is not None


def test_figure_7b_in_a_plan() -> None:
    """A strong pair takes most layers; two single devices, one twice as fast, share the rest of the layers, and three
    sequences 1:2."""
    pair = {"devices": 2, "sustained_tflops": 40, "network_gbps": 100, "memory_gib": 24}
    setup = lan(pair, {"sustained_tflops": 2}, {"sustained_tflops": 4}, gbps=100, layers=24)
    stages = whole(planned(setup, 3)).stages
    lone = next(stage.team for stage in stages if stage.team.layout == DATA)
    assert [(share.site, share.tile.data, share.tile.tensor) for share in lone.shares] == [
        (1, THIRD, Fraction(1)),
        (2, TWO_THIRDS, Fraction(1)),
    ]
    assert len(stages) == 2


def test_figure_7c_in_a_plan() -> None:
    """Four devices 1:2:2:4: three sequences and twelve heads are split 1:2 each."""
    powers = (1, 2, 2, 4)
    setup = lan(*({"sustained_tflops": power} for power in powers), gbps=1e6)
    planner = planned(setup, 3)
    (team,) = (team for team in planner.lines[0][-1][0] if team.layout == GRID)
    parts = {share.site: share.tile for share in team.shares for _ in range(share.devices)}
    assert [parts[site].data * parts[site].tensor * 9 for site in range(4)] == list(powers)


def test_whole_shares_are_the_fastest_of_all() -> None:
    for total, powers in ((1, (1.0, 2.0)), (7, (1.0, 2.0, 4.0)), (8, (3.0, 3.0, 1.0)), (5, (1.0, 1.0, 1.0))):
        found = whole_shares(total, powers)
        assert sum(found) == total
        slowest = max(share / power for share, power in zip(found, powers, strict=True))
        for cuts in combinations(range(total + len(powers) - 1), len(powers) - 1):
            bounds = (-1, *cuts, total + len(powers) - 1)
            other = [b - a - 1 for a, b in pairwise(bounds)]
            assert max(share / power for share, power in zip(other, powers, strict=True)) >= slowest - 1e-12


def test_a_microbatch_needs_a_sequence_for_each_device() -> None:
    setup = problem([{"name": "a", "devices": 7, "network_gbps": 10, "sustained_tflops": 1}], [], layers=6)
    assert not all(planned(setup, 6).lines[0][0])
    assert all(planned(setup, 7).lines[0][0])
    assert all(planned(setup, 6, rules=SecondLevelRules(idle=True)).lines[0][0])


def test_equal_devices_choose_tensor_or_data_parallel_by_what_is_sent() -> None:
    """With a microbatch and a slow start there is little to send for tensors; with many, gradients are less."""
    setup = problem([{"name": "a", "devices": 4, "network_gbps": 10, "sustained_tflops": 50}], [], layers=6)
    found = {count: whole(planned(setup, 4, count)).stages[0].team for count in (1, 64)}
    assert found[1].layout == found[64].layout == SYMMETRIC
    assert (found[1].tensor_parts, found[64].tensor_parts) == (4, 1)
    assert found[64].replicas == 4


def test_collectives_and_tensor_parallel_by_hand() -> None:
    """A ring of two over 1 Gbit/s sends the gradients once, 16 bits each, in two steps of 1 ms; tensor parallel: four
    all-reduces of a microbatch's message in each layer, each of which sends 2 (t - 1) / t."""
    setup = lan({"sustained_tflops": 1}, {"sustained_tflops": 1})
    planner = planned(setup, 2)
    stage = whole(planner).stages[0]
    assert (stage.team.replicas, stage.team.tensor_parts) == (2, 1)
    parameters = setup.model.parameters()
    assert sync_s(planner.work, stage) == pytest.approx(2 * parameters * 2 / 2 / 125e6 + 2 * 1e-3)
    assert tensor_s(stage) == 0
    setup = problem(
        [{"name": "a", "devices": 4, "network_gbps": 10, "network_latency_us": 5, "sustained_tflops": 50}], [], layers=6
    )
    planner = planned(setup, 4, 1)
    (stage,) = whole(planner).stages
    one_s = 2 * 3 / 4 * (4 * 512 * 768 * 2) / 1.25e9 + 6 * 5e-6
    assert tensor_s(stage) == pytest.approx(6 * 4 * one_s)


def test_a_part_of_a_microbatch_takes_its_part_of_the_time() -> None:
    setup = lan({"sustained_tflops": 1}, {"sustained_tflops": 3})
    planner = planned(setup, 4, microbatches=1000)
    alone = times_of(planner.work, TeamStage(planner.lines[0][-1][0][0], 0, 6)).total_s  # all devices in one team
    assert alone == pytest.approx(planner.work.times_s[0][-1].total_s / 4)


def test_memory_of_a_device_by_hand() -> None:
    setup = lan({"sustained_tflops": 1, "memory_gib": 4}, {"sustained_tflops": 3})
    planner = planned(setup, 4)
    stage = TeamStage(planner.lines[0][-1][0][0], 1, 3)
    share = stage.team.shares[0]
    layer = setup.model.layer_parameters(0)
    held = held_by(planner.work, share, 1, 3)
    assert held.state_bytes == 2 * layer * 16
    assert held.activation_bytes == pytest.approx(
        (planner.work.activation_bytes[3] - planner.work.activation_bytes[1]) / 4
    )
    assert tightest(planner.work, stage) == held
    assert held.microbatches == pytest.approx((4 * 2**30 - held.state_bytes) / held.activation_bytes)


def test_a_device_is_left_out_for_its_memory_alone() -> None:
    """A small one cannot hold a layer: the other one has all. With memory enough it works, though it is slow."""
    rows: list[Row] = [{"sustained_tflops": 1.0, "memory_gib": 0.05}, {"sustained_tflops": 8.0}]
    small = whole(planned(lan(*rows, gbps=0.3), 4))
    assert [(stage.layers, stage.team.working, stage.team.left_out) for stage in small.stages] == [(6, 1, 1)]
    large = whole(planned(lan(rows[0] | {"memory_gib": 8}, rows[1], gbps=0.3), 4))
    assert sum(stage.team.working for stage in large.stages) == 2
    assert all(not stage.team.left_out for stage in large.stages)


def test_memory_that_is_too_small_or_not_given() -> None:
    assert planned(lan({"memory_gib": 0.05, "sustained_tflops": 1}), 4).inside(0, 0, 6) is None
    setup = problem([{"name": "a", "memory_gib": None, "sustained_tflops": 1}], [])
    with pytest.raises(ConfigError, match=r"problem.toml \[\[sites\]\] 1: memory_gib of a is not given"):
        work_of(setup, 1)


def all_insides(planner: Planner, group: int) -> list[Inside]:
    """The insides of all lines with all cuts and all ways, by brute force."""
    work, found = planner.work, []

    def grown(line: list[tuple[Team, ...]], stages: list[TeamStage], first: int) -> None:
        if not line:
            if first == work.units:
                found.append(inside_of(work, stages))
            return
        for last in range(first + 1, work.units + 1):
            for team in line[0]:
                stage = TeamStage(team, first, last)
                if tightest(work, stage).microbatches >= 1:
                    grown(line[1:], [*stages, stage], last)

    for line in planner.lines[group]:
        grown(list(line), [], 0)
    return found


@pytest.mark.parametrize("memory_gib", [24, 0.9])
@pytest.mark.parametrize("gbps", [0.3, 4, 1000])
def test_layers_inside_a_group_are_cut_as_well_as_can_be(gbps: float, memory_gib: float) -> None:
    """The slowest team of the chosen line is as fast as that of any line, cut and way."""
    setup = lan(
        {"devices": 2, "network_gbps": 50, "sustained_tflops": 3, "memory_gib": memory_gib},
        {"sustained_tflops": 1},
        {"sustained_tflops": 2, "memory_gib": memory_gib},
        gbps=gbps,
    )
    planner = planned(setup, 4, rules=SecondLevelRules(idle=True))
    slowest = min(slowest_s(planner, one) for one in all_insides(planner, 0))
    chosen = min(
        slowest_s(planner, one) for line in planner.lines[0] for one in planner.of_line(line, 0, planner.work.units)
    )
    assert chosen == pytest.approx(slowest)


def slowest_s(planner: Planner, inside: Inside) -> float:
    """Of a line's teams: running and collectives."""
    work: Work = planner.work
    return max(
        planner.microbatches * (times_of(work, stage).total_s + tensor_s(stage)) + sync_s(work, stage)
        for stage in inside.stages
    )


def test_groups_and_shares_without_a_second_level() -> None:
    setup = lan({"sustained_tflops": 1}, {"sustained_tflops": 3})
    (stage,) = whole(planned(setup, 4, rules=SecondLevelRules(second_level=False))).stages
    assert [share.tile.data for share in stage.team.shares] == [Fraction(1, 2)] * 2
    with_it = planned(setup, 4)
    assert whole(with_it).stage_s(4) < whole(planned(setup, 4, rules=SecondLevelRules(second_level=False))).stage_s(4)


def test_a_group_is_one_stage_of_equation_1() -> None:
    """Two teams: filling goes through both and the link; the slower one and the message decide the running."""
    setup = lan({"sustained_tflops": 1}, {"sustained_tflops": 8}, gbps=0.3)
    planner = planned(setup, 4, microbatches=1)
    line = next(line for line in planner.lines[0] if len(line) == 2)
    stages = [TeamStage(line[0][0], 0, 1), TeamStage(line[1][0], 1, 6)]
    one, times = inside_of(planner.work, stages), [times_of(planner.work, stage) for stage in stages]
    busy_s = planner.work.message_bytes / 37.5e6
    assert one.fill_s == pytest.approx(times[0].forward_s + times[1].forward_s + busy_s + 1e-3)
    assert one.each_s == max(time.total_s for time in times)
    assert one.wait_s == pytest.approx(max(0.0, busy_s - one.each_s))
