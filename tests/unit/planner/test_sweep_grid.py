"""Cases of four devices and eight microbatches: proved optima, and how near the greedy comes."""

from __future__ import annotations

from typing import Any

import pytest

from dips.planner.costs import NS
from dips.planner.ir import straight
from dips.planner.schedules.fixed import zb_h1
from dips.planner.schedules.greedy import cross_ud
from dips.planner.schedules.optimal import Optimum, optimal
from dips.planner.simulate import simulate
from dips.planner.sweep import GridPoint, rows_of


@pytest.mark.parametrize(
    ("case", "best", "greedy"),
    [
        (GridPoint(4, 8, 2, 0.25, 0, 1), 28, 29),
        (GridPoint(4, 8, 2, 2, 2, 1), 43, 43),
        (GridPoint(4, 8, 2, 2, 2, 2), 31, 31),
        (GridPoint(4, 8, 4, 1, 0, 1), 39, 40),
    ],
)
def test_the_proved_best_and_the_greedy(case: GridPoint, best: float, greedy: float) -> None:
    """Never more than five percent longer; the solver's schedule is the shortest of its kind: with two sites and 1F1B's
    memory 27 + 4 (latency + bandwidth), CrossPipe's setting."""
    costs, limits = case.costs(), case.limits()
    schedules = [cross_ud(4, 8, costs, limits, parts) for parts in (1, 2, 4)]
    optimum = optimal("best", straight(4), 8, costs, limits, zb_h1(4, 8))
    assert simulate(optimum.schedule, costs).makespan_ns == optimum.lower_bound_ns == best * NS
    assert min(simulate(schedule, costs).makespan_ns for schedule in schedules) == greedy * NS <= 1.05 * best * NS


def test_the_solver_begins_at_the_best_of_its_kind_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZB-H1 takes 28 here and the greedy 29; of waves the greedy takes 26.25 and ZB-V 26.75. With no time at all the
    solver would answer with these. Where a greedy schedule in parts is shorter, it is asked again, for parts."""
    hints: list[str] = []

    def no_time(name: str, *rest: Any, parts: int) -> Optimum:
        assert rest[4].parts == parts
        hints.append(rest[4].name)
        return Optimum(rest[4], 0, proved=False, wall_s=0.0)

    monkeypatch.setattr("dips.planner.schedules.optimal.optimal", no_time)
    rows = {row.schedule: row for row in rows_of(GridPoint(4, 8, 2, 0.25, 0, 1), optimal_s=20.0)}
    assert hints == ["zb_h1", "cross_wave"]
    assert rows["cross_ud/optimal"].makespan == rows["zb_h1"].makespan == 28 < rows["cross_ud/1"].makespan
    assert rows["cross_wave/optimal"].makespan == 26.25 < rows["zb_v"].makespan
    hints.clear()
    list(rows_of(GridPoint(4, 8, 2, 0.25, 0, 0.75), optimal_s=20.0))
    assert hints == ["cross_ud/1", "cross_ud/2", "cross_wave"]
    hints.clear()
    rows = {row.schedule: row for row in rows_of(GridPoint(3, 6, 3, 0.25, 2, 2), optimal_s=20.0)}
    assert hints == ["cross_ud/1", "cross_ud/2", "cross_wave"]
    assert rows["cross_ud/optimal"].makespan == rows["cross_ud/2"].makespan == 26.5 < rows["cross_ud/1"].makespan == 27
