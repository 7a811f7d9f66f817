"""SIGTERM in a user's training loop: taken for a wish to leave in order, and its end of the process only put off.

A library must not take signals from its user: the handler is installed in the main thread alone, where no handler but
the default one stands, and is given back. A second SIGTERM changes nothing, as launchers send one to a whole group and
then to each process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Sigterm:
    """`received` is called inside the handler, once; it must be safe there."""

    def __init__(self, received: Callable[[], None]) -> None:
        self._received = received
        self._installed = False
        self.caught = False

    def install(self) -> None:
        """Nothing happens outside the main thread, and where somebody else handles SIGTERM."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def give_back(self) -> None:
        """Put the default handler back, unless somebody else has put theirs in place of ours. May be called twice."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.caught:
            self.caught = True
            self._received()
