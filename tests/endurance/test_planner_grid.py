"""The planner over whole grids: each small case against a proof, and the solver against all others."""

from __future__ import annotations

import pytest
from support.planner_grid import check_grid

from dips.planner.ir import straight
from dips.planner.schedules.greedy import cross_ud
from dips.planner.schedules.optimal import optimal
from dips.planner.simulate import simulate
from dips.planner.sweep import GridPoint, cases, rows_of

RATIOS = [0, 0.25, 0.5, 1, 2]


pytestmark = pytest.mark.long


@pytest.mark.timeout(2400)
def test_the_greedy_is_within_five_percent_of_the_best_in_every_case_of_four_devices() -> None:
    for case in cases([4], [8], [2, 4], RATIOS, RATIOS, [1, 2]):
        costs, limits = case.costs(), case.limits()
        greedy = [cross_ud(4, 8, costs, limits, parts) for parts in (1, 2, 4)]
        best = optimal("best", straight(4), 8, costs, limits, greedy[0], time_limit_s=120.0)
        assert best.proved, case
        least_ns = min(simulate(schedule, costs).makespan_ns for schedule in greedy)
        assert least_ns <= 1.05 * best.lower_bound_ns, case


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("n_sites", "latency", "bandwidth"), [(2, 0.25, 0), (4, 0.5, 0.5), (4, 0.25, 2)])
def test_eight_devices_the_solver_is_never_worse_than_others(n_sites: int, latency: float, bandwidth: float) -> None:
    for memory in (1, 2):
        check_grid(rows_of(GridPoint(8, 16, n_sites, latency, bandwidth, memory), optimal_s=10.0))
