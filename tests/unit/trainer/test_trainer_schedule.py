"""The learning rate over the run's tokens, and the wait that plays slower hardware."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.trainer.progress import Slowdown
from dips.trainer.train import LearningRateSchedule

SCHEDULE = LearningRateSchedule(peak=0.01, warmup_tokens=1000, min_fraction=0.1, total_tokens=11_000)


def test_the_rate_rises_to_its_peak_and_falls_to_its_fraction() -> None:
    assert 0 < SCHEDULE.at(0) < 0.0001
    assert SCHEDULE.at(500) == pytest.approx(0.005, rel=0.01)
    assert SCHEDULE.at(1000) == pytest.approx(0.01)
    assert SCHEDULE.at(6000) == pytest.approx(0.0055)
    assert SCHEDULE.at(11_000) == pytest.approx(0.001)


@given(st.integers(1000, 20_000), st.integers(1, 1000))
def test_after_the_warm_up_the_rate_never_rises(tokens: int, more: int) -> None:
    assert SCHEDULE.at(tokens + more) <= SCHEDULE.at(tokens) + 1e-15


def test_without_a_known_end_the_rate_stays_at_its_peak() -> None:
    schedule = LearningRateSchedule(peak=0.01, warmup_tokens=10, min_fraction=0.1, total_tokens=0)
    assert schedule.at(4) == pytest.approx(0.01 * 5 / 11)
    assert schedule.at(10) == schedule.at(10**9) == 0.01


@pytest.mark.parametrize("total", [1, 1000, 1001])
def test_a_run_that_ends_within_the_warm_up_is_no_division_by_zero(total: int) -> None:
    schedule = LearningRateSchedule(peak=0.01, warmup_tokens=1000, min_fraction=0.0, total_tokens=total)
    assert schedule.at(999) == pytest.approx(0.01, rel=0.01)
    assert schedule.at(5000) >= 0


@pytest.mark.parametrize(("gap", "ratio"), [(0.0, 0.0), (0.5, 1.0), (0.75, 3.0)])
def test_a_gap_makes_steps_longer_by_its_share(gap: float, ratio: float) -> None:
    slowdown = Slowdown(gap)
    for _ in range(3):
        assert slowdown.wait_s(0.2) == pytest.approx(0.2 * ratio)


def test_one_disturbed_step_hardly_moves_the_wait() -> None:
    slowdown = Slowdown(0.5)
    slowdown.wait_s(0.1)
    assert slowdown.wait_s(1.1) == pytest.approx(0.3)
    for _ in range(40):
        last_s = slowdown.wait_s(0.1)
    assert last_s == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("gap", [-0.1, 1.0, float("nan")])
def test_an_impossible_gap_is_an_error(gap: float) -> None:
    with pytest.raises(ValueError, match="a gap is at least 0"):
        Slowdown(gap)
