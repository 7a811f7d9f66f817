"""Compares the papers' published numbers with what the planner computes (`dips plan validate`).

Each paper's section holds its numbers with their places, names the values that were assumed or fitted where the paper
gives none, and holds the tolerances. A number without a tolerance is for information: its error is
printed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PaperCheck:
    """One comparison of a published number with ours."""

    about: str  # the setting and the assumptions; the same for several numbers
    what: str
    published: float | None  # None: the paper shows it without a number
    ours: float
    low: float | None = None  # the least that ours may be; None: for information
    high: float | None = None  # and the greatest
    percent: bool = False  # the numbers are parts of one
    statement: bool = False  # 1 where a statement of the paper holds, else 0

    @property
    def error(self) -> float | None:
        """The error relative to the published number; for percentages the difference, as a part of one."""
        if self.published is None:
            return None
        return self.ours - self.published if self.percent else self.ours / self.published - 1

    @property
    def binds(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def missed(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= self.ours <= self.high

    def cells(self) -> tuple[str, ...]:
        """The table cells: what, published, ours, error, tolerance, verdict."""
        off, error = self.error, ""
        if off is not None:
            error = f"{100 * off:+.1f} points" if self.percent else f"{off:+.1%}"
        between = f"{self._shown(self.low)} to {self._shown(self.high)}" if self.binds else ""
        verdict = ("MISSED" if self.missed else "ok") if self.binds else ""
        return self.what, self._shown(self.published), self._shown(self.ours), error, between, verdict

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "missed": self.missed}

    def _shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.1%}" if self.percent else f"{value:.3g}"


def within(about: str, what: str, published: float, ours: float, part: float) -> PaperCheck:
    """A check that ours is within a part of the published number."""
    return PaperCheck(about, what, published, ours, published * (1 - part), published * (1 + part))


def holds(about: str, what: str, true: bool) -> PaperCheck:
    """An ordering that the paper states: 1 published, ours 1 if it holds."""
    return PaperCheck(about, what, 1.0, float(true), 1.0, 1.0, statement=True)


def ordering(about: str, what: str, true: bool) -> PaperCheck:
    """An ordering that a paper's testbed showed: as holds(), but for information: what the paper leaves out decides."""
    return PaperCheck(about, what if true else f"{what}: DOES NOT HOLD", 1.0, float(true), statement=True)
