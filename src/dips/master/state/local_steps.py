"""Computes how many inner steps a cluster makes before its next push (docs/algorithm.md, dynamic local steps).

Dynamic: H_j = clamp(speed_j x (t* - now - pull_j - push_j), H/8, H), t* the next planned window. t* is one absolute
target for all clusters, one fastest round apart, so that their phases align again after a drift.
Static: H, but fewer for a cluster that would otherwise be more than s_max versions late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterPace:
    """A cluster's measured speed and its last transfers; steps_per_s 0: not measured yet."""

    steps_per_s: float
    push_s: float
    pull_s: float

    @property
    def known(self) -> bool:
        return self.steps_per_s > 0 and math.isfinite(self.steps_per_s)

    def round_s(self, steps: int) -> float:
        return steps / self.steps_per_s + self.push_s + self.pull_s


def lower_bound(sync_every: int) -> int:
    """H/8, at least one step."""
    return max(1, math.ceil(sync_every / 8))


def fastest_round_s(paces: Sequence[ClusterPace], sync_every: int, overlap: str = "none") -> float | None:
    """Seconds of the fastest measured cluster's round of H steps; None while nothing is measured."""
    rounds = [round_s(pace, sync_every, overlap) for pace in paces if pace.known]
    return min(rounds) if rounds else None


def round_s(pace: ClusterPace, sync_every: int, overlap: str) -> float:
    """Seconds between two pushes of H steps; steps made during transfers count too.

    A transfer during which the cluster trains takes no extra time; but H/8 steps are always made after the pull.
    """
    hidden_s = {"none": 0.0, "push": pace.push_s, "full": pace.push_s + pace.pull_s}[overlap]
    return max(pace.round_s(sync_every) - hidden_s, pace.round_s(lower_bound(sync_every)))


def dynamic_steps(pace: ClusterPace, sync_every: int, window_at_s: float, period_s: float, now_s: float) -> int:
    """H_j for the first planned window, window_at_s + k x period_s, that is at least H/8 steps away.

    Rounded to the nearest step: a cluster is at most half a step early or late, so that one window gets all pushes.
    """
    if not pace.known or period_s <= 0:
        return sync_every
    least = lower_bound(sync_every)
    earliest_s = now_s + pace.round_s(least)
    periods = max(0, math.ceil((earliest_s - window_at_s) / period_s - 1e-9))
    room_s = window_at_s + periods * period_s - now_s - pace.push_s - pace.pull_s
    return min(sync_every, max(least, math.floor(pace.steps_per_s * room_s + 0.5)))


def steps_within_staleness(pace: ClusterPace, sync_every: int, s_max: int, publish_interval_s: float) -> int:
    """H, or fewer when H steps would take longer than s_max published versions."""
    if not pace.known or publish_interval_s <= 0:
        return sync_every
    room_s = s_max * publish_interval_s - pace.push_s - pace.pull_s
    return min(sync_every, max(lower_bound(sync_every), math.floor(pace.steps_per_s * room_s)))
