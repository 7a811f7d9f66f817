"""Clocks, which are passed to the code that needs the time, so that a test can run it under a clock of its own.

Only adapters read a clock; state machines get `now_s` as an argument. Never used to order events between
processes: monotonic clocks of two processes have nothing in common.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The time in seconds, in two forms: `monotonic_s` for intervals and deadlines, `wall_s` (Unix time) for people."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
