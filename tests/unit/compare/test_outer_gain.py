"""What `dips plan` knows of local steps is what the kept runs say."""

from __future__ import annotations

from bench_outer_gain import PLANNER, kept, planner_text


def test_the_planners_losses_are_those_of_the_records() -> None:
    assert PLANNER.read_text() == planner_text(kept())
