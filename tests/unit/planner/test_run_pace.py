"""Ranks that keep a plan's times, on clocks that only waiting moves: the run is the simulator's, to the nanosecond."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paced_play import RankClock, play
from support.planner_grid import STATIC

from dips.planner.commands.plan_run import CASE, PlanSource, scaled, source_of, timelines
from dips.planner.costs import Costs, StageCost, Wire
from dips.planner.ir import Kind, Op
from dips.planner.run.links import FORTH, LinkBoard, PlanJob, RankLink, RankPace, RankReport, parse_cells
from dips.planner.schedules import MANY_CHUNKS
from dips.planner.simulate import Timeline, simulate

EVERY = (*STATIC, "cross_ud/1", "cross_ud/2", "cross_ud/4", "cross_wave", "compact_zb", *MANY_CHUNKS)
NOTHING_GIVEN: dict[str, float | None] = dict.fromkeys(CASE)


def run_of(folder: Path, source: PlanSource, late_ns: int = 0) -> Timeline:
    reports = [RankReport((iteration,), 0, 0.0, 0) for iteration in play(folder, source, late_ns)]
    (timeline,) = timelines(source, reports)
    return timeline


def assert_as_simulated(folder: Path, source: PlanSource) -> None:
    ran, planned = run_of(folder, source), simulate(source.schedule, source.costs)
    assert (ran.starts, ran.ends) == (planned.starts, planned.ends)
    linked = [message for message in ran.messages if (message.source, message.target) in source.costs.wires]
    assert sorted(linked) == sorted(planned.messages)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("latency", "bandwidth"), [(0.5, 0.25), (0.0, 0.7), (2.0, 1.5)])
def test_every_schedule_runs_as_it_was_simulated(tmp_path: Path, name: str, latency: float, bandwidth: float) -> None:
    source = source_of(name, {**NOTHING_GIVEN, "latency": latency, "bandwidth": bandwidth})
    assert_as_simulated(tmp_path, source)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(STATIC)),
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=8, max_size=8),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 3),
)
def test_uneven_stages_and_links(
    tmp_path: Path, name: str, times: list[tuple[int, int, int]], busy: int, latency: int, hold: int
) -> None:
    make, chunks = STATIC[name]
    stages = tuple(StageCost(f, d, w, 2, 1) for f, d, w in times[: 4 * chunks])
    wires = {(a, b): Wire(4 * a + b, busy, latency, hold) for a in range(4) for b in range(4) if a != b}
    assert_as_simulated(tmp_path, PlanSource(make(4, 8), Costs(stages, wires), ("here",) * 4))


def test_lateness_of_the_clock_is_measured_and_not_hidden(tmp_path: Path) -> None:
    source = source_of("1f1b", NOTHING_GIVEN)
    late = run_of(tmp_path, source, late_ns=10_000_000)
    assert late.makespan_ns > simulate(source.schedule, source.costs).makespan_ns + 33 * 10_000_000 / 2


def test_work_that_takes_longer_than_planned_makes_its_operation_longer(tmp_path: Path) -> None:
    LinkBoard.make(tmp_path / "links", 1, 0, 1, 1)
    job, cells = PlanJob("0F0,0B0\n", ((5, 5, 5),), (), 1, "gloo", 1.0), parse_cells("0F0,0B0\n", "one")
    with LinkBoard(tmp_path / "links", 1, 0, 1, 1) as board:
        clock = RankClock()
        pace = RankPace(job, cells, 0, board, clock)
        pace.begin(0)
        pace.run(Op(Kind.F, 0, 0), lambda: clock.wait_until(8))
        pace.run(Op(Kind.B, 0, 0), lambda: clock.wait_until(9))
        assert pace.finish().times == ((0, 8), (8, 18))


def test_before_the_first_timed_iteration_nothing_is_waited_for(tmp_path: Path) -> None:
    LinkBoard.make(tmp_path / "links", 1, 1, 2, 1)
    job = PlanJob("0F0,0B0\n1F0,1B0\n", ((5, 5, 5),) * 2, (RankLink(0, 1, 0, 5, 5),), 1, "gloo", 1.0)
    with LinkBoard(tmp_path / "links", 1, 1, 2, 1) as board:
        clock = RankClock()
        pace = RankPace(job, parse_cells(job.csv, "two"), 0, board, clock)
        assert pace.run(Op(Kind.F, 0, 0), lambda: "output") == "output"
        pace.send(Op(Kind.F, 0, 0))
        assert (clock.ns, board.arrives_ns(0, FORTH, 1, 0)) == (0, 0)


def test_times_are_scaled_to_the_forward_pass_of_a_device() -> None:
    source = source_of("zb_v", NOTHING_GIVEN)
    costs = scaled(source.costs, 4, 80.0)
    assert {stage.f_ns for stage in costs.stages} == {40_000_000}
    assert {(wire.busy_ns, wire.latency_ns) for wire in costs.wires.values()} == {(20_000_000, 40_000_000)}
    before, after = (simulate(source.schedule, each).makespan_ns for each in (source.costs, costs))
    assert after == before * 0.08
