"""Flow control of a transfer: one window of unanswered requests for each slave, and one budget over all slaves.

The budget is B = 2 x rate x smallest round trip, in bytes: enough to keep this side's link full while answers travel,
and at most as much again in queues. The rate is the bytes answered between sending a request and its answer, over that
time, so it grows with the budget until a link is full and stays there when only queues grow. A slave's window is four
times the product of its own rate and round trip: it may double its part of the budget. A slave may ask for less
(credit).

A transfer sends to its slaves in turn, as far as budget and windows allow: a slave that takes less than its part fills
its window and leaves the rest of the budget to the others.

The state is columns, and the rules are plain functions over them: the interpreter runs them over lists, compiled loops
inline them and run them over numpy arrays. So they raise nothing and use only what numba compiles. A slave is named by
its lane: its place in the schedule.

Pure: time is an argument.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

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

NONE = -1
"""No lane, no slot, no chunk."""

Ints = list[int]
Floats = list[float]
"""Columns. At run time lists, or one-dimensional numpy arrays of int64 and float64 (uint64 for checksums)."""

_Table = TypeVar("_Table", bound=NamedTuple)


def table(kind: type[_Table], n: int, arrays: bool, **given: list[int] | float | np.uint64) -> _Table:
    """The columns of `kind`, of n entries each: lists, or arrays. given: a column's whole numbers, or the value of all
    its entries, whose type is the array's; 0 in any other column."""
    columns: list[Any] = []
    for name in kind._fields:
        value = given.get(name, 0)
        if arrays:
            columns.append(np.array(value, np.int64) if isinstance(value, list) else np.full(n, value))
        elif isinstance(value, list):
            columns.append(value)
        else:
            columns.append([value.item() if isinstance(value, np.uint64) else value] * n)
    return kind._make(columns)


def column(values: list[Any], arrays: bool) -> Any:
    """Values that stand for themselves, as a table's column: the list, or an array."""
    return np.array(values) if arrays else values


class WindowRule(IntEnum):
    """How much may be in flight. MEASURED is the rule above; the others are what comparisons measure it against.

    EQUAL: the largest window to every slave at any time, without budget and credit. ONE_BY_ONE: the same, and a slave
    begins when the one before it has everything.
    """

    MEASURED = 0
    EQUAL = 1
    ONE_BY_ONE = 2


_MEASURED, _ONE_BY_ONE = int(WindowRule.MEASURED), int(WindowRule.ONE_BY_ONE)


class Windows(NamedTuple):
    """One entry for each lane."""

    window_bytes: Floats  # most bytes in flight
    bytes_per_s: Floats  # answered, over the round trip of each request
    round_trip_s: Floats  # the shortest one; infinite before the first
    credit_bytes: Floats  # what the slave allows; infinite while it has sent no credit
    answered_bytes: Ints
    bytes_in_flight: Ints
    n_in_flight: Ints
    open: Ints  # 0 once it is done


class Requests(NamedTuple):
    """One entry for each request in flight. Request r is in slot r modulo their number, a power of two."""

    request: Ints  # its number; 0: the slot is free
    lane: Ints
    chunk: Ints  # as the caller named it
    n_bytes: Ints  # of the chunk that travels with it or with its answer
    sent_s: Floats
    answered_by_lane: Ints  # bytes answered by its slave when it was sent
    answered_by_all: Ints


class Flow(NamedTuple):
    """The state of one transfer's flow control; counts and rates: of the transfer as a whole, by the names below."""

    windows: Windows
    requests: Requests
    counts: Ints
    rates: Floats


NEXT_REQUEST, BYTES_IN_FLIGHT, ANSWERED_BYTES, N_OPEN, CHUNK_BYTES, RULE = range(6)
"""Of counts."""

BYTES_PER_S, LONGEST_TRIP_S, BUDGET_BYTES, FAIR_BYTES, CAP_BYTES = range(5)
"""Of rates. LONGEST_TRIP_S: the longest of the slaves' shortest round trips. FAIR_BYTES: what a window has at least,
CAP_BYTES: at most."""


def flow_of(
    n_lanes: int, chunk_bytes: int, cap_chunks: int, most_in_flight: int, *, rule: WindowRule = WindowRule.MEASURED,
    arrays: bool = False,
) -> Flow:  # fmt: skip
    """A new transfer's flow control. cap_chunks: largest window, in full chunks.

    most_in_flight: requests in flight at the same time, to all slaves together. More must never be sent.
    """
    unknown = {"round_trip_s": math.inf, "credit_bytes": math.inf}
    windows = table(Windows, n_lanes, arrays, window_bytes=0.0, bytes_per_s=0.0, open=1, **unknown)
    n_slots = 1 << (2 * most_in_flight - 1).bit_length()  # at most half are taken, so that the next free one is near
    requests = table(Requests, n_slots, arrays, sent_s=0.0)
    budget_bytes = float(START_CHUNKS * chunk_bytes) if rule is WindowRule.MEASURED else math.inf
    counts = column([1, 0, 0, n_lanes, chunk_bytes, int(rule)], arrays)
    rates = column([0.0, 0.0, budget_bytes, 0.0, float(cap_chunks * chunk_bytes)], arrays)
    flow = Flow(windows, requests, counts, rates)
    _size_all(flow)
    return flow


def budget_left(flow: Flow) -> bool:
    """Whether one more request may go to some slave."""
    return flow.counts[BYTES_IN_FLIGHT] < flow.rates[BUDGET_BYTES]


def window_left(flow: Flow, lane: int) -> bool:
    """Whether this slave's window takes one more request."""
    windows = flow.windows
    return windows.bytes_in_flight[lane] < windows.window_bytes[lane] and windows.n_in_flight[lane] < MOST_REQUESTS


def note_sent(flow: Flow, lane: int, chunk: int, n_bytes: int, now_s: float) -> int:
    """A request is sent to this slave: the slot that holds it. n_bytes: as in Requests."""
    windows, requests, counts = flow.windows, flow.requests, flow.counts
    number, mask = counts[NEXT_REQUEST], len(requests.request) - 1
    while requests.request[number & mask] != 0:
        number += 1  # an older request is still in the slot of this number: a number that is never sent
    slot = number & mask
    counts[NEXT_REQUEST] = number + 1
    requests.request[slot] = number
    requests.lane[slot] = lane
    requests.chunk[slot] = chunk
    requests.n_bytes[slot] = n_bytes
    requests.sent_s[slot] = now_s
    requests.answered_by_lane[slot] = windows.answered_bytes[lane]
    requests.answered_by_all[slot] = counts[ANSWERED_BYTES]
    windows.n_in_flight[lane] += 1
    windows.bytes_in_flight[lane] += n_bytes
    counts[BYTES_IN_FLIGHT] += n_bytes
    return slot


def slot_of(flow: Flow, lane: int, request: int) -> int:
    """The slot of a request that is in flight to this slave; NONE for any other number."""
    requests = flow.requests
    slot = request & (len(requests.request) - 1)
    if request > 0 and requests.request[slot] == request and requests.lane[slot] == lane:
        return slot
    return NONE


def note_answered(flow: Flow, slot: int, now_s: float, credit: int) -> None:
    """An answer came, of any kind; the slot is free. credit: chunks that the slave allows from now on; 0: not
    stated."""
    windows, requests, counts, rates = flow.windows, flow.requests, flow.counts, flow.rates
    lane, n_bytes = requests.lane[slot], requests.n_bytes[slot]
    requests.request[slot] = 0
    if credit > 0:
        windows.credit_bytes[lane] = float(credit) * float(counts[CHUNK_BYTES])
    windows.n_in_flight[lane] -= 1
    windows.bytes_in_flight[lane] -= n_bytes
    counts[BYTES_IN_FLIGHT] -= n_bytes
    took_s = max(now_s - requests.sent_s[slot], LEAST_TRIP_S)
    if took_s < windows.round_trip_s[lane]:
        windows.round_trip_s[lane] = took_s
        longest_s = took_s
        for trip_s in windows.round_trip_s:
            if longest_s < trip_s < math.inf:
                longest_s = trip_s
        rates[LONGEST_TRIP_S] = longest_s
    if n_bytes:
        windows.answered_bytes[lane] += n_bytes
        sample = (windows.answered_bytes[lane] - requests.answered_by_lane[slot]) / took_s
        windows.bytes_per_s[lane] = _measured(windows.bytes_per_s[lane], sample)
        counts[ANSWERED_BYTES] += n_bytes
        sample = (counts[ANSWERED_BYTES] - requests.answered_by_all[slot]) / took_s
        rates[BYTES_PER_S] = _measured(rates[BYTES_PER_S], sample)
        if counts[RULE] == _MEASURED:
            needed_bytes = BUDGET_HEADROOM * rates[BYTES_PER_S] * rates[LONGEST_TRIP_S]
            least_bytes = float(START_CHUNKS * counts[CHUNK_BYTES])
            rates[BUDGET_BYTES] = needed_bytes if needed_bytes > least_bytes else least_bytes
    _size(flow, lane)


def note_lost(flow: Flow, lane: int) -> None:
    """Forget the requests in flight to this slave, and begin with a new window."""
    windows = flow.windows
    _forget(flow, lane)
    windows.bytes_per_s[lane] = 0.0
    windows.answered_bytes[lane] = 0
    windows.credit_bytes[lane] = math.inf
    _size(flow, lane)


def note_done(flow: Flow, lane: int) -> None:
    """This slave is finished: its part of the budget is for the others."""
    _forget(flow, lane)
    flow.windows.open[lane] = 0
    n_open = 0
    for is_open in flow.windows.open:
        n_open += is_open
    flow.counts[N_OPEN] = n_open
    _size_all(flow)


# ---- parts ----


def _forget(flow: Flow, lane: int) -> None:
    windows, requests = flow.windows, flow.requests
    if windows.n_in_flight[lane]:
        for slot in range(len(requests.request)):
            if requests.lane[slot] == lane:
                requests.request[slot] = 0
    flow.counts[BYTES_IN_FLIGHT] -= windows.bytes_in_flight[lane]
    windows.bytes_in_flight[lane] = 0
    windows.n_in_flight[lane] = 0


def _measured(bytes_per_s: float, sample: float) -> float:
    slower = bytes_per_s + FORGETTING * (sample - bytes_per_s)
    return sample if sample > slower else slower


def _size_all(flow: Flow) -> None:
    fair_chunks = max(LEAST_CHUNKS, START_CHUNKS // max(1, flow.counts[N_OPEN]))
    flow.rates[FAIR_BYTES] = float(fair_chunks * flow.counts[CHUNK_BYTES])
    for lane in range(len(flow.windows.open)):
        _size(flow, lane)


def _size(flow: Flow, lane: int) -> None:
    """Set a window: as much as the slave's link needs, at least its part of the budget, at most its credit."""
    windows, counts, rates = flow.windows, flow.counts, flow.rates
    cap_bytes = rates[CAP_BYTES]
    if counts[RULE] != _MEASURED:
        windows.window_bytes[lane] = cap_bytes
        for before in range(lane):
            if counts[RULE] == _ONE_BY_ONE and windows.open[before]:
                windows.window_bytes[lane] = 0.0
        return
    answered_bytes, size_bytes = windows.answered_bytes[lane], rates[FAIR_BYTES]
    if answered_bytes:
        size_bytes = max(size_bytes, WINDOW_HEADROOM * windows.bytes_per_s[lane] * windows.round_trip_s[lane])
    if answered_bytes < LEAST_CHUNKS * counts[CHUNK_BYTES]:
        # The first answers show the delay, not the rate. Half of START_CHUNKS: a slow slave must not hold all.
        size_bytes = max(size_bytes, float(START_CHUNKS // 2 * counts[CHUNK_BYTES]))
    windows.window_bytes[lane] = max(1.0, min(size_bytes, cap_bytes, windows.credit_bytes[lane]))


STEPS = (
    budget_left, window_left, note_sent, slot_of, note_answered, note_lost, note_done, _forget, _measured, _size_all,
    _size,
)  # fmt: skip
"""All functions that a compiled loop inlines."""
