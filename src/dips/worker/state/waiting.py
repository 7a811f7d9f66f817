"""Decides how long the training loop waits for an exchange with the run, by the setting `overlap`.

One row for each value of the setting, one word for each stage of an exchange; docs/protocol.md shows the same table.
With `verdict_wait_measured` a full wait ends when recent exchanges did not take so long: a cluster that waits for one
that died trains on, instead of waiting for a time-out that had to be chosen for the slowest case.
Knows only time: ClusterMachine.must_wait ensures that no steps are made which would be dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum

from dips.core.messages import Settings

BRIEF_SHARE = 0.01
BRIEF_MOST_S = 0.5
"""The loop waits for calls that the master answers at once, whatever overlaps: an answer that arrives during a step is
taken only at its end, so each of the three calls (may I push; it is all there; which version) would cost a whole step
on older parameters. The wait is at most BRIEF_SHARE of the time between two pushes, and at most BRIEF_MOST_S."""


REMEMBERED = 32
"""Number of remembered waits, of exchanges that ended by themselves without a disturbance."""

PASSED_OVER = 4
"""One in so many of them may be longer than the bound: rounds that wait for a cluster that died, until its eviction,
do not count, and slower links raise the bound after eight rounds."""

HEADROOM = 1.05


class ExchangeStage(Enum):
    """The stages of an exchange, each with its own wait."""

    BEGIN = "a push is due: is it welcome?"
    SEND = "the push is being sent"
    FINISH = "all of the push is sent: is it complete?"
    VERDICT = "the push waits in a window"
    PULL = "a version is wanted: which?"
    FETCH = "the version is being fetched"


class Wait(Enum):
    """How long the training loop waits when a stage begins."""

    FULLY = "wait for as long as it takes, and no longer than the settings say"
    AS_BEFORE = "what the stage before has left of its wait"
    BRIEFLY = "wait for as long as an answer takes"
    NOT = "train on"


_ROWS: Mapping[str, tuple[Wait, ...]] = {
    #         begin         send            finish          verdict         pull          fetch
    "none": (Wait.FULLY, Wait.AS_BEFORE, Wait.AS_BEFORE, Wait.AS_BEFORE, Wait.FULLY, Wait.AS_BEFORE),
    "push": (Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.FULLY, Wait.FULLY, Wait.AS_BEFORE),
    "full": (Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.NOT),
}

RULES: Mapping[str, Mapping[ExchangeStage, Wait]] = {
    overlap: dict(zip(ExchangeStage, row, strict=True)) for overlap, row in _ROWS.items()
}
"""Wait by stage, by the value of the setting."""


class WaitPolicy:
    """Keeps until when the training loop waits."""

    def __init__(self) -> None:
        self.until_s = -math.inf
        self._round_s = 0.0
        self._round_began_s: float | None = None
        self._waits_s: deque[float] = deque(maxlen=REMEMBERED)
        self._since_s: float | None = None
        self._disturbed = False

    def round_begins(self, now_s: float) -> None:
        """A push begins. The time between two pushes is known from the second one on."""
        if self._round_began_s is not None:
            self._round_s = now_s - self._round_began_s
        self._round_began_s = now_s

    def bound_s(self, settings: Settings) -> float:
        """How long one full wait may be."""
        if not (settings.verdict_wait_measured and self._waits_s):
            return settings.verdict_wait_s
        usual_s = sorted(self._waits_s)[-1 - (len(self._waits_s) - 1) // PASSED_OVER]
        return min(settings.verdict_wait_s, HEADROOM * usual_s)

    def over(self, now_s: float) -> None:
        """The exchange ended by itself: remember how long it took, unless something failed on the way."""
        if self._since_s is not None and not self._disturbed:
            self._waits_s.append(now_s - self._since_s)
        self.forget()

    def forget(self) -> None:
        """The exchange is over; do not remember how long it took."""
        self._since_s, self._disturbed = None, False

    def enter(self, stage: ExchangeStage, settings: Settings, now_s: float) -> None:
        """Set the wait for the stage that an exchange reaches."""
        match RULES[settings.overlap][stage]:
            case Wait.FULLY if settings.verdict_wait_measured:
                if self._since_s is None:
                    self._since_s = now_s
                if now_s >= self.until_s:  # else the same wait goes on, and keeps its end
                    self.until_s = now_s + self.bound_s(settings)
            case Wait.FULLY:
                self.until_s = max(self.until_s, now_s + settings.verdict_wait_s)
            case Wait.BRIEFLY:
                self.until_s = now_s + min(BRIEF_MOST_S, BRIEF_SHARE * self._round_s)
            case Wait.NOT:
                self.train_on(now_s)
            case Wait.AS_BEFORE:
                pass

    def train_on(self, now_s: float) -> None:
        """Stop waiting until the next stage."""
        self.until_s = min(self.until_s, now_s)

    def unusual(self) -> None:
        """Something is not as in most rounds: do not remember how long this exchange takes."""
        self._disturbed = True
