"""Measures how fast this cluster computes, over its last steps, without waits and transfers."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

WINDOW_STEPS = 32
"""Steps in the window: enough to smooth over a slow step, few enough to follow a change of speed within one round."""


class _Steps(NamedTuple):
    tokens: int
    computing_s: float
    loss: float
    steps: int


class _Pace(NamedTuple):
    tokens_per_s: float
    steps_per_s: float
    loss: float


class StepTimer:
    """Measures computing time from resume() to the next stepped(), without the pauses between. Times in seconds.

    Steps are added and looked at by one thread at a time.
    """

    def __init__(self) -> None:
        self._steps: deque[_Steps] = deque(maxlen=WINDOW_STEPS)
        self._resumed_s: float | None = None
        self._paused_s = 0.0
        self._warm = False
        self._known: _Pace | None = None

    def resume(self, now_s: float) -> None:
        """The training loop computes from now on."""
        self._resumed_s, self._paused_s = now_s, 0.0

    def pause(self, seconds: float) -> None:
        """The loop waited this long for data."""
        self._paused_s += seconds

    def stepped(self, tokens: int, loss: float, now_s: float, steps: int = 1) -> None:
        """A step ended, or several since resume(), on all these tokens. The first one is left out: it includes
        compilation and first allocations.
        """
        if self._resumed_s is not None and self._warm:
            self._steps.append(_Steps(tokens, max(0.0, now_s - self._resumed_s - self._paused_s), loss, steps))
        self._warm, self._resumed_s, self._known = True, None, None

    @property
    def tokens_per_s(self) -> float:
        return self._pace().tokens_per_s

    @property
    def steps_per_s(self) -> float:
        return self._pace().steps_per_s

    @property
    def loss(self) -> float:
        """Mean of the finite losses in the window, nats per token; NaN when there is none."""
        return self._pace().loss

    def _pace(self) -> _Pace:
        """Computed once for each step, in one pass: each step's heartbeat asks for all three."""
        if self._known is None:
            tokens = steps = n_known = 0
            seconds = losses = 0.0
            for each in self._steps:
                tokens, steps, seconds = tokens + each.tokens, steps + each.steps, seconds + each.computing_s
                if math.isfinite(each.loss):
                    losses, n_known = losses + each.loss, n_known + 1
            loss = losses / n_known if n_known else math.nan
            self._known = _Pace(tokens / seconds, steps / seconds, loss) if seconds > 0 else _Pace(0.0, 0.0, loss)
        return self._known
