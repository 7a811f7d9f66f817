"""Participation scaling: how far a round may move the model, from the share of a full round that took part.

The rule of docs/algorithm.md, and when to warn of momentum. It must never use norms: penalty.py judges the pushes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from dips.master.state.penalty_config import PenaltyConfig

WARN_TOKEN_SHARE = 0.8
WARN_PERIOD_RATIO = 8.0


def round_tokens(rates: Mapping[str, float], intervals_s: Mapping[str, float]) -> float:
    """T_round: tokens that the live clusters train on between two pushes; 0.0 when that is not known.

    rates: tokens/s of every live cluster (measured, declared until measured; <= 0: neither). intervals_s:
    their measured push intervals; clusters without one may be absent or <= 0. T_round = (sum of the rates) x
    (arithmetic mean of the intervals). One unknown rate makes it unknown, because the sum would be too small
    and rho too large.
    """
    known_s = [intervals_s[cluster] for cluster in sorted(intervals_s) if intervals_s[cluster] > 0]
    speeds = [rates[cluster] for cluster in sorted(rates)]
    if not known_s or not speeds or not all(speed > 0 for speed in speeds):
        return 0.0
    return sum(speeds) * (sum(known_s) / len(known_s))


def participation(
    config: PenaltyConfig,
    accepted: Collection[str],
    accepted_tokens: float,
    live_unquarantined: frozenset[str],
    round_tokens: float,
) -> float:
    """rho in (0, 1]: 1 when every live, unquarantined cluster is accepted, else min(1, sum_c T / T_round).

    With T_round unknown (<= 0 or not finite) the clusters count as equal: accepted / (accepted or live).
    """
    if not config.participation_scaling or live_unquarantined <= set(accepted):
        return 1.0
    if math.isfinite(round_tokens) and round_tokens > 0:
        return min(1.0, accepted_tokens / round_tokens)
    return len(accepted) / len(live_unquarantined | set(accepted))


def momentum_warning(config: PenaltyConfig, rates: Mapping[str, float], intervals_s: Mapping[str, float]) -> str | None:
    """A sentence when one slow cluster makes momentum unstable in the linear model and momentum_scaling is
    off.

    That is: it makes more than 0.8 of the tokens and pushes less than an eighth as often as each of the
    others.
    """
    total = sum(rates.values())
    if config.momentum_scaling != "off" or config.outer_momentum == 0 or total <= 0:
        return None
    scaling = "momentum_scaling to 'tokens'" if config.outer_optimizer == "nesterov" else "a smaller outer_momentum"
    for cluster in sorted(rates):
        others_s = [interval for name, interval in intervals_s.items() if name != cluster and interval > 0]
        share, period_s = rates[cluster] / total, intervals_s.get(cluster, 0.0)
        if share > WARN_TOKEN_SHARE and others_s and period_s > WARN_PERIOD_RATIO * max(others_s):
            return (
                f"cluster {cluster} makes {share:.0%} of the tokens and pushes every {period_s:.1f} s, the "
                f"others every {max(others_s):.1f} s or faster: momentum may become unstable; set {scaling}, "
                "turn dynamic local steps on, or lower that cluster's local steps"
            )
    return None
