"""How many steps, in which order, and what the slaves' sums add up to: the small pure functions of the master."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.master_bench import Bench

from dips.core.ids import SlaveId
from dips.core.messages import BeginPullRequest, BlockGram, FinishPullRequest, Settings, VerdictKind
from dips.core.placement import Placement
from dips.master.state.pacing import (
    ClusterPace,
    dynamic_steps,
    fastest_round_s,
    lower_bound,
    round_s,
    steps_within_staleness,
)
from dips.master.state.penalty_detect import GramError, add_blocks

H = 64


@given(st.floats(0.2, 1.0), st.floats(0.0, 0.4), st.integers(0, 5))
def test_clusters_of_any_speed_meet_at_the_planned_window(relative_speed: float, late_share: float, k: int) -> None:
    """A cluster that begins anywhere in the period arrives at a multiple of the period, within one of its steps."""
    period_s, push_s, pull_s = 20.0, 0.3, 0.2
    fastest = H / (period_s - push_s - pull_s)
    pace = ClusterPace(fastest * relative_speed, push_s, pull_s)
    now_s = 100.0 + (k + late_share) * period_s
    steps = dynamic_steps(pace, H, 100.0, period_s, now_s)
    arrives_s = now_s + pace.round_s(steps)
    off_s = (arrives_s - 100.0) % period_s
    assert min(off_s, period_s - off_s) <= 1 / pace.steps_per_s + 1e-6 or steps == H


@pytest.mark.parametrize(
    ("speed", "h", "window_at_s", "steps"),
    [
        (2.0, 32, 0.0, 32),
        (1.0, 32, 0.0, 16),
        (1 / 3, 16, 16.0, 5),  # the nearest window, also a little after it: else it would open one a step too early
        (1 / 2.9, 16, 16.0, 6),
        (1e-9, 64, 0.0, 8),
        (0.0, 64, 0.0, 64),  # not measured
        (math.nan, 64, 0.0, 64),
    ],
)
def test_steps_go_to_the_nearest_window_of_an_eighth_to_h(speed: float, h: int, window_at_s: float, steps: int) -> None:
    assert dynamic_steps(ClusterPace(speed, 0, 0), h, window_at_s, 16.0, 0.0) == steps


@pytest.mark.parametrize(("overlap", "seconds"), [("none", 39.0), ("push", 35.0), ("full", 32.0)])
def test_a_round_takes_no_time_for_what_is_trained_through(overlap: str, seconds: float) -> None:
    assert fastest_round_s([ClusterPace(0, 0, 0)], H, overlap) is None
    assert round_s(ClusterPace(2.0, 4.0, 3.0), H, overlap) == seconds
    least_s = 1e3 + (H if overlap == "none" else lower_bound(H)) / 2.0
    assert round_s(ClusterPace(2.0, 600.0, 400.0), H, overlap) == least_s, "room for the least steps after the pull"
    assert (
        fastest_round_s([ClusterPace(0, 0, 0), ClusterPace(1.0, 4.0, 3.0), ClusterPace(2.0, 4.0, 3.0)], H, overlap)
        == seconds
    )


def test_static_steps_are_cut_to_what_fits_into_s_max() -> None:
    assert steps_within_staleness(ClusterPace(0.0, 0, 0), H, 8, 1.0) == H
    assert steps_within_staleness(ClusterPace(1.0, 0, 0), H, 8, 100.0) == H
    assert steps_within_staleness(ClusterPace(1.0, 0, 0), H, 8, 4.0) == 32
    assert steps_within_staleness(ClusterPace(0.01, 0, 0), H, 8, 1.0) == lower_bound(H)


def test_master_says_when_it_cuts_a_slow_cluster_s_steps() -> None:
    bench = Bench(settings=Settings(max_staleness_versions=1), grace_s=0.5).running("a", "b")
    bench.beat("b", steps_per_s=1.0)
    for _ in range(3):
        bench.advance(10.0)
        bench.rounds(1, "a", wait_s=1.0)
    bench.beat("b", steps_per_s=1.0)
    assert bench.pull("b").local_steps < 64
    assert any("instead of 64" in log.sentence for log in bench.logs)


def test_master_warns_of_one_slow_cluster_with_most_of_the_tokens() -> None:
    bench = Bench(grace_s=0.1, settings=Settings(max_staleness_versions=100)).running("a", "b")
    bench.push("b", 10_000, steps=10_000)
    bench.advance(0.5)
    bench.pull("b")
    for _ in range(12):
        bench.push("a", 10)
        bench.advance(5.0)
        bench.pull("a")
    assert not [log for log in bench.logs if log.key == "momentum"]
    bench.push("b", 100_000, steps=100_000)
    bench.advance(0.5)
    assert "cluster b makes" in next(log.sentence for log in bench.logs if log.key == "momentum")


def dynamic_bench() -> Bench:
    """Cluster a makes 64 steps in 64 s, b in 128 s; a's first push was just published, b's is not there yet."""
    bench = Bench(settings=Settings(dynamic_local_steps=True), grace_s=1.0).running("a", "b")
    bench.silent.update(("a", "b"))
    train(bench, 10)
    bench.push("a")
    train(bench, 1)
    return bench


def train(bench: Bench, seconds: int) -> None:
    """Time passes, and each beat tells how fast the cluster is."""
    for _ in range(seconds):
        bench.advance(1.0)
        bench.beat("a", steps_per_s=1.0)
        bench.beat("b", steps_per_s=0.5)


def test_a_straggler_s_round_does_not_move_the_planned_window() -> None:
    """Else each cluster would aim one round after its own last push, and no two would ever meet."""
    bench = dynamic_bench()
    planned_s = bench.now_s + 64.0
    assert bench.pull("a").local_steps == 64
    train(bench, 21)
    bench.push("b")
    train(bench, 1)
    assert bench.verdict("b").kind is VerdictKind.APPLIED
    assert bench.pull("b").local_steps == (planned_s - bench.now_s) / 2 == 21


def test_a_round_near_the_planned_window_plans_the_next_one_for_all() -> None:
    bench = dynamic_bench()
    bench.pulls("a", "b")
    train(bench, 60)
    bench.pushes("b", "a")
    assert [bench.pull(name).local_steps for name in ("a", "b")] == [64, 32]


def test_after_a_pull_no_time_is_kept_for_it() -> None:
    """The pull that was measured is over; what is ahead are steps and the next push."""
    bench = dynamic_bench()
    bench.beat("a", steps_per_s=1.0, pull_s=8.0)
    grant = bench.ask(BeginPullRequest(bench.caller("a"))).answer
    finished = bench.ask(FinishPullRequest(bench.caller("a"), grant.pin_id))
    assert (grant.local_steps, finished.local_steps) == (56, 64)


def overlapped(overlap: str) -> Bench:
    """Cluster a pushed, and makes a step a second; its window closed 5 s later; push and pull take 4 s each."""
    settings = Settings(dynamic_local_steps=True, overlap=overlap)
    bench = Bench(settings=settings, grace_s=5.0).running("a", "b")
    bench.silent.update(("a", "b"))
    bench.beat("a", steps_per_s=1.0, push_s=4.0, pull_s=4.0)
    bench.beat("b", steps_per_s=0.5, push_s=4.0, pull_s=4.0)
    bench.push("a")
    bench.advance(5.0)
    assert bench.verdict("a").kind is VerdictKind.APPLIED
    return bench


@pytest.mark.parametrize(("overlap", "steps", "made"), [("none", 64, 0), ("push", 60, 4), ("full", 51, 13)])
def test_steps_made_through_an_exchange_are_of_the_h_between_two_pushes(overlap: str, steps: int, made: int) -> None:
    """`made`: what a makes while it pushes (4 s), waits (5 s) and pulls (4 s), as far as it does not stand still."""
    bench = overlapped(overlap)
    assert steps + made == 64
    assert bench.pull("a").local_steps == steps
    assert bench.pull("b").local_steps == (steps + 1) // 2


def test_grace_is_a_tenth_of_the_fastest_round_and_at_least_a_second() -> None:
    bench = Bench().running("a", "b")
    bench.beat("a", steps_per_s=1.0)
    bench.beat("b", steps_per_s=0.1)
    bench.push("a")
    assert bench.status().window_closes_in_s == pytest.approx(6.4)


def test_gram_sums_do_not_depend_on_the_placement() -> None:
    values = [0.1 * (b + 1) for b in range(4)]
    rows = {b: BlockGram(b, (values[b], values[b] / 3, values[b] * 7), (b, 0)) for b in range(4)}
    results = set()
    for owners in itertools.product(range(2), repeat=4):
        placement = Placement((SlaveId("s0"), SlaveId("s1")), owners)
        measured = {f"s{i}": tuple(rows[b] for b in reversed(range(4)) if owners[b] == i) for i in range(2)}
        gram, nonfinite = add_blocks(measured, placement, 2)
        results.add((repr(gram), tuple(nonfinite)))
        assert gram[0][1] == gram[1][0]
    assert len(results) == 1


def test_gram_of_wrong_blocks_and_with_odd_numbers() -> None:
    placement = Placement((SlaveId("s0"),), (0, 0))
    good = (BlockGram(0, (1.0,), (0,)), BlockGram(1, (1.0,), (0,)))
    assert add_blocks({"s0": good}, placement, 1)[0] == [[2.0]]
    for bad in ((), good[:1], (good[0], good[0]), (*good, BlockGram(2, (1.0,), (0,)))):
        with pytest.raises(GramError):
            add_blocks({"s0": bad}, placement, 1)
    with pytest.raises(GramError):
        add_blocks({"s0": good}, placement, 2)
    placement = Placement((SlaveId("s0"),), (0,))
    gram, _ = add_blocks({"s0": (BlockGram(0, (-1e-20, 0.5, math.nan), (0, 0)),)}, placement, 2)
    assert gram[0][0] == 0.0
    assert gram[0][1] == 0.5
    assert math.isnan(gram[1][1])


def test_a_plan_made_of_a_first_slow_step_does_not_outlive_it() -> None:
    """A first step that compiles may take minutes; clusters would else make H steps each until that time has come."""
    bench = Bench(settings=Settings(dynamic_local_steps=True), grace_s=1.0).running("a", "b")
    bench.silent.update(("a", "b"))
    bench.beat("a", steps_per_s=0.001)
    bench.beat("b", steps_per_s=0.001)
    bench.rounds(1, "a", wait_s=2.0)
    train(bench, 10)
    bench.push("a")
    train(bench, 1)
    bench.pull("a")
    assert bench.pull("b").local_steps == 32, "64 s of a's are 32 steps of b's"
