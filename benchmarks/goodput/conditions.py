"""What happens to the clusters and their links while a system is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shaped import Cable

SLOWEST_EXTRA = 0.5
"""How much longer the slowest cluster's step takes; four clusters have the paper's 0, 16, 33 and 50 %."""

SLOW_PART = 0.1
"""Of the last cluster's link, where one is slow."""


@dataclass(frozen=True)
class Condition:
    """kills: what is killed with SIGKILL in the measurement, and started again at once."""

    title: str
    gaps: bool = False
    slow_link: bool = False
    kills_cluster: bool = False
    kills_server: bool = False

    @property
    def kills(self) -> bool:
        return self.kills_cluster or self.kills_server


CONDITIONS = {
    "a": Condition("all clusters equal"),
    "b": Condition("steps 0 to 50 % longer", gaps=True),
    "c": Condition("one link ten times slower", slow_link=True),
    "d": Condition("a cluster killed", kills_cluster=True),
    "e": Condition("a server killed", kills_server=True),
    "f": Condition("b, c and d together", gaps=True, slow_link=True, kills_cluster=True),
}


@dataclass(frozen=True)
class Setting:
    """What all systems of a matrix have in common; kept beside each result. Rates in bit/s; delay one way."""

    clusters: int
    params: int
    inner_steps: int
    step_s: float
    rounds: int
    bits_per_s: float
    delay_ms: float

    @property
    def model_bytes(self) -> int:
        return 4 * self.params

    def steps_s(self, condition: Condition) -> Sequence[float]:
        """Of each cluster; the gaps are whole percents."""
        if not condition.gaps:
            return [self.step_s] * self.clusters
        last = max(1, self.clusters - 1)
        return [self.step_s * (1 + math.floor(100 * SLOWEST_EXTRA * i / last) / 100) for i in range(self.clusters)]

    def cables(self, condition: Condition) -> list[Cable]:
        """Of each cluster."""
        rates = [self.bits_per_s] * self.clusters
        if condition.slow_link:
            rates[-1] *= SLOW_PART
        return [Cable(rate, rate, self.delay_ms) for rate in rates]

    def round_s(self, condition: Condition) -> float:
        """The slowest cluster's inner loop."""
        return self.inner_steps * max(self.steps_s(condition))
