"""Participation, T_round, and when momentum is warned of (docs/algorithm.md)."""

from __future__ import annotations

import math

import pytest

from dips.master.state.penalty import momentum_warning, participation, round_tokens
from dips.master.state.penalty_types import PenaltyConfig

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


def test_the_master_warns_of_one_big_slow_cluster() -> None:
    rates, intervals_s = {"a": 1.0, "b": 1.0, "slow": 20.0}, {"a": 1.0, "b": 1.2, "slow": 10.0}
    warning = momentum_warning(SAFE, rates, intervals_s)
    assert warning is not None
    assert "cluster slow makes 91% of the tokens and pushes every 10.0 s, the others every 1.2 s" in warning
    assert "momentum_scaling to 'tokens'" in warning


def test_other_outer_optimizers_are_warned_of_what_they_can_do() -> None:
    """Momentum scaling is refused beside heavy ball, so nobody is told to set it."""
    rates, intervals_s = {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}
    warning = momentum_warning(PenaltyConfig(outer_optimizer="heavy-ball"), rates, intervals_s)
    assert warning is not None
    assert "set a smaller outer_momentum" in warning
    assert "momentum_scaling" not in warning


@pytest.mark.parametrize(
    ("config", "rates", "intervals_s"),
    [
        (PenaltyConfig(outer_momentum=0.0), {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
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
