"""Measures how fast a cluster computes."""

from __future__ import annotations

import math
from collections import deque

WINDOW_STEPS = 32
"""Steps in the window: enough to smooth over a slow step, few enough to follow a change of speed within one round."""


class StepTimer:
    """Measures how fast this cluster computes, over its last steps, without waits and transfers.

    Computing time is from resume() to the next stepped(), without the pauses between. Times in seconds. Steps are added
    and looked at by one thread at a time.
    """

    def __init__(self) -> None:
        # tokens, seconds, loss, whether it is known, steps; summed in few calls, as each step's heartbeat asks for all
        self._steps: deque[tuple[float, ...]] = deque(maxlen=WINDOW_STEPS)
        self._resumed_s: float | None = None
        self._paused_s = 0.0
        self._warm = False
        self._sums: list[float] | None = None

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
            computing_s, known = max(0.0, now_s - self._resumed_s - self._paused_s), math.isfinite(loss)
            self._steps.append((tokens, computing_s, loss if known else 0.0, known, steps))
        self._warm, self._resumed_s, self._sums = True, None, None

    @property
    def tokens_per_s(self) -> float:
        tokens, seconds, *_ = self._summed()
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        _, seconds, *_, steps = self._summed()
        return steps / seconds if seconds > 0 else 0.0

    @property
    def loss(self) -> float:
        """Mean of the finite losses in the window, nats per token; NaN when there is none."""
        _, _, losses, n_known, _ = self._summed()
        return losses / n_known if n_known else math.nan

    def _summed(self) -> list[float]:
        if self._sums is None:
            self._sums = [sum(column) for column in zip(*self._steps, strict=True)] or [0.0] * 5
        return self._sums
