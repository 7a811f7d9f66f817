"""Flow control of a transfer: one window of unanswered requests for each slave, and one budget over all slaves.

The budget is B = 2 x rate x smallest round trip, in bytes: enough to keep this side's link full while answers travel,
and at most as much again in queues. The rate is the bytes answered between sending a request and its answer, over that
time, so it grows with the budget until a link is full and stays there when only queues grow. A slave's window is four
times the product of its own rate and round trip: it may double its part of the budget. A slave may ask for less
(credit).

A transfer sends to its slaves in turn, as far as budget and windows allow: a slave that takes less than its part fills
its window and leaves the rest of the budget to the others.

Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

START_CHUNKS = 16
"""Chunks in flight before a rate is known: they fill 1 Gbit/s over 130 ms with chunks of 1 MiB, and 16 MiB are not much
to buffer. Also the least budget of all slaves together, for links without delay."""

LEAST_CHUNKS = 4
"""Least window of one slave: one chunk on its way there, one landing, one answer on its way back, one spare."""

MOST_REQUESTS = 512
"""Most requests unanswered by one slave, however small they are: queues on the way count messages."""

BUDGET_HEADROOM = 2.0
WINDOW_HEADROOM = 4.0
"""Factors on rate x round trip. A rate can only be measured to double in a round trip if twice as much is sent; a
window needs twice the budget's headroom, or a slave's part of the budget could never change."""

FORGETTING = 0.1
"""A lower rate is taken over by this share with each answer, a higher one at once: bursts must not reduce it."""

LEAST_TRIP_S = 1e-6


@dataclass(slots=True)
class _Meter:
    """Measures bytes answered a second, over the round trip of each request."""

    answered_bytes: int = 0
    per_s: float = 0.0

    def count(self, n_bytes: int, answered_at_sending: int, took_s: float) -> None:
        self.answered_bytes += n_bytes
        sample = (self.answered_bytes - answered_at_sending) / took_s
        self.per_s = max(sample, self.per_s + FORGETTING * (sample - self.per_s))


@dataclass(slots=True)
class _Lane:
    """One slave's state."""

    window_bytes: float
    meter: _Meter = field(default_factory=_Meter)
    # (bytes, sent at, bytes answered by this slave before, by all before) by request
    in_flight: dict[int, tuple[int, float, int, int]] = field(default_factory=dict)
    bytes_in_flight: int = 0
    round_trip_s: float = math.inf
    credit_bytes: float = math.inf  # what the slave allows; infinite while it has sent no credit
    open: bool = True


class FlowControl:
    """Keeps the windows of one transfer. slaves: those that take part; cap_chunks: largest window, in full chunks."""

    def __init__(self, slaves: Iterable[str], chunk_bytes: int, cap_chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._cap_bytes = cap_chunks * chunk_bytes
        self._lanes = {slave: _Lane(0.0) for slave in slaves}
        self._all = _Meter()
        self._bytes_in_flight = 0
        self._longest_trip_s = 0.0
        self._n_open = len(self._lanes)
        self._budget_bytes = float(START_CHUNKS * chunk_bytes)
        self._resize()

    def may_send(self, slave: str) -> bool:
        """Whether one more request may go to this slave now."""
        lane = self._lanes[slave]
        return (
            lane.bytes_in_flight < lane.window_bytes
            and self._bytes_in_flight < self._budget_bytes
            and len(lane.in_flight) < MOST_REQUESTS
        )

    def sent(self, slave: str, request: int, n_bytes: int, now_s: float) -> None:
        """A request was sent to this slave; n_bytes: of the chunk that travels with it or with its answer."""
        lane = self._lanes[slave]
        lane.in_flight[request] = (n_bytes, now_s, lane.meter.answered_bytes, self._all.answered_bytes)
        lane.bytes_in_flight += n_bytes
        self._bytes_in_flight += n_bytes

    def answered(self, slave: str, request: int, now_s: float, credit: int = 0) -> None:
        """An answer came, of any kind. credit: chunks that the slave allows from now on; 0: not stated."""
        lane = self._lanes[slave]
        if credit:
            lane.credit_bytes = credit * self.chunk_bytes
        sent = lane.in_flight.pop(request, None)
        if sent is not None:
            n_bytes, sent_s, by_slave, by_all = sent
            lane.bytes_in_flight -= n_bytes
            self._bytes_in_flight -= n_bytes
            took_s = max(now_s - sent_s, LEAST_TRIP_S)
            if took_s < lane.round_trip_s:
                lane.round_trip_s = took_s
                self._longest_trip_s = max(a.round_trip_s for a in self._lanes.values() if a.round_trip_s < math.inf)
            if n_bytes:
                lane.meter.count(n_bytes, by_slave, took_s)
                self._all.count(n_bytes, by_all, took_s)
                self._budget_bytes = max(
                    START_CHUNKS * self.chunk_bytes, BUDGET_HEADROOM * self._all.per_s * self._longest_trip_s
                )
        self._size(lane)

    def lost(self, slave: str) -> None:
        """Forget the requests in flight to this slave, and begin with a new window."""
        lane = self._lanes[slave]
        self._bytes_in_flight -= lane.bytes_in_flight
        self._lanes[slave] = _Lane(0.0, round_trip_s=lane.round_trip_s, open=lane.open)
        self._size(self._lanes[slave])

    def done(self, slave: str) -> None:
        """This slave is finished: its part of the budget is for the others."""
        lane = self._lanes[slave]
        self._bytes_in_flight -= lane.bytes_in_flight
        lane.in_flight.clear()
        lane.bytes_in_flight = 0
        lane.open = False
        self._resize()

    def round_trip_s(self, slave: str) -> float | None:
        """The shortest time from a request to its answer; None before the first one."""
        shortest_s = self._lanes[slave].round_trip_s if slave in self._lanes else math.inf
        return shortest_s if shortest_s < math.inf else None

    def in_flight_bytes(self, slave: str) -> int:
        """Bytes in flight to this slave."""
        return self._lanes[slave].bytes_in_flight

    def open_slaves(self) -> Iterator[str]:
        """Slaves that are not done, in the schedule's order."""
        return (slave for slave, lane in self._lanes.items() if lane.open)

    def window_bytes(self, slave: str) -> float:
        """Most bytes in flight to this slave."""
        return self._lanes[slave].window_bytes

    @property
    def budget_bytes(self) -> float:
        """Most bytes in flight to all slaves together."""
        return self._budget_bytes

    # ---- parts ----

    def _resize(self) -> None:
        self._n_open = sum(lane.open for lane in self._lanes.values())
        for lane in self._lanes.values():
            self._size(lane)

    def _size(self, lane: _Lane) -> None:
        """Set a window: as much as the slave's link needs, at least its part of the budget, at most its credit."""
        fair = max(LEAST_CHUNKS, START_CHUNKS // max(1, self._n_open)) * self.chunk_bytes
        needed = WINDOW_HEADROOM * lane.meter.per_s * lane.round_trip_s if lane.meter.answered_bytes else 0.0
        if lane.meter.answered_bytes < LEAST_CHUNKS * self.chunk_bytes:
            # The first answers show the delay, not the rate. Half of START_CHUNKS: a slow slave must not hold all.
            needed = max(needed, START_CHUNKS // 2 * self.chunk_bytes)
        lane.window_bytes = max(1.0, min(max(fair, needed), self._cap_bytes, lane.credit_bytes))
