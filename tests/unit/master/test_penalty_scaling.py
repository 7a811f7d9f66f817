"""Participation, T_round, and when momentum is warned of (docs/algorithm.md)."""

from __future__ import annotations

import math

import pytest

from dips.master.state.penalty import momentum_warning, participation, round_tokens
from dips.master.state.penalty_types import PenaltyConfig

SAFE = PenaltyConfig()
TOKENS = PenaltyConfig(momentum_scaling="tokens")
UNKNOWN: list[tuple[dict[str, float], dict[str, float]]] = [
    ({}, {}), ({"a": 1.0}, {}), ({"a": 1.0, "b": 0.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 0.0}), ({}, {"a": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "intervals_s", "tokens"),
    [
        ({"a": 10.0, "b": 30.0}, {"a": 2.0, "b": 4.0}, 120.0),
        ({"a": 10.0, "b": 30.0}, {"a": 2.0}, 80.0),  # what is not measured yet is left out of the mean
        ({"a": 10.0, "b": 30.0}, {"a": 2.0, "b": 0.0}, 80.0),
        *((rates, intervals_s, 0.0) for rates, intervals_s in UNKNOWN),
    ],
)
def test_round_tokens_are_rates_times_interval(
    rates: dict[str, float], intervals_s: dict[str, float], tokens: float
) -> None:
    assert round_tokens(rates, intervals_s) == tokens


@pytest.mark.parametrize(
    ("config", "accepted", "tokens", "live", "round_", "rho"),
    [
        (SAFE, "abcd", 1.0, "abcd", 1e9, 1.0),  # all live clusters that are not in quarantine
        (SAFE, "abcdx", 1.0, "abcd", 1e9, 1.0),
        (SAFE, "a", 1.0, "", 1e9, 1.0),
        (SAFE, "abc", 300.0, "abcd", 400.0, 0.75),
        (SAFE, "a", 0.25, "abcd", 0.5, 0.5),
        (SAFE, "a", 900.0, "abcd", 400.0, 1.0),  # never above 1
        *((SAFE, "a", 100.0, "abcd", unknown, 0.25) for unknown in (0.0, -1.0, math.nan, math.inf)),
        (SAFE, "aq", 100.0, "abcd", 0.0, 0.4),
        (PenaltyConfig.of("paper"), "a", 1.0, "abcd", 1e9, 1.0),
    ],
)
def test_rho_is_the_share_of_a_full_rounds_tokens(
    config: PenaltyConfig, accepted: str, tokens: float, live: str, round_: float, rho: float
) -> None:
    assert participation(config, list(accepted), tokens, frozenset(live), round_) == rho


def test_the_master_warns_of_one_big_slow_cluster() -> None:
    rates, intervals_s = {"a": 1.0, "b": 1.0, "slow": 20.0}, {"a": 1.0, "b": 1.2, "slow": 10.0}
    warning = momentum_warning(SAFE, rates, intervals_s)
    assert warning is not None
    assert "cluster slow makes 91% of the tokens and pushes every 10.0 s, the others every 1.2 s" in warning
    assert "momentum_scaling to 'tokens'" in warning
    other = momentum_warning(PenaltyConfig(outer_optimizer="heavy-ball"), rates, intervals_s)
    assert other is not None
    assert ("smaller outer_momentum" in other, "momentum_scaling" in other) == (True, False)


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
