"""Emulates links: computes when a message from one rank arrives at another.

The planner's convention (docs/planner.md): a message starts when its producer has ended and its link is free,
occupies the link for busy_ns and arrives latency_ns later; the sender does not wait. So a message itself is sent at
once, with a note of its arrival time, until which the receiver waits. Notes and the times at which links are free are
in one file that all ranks map, because several ranks may send over one link. They are times of the
monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from dips.planner.run.job import RankLink

NO_NOTE = 0
FORTH, BACK = 0, 1
"""Messages to the next stage (of forward passes) and to the one before (gradients)."""


class Passage(NamedTuple):
    """A message on its link, which it occupies in [start_ns, freed_ns). free_ns: when the link takes the next one."""

    start_ns: int
    freed_ns: int
    arrives_ns: int
    free_ns: int


def passage(ready_ns: int, free_ns: int, link: RankLink) -> Passage:
    """The passage of a message whose producer ended at ready_ns, on a link that is free from free_ns on."""
    if not (link.busy_ns or link.hold_ns):
        return Passage(ready_ns, ready_ns, ready_ns + link.latency_ns, free_ns)
    start_ns = max(ready_ns, free_ns)
    freed_ns = start_ns + link.busy_ns
    return Passage(start_ns, freed_ns, freed_ns + link.latency_ns, freed_ns + link.hold_ns)


class LinkBoard:
    """The file that the ranks share. One iteration has its own links and notes: nothing is ever reset."""

    def __init__(self, file: Path, n_iterations: int, n_links: int, n_stages: int, n_microbatches: int) -> None:
        """Open the file that make() wrote. n_links: one more than the highest number of a link."""
        self._lock = os.open(file, os.O_RDWR)
        n_free, notes = n_iterations * n_links, (n_iterations, 2, n_stages, n_microbatches)
        whole = np.memmap(file, np.int64, "r+", shape=(n_free + int(np.prod(notes)),))
        self._free = whole[:n_free].reshape(n_iterations, n_links)
        self._notes = whole[n_free:].reshape(notes)

    @staticmethod
    def make(file: Path, n_iterations: int, n_links: int, n_stages: int, n_microbatches: int) -> None:
        """Make the file: all links are free, no message is on its way."""
        file.write_bytes(bytes(8 * n_iterations * (n_links + 2 * n_stages * n_microbatches)))

    def __enter__(self) -> LinkBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def send(
        self, iteration: int, link: RankLink, direction: int, stage: int, microbatch: int, ready_ns: int
    ) -> Passage:
        """Take the link for a message to `stage`, and leave the note of its arrival."""
        with self._locked():
            found = passage(ready_ns, int(self._free[iteration, link.resource]), link)
            self._free[iteration, link.resource] = found.free_ns
        self._notes[iteration, direction, stage, microbatch] = found.arrives_ns
        return found

    def arrives_ns(self, iteration: int, direction: int, stage: int, microbatch: int) -> int:
        """When the message to `stage` arrives; NO_NOTE while it was not sent."""
        return int(self._notes[iteration, direction, stage, microbatch])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
