"""Decides when to close data-port connections, so that no peer fills this process's memory or its file table.

libzmq bounds the size of a frame and the number of whole messages that wait, not the number of frames of one message:
a message that never ends grows in memory that only libzmq sees. This module can see how much memory the process uses,
how many bytes each connection sent, and which connections delivered a whole message. Connections that send bytes and
deliver no message are closed when a budget is reached. A healthy one among them connects again by itself and sends what
was lost (docs/budgets.md). Pure: the numbers and the time are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

LEAST_BYTES = 256
"""An idle connection sends fewer bytes than this in many minutes: its greeting and its heartbeats."""

SETTLE_S = 1.0
"""Another thread frees the memory of closed connections and returns it to the system within this time."""

QUIET_S = 60.0
"""When closing all connections did not help, the memory is not theirs; it is tried again after this time."""

FILES_SHARE = 0.8
"""Share of the files that this process may open, connections included; the rest is for the disk."""


@dataclass(frozen=True)
class Pressure:
    """The process's use of memory and files. memory_bytes: private memory of this process (without mapped files).

    headroom_bytes: how far below the limit connections begin to be watched. n_files: open now, of most_files.
    """

    memory_bytes: int
    limit_bytes: int
    headroom_bytes: int
    n_files: int
    most_files: int

    @property
    def near(self) -> bool:
        """Whether a budget is so near that connections must be watched."""
        files_near = self.n_files > FILES_SHARE / 2 * self.most_files
        return files_near or self.memory_bytes > self.limit_bytes - self.headroom_bytes

    @property
    def files_over(self) -> bool:
        return self.n_files > FILES_SHARE * self.most_files

    @property
    def over(self) -> bool:
        return self.files_over or self.memory_bytes > self.limit_bytes

    def sentence(self) -> str:
        if self.files_over:
            return f"{self.n_files} of the {self.most_files} files that this slave may open are in use"
        return f"this slave has {self.memory_bytes} bytes of memory, its budget is {self.limit_bytes}"


@dataclass(frozen=True)
class Cut:
    """Connections to close, by their keys; None: all of them. sentence: why, for the log and the master."""

    connections: tuple[int, ...] | None
    sentence: str


class ConnectionLimits:
    """Watches connections from the moment that a budget is near until it is far again."""

    def __init__(self) -> None:
        self._watching = False
        self._at_first: dict[int, int] = {}
        self._delivered: set[int] = set()
        self._last_cut_s = -math.inf
        self._all_cut_s: float | None = None
        self._all_cut_bytes = 0

    def look(
        self, pressure: Pressure, received: Mapping[int, int], delivered: Collection[int], now_s: float
    ) -> Cut | None:
        """The connections to close now; None: none.

        received: bytes that each connection sent so far, by its key; delivered: the keys of those that delivered a
        whole message since the last call. Both may be empty while no budget is near.
        """
        if not pressure.near:
            self._watching = False
            return None
        just_begun = not self._watching
        self._note(received, delivered)
        if not pressure.over:
            self._all_cut_s = None
            return None
        if self._rests(pressure, now_s):
            return None
        least = 0 if pressure.files_over else LEAST_BYTES
        suspects = tuple(
            key for key in received if key not in self._delivered and self._brought(key, received) >= least
        )
        if suspects:
            self._last_cut_s = now_s
            return Cut(suspects, f"{pressure.sentence()}: cut {len(suspects)} connections that delivered nothing")
        if just_begun or self._settles(now_s):  # which connection fills the memory shows between two calls
            return None
        self._all_cut_s, self._all_cut_bytes = now_s, pressure.memory_bytes
        return Cut(None, f"{pressure.sentence()}: cut all {len(received)} connections, since none is suspect")

    def _note(self, received: Mapping[int, int], delivered: Collection[int]) -> None:
        """Begin to watch, or go on: a connection that opens later is watched from its first byte."""
        known = self._at_first if self._watching else received
        self._at_first = {key: known.get(key, 0) for key in received}
        before = self._delivered if self._watching else set()
        self._delivered = {key for key in received if key in before or key in delivered}
        self._watching = True

    def _brought(self, key: int, received: Mapping[int, int]) -> int:
        return received[key] - self._at_first[key]

    def _rests(self, pressure: Pressure, now_s: float) -> bool:
        """After all connections were closed: memory that is still over budget is not theirs, unless it grows."""
        if self._all_cut_s is None:
            return False
        if pressure.files_over:
            return now_s - self._all_cut_s < SETTLE_S
        grew = pressure.memory_bytes > self._all_cut_bytes + pressure.headroom_bytes
        return not grew and now_s - self._all_cut_s < QUIET_S

    def _settles(self, now_s: float) -> bool:
        """Whether the memory of the connections that were closed last may not be free yet."""
        last_s = self._last_cut_s if self._all_cut_s is None else max(self._last_cut_s, self._all_cut_s)
        return now_s - last_s < SETTLE_S
