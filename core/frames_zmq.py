"""Frames that libzmq sends from the memory of somebody else, without a copy."""

from __future__ import annotations

import zmq


class Outgoing:
    """Makes them, and keeps them until `most` are kept, or until clear().

    When such a frame is given up, pyzmq's collector is told: a thread that wakes, takes the interpreter lock, and has
    driven the sender's code out of the caches when it sleeps again. Given up one by one they cost as much as a quarter
    of the sender's work (benchmarks/bench_transfer.py); given up many at once, next to nothing. Keeps the memory of
    the payloads alive, too.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[zmq.Frame] = []

    def frame(self, payload: memoryview) -> zmq.Frame:
        """To be sent with copy=False. The payload's bytes must stand until the frame has left."""
        if len(self._kept) >= self._most:
            self._kept.clear()
        frame = zmq.Frame(payload, copy=False, track=False)
        self._kept.append(frame)
        return frame

    def clear(self) -> None:
        """Give up those that are kept; libzmq keeps what has not left yet."""
        self._kept.clear()
