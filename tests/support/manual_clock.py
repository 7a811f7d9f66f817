"""A clock of a test's own."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only by advance(); monotonic and wall time move together."""

    def __init__(self, monotonic_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, seconds_s: float) -> None:
        """Move forward. Raises ValueError for a negative or non-finite amount: time does not run back."""
        if not 0 <= seconds_s < float("inf"):
            raise ValueError(f"a clock cannot advance by {seconds_s} s")
        self._monotonic_s += seconds_s
        self._wall_s += seconds_s
