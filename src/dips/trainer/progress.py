"""Reports a training loop's progress: a log line and a record on the tape every few steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from dips.core.observe.telemetry import Tape

_logger = logging.getLogger("dips.trainer")


class StepReports:
    """Collects losses and reports their mean, in nats per byte, every `every_steps` steps."""

    def __init__(self, tape: Tape, every_steps: int) -> None:
        self._tape = tape
        self._every_steps = every_steps
        self._losses: list[float] = []
        self._tokens = 0
        self._steps = 0
        self._since_s = time.monotonic()

    def step(self, loss: float, tokens: int, lr: float, run_tokens: int, base: str, cause: str) -> None:
        """Count an inner step on `tokens` tokens, made from version `base` ("": none); the run is at run_tokens."""
        self._losses.append(loss)
        self._tokens += tokens
        self._steps += 1
        if len(self._losses) >= self._every_steps:
            self._report(lr, run_tokens, base, cause)

    def state_dict(self) -> dict[str, object]:
        return {"losses": list(self._losses), "tokens": self._tokens, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the counts of an earlier process; its speed is not kept."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._tokens, self._steps = 0, int(state["steps"])

    def _report(self, lr: float, run_tokens: int, base: str, cause: str) -> None:
        now_s = time.monotonic()
        mean = math.fsum(self._losses) / len(self._losses)
        tokens_per_s = self._tokens / max(now_s - self._since_s, 1e-9)
        self._tape.write(
            "step",
            cause,
            steps=self._steps,
            tokens=run_tokens,
            loss=mean,
            lr=lr,
            version=base or None,
            tokens_per_s=tokens_per_s,
        )
        where = f", base {base}" if base else ""
        _logger.info(
            "step %d: loss %.3f at %d tokens%s (%.0f tokens/s, lr %.2g)",
            *(self._steps, mean, run_tokens, where, tokens_per_s, lr),
        )
        self._losses, self._tokens, self._since_s = [], 0, now_s
