"""Participation, T_round and momentum scaling (docs/algorithm.md)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core import outer_numpy
from dips.master.state.penalty_config import PenaltyConfig
from dips.master.state.penalty_scaling import (
    momentum_coefficients,
    momentum_warning,
    participation,
    round_tokens,
)

SAFE = PenaltyConfig()
TOKENS = PenaltyConfig(momentum_scaling="tokens")
ALL = frozenset("abcd")


def test_round_tokens_is_the_sum_of_rates_times_the_mean_interval() -> None:
    assert round_tokens({"a": 10.0, "b": 30.0}, {"a": 2.0, "b": 4.0}) == 120.0


def test_intervals_not_yet_measured_are_left_out_of_the_mean() -> None:
    assert round_tokens({"a": 10.0, "b": 30.0}, {"a": 2.0}) == 80.0
    assert round_tokens({"a": 10.0, "b": 30.0}, {"a": 2.0, "b": 0.0}) == 80.0


@pytest.mark.parametrize(
    ("rates", "intervals_s"),
    [({}, {}), ({"a": 1.0}, {}), ({"a": 1.0, "b": 0.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 0.0}), ({}, {"a": 1.0})],
)
def test_round_tokens_is_zero_when_unknown(rates: dict[str, float], intervals_s: dict[str, float]) -> None:
    assert round_tokens(rates, intervals_s) == 0.0


def test_rho_is_one_exactly_when_all_live_unquarantined_clusters_are_accepted() -> None:
    assert participation(SAFE, ["a", "b", "c", "d"], 1.0, ALL, 1e9) == 1.0
    assert participation(SAFE, ["a", "b", "c", "d", "left"], 1.0, ALL, 1e9) == 1.0
    assert participation(SAFE, ["a"], 1.0, frozenset(), 1e9) == 1.0
    assert participation(SAFE, ["a", "b", "c"], 300.0, ALL, 400.0) == 0.75


def test_rho_is_never_above_one() -> None:
    assert participation(SAFE, ["a"], 900.0, ALL, 400.0) == 1.0


@pytest.mark.parametrize("unknown", [0.0, -1.0, math.nan, math.inf])
def test_with_unknown_round_tokens_clusters_count_as_equal(unknown: float) -> None:
    assert participation(SAFE, ["a"], 100.0, ALL, unknown) == 0.25
    assert participation(SAFE, ["a", "quarantined"], 100.0, ALL, unknown) == 0.4


def test_without_participation_scaling_rho_is_one() -> None:
    assert participation(PenaltyConfig.of("paper"), ["a"], 1.0, ALL, 1e9) == 1.0


def test_momentum_is_plain_unless_asked_for() -> None:
    assert momentum_coefficients(SAFE, 0.25) == (0.8, 0.8)
    assert momentum_coefficients(TOKENS, 1.0) == (0.8, 0.8)


def test_momentum_scaling_by_tokens() -> None:
    decay, lookahead = momentum_coefficients(TOKENS, 0.25)
    assert decay == pytest.approx(0.8**0.25)
    assert lookahead == pytest.approx(0.8 * (1 - 0.8**0.25) / 0.2)
    assert momentum_coefficients(PenaltyConfig(momentum_scaling="tokens", outer_momentum=0.0), 0.5) == (0.0, 0.0)


@given(parts=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), mu=st.floats(0.0, 0.99))
def test_partial_rounds_decay_together_as_one_full_round(parts: list[float], mu: float) -> None:
    """rho that add up to 1 forget as much momentum as one full round, and the coefficients stay in range."""
    config = PenaltyConfig(momentum_scaling="tokens", outer_momentum=mu)
    product = 1.0
    for part in parts:
        decay, lookahead = momentum_coefficients(config, part / sum(parts))
        assert 0.0 <= decay <= 1.0
        assert 0.0 <= lookahead <= mu or lookahead == pytest.approx(mu)
        product *= decay
    assert product == pytest.approx(mu)


def test_scaled_momentum_moves_as_far_in_the_long_run() -> None:
    """A constant push, in full rounds or in quarters (rho 1/4, g/4): the same total way, through the real
    kernel."""

    def way(config: PenaltyConfig, rho: float, rounds: int) -> float:
        decay, lookahead = momentum_coefficients(config, rho)
        theta, momentum = np.zeros(1, np.float32), np.zeros(1, np.float32)
        for _ in range(rounds):
            staging = (theta - np.float32(0.01)).reshape(1, 1)  # a pseudo-gradient of 0.01
            outer_numpy.outer_step(
                *(theta, momentum, staging, np.zeros(1, np.int64), np.ones(1, np.float32)),
                *(rho, 0.7, decay, lookahead, theta, momentum, 0, 1),
            )
        return float(-theta[0])

    assert way(TOKENS, 0.25, 800) == pytest.approx(way(SAFE, 1.0, 200), rel=0.05)


def test_the_master_warns_of_one_big_slow_cluster() -> None:
    rates, intervals_s = {"a": 1.0, "b": 1.0, "slow": 20.0}, {"a": 1.0, "b": 1.2, "slow": 10.0}
    warning = momentum_warning(SAFE, rates, intervals_s)
    assert warning is not None
    assert "cluster slow makes 91% of the tokens and pushes every 10.0 s, the others every 1.2 s" in warning
    assert "momentum_scaling to 'tokens'" in warning


@pytest.mark.parametrize(
    ("config", "rates", "intervals_s"),
    [
        (TOKENS, {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
        (SAFE, {"a": 10.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
        (SAFE, {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 7.0}),
        (SAFE, {"slow": 20.0}, {"slow": 7.0}),
        (SAFE, {"a": 1.0, "slow": 20.0}, {}),
        (SAFE, {}, {}),
    ],
)
def test_no_warning_otherwise(config: PenaltyConfig, rates: dict[str, float], intervals_s: dict[str, float]) -> None:
    assert momentum_warning(config, rates, intervals_s) is None
