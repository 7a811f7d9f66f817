"""The inner learning rate as a function of the run's tokens.

The argument is the run's own progress, not this cluster's steps: clusters of different speed, and one that joins
late, are then at the same place of the same curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then a cosine down to `peak * min_fraction` at `total_tokens`.

    total_tokens 0: the run's length is unknown, the rate stays at its peak after the warm-up.
    """

    peak: float
    warmup_tokens: int
    min_fraction: float
    total_tokens: int

    def at(self, tokens: int) -> float:
        """The learning rate after `tokens` tokens of the run; beyond the end it stays at its last value."""
        if tokens < self.warmup_tokens:
            return self.peak * (tokens + 1) / (self.warmup_tokens + 1)
        if self.total_tokens <= 0:
            return self.peak
        span = max(1, self.total_tokens - self.warmup_tokens)
        share = min(1.0, (tokens - self.warmup_tokens) / span)
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return self.peak * (self.min_fraction + (1 - self.min_fraction) * cosine)
