"""Handles SIGTERM and SIGINT as a request to end at the next step boundary.

The handler only sets a flag and writes one byte to a pipe: the interrupted thread may hold locks.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from dips.core.errors import INTERRUPTED, TERMINATED


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
