"""The solver's schedules: proved optima that are known, and how near the greedy comes."""

from __future__ import annotations

import pytest

from dips.core.errors import ConfigError
from dips.planner.costs import NS, uniform
from dips.planner.ir import straight, wave
from dips.planner.schedules.fixed import zb_v
from dips.planner.schedules.greedy import cross_ud
from dips.planner.schedules.optimal import optimal
from dips.planner.simulate import validate
from dips.planner.sweep import GridPoint


def test_stages_and_weight_gradients() -> None:
    """With frozen weights W ends when it begins: it precedes the F that begins then and needs its memory."""
    case = GridPoint(2, 4, 2, 0.5, 0, 2)
    hint = zb_v(2, 4)
    found = optimal("best", wave(2), 4, case.costs(2), case.limits(), hint)
    timeline = validate(found.schedule, case.costs(2), case.limits())
    assert found.proved
    assert found.lower_bound_ns == timeline.makespan_ns <= validate(hint, case.costs(2)).makespan_ns
    costs, limits = uniform(4, 1, (1.0, 1.0, 0.0), activation=2), [8] * 4
    found = optimal("best", straight(4), 8, costs, limits)
    assert validate(found.schedule, costs, limits).makespan_ns == found.lower_bound_ns == 22 * NS


def test_memory_in_bytes_and_memory_for_nothing() -> None:
    """Numbers as a plan has them, without a large common divisor."""
    times, limits = (0.150000001, 0.150000003, 0.150000007), [8 * 1284636673] * 4
    costs = uniform(4, 1, times, release_of_d=2 / 34, activation=1284636673)
    found = optimal("best", straight(4), 8, costs, limits, cross_ud(4, 8, costs, limits), time_limit_s=2.0)
    assert 0 < found.lower_bound_ns <= validate(found.schedule, costs, limits).makespan_ns
    case = GridPoint(2, 2, 2, 0, 0, 1)
    with pytest.raises(ConfigError, match="best: no schedule within the memory; none exists"):
        optimal("best", straight(2), 2, case.costs(), [1, 1])


def test_blocks_cut_into_parts() -> None:
    """The greedy's 26.5 is the best there is, and the solver finds it alone; a hint must be cut alike."""
    case = GridPoint(3, 6, 3, 0.25, 2, 2)
    costs, limits = case.costs(), case.limits()
    found = optimal("best", straight(3), 6, costs, limits, parts=2)
    assert found.proved
    assert found.schedule.parts == 2
    assert found.lower_bound_ns == validate(found.schedule, costs, limits).makespan_ns == 26.5 * NS
    with pytest.raises(ConfigError, match="blocks cut into 2 cannot begin with a schedule that cuts them into 1"):
        optimal("best", straight(3), 6, costs, limits, cross_ud(3, 6, costs, limits), parts=2)


def test_a_solver_without_time_gives_back_the_schedule_that_it_began_with() -> None:
    """A busy machine may leave it too little time to find even that one."""
    case = GridPoint(8, 16, 2, 0.25, 0, 1)
    hint = cross_ud(case.n_pp, case.n_mb, case.costs(), case.limits())
    found = optimal("best", straight(8), 16, case.costs(), case.limits(), hint, time_limit_s=1e-3)
    assert (found.schedule.name, found.proved) == ("best", False)
    timeline = validate(found.schedule, case.costs(), case.limits())
    assert timeline.makespan_ns == validate(hint, case.costs(), case.limits()).makespan_ns
    with pytest.raises(ConfigError, match="allow more time"):
        optimal("best", straight(8), 16, case.costs(), case.limits(), time_limit_s=1e-3)
