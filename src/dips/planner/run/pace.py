"""Keeps a plan's times on a real clock: how long each operation of a rank takes, and when its input arrives.

An operation starts when its rank has reached it and its input has arrived, does its real work, and ends when its
planned time is over (later only if the work took longer). Knows no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from dips.planner.run.cells import Cell, Cells
from dips.planner.run.job import Iteration, PlanJob, RankLink, Sent
from dips.planner.run.links import BACK, FORTH, NO_NOTE, LinkBoard

T = TypeVar("T")
LOOK_AGAIN_NS = 50_000
_UNTIMED = -1


class WaitingClock(Protocol):
    """A clock that can be waited on."""

    def now_ns(self) -> int: ...

    def wait_until(self, ns: int) -> None: ...


class SystemWaits:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, ns: int) -> None:
        while (left := ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)


class RankPace:
    """Keeps the times of one rank. Before begin() nothing waits and nothing is recorded."""

    def __init__(
        self,
        job: PlanJob,
        cells: Cells,
        rank: int,
        board: LinkBoard,
        waits: WaitingClock,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """settle: waits until the device has finished its work."""
        self._cells, self._rank, self._board, self._waits, self._settle = cells, rank, board, waits, settle
        self._lasts = {
            (stage, kind): ns
            for stage, (f, d, w) in enumerate(job.lasts_ns)
            for kind, ns in (("F", f), ("I", d), ("W", w), ("B", d + w))
        }
        self._links: Mapping[tuple[int, int], RankLink] = {(link.source, link.target): link for link in job.links}
        self._iteration = _UNTIMED
        self._times: list[tuple[int, int]] = []
        self._ended: dict[Cell, int] = {}
        self._sent: list[Sent] = []

    def begin(self, iteration: int) -> None:
        """The next operations belong to this timed iteration."""
        self._iteration = iteration
        self._times, self._sent, self._ended = [], [], {}

    def finish(self) -> Iteration:
        """The times that were recorded since begin()."""
        self._iteration = _UNTIMED
        return Iteration(tuple(self._times), tuple(self._sent))

    def run(self, cell: Cell, work: Callable[[], T]) -> T:
        """Do an operation's real work in its planned time."""
        if self._iteration == _UNTIMED:
            return work()
        self._wait_for_input(cell)
        start_ns = self._waits.now_ns()
        result = work()
        self._settle()
        self._waits.wait_until(start_ns + self._lasts[cell.stage, cell.kind])
        end_ns = self._waits.now_ns()
        self._times.append((start_ns, end_ns))
        self._ended[cell] = end_ns
        return result

    def send(self, cell: Cell) -> None:
        """Send the message of an operation."""
        if self._iteration == _UNTIMED:
            return
        ready_ns = self._ended[cell]
        direction, stage = (FORTH, cell.stage + 1) if cell.kind == "F" else (BACK, cell.stage - 1)
        target = self._cells.rank_of_stage[stage]
        link = self._links.get((self._rank, target))
        if link is None:
            self._sent.append(Sent(str(cell), target, ready_ns, ready_ns, ready_ns, ready_ns))
            return
        found = self._board.send(self._iteration, link, direction, stage, cell.microbatch, ready_ns)
        self._sent.append(Sent(str(cell), target, ready_ns, found.start_ns, found.freed_ns, found.arrives_ns))

    def _wait_for_input(self, cell: Cell) -> None:
        """Wait for the planned arrival: the bytes may be here long before a slow link would have delivered them."""
        last = self._cells.n_stages - 1
        if cell.kind == "W" or cell.stage == (0 if cell.kind == "F" else last):
            return
        direction, before = (FORTH, cell.stage - 1) if cell.kind == "F" else (BACK, cell.stage + 1)
        if (self._cells.rank_of_stage[before], self._rank) not in self._links:
            return
        # When receiving does not wait for the device, the note can be written after this check.
        note = (self._iteration, direction, cell.stage, cell.microbatch)
        while (arrives_ns := self._board.arrives_ns(*note)) == NO_NOTE:
            self._waits.wait_until(self._waits.now_ns() + LOOK_AGAIN_NS)
        self._waits.wait_until(arrives_ns)
