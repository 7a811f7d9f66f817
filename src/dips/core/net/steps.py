"""What a transfer does for each chunk: which one is next, to which slave, and what an answer changes.

The state is columns, and the steps are plain functions over them, as in core/net/flow.py: core/net/transfer.py takes
them in the interpreter, and compiled loops inline them. Everything unusual is decided in core/net/transfer.py, over the
same columns.

A slave is named by its lane, a chunk by its place in the columns: lane by lane, each lane's in the order of the digest,
(block, offset). A chunk that is not moved is either in flight or still to do, never both.

Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dips.core.layout import Chunk
from dips.core.net.flow import (
    MOST_REQUESTS,
    NONE,
    Floats,
    Flow,
    Ints,
    WindowRule,
    budget_left,
    column,
    flow_of,
    note_answered,
    note_done,
    note_sent,
    table,
    window_left,
)

MAX_SILENCE_S = 60.0

FIRST_PAUSE_S = 0.005
"""First pause after a refusal. A ticket often reaches the worker a millisecond or two before the slave is informed."""

QUERY = NONE
"""In place of a chunk: a query for the missing chunks."""


class Lanes(NamedTuple):
    """One entry for each slave that has chunks, in the order of the schedule."""

    first: Ints  # its first chunk
    n_chunks: Ints
    n_moved: Ints
    next_todo: Ints  # where its chunks to do begin in its part of Chunks.todo
    n_todo: Ints
    query: Ints  # the number of the query in flight; 0: none
    must_query: Ints  # 1: nothing is sent before a query
    carried_bytes: Ints  # over the link, now
    resumed_bytes: Ints  # there before
    silences: Ints  # in a row
    last_word_s: Floats
    silence_s: Floats  # how long it may answer nothing
    resume_at_s: Floats  # nothing is sent before
    pause_s: Floats  # after the next refusal
    unknown_since_s: Floats
    away_since_s: Floats
    in_turn: Ints  # lanes in the order of their turns; not of this lane
    begun: Floats  # the begun part of the lane in in_turn


class Chunks(NamedTuple):
    """One entry for each chunk."""

    block: Ints
    offset_bytes: Ints
    length_bytes: Ints
    moved: Ints  # 1: the other side has confirmed it
    checksum: Ints
    known: Ints  # 1: its checksum is known
    todo: Ints  # chunks to do: a ring in each lane's part


class Columns(NamedTuple):
    """The state of one transfer; counts and times: of the transfer as a whole, by the names below."""

    flow: Flow
    lanes: Lanes
    chunks: Chunks
    counts: Ints
    times: Floats


PUSHES, N_TURNS, TURN, N_NEXT_TURNS, IS_SHARE = range(5)
"""Of counts. PUSHES: 1 for a push, 0 for a pull. IS_SHARE: 1 where the transfer has only some of the slaves' chunks and
other ranks carry the rest, so that a slave of a push is done when it has ours. The others: see next_request()."""

PROGRESS_S, ASKED_S, SILENCE_S, STALL_S = range(4)
"""Of times. PROGRESS_S: when a chunk was moved last. ASKED_S: when it was last decided what to send. SILENCE_S,
STALL_S: settings."""


def columns_of(
    shares: Sequence[Sequence[Chunk]], now_s: float, *, pushes: bool, is_share: bool, chunk_bytes: int, window_chunks:
    int, rule: WindowRule, silence_s: float, first_silence_s: float, stall_s: float, arrays: bool,
) -> tuple[Columns, tuple[Chunk, ...], list[int]]:  # fmt: skip
    """A new transfer: its columns, all chunks in their order, and the turn of each in its lane's schedule.

    shares: of each lane, one chunk at least, in the order of the schedule.
    """
    chunks: list[Chunk] = []
    turns: list[int] = []
    todo: list[int] = []
    first: list[int] = []
    for share in shares:
        start = len(chunks)
        first.append(start)
        order = sorted(range(len(share)), key=share.__getitem__)
        chunks += [share[turn] for turn in order]
        turns += order
        todo += [start] * len(share)
        for place, turn in enumerate(order):
            todo[start + turn] += place
    n_lanes, n = len(first), len(chunks)
    lanes = table(
        Lanes, n_lanes, arrays, first=first, n_chunks=[*map(len, shares)], n_todo=[*map(len, shares)],
        must_query=int(pushes), last_word_s=float(now_s), silence_s=float(first_silence_s), resume_at_s=-math.inf,
        pause_s=FIRST_PAUSE_S, unknown_since_s=math.inf, away_since_s=math.inf, begun=0.0,
    )  # fmt: skip
    of_chunks = table(
        Chunks, n, arrays, block=[chunk.block_id for chunk in chunks], todo=todo, checksum=np.uint64(0),
        offset_bytes=[chunk.offset_bytes for chunk in chunks], length_bytes=[chunk.length_bytes for chunk in chunks],
    )  # fmt: skip
    # A query is in flight only while no chunk is.
    most_in_flight = min(n, MOST_REQUESTS * n_lanes) + n_lanes
    flow = flow_of(n_lanes, chunk_bytes, window_chunks, most_in_flight, rule=rule, arrays=arrays)
    counts = column([int(pushes), 0, 0, 0, int(is_share)], arrays)
    times = column([float(now_s), float(now_s), float(silence_s), float(stall_s)], arrays)
    return Columns(flow, lanes, of_chunks, counts, times), tuple(chunks), turns


# ---- what is next ----


def begin_turns(columns: Columns, now_s: float) -> None:
    """Put the slaves that may be asked now in order: the least begun part of its share first, the schedule between
    equals."""
    lanes, windows = columns.lanes, columns.flow.windows
    in_turn, begun = lanes.in_turn, lanes.begun
    n_turns, left = 0, budget_left(columns.flow)
    for lane in range(len(in_turn)):
        if windows.open[lane] and now_s >= lanes.resume_at_s[lane] and _may_be_asked(columns, lane, left):
            part = (lanes.n_moved[lane] + windows.n_in_flight[lane]) / lanes.n_chunks[lane]
            place = n_turns
            while place > 0 and begun[place - 1] > part:
                in_turn[place], begun[place] = in_turn[place - 1], begun[place - 1]
                place -= 1
            in_turn[place], begun[place] = lane, part
            n_turns += 1
    columns.times[ASKED_S] = now_s
    columns.counts[N_TURNS] = n_turns
    columns.counts[TURN] = columns.counts[N_NEXT_TURNS] = 0


def next_request(columns: Columns, now_s: float) -> int:
    """The slot of the next request, which counts as sent from now on; NONE: no slave may be asked.

    One to each slave in turn, in the order of begin_turns(), so that all shares end together. A slave that may not be
    asked has no more turns until then: no one else's turn can change that.
    """
    counts = columns.counts
    turn, n_turns = counts[TURN], counts[N_TURNS]
    if n_turns == 0:
        return NONE
    lanes, in_turn, left = columns.lanes, columns.lanes.in_turn, budget_left(columns.flow)
    n_todo, must_query = lanes.n_todo, lanes.must_query
    while n_turns > 0:
        if turn == n_turns:
            turn, n_turns = 0, counts[N_NEXT_TURNS]
            counts[N_NEXT_TURNS] = 0
            continue
        lane = in_turn[turn]
        turn += 1
        # The first condition is part of _may_be_asked() too: it is what most slaves meet, and costs no call.
        if (left or not n_todo[lane] or must_query[lane]) and _may_be_asked(columns, lane, left):
            slot = _ask(columns, lane, now_s)
            if slot != NONE:
                in_turn[counts[N_NEXT_TURNS]] = lane
                counts[N_NEXT_TURNS] += 1
                counts[TURN], counts[N_TURNS] = turn, n_turns
                return slot
    counts[N_TURNS] = 0
    return NONE


def next_deadline_s(columns: Columns) -> float:
    """When something unusual is due although no answer came: a silence, the end of a pause, a stall."""
    windows, lanes, asked_s = columns.flow.windows, columns.lanes, columns.times[ASKED_S]
    deadline_s = columns.times[PROGRESS_S] + columns.times[STALL_S]
    for lane in range(len(lanes.first)):
        if windows.n_in_flight[lane]:
            deadline_s = min(deadline_s, lanes.last_word_s[lane] + lanes.silence_s[lane])
        elif windows.open[lane] and lanes.resume_at_s[lane] > asked_s:  # else it waits for an answer to free its window
            deadline_s = min(deadline_s, lanes.resume_at_s[lane])
    return deadline_s


# ---- what an answer changes ----


def take_answer(columns: Columns, slot: int, now_s: float, credit: int) -> int:
    """The request in this slot is answered, in whatever way: its chunk, or QUERY. credit: as in note_answered()."""
    lanes, requests = columns.lanes, columns.flow.requests
    lane, chunk = requests.lane[slot], requests.chunk[slot]
    # A slow link is allowed a longer silence: four times the longest recent gap between two answers.
    gap_s = now_s - lanes.last_word_s[lane]
    silence_s = max(columns.times[SILENCE_S], 4 * gap_s, 0.9 * lanes.silence_s[lane])
    lanes.silence_s[lane] = min(MAX_SILENCE_S, silence_s)
    lanes.last_word_s[lane] = now_s
    lanes.silences[lane] = 0
    lanes.away_since_s[lane] = math.inf
    if chunk == QUERY:
        lanes.query[lane] = 0
    note_answered(columns.flow, slot, now_s, credit)
    return chunk


def take_ack(columns: Columns, slot: int, complete: bool, now_s: float, credit: int) -> None:
    """The slave landed and verified the chunk of this request. complete: it holds everything."""
    lanes, lane = columns.lanes, columns.flow.requests.lane[slot]
    chunk = take_answer(columns, slot, now_s, credit)
    if chunk != QUERY:
        _note_moved(columns, lane, chunk, lanes.carried_bytes)
        _note_progress(columns, lane, now_s)
    if complete or (columns.counts[IS_SHARE] == 1 and lanes.n_moved[lane] == lanes.n_chunks[lane]):
        complete_lane(columns, lane, now_s)


def take_landed(columns: Columns, slot: int, checksum: int, now_s: float, credit: int) -> bool:
    """The chunk of this request is in the buffer, with this checksum. Returns whether it was the last of its slave."""
    lanes = columns.lanes
    lane = columns.flow.requests.lane[slot]
    chunk = take_answer(columns, slot, now_s, credit)
    columns.chunks.checksum[chunk] = checksum
    columns.chunks.known[chunk] = 1
    _note_moved(columns, lane, chunk, lanes.carried_bytes)
    _note_progress(columns, lane, now_s)
    return lanes.n_moved[lane] == lanes.n_chunks[lane]


def note_resumed(columns: Columns, lane: int, chunk: int, now_s: float) -> None:
    """The slave of a push had this chunk before."""
    if not columns.chunks.moved[chunk]:
        _note_moved(columns, lane, chunk, columns.lanes.resumed_bytes)
        _note_progress(columns, lane, now_s)


def complete_lane(columns: Columns, lane: int, now_s: float) -> None:
    """This slave of a push holds everything that this transfer has for it."""
    lanes = columns.lanes
    if lanes.n_moved[lane] < lanes.n_chunks[lane]:
        for chunk in range(lanes.first[lane], lanes.first[lane] + lanes.n_chunks[lane]):
            _note_moved(columns, lane, chunk, lanes.resumed_bytes)
    _note_progress(columns, lane, now_s)
    lanes.n_todo[lane] = 0
    lanes.query[lane] = 0
    note_done(columns.flow, lane)


# ---- chunks to do ----


def put_first(columns: Columns, lane: int, chunk: int) -> None:
    """This chunk is the next of its lane."""
    lanes = columns.lanes
    n_chunks = lanes.n_chunks[lane]
    lanes.next_todo[lane] = (lanes.next_todo[lane] + n_chunks - 1) % n_chunks
    columns.chunks.todo[lanes.first[lane] + lanes.next_todo[lane]] = chunk
    lanes.n_todo[lane] += 1


def put_last(columns: Columns, lane: int, chunk: int) -> None:
    """This chunk is the last of its lane."""
    lanes = columns.lanes
    place = (lanes.next_todo[lane] + lanes.n_todo[lane]) % lanes.n_chunks[lane]
    columns.chunks.todo[lanes.first[lane] + place] = chunk
    lanes.n_todo[lane] += 1


def _take_first(columns: Columns, lane: int) -> int:
    """The next chunk of this lane that is not moved; NONE: there is none."""
    lanes, chunks = columns.lanes, columns.chunks
    while lanes.n_todo[lane] > 0:
        chunk = chunks.todo[lanes.first[lane] + lanes.next_todo[lane]]
        lanes.next_todo[lane] = (lanes.next_todo[lane] + 1) % lanes.n_chunks[lane]
        lanes.n_todo[lane] -= 1
        if not chunks.moved[chunk]:
            return chunk
    return NONE


# ---- parts ----


def _may_be_asked(columns: Columns, lane: int, left: bool) -> bool:
    """Whether an open slave that does not pause may be asked. left: whether anything is left of the budget.

    A query is sent when nothing else is in flight, so its answer covers everything sent before.
    """
    lanes = columns.lanes
    if lanes.n_todo[lane] and not lanes.must_query[lane]:
        return left and window_left(columns.flow, lane) and not lanes.query[lane]
    return columns.flow.windows.n_in_flight[lane] == 0 and columns.counts[PUSHES] == 1


def _ask(columns: Columns, lane: int, now_s: float) -> int:
    """Note the next request to this slave as sent: its slot; NONE: all of its chunks are moved or in flight."""
    flow, lanes = columns.flow, columns.lanes
    chunk, n_bytes = QUERY, 0
    if not lanes.must_query[lane]:
        chunk = _take_first(columns, lane)
    if chunk != QUERY:
        n_bytes = columns.chunks.length_bytes[chunk]
    elif columns.counts[PUSHES] == 0 or flow.windows.n_in_flight[lane]:
        return NONE
    if flow.windows.n_in_flight[lane] == 0:
        lanes.last_word_s[lane] = now_s  # silence is counted from the first unanswered request
    slot = note_sent(flow, lane, chunk, n_bytes, now_s)
    if chunk == QUERY:
        lanes.must_query[lane] = 0
        lanes.query[lane] = flow.requests.request[slot]
    return slot


def _note_moved(columns: Columns, lane: int, chunk: int, how: Ints) -> None:
    """Note a moved chunk. how: the column of its lane that counts its bytes."""
    chunks, lanes = columns.chunks, columns.lanes
    if not chunks.moved[chunk]:
        chunks.moved[chunk] = 1
        lanes.n_moved[lane] += 1
        how[lane] += chunks.length_bytes[chunk]


def _note_progress(columns: Columns, lane: int, now_s: float) -> None:
    columns.times[PROGRESS_S] = now_s
    columns.lanes.pause_s[lane] = FIRST_PAUSE_S
    columns.lanes.unknown_since_s[lane] = math.inf


STEPS = (
    begin_turns, next_request, next_deadline_s, take_answer, take_ack, take_landed, complete_lane, put_first, put_last,
    _take_first, _may_be_asked, _ask, _note_moved, _note_progress,
)  # fmt: skip
"""All functions that a compiled loop inlines, with those of core/net/flow.py."""
