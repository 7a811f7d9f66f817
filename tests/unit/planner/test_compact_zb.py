"""SpanTrain's compact zero-bubble order: what it runs first, what it holds, and where it is shorter than ZB-H1."""

from __future__ import annotations

import pytest

from dips.core.errors import ConfigError
from dips.planner.costs import NS, Costs, Wire, uniform
from dips.planner.ir import Schedule
from dips.planner.schedules.greedy import compact_zb
from dips.planner.simulate import peaks
from dips.planner.sweep import ACTIVATION


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


def test_memory_decides_what_is_held() -> None:
    """Also those that 1F1B would hold back: 16 of them on the first of 4 devices."""
    costs = chain((1, 0), (1, 0), (1, 0))
    assert peaks(compact_zb(4, 16, costs, [99 * ACTIVATION] * 4), costs)[0] == 16 * ACTIVATION
    limits = [5 * ACTIVATION, 4 * ACTIVATION, 3 * ACTIVATION, ACTIVATION]
    assert peaks(compact_zb(4, 16, costs, limits), costs) == tuple(limits)
    with pytest.raises(ConfigError, match=r"stage 2 holds \d+ for one microbatch, its memory allows 5: make"):
        compact_zb(3, 4, chain((0, 0), (0, 0)), [ACTIVATION, ACTIVATION, 5])
    with pytest.raises(ConfigError, match="3 stages and 2 limits for 2 devices"):
        compact_zb(2, 4, chain((0, 0), (0, 0)), [ACTIVATION] * 2)


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
