"""Sends a push from the model's own memory, as long as no training changes it.

While the training loop waits for its push, a copy would equal the parameters. freeze() replaces them by a copy before
training goes on. Frames that the socket has not sent by then may be overwritten: their checksums were taken before, so
a slave refuses such a chunk and it is sent again, from the copy.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import LocalProtocolError
from dips.worker.wire import bytes_of

F32 = NDArray[np.float32]


class Live:
    """The parameters, one flat array after the other in layout order. A reader holds `lock`."""

    def __init__(self, parts: Sequence[F32]) -> None:
        self._parts = [bytes_of(part) for part in parts]
        self._starts = list(accumulate((part.nbytes for part in self._parts), initial=0))
        self._copy: memoryview | None = None
        self._ended = False
        self.lock = threading.Lock()

    def freeze(self, copy: F32) -> None:
        """Read from this equal vector from now on. The parameters may change as soon as this returns."""
        with self.lock:
            self._copy = bytes_of(copy).data

    def end(self) -> None:
        """Forbid further reads, so that a transfer that was given up sends no half changed bytes."""
        with self.lock:
            self._ended = True

    def bytes_at(self, here: slice) -> memoryview:
        """These bytes of the flat vector; the caller holds the lock. A copy where they span several parts.

        Raises LocalProtocolError after end().
        """
        if self._ended:
            raise LocalProtocolError("the push was given up while it was sent")
        if self._copy is not None:
            return self._copy[here]
        first = bisect_right(self._starts, here.start) - 1
        begin = here.start - self._starts[first]
        if here.stop <= self._starts[first + 1]:
            return self._parts[first].data[begin : begin + here.stop - here.start]
        whole, filled = np.empty(here.stop - here.start, np.uint8), 0
        while filled < whole.size:
            piece = self._parts[first][begin : begin + whole.size - filled]
            whole[filled : filled + piece.size] = piece
            first, begin, filled = first + 1, 0, filled + piece.size
        return whole.data
