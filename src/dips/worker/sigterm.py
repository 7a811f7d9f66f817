"""Handles SIGTERM in a user's training loop: the cluster leaves the run in order before the process ends.

A library must not take signals from its user: the handler is installed only in the main thread and only in place of the
default handler, which is put back afterwards. A second SIGTERM changes nothing, since launchers send one to a whole
group and then to each process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Sigterm:
    """The handler. `received` is called inside it, once, and must be safe there."""

    def __init__(self, received: Callable[[], None]) -> None:
        self._received = received
        self._installed = False
        self.caught = False

    def install(self) -> None:
        """Install the handler; does nothing outside the main thread, or where the program handles SIGTERM."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def give_back(self) -> None:
        """Put the default handler back, unless another handler has replaced this one. May be called twice."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.caught:
            self.caught = True
            self._received()
