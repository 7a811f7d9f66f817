"""Clocks: the one that a test holds moves only when told to."""

from __future__ import annotations

import math

import pytest

from dips.core.clock import ManualClock


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(monotonic_s=5.0, wall_s=1000.0)
    assert (clock.monotonic_s(), clock.wall_s()) == (5.0, 1000.0)
    clock.advance(2.5)
    assert (clock.monotonic_s(), clock.wall_s()) == (7.5, 1002.5)


@pytest.mark.parametrize("amount_s", [-1.0, math.inf, math.nan])
def test_time_does_not_run_back_nor_to_infinity(amount_s: float) -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="a clock cannot advance by"):
        clock.advance(amount_s)
    assert clock.monotonic_s() == 0.0
