"""Frames that libzmq sends from the caller's memory, without a copy; and flags as plain numbers."""

from __future__ import annotations

import zmq

NOW = int(zmq.NOBLOCK)
NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Each operation on an enum of flags takes microseconds, and each chunk needs several."""

MOST_FRAMES, MOST_BYTES = 64, 16 << 20
"""That are kept. Bytes too: a payload may be memory of its own, which is kept with its frame."""


class Outgoing:
    """Makes such frames, and keeps them until there are most_frames or most_bytes, or until clear().

    When such a frame is given up, pyzmq's collector is notified: a thread wakes, takes the interpreter lock, and has
    driven the sender's code out of the caches when it sleeps again. Many that are given up at once wake it once.
    """

    def __init__(self, most_frames: int = MOST_FRAMES, most_bytes: int = MOST_BYTES) -> None:
        self._most_frames = most_frames
        self._most_bytes = most_bytes
        self._kept: list[zmq.Frame] = []
        self._kept_bytes = 0

    def frame(self, payload: memoryview) -> zmq.Frame:
        """To be sent with copy=False. The payload's bytes must stay as they are until the frame has left."""
        if len(self._kept) >= self._most_frames or self._kept_bytes + payload.nbytes > self._most_bytes:
            self.clear()
        frame = zmq.Frame(payload, copy=False, track=False)
        self._kept.append(frame)
        self._kept_bytes += payload.nbytes
        return frame

    def clear(self) -> None:
        """Give up those that are kept; libzmq keeps what has not left yet."""
        self._kept.clear()
        self._kept_bytes = 0
