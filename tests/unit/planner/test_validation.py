"""The papers' numbers: those that bind, where they are quick; and what a missed one looks like."""

from __future__ import annotations

import pytest

from dips.planner.cluster import read_setup
from dips.planner.errors import PlanError
from dips.planner.problem import Problem
from dips.planner.validation import Check, all_checks
from dips.planner.validation.check import holds, within
from dips.planner.validation.crosspipe import TABLE_5, TABLE_6, each_s
from dips.planner.validation.jeeves import dapple_ns, inside_ns


def test_crosspipes_numbers_are_within_their_tolerances() -> None:
    checks = list(all_checks("crosspipe"))
    assert [check.what for check in checks if check.missed] == []
    assert sum(check.binds for check in checks) == 2 * (10 + 10 + 5 + 5) + 7 + 2
    assert all("assumed" in check.about for check in checks)


def test_the_tables_hold_what_was_published() -> None:
    for table in (TABLE_5, TABLE_6):
        assert len(table) == 5
        for rows in table.values():
            assert [sum(cell is not None for cell in rows[case]) for case in (1, 2, 3)] == [6, 5, 3]
    assert TABLE_5[2, 2][1] == (0.321, 0.309, 0.473, 0.198, 0.196, 0.256)
    assert TABLE_6[2, 2][3][3:] == (0.178, 0.178, 0.264)


def test_without_delay_the_profile_gives_what_table_5_says() -> None:
    problem = Problem(read_setup("crosspipe-m70-2dc")).with_delays(0, 0)
    assert each_s(problem, "1f1b") == pytest.approx(0.151, abs=0.0005)
    assert each_s(problem, "zb_h1") == pytest.approx(0.133, abs=0.0005)


def test_jeeves_baselines() -> None:
    """1F1B of 8 stages and 32 microbatches takes (32 + 7) x 45 ms; over both sites, much more."""
    problem = Problem(read_setup("jeeves"))
    assert inside_ns(problem) == 39 * 45_000_000
    assert 1.2 < dapple_ns(problem) / inside_ns(problem) < 1.3
    far = problem.with_links(latency=20)
    assert dapple_ns(far, blocking=True) > dapple_ns(far, blocking=False)


def test_a_miss_is_a_miss() -> None:
    assert within("a", "b", 100.0, 115.9, 0.16).missed is False
    assert within("a", "b", 100.0, 116.1, 0.16).missed
    assert within("a", "b", 100.0, 83.9, 0.16).missed
    assert holds("a", "b", False).missed
    assert not Check("a", "b", 1.0, 9.0).missed
    check = Check("a", "b", 0.367, 0.303, 0.29, 0.37, percent=True)
    assert check.cells() == ("b", "36.7%", "30.3%", "-6.4 points", "29.0% to 37.0%", "ok")
    assert Check("a", "b", None, 0.1, percent=True).cells() == ("b", "", "10.0%", "", "", "")


def test_an_unknown_paper() -> None:
    with pytest.raises(PlanError, match="--paper 'spantrain' is unknown: choose one of jeeves, crosspipe, all"):
        list(all_checks("spantrain"))
