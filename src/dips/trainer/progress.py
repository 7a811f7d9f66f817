"""Reports a training loop's progress: a log line and a record on the tape every few steps."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from dips.core.errors import INTERRUPTED, TERMINATED
from dips.core.observe.tape import Tape

# ---- signals ---------------------------------------------------------------------------------------------------------
#
# Handles SIGTERM and SIGINT as a request to end at the next step boundary.
#
# The handler only sets a flag and writes one byte to a pipe: the interrupted thread may hold locks.


class StopSignals:
    """While entered, the first SIGTERM or SIGINT sets `caught`; a second SIGINT is an ordinary KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, it only waits.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._received: Callable[[], None] | None = None
        self._before: dict[signal.Signals, object] = {}
        self._reader, self._writer = os.pipe()

    @property
    def exit_code(self) -> int:
        """128 + the signal that was caught, as in shells; 0 if none was."""
        return {None: 0, signal.SIGINT: INTERRUPTED}.get(self.caught, TERMINATED)

    def when_received(self, action: Callable[[], None]) -> None:
        """Call `action` inside the handler, or now if a signal was caught already; it must be safe there."""
        self._received = action
        if self.caught is not None:
            action()

    def another_rank_was_told(self) -> None:
        """Another rank of this cluster got a signal, which counts as a SIGTERM to this one where it got none."""
        self.caught = self.caught or signal.SIGTERM

    @contextlib.contextmanager
    def ending_the_process(self) -> Iterator[None]:
        """Until the end of this context a signal ends the process: in torch's own waits no handler would run."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._handle)

    def wait(self, timeout_s: float) -> bool:
        """Wait, at most until a signal comes. Returns whether one has come."""
        if self.caught is None and timeout_s > 0:
            select.select([self._reader], [], [], timeout_s)
        return self.caught is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.caught = signal.Signals(number)
        os.write(self._writer, b"!")
        if self._received is not None:
            self._received()


# ---- slowdown --------------------------------------------------------------------------------------------------------
#
# Emulates a cluster of slower hardware: computes a wait after each step.
#
# For trying out unequal clusters on one machine. The wait is part of the step: a measurement of this cluster's speed
# must include it.


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


# ---- progress --------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("dips.trainer")


class StepReports:
    """Collects losses and reports their mean, in nats per byte, every `every_steps` steps."""

    def __init__(self, every_steps: int, tape: Tape | None = None) -> None:
        self.tape = tape
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
        if self.tape is not None:
            self.tape.write(
                "step", cause, steps=self._steps, tokens=run_tokens, loss=mean, lr=lr, version=base or None,
                tokens_per_s=tokens_per_s,
            )  # fmt: skip
        where = f", base {base}" if base else ""
        _logger.info(
            "step %d: loss %.3f at %d tokens%s (%.0f tokens/s, lr %.2g)",
            *(self._steps, mean, run_tokens, where, tokens_per_s, lr),
        )
        self._losses, self._tokens, self._since_s = [], 0, now_s
