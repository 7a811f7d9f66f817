"""JEEVES' greedy, and replicas that share links."""

from __future__ import annotations

import itertools

import pytest

from dips.core.errors import ConfigError
from dips.planner.costs import NS, Costs, Wire, uniform
from dips.planner.ir import Kind, Schedule
from dips.planner.schedules.fixed import gpipe, one_f_one_b
from dips.planner.schedules.greedy import jeeves
from dips.planner.simulate import simulate, simulate_fleet, validate

UNIT = 1 << 20


def costs(busy: float, latency: float, n: int = 4, hold: float = 0.0) -> Costs:
    """Two sites of n / 2 devices; T_F 1 s, T_B 2 s."""
    middle = n // 2
    sizes = (round(busy * NS), round(latency * NS), round(hold * NS))
    wires = {(middle - 1, middle): Wire(0, *sizes), (middle, middle - 1): Wire(1, *sizes)}
    return uniform(n, 1, wires=wires, activation=UNIT)


def test_without_delay_it_is_1f1b() -> None:
    """Backward first, and no more forward passes than memory holds."""
    free = uniform(4, 1, activation=UNIT)
    (found,) = jeeves(8, free, [4 * UNIT] * 4)
    assert validate(found, free, [4 * UNIT] * 4).makespan_ns == simulate(one_f_one_b(4, 8), free).makespan_ns == 33 * NS


def test_the_order_it_ran_in_simulates_to_the_same_times() -> None:
    for replicas, delay in itertools.product([1, 3], [0.5, 2.0]):
        wired = costs(0.3, delay)
        found = jeeves(8, wired, [5 * UNIT] * 4, replicas)
        fleet = simulate_fleet(found, wired)
        again = jeeves(8, wired, [5 * UNIT] * 4, replicas)
        assert again == found
        assert [t.schedule for t in fleet.timelines] == found
        if replicas == 1:
            assert fleet.makespan_ns == simulate(found[0], wired).makespan_ns


def test_memory_and_backward_passes() -> None:
    """The paper's Figure 7(c). On the last stage every backward pass follows its forward pass at once."""
    wired = costs(0.2, 4)
    spans = [simulate(jeeves(16, wired, [m * UNIT] * 4)[0], wired).makespan_ns for m in (2, 4, 6, 8, 16)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[2]
    assert spans[-2] == spans[-1]
    (found,) = jeeves(6, costs(0, 0.1), [9 * UNIT] * 4)
    kinds = [op.kind for op in found.orders[3]]
    assert kinds == [Kind.F, Kind.B] * 6


def test_what_cannot_run_is_named() -> None:
    with pytest.raises(ConfigError, match="stage 0 holds 1048576 for one microbatch, its memory allows 7"):
        jeeves(2, uniform(2, 1, activation=UNIT), [7, 7])
    good = one_f_one_b(2, 2)
    bad = Schedule("bad", good.device_of_stage, 2, (good.orders[0][::-1], good.orders[1]))
    with pytest.raises(ConfigError, match="replica 1: the schedule cannot end: device 0 waits at cell 1"):
        simulate_fleet([good, bad], uniform(2, 1))


def test_turns_on_a_link() -> None:
    fair = simulate(one_f_one_b(4, 8), costs(4 * 0.25, 0.5))  # each message has a fourth of the link
    fleet = simulate_fleet([one_f_one_b(4, 8)] * 4, costs(0.25, 0.5))
    assert max(t.starts[0][-1] for t in fleet.timelines) < fair.starts[0][-1]
    sent = sorted((m.start_ns, m.freed_ns) for t in fleet.timelines for m in t.messages if m.op.kind is Kind.F)
    assert all(freed <= start for (_, freed), (start, _) in itertools.pairwise(sent))
    wired = costs(1, 2, n=2, hold=4)
    (timeline,) = simulate_fleet([gpipe(2, 3)], wired).timelines
    forth = [m for m in timeline.messages if m.op.kind is Kind.F]
    assert [m.start_ns // NS for m in forth] == [1, 6, 11]
    assert [m.arrives_ns // NS for m in forth] == [4, 9, 14]
    assert timeline.starts == simulate(gpipe(2, 3), wired).starts
