"""SpanTrain's compact zero-bubble order: what it runs first, what it holds, and where it is shorter than ZB-H1."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.planner.costs import NS, Costs, StageCost, Wire, uniform
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.schedules.fixed import zb_h1
from dips.planner.schedules.greedy import compact_zb
from dips.planner.simulate import Timeline, simulate
from dips.planner.sweep import ACTIVATION, Case
from dips.planner.validate import peaks, validate


def chain(*links: tuple[float, float], times: tuple[float, float, float] = (1, 1, 1)) -> Costs:
    """Equal devices in a row; links[d]: (latency, time on the link) between d and d + 1, each way, in T_F."""
    n = len(links) + 1
    wires = {
        (a, b): Wire(a * n + b, round(busy * NS), round(latency * NS))
        for d, (latency, busy) in enumerate(links)
        for a, b in ((d, d + 1), (d + 1, d))
    }
    return uniform(n, 1, times, wires=wires, activation=ACTIVATION)


def cells(schedule: Schedule, device: int) -> list[str]:
    return [f"{op.kind.value}{op.microbatch}" for op in schedule.orders[device]]


@pytest.mark.parametrize("sites", [1, 2, 4])
@pytest.mark.parametrize("memory", [0.25, 1, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 6, 16])
def test_it_is_valid_and_within_any_memory(sites: int, memory: float, microbatches: int) -> None:
    for devices in (4, 8):
        for latency, bandwidth in itertools.product((0, 0.5, 3), (0, 0.5, 3)):
            case = Case(devices, microbatches, sites, latency, bandwidth, memory)
            schedule, costs = case.schedule("compact_zb")
            validate(schedule, costs, case.limits())


def test_memory_decides_what_is_held() -> None:
    """Also those that 1F1B would hold back: 16 of them on the first of 4 devices."""
    costs = chain((1, 0), (1, 0), (1, 0))
    assert peaks(compact_zb(4, 16, costs, [99 * ACTIVATION] * 4), costs)[0] == 16 * ACTIVATION
    limits = [5 * ACTIVATION, 4 * ACTIVATION, 3 * ACTIVATION, ACTIVATION]
    assert peaks(compact_zb(4, 16, costs, limits), costs) == tuple(limits)
    with pytest.raises(PlanError, match=r"stage 2 holds \d+ for one microbatch, its memory allows 5: make"):
        compact_zb(3, 4, chain((0, 0), (0, 0)), [ACTIVATION, ACTIVATION, 5])
    with pytest.raises(PlanError, match="3 stages and 2 limits for 2 devices"):
        compact_zb(2, 4, chain((0, 0), (0, 0)), [ACTIVATION] * 2)


@pytest.mark.parametrize("latency", [0.5, 0.75, 1, 2, 5])
@pytest.mark.parametrize("bandwidth", [0, 0.5, 1, 2, 5])
def test_six_microbatches_over_slow_links(latency: float, bandwidth: float) -> None:
    costs = chain(*[(latency, bandwidth)] * 3)
    schedule = compact_zb(4, 6, costs, [6 * ACTIVATION] * 4)
    compact, original = simulate(schedule, costs).makespan_ns, simulate(zb_h1(4, 6), costs).makespan_ns
    assert compact <= original
    assert (compact < original) == (latency + bandwidth > 0.5)
    assert cells(schedule, 0)[:6] == ["F0", "F1", "F2", "F3", "F4", "F5"], "section 3.3.1: all six forward passes first"


def test_what_the_text_says_of_the_groups_in_figure_6() -> None:
    """FG2: after W2 "the system immediately processes backward propagations #4 and #5 before completing remaining
    weight operations". FG3: "we insert weight update #0 between backward propagation #2 and forward propagation #5,
    then immediately resume backward propagation #3 ..., temporarily suspending non-critical weight updates #1 and #2".

    The figure's links and times are not in the text; each statement is found with others.
    """
    fg2 = chain((2, 2), (0, 1.5), (0.25, 0.25))
    fg3 = chain((0, 3), (0.5, 1.5), (0.5, 1), times=(1, 2, 1))
    second = cells(compact_zb(4, 6, fg2, [6 * ACTIVATION] * 4), 1)
    at = second.index("W2")
    assert second[at + 1 : at + 3] == ["I4", "I5"]
    assert second[at + 3 :] == ["W3", "W4", "W5"]
    third = cells(compact_zb(4, 6, fg3, [6 * ACTIVATION] * 4), 2)
    at = third.index("I2")
    assert third[at : at + 4] == ["I2", "W0", "F5", "I3"]
    assert {"W1", "W2"} <= set(third[at + 4 :])


def ready_ns(timeline: Timeline, costs: Costs) -> dict[Op, int]:
    """When the input of each F and D was on its device."""
    last = timeline.schedule.n_stages - 1
    ends = {
        op: end
        for order, row in zip(timeline.schedule.orders, timeline.ends, strict=True)
        for op, end in zip(order, row, strict=True)
    }
    arrives = {message.op: message.arrives_ns for message in timeline.messages}
    found = {}
    for op in ends:
        if op.kind is Kind.W or (op.kind is Kind.F and op.stage == 0):
            found[op] = 0 if op.kind is Kind.F else ends[op._replace(kind=Kind.D)]
        elif op.kind is Kind.D and op.stage == last:
            found[op] = ends[op._replace(kind=Kind.F)]
        else:
            before = op._replace(stage=op.stage + (1 if op.kind is Kind.D else -1))
            found[op] = arrives.get(before, ends[before])
    return found


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.lists(st.tuples(*[st.integers(1, 9)] * 5), min_size=5, max_size=5),
)
def test_f_before_d_before_w(devices: int, microbatches: int, numbers: list[tuple[int, int, int, int, int]]) -> None:
    """With ample memory no device runs anything while something more urgent is there, and none waits while a W is."""
    stages = tuple(StageCost(f, d, w, 2, 1) for f, d, w, _, _ in numbers[:devices])
    pairs = [(a, b) for a in range(devices) for b in (a - 1, a + 1) if 0 <= b < devices]
    costs = Costs(stages, {(a, b): Wire(9 * a + b, numbers[a][3], numbers[b][4]) for a, b in pairs})
    schedule = compact_zb(devices, microbatches, costs, [2 * microbatches] * devices)
    timeline = validate(schedule, costs, [2 * microbatches] * devices)
    ready, urgency = ready_ns(timeline, costs), [Kind.F, Kind.D, Kind.W]
    for device, order in enumerate(schedule.orders):
        free = 0
        for at, op in enumerate(order):
            start = timeline.starts[device][at]
            for later in order[at + 1 :]:
                assert ready[later] >= start or urgency.index(later.kind) >= urgency.index(op.kind), (op, later)
                assert start == free or ready[later] >= start, "no device waits while something is ready"
            free = timeline.ends[device][at]
