"""Participation, T_round, and when momentum is warned of (docs/algorithm.md)."""

from __future__ import annotations

import pytest

from dips.master.state.penalty import momentum_warning, round_tokens
from dips.master.state.penalty_types import PenaltyConfig

SAFE = PenaltyConfig()
TOKENS = PenaltyConfig(momentum_scaling="tokens")


@pytest.mark.parametrize(
    ("rates", "intervals_s"),
    [({}, {}), ({"a": 1.0}, {}), ({"a": 1.0, "b": 0.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 0.0}), ({}, {"a": 1.0})],
)
def test_one_unknown_rate_makes_the_tokens_of_a_round_unknown(
    rates: dict[str, float], intervals_s: dict[str, float]
) -> None:
    assert round_tokens(rates, intervals_s) == 0.0


def test_the_master_warns_of_one_big_slow_cluster() -> None:
    rates, intervals_s = {"a": 1.0, "b": 1.0, "slow": 20.0}, {"a": 1.0, "b": 1.2, "slow": 10.0}
    warning = momentum_warning(SAFE, rates, intervals_s)
    assert warning is not None
    assert "cluster slow makes 91% of the tokens and pushes every 10.0 s, the others every 1.2 s" in warning
    assert "momentum_scaling to 'tokens'" in warning
    other = momentum_warning(PenaltyConfig(outer_optimizer="heavy-ball"), rates, intervals_s)
    assert other is not None
    assert ("smaller outer_momentum" in other, "momentum_scaling" in other) == (True, False)


@pytest.mark.parametrize(("config", "rates", "intervals_s"), [
    (PenaltyConfig(outer_momentum=0.0), {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
    (TOKENS, {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
    (SAFE, {"a": 10.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
    (SAFE, {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 7.0}), (SAFE, {"slow": 20.0}, {"slow": 7.0}),
    (SAFE, {"a": 1.0, "slow": 20.0}, {}), (SAFE, {}, {}),
])  # fmt: skip
def test_no_warning_otherwise(config: PenaltyConfig, rates: dict[str, float], intervals_s: dict[str, float]) -> None:
    assert momentum_warning(config, rates, intervals_s) is None
