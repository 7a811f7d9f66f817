"""How long the training loop waits for an exchange with the run, as the setting `overlap` says.

One row for each value of the setting, one word for each stage of an exchange; docs/protocol.md shows the same table.
Knows only time: that steps which would be dropped are never made is Session.must_wait's to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from dips.core.messages import Settings

BRIEF_SHARE = 0.01
BRIEF_MOST_S = 0.5
"""A question that the master answers at once is waited for, whatever overlaps: what arrives in the middle of a step
lies there until its end, so each of the three (may I push; it is all there; which version) would cost a whole step
on older parameters. At most this share of the time between two pushes is waited, and never longer than that."""


class Stage(Enum):
    """Where an exchange stands when it is asked how long to wait."""

    BEGIN = "a push is due: is it welcome?"
    SEND = "the push is being sent"
    FINISH = "all of the push is sent: is it complete?"
    VERDICT = "the push waits in a window"
    PULL = "a version is wanted: which?"
    FETCH = "the version is being fetched"


class Wait(Enum):
    """What a stage asks of the training loop when it begins."""

    FULLY = "wait for up to verdict_wait_s from now on"
    AS_BEFORE = "what the stage before has left of its wait"
    BRIEFLY = "wait for as long as an answer takes"
    NOT = "train on"


_ROWS: Mapping[str, tuple[Wait, ...]] = {
    #         begin         send            finish          verdict         pull          fetch
    "none": (Wait.FULLY, Wait.AS_BEFORE, Wait.AS_BEFORE, Wait.AS_BEFORE, Wait.FULLY, Wait.AS_BEFORE),
    "push": (Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.FULLY, Wait.FULLY, Wait.AS_BEFORE),
    "full": (Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.NOT),
}

RULES: Mapping[str, Mapping[Stage, Wait]] = {
    overlap: dict(zip(Stage, row, strict=True)) for overlap, row in _ROWS.items()
}
"""Wait by stage, by the value of the setting."""


class Patience:
    """Until when the training loop waits."""

    def __init__(self) -> None:
        self.until_s = -math.inf
        self._round_s = 0.0
        self._round_began_s: float | None = None

    def round_begins(self, now_s: float) -> None:
        """A push begins. Before the second one nothing is known to take a share of."""
        if self._round_began_s is not None:
            self._round_s = now_s - self._round_began_s
        self._round_began_s = now_s

    def enter(self, stage: Stage, settings: Settings, now_s: float) -> None:
        """An exchange comes to this stage."""
        match RULES[settings.overlap][stage]:
            case Wait.FULLY:
                self.until_s = max(self.until_s, now_s + settings.verdict_wait_s)
            case Wait.BRIEFLY:
                self.until_s = now_s + min(BRIEF_MOST_S, BRIEF_SHARE * self._round_s)
            case Wait.NOT:
                self.train_on(now_s)
            case Wait.AS_BEFORE:
                pass

    def train_on(self, now_s: float) -> None:
        """Wait no longer, until the next stage says so."""
        self.until_s = min(self.until_s, now_s)
