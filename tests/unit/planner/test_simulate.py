"""The fast simulator against a plain one, to the nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_simulator import plain_simulation
from support.planner_grid import STATIC

from dips.planner.costs import Costs, StageCost, Wire
from dips.planner.ir import Schedule
from dips.planner.schedules.greedy import cross_ud
from dips.planner.simulate import simulate
from dips.planner.sweep import Case


def assert_the_same(schedule: Schedule, costs: Costs) -> None:
    timeline = simulate(schedule, costs)
    times, sent = plain_simulation(schedule, costs)
    ours = [list(zip(ss, ee, strict=True)) for ss, ee in zip(timeline.starts, timeline.ends, strict=True)]
    assert ours == times
    assert sorted((m.op, m.ready_ns, m.start_ns, m.arrives_ns) for m in timeline.messages) == sorted(sent)


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize(("latency", "bandwidth"), [(0, 0), (0.3, 0.7), (2, 1.5)])
@pytest.mark.parametrize("sites", [2, 4])
def test_static_schedules(name: str, latency: float, bandwidth: float, sites: int) -> None:
    make, chunks = STATIC[name]
    case = Case(4, 12, sites, latency, bandwidth, 1)
    assert_the_same(make(4, 12), case.costs(chunks, wraps=name == "interleaved_1f1b"))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(STATIC)),
    st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=8, max_size=8),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(1, 3),
)
def test_uneven_stages_and_links_that_all_share(
    name: str, stage_times: list[tuple[int, int, int]], busy: int, latency: int, links: int
) -> None:
    make, chunks = STATIC[name]
    stages = tuple(StageCost(f, d, w, 2, 1) for f, d, w in stage_times[: 4 * chunks])
    wires = {(a, b): Wire((a + b) % links, busy, latency) for a in range(4) for b in range(4) if a != b}
    assert_the_same(make(4, 8), Costs(stages, wires))


@pytest.mark.parametrize("parts", [2, 3])
def test_blocks_in_parts(parts: int) -> None:
    case = Case(4, 8, 2, 0.5, 0.25, 1)
    assert_the_same(cross_ud(4, 8, case.costs(), case.limits(), parts), case.costs())
