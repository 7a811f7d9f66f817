"""Emulates a cluster of slower hardware: computes a wait after each step.

For trying out unequal clusters on one machine. The wait is part of the step: a measurement of this cluster's speed must
include it.
"""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest step in the mean duration; a single disturbed step must not double a wait."""


class Slowdown:
    """gap 0.5 makes steps take twice as long: a step of d seconds is followed by a wait of d * gap / (1 - gap)."""

    def __init__(self, gap: float) -> None:
        """Raises ValueError unless 0 <= gap < 1."""
        if not 0 <= gap < 1:
            raise ValueError(f"a gap is at least 0 and below 1, not {gap}")
        self._ratio = gap / (1 - gap)
        self._mean_s: float | None = None

    def wait_s(self, step_s: float) -> float:
        """Seconds to wait after a step that took step_s of computing."""
        last = step_s if self._mean_s is None else self._mean_s
        self._mean_s = last + SMOOTHING * (step_s - last)
        return self._ratio * self._mean_s
