"""The usual part of a worker's transfer, compiled: chunks out and acknowledgements in, or requests out and chunks in.

push() and pull() run without the interpreter's lock until something happens that is not a chunk or its answer. They
decide nothing themselves: which request is next, what an answer means and how much may be unanswered is
core/net/steps.py and core/net/flow.py, which are compiled into them. Whatever is unusual (a refusal, a damaged chunk, a
question for missing chunks, a message of another run) is left to Python with its frames, where core/net/carriers.py
does what it does without this module.

The loops raise nothing and allocate nothing that grows: they return one of the codes below. Shapes: lanes are the
slaves that have chunks, chunks those of steps.Columns; columns of integers are int64, addresses too.

A payload is sent from where it lies, so its memory must not be given back before libzmq has: each lane counts what was
handed to libzmq (SENT) and what came back (BACK). Memory whose socket was closed comes back a little later, on a thread
of libzmq: see park().
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq
from numba.extending import register_jitable
from numpy.typing import NDArray

from dips.core.ids import PushId, Version
from dips.core.layout import FLOAT32_BYTES, Layout, Parameter
from dips.core.math.landing_numba import copy_hashed
from dips.core.math.simd_numba import address, address_of, array_at, atomic_get, compiled
from dips.core.math.wire_numba import decode_at, encode_at
from dips.core.math.xxh3_numba import xxh3
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net import flow, steps
from dips.core.net.flow import MOST_REQUESTS, N_OPEN, NONE, slot_of
from dips.core.net.header_numba import (
    ACK,
    BASE,
    BLOCK,
    CHECKSUM,
    CHUNK,
    CODEC,
    COMPLETE,
    CREDIT,
    F32,
    LENGTH_BYTES,
    MOMENTUM,
    N_FIELDS,
    OFFSET_BYTES,
    OP,
    PLAIN_BYTES,
    REQUEST,
    VERSION,
    is_ours,
    parse,
    part_of,
    same,
    text_of,
    write_get_chunk,
    write_put_chunk,
)
from dips.core.net.payloads import (
    BlockPlaces,
    Difference,
    Parameters,
    Payloads,
    Places,
    PulledDifferences,
    SharedLock,
    bytes_of,
)
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.steps import QUERY, Columns, begin_turns, next_deadline_s, next_request, take_ack, take_landed
from dips.core.net.transfer import PullTransfer, PushTransfer, Transfer, TransferSettings, chunks_by_slave
from dips.core.net.zmq_numba import (
    DONTWAIT,
    EINTR,
    MESSAGE_BYTES,
    SNDMORE,
    Messages,
    PollItems,
    ReceivedFrame,
    freed,
    is_ready,
    new_messages,
    now_s,
    poll_items,
    zmq_errno,
    zmq_msg_close,
    zmq_msg_data,
    zmq_msg_init,
    zmq_msg_init_data,
    zmq_msg_init_size,
    zmq_msg_more,
    zmq_msg_recv,
    zmq_msg_send,
    zmq_msg_size,
    zmq_poll,
    zmq_send,
)
from dips.core.wire import encoded_bytes, n_scales

for _rule in (*flow.STEPS, *steps.STEPS, encoded_bytes, n_scales):
    register_jitable(_rule)

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

LEAD = 2
"""Most chunks of a lane in libzmq's hands. More would be read, and have their checksums taken, long before they leave:
then they are no longer in the cache when the kernel copies them. The kernel's own buffer keeps the link busy."""

MOST_HEARD = 8
"""Messages taken from one lane before another lane's and before the next requests are sent."""

SHORTEST_WAIT_MS = 1
"""While a lane has chunks ready and libzmq still has others of it: nothing wakes a poll when they come back. Doubles
while nothing happens."""

# ---- why a loop returned ----

AGAIN = 0
"""A deadline is reached, a monitor has news, or somebody wants the source: call it again after a look at these."""
UNUSUAL = 1
"""A message that Python must judge; its frames are in Scratch.messages (numbers[N_FRAMES]), from numbers[LANE]."""
SEND = 2
"""Python must send, or prepare, the request in numbers[SLOT]: a query, or a chunk that is not there yet."""
WHOLE = 3
"""The share of numbers[LANE] has landed: its digest must be compared."""
DONE = 4
"""No lane is open."""
IDLE = 5
"""There is nothing to do before a message arrives: wait() for it."""
FAILED = 6
"""zmq_poll failed, as when its context ends: the next call of pyzmq says why."""

# ---- what a loop works on ----

EPOCH, ATTEMPT, CODEC_NUMBER, IS_MOMENTUM, NOW, OLD, RESIDUAL = range(7)
N_SOCKETS, MAY_WAIT, WAIT_MS, SLOT, SLOT_REQUEST, N_FRAMES, LANE = range(7, 14)
N_DIFFERENCES = 14
N_NUMBERS = 15
"""Indices of a loop's numbers.

NOW, OLD, RESIDUAL: addresses of a push's vectors where differences are sent, RESIDUAL 0: there is none. N_DIFFERENCES:
of a pull, 0: parameters are fetched. N_SOCKETS: of Links.items, the
others are monitors. MAY_WAIT: 0 where IDLE is wanted instead of a wait, which may then last WAIT_MS. SLOT: of SEND; if
it still holds the request SLOT_REQUEST, the next run begins with it. N_FRAMES, LANE: see the codes.
"""

SENT, BACK = 0, 1
"""Columns of Links.handed."""


class Links(NamedTuple):
    """The sockets of a transfer, and what libzmq has of it."""

    socket: I64  # (lanes,) address of its DEALER, 0: there is none, and what is sent to it is lost
    items: PollItems  # the DEALERs, then monitors
    handed: I64  # (lanes, 2) payloads that libzmq was handed, and that it gave back


class HeldChunks(NamedTuple):
    """Requests that count as sent and wait until libzmq has room for them (LEAD): a ring for each lane."""

    slot: I64  # (lanes, MOST_REQUESTS)
    request: I64  # the slot's request then: it may have been given up since
    first: I64  # (lanes,) index of the oldest, grows
    stop: I64  # (lanes,) behind the newest


class Source(NamedTuple):
    """Where the payloads of a push are."""

    first_piece: I64  # (chunks + 1,) pieces of each chunk, one after the other; none where differences are sent
    address: I64  # (pieces,)
    n_bytes: I64  # (pieces,)
    start_elem: I64  # (chunks,) in the vectors of a difference
    payload_bytes: I64  # (chunks,)
    ready: U8  # (chunks,) 0: not there yet
    wanted: I64  # (1,) not 0: somebody wants the lock that is held while the loop runs


class PullLanding(NamedTuple):
    """Where the chunks of a pull land."""

    into: I64  # (chunks,) addresses
    base: I64  # (chunks,) addresses of the parameters that differences are to; of no meaning where there are none


class Texts(NamedTuple):
    """What the headers of a transfer have in common (header_numba.text_of, part_of)."""

    run_id: U8
    named: U8  # the push, or the version
    cause: U8
    base: U8  # the version that a pull's differences are to; empty: there are none


class Scratch(NamedTuple):
    """Room to work."""

    messages: Messages  # head and body
    header: U8
    value: I64  # of a parsed header
    length: I64
    acc: U64  # of a checksum


# ---- out ----


@compiled
def _send_push(
    columns: Columns, links: Links, held: HeldChunks, source: Source, texts: Texts, scratch: Scratch, numbers: I64,
    free_function: int,
) -> int:  # fmt: skip
    """Send what may be sent; returns how many chunks were. numbers[SLOT]: see SEND."""
    begin_turns(columns, now_s())
    requests, slot = columns.flow.requests, numbers[SLOT]
    if slot != NONE and requests.request[slot] != numbers[SLOT_REQUEST]:
        slot = NONE  # it was given up meanwhile
    while True:
        if slot == NONE:
            slot = next_request(columns, now_s())
        if slot == NONE or requests.chunk[slot] == QUERY or source.ready[requests.chunk[slot]] == 0:
            break
        lane = requests.lane[slot]
        place = held.stop[lane] % MOST_REQUESTS
        held.slot[lane, place], held.request[lane, place] = slot, requests.request[slot]
        held.stop[lane] += 1
        slot = NONE
    numbers[SLOT] = slot
    if slot != NONE:
        numbers[SLOT_REQUEST] = requests.request[slot]
    n_sent = 0
    for lane in range(len(links.socket)):
        n_sent += _send_held(columns, links, held, source, texts, scratch, numbers, free_function, lane)
    return n_sent


@compiled
def _send_held(
    columns: Columns, links: Links, held: HeldChunks, source: Source, texts: Texts, scratch: Scratch, numbers: I64,
    free_function: int, lane: int,
) -> int:  # fmt: skip
    """Hand a lane's oldest requests to libzmq, as far as it has room; returns how many."""
    n_sent = 0
    back = address_of(links.handed) + 8 * (2 * lane + BACK)
    while held.first[lane] < held.stop[lane]:
        place = held.first[lane] % MOST_REQUESTS
        slot = held.slot[lane, place]
        if columns.flow.requests.request[slot] == held.request[lane, place]:  # else it was given up meanwhile
            if links.handed[lane, SENT] - atomic_get(back) >= LEAD:
                break
            _send_chunk(columns, links, source, texts, scratch, numbers, free_function, lane, slot, back)
            n_sent += 1
        held.first[lane] += 1
    return n_sent


@compiled
def _send_chunk(
    columns: Columns, links: Links, source: Source, texts: Texts, scratch: Scratch, numbers: I64, free_function: int,
    lane: int, slot: int, back: int,
) -> None:  # fmt: skip
    """As carriers' _send_chunk: a message that does not fit counts as lost, and is sent again after a silence."""
    socket = links.socket[lane]
    if socket == 0:
        return
    chunks, chunk, request = columns.chunks, columns.flow.requests.chunk[slot], columns.flow.requests.request[slot]
    body, n_bytes = address_of(scratch.messages) + MESSAGE_BYTES, source.payload_bytes[chunk]
    piece, stop = source.first_piece[chunk], source.first_piece[chunk + 1]
    if stop - piece == 1:
        if zmq_msg_init_data(body, source.address[piece], n_bytes, free_function, back) != 0:
            return
        links.handed[lane, SENT] += 1
    else:
        if zmq_msg_init_size(body, n_bytes) != 0:
            return
        if stop > piece:
            _gather(zmq_msg_data(body), source, piece, stop)
        else:
            _write_difference(zmq_msg_data(body), chunks.length_bytes[chunk] // 4, source.start_elem[chunk], numbers)
    if chunks.known[chunk] == 0:
        chunks.checksum[chunk] = xxh3(zmq_msg_data(body), n_bytes)
        chunks.known[chunk] = 1
    n_header = write_put_chunk(
        scratch.header, texts.run_id, numbers[EPOCH], texts.named, numbers[ATTEMPT], chunks.block[chunk],
        chunks.offset_bytes[chunk], chunks.length_bytes[chunk], numbers[CODEC_NUMBER],
        np.uint64(chunks.checksum[chunk]), request, texts.cause,
    )  # fmt: skip
    sent = zmq_send(socket, address_of(scratch.header), n_header, SNDMORE | DONTWAIT)
    if sent < 0 or zmq_msg_send(body, socket, DONTWAIT) < 0:
        zmq_msg_close(body)


@compiled
def _gather(into_address: int, source: Source, piece: int, stop: int) -> None:
    """The bytes of these pieces, one after the other."""
    for k in range(piece, stop):
        n_bytes = source.n_bytes[k]
        into, part = array_at(into_address, n_bytes, np.uint8), array_at(source.address[k], n_bytes, np.uint8)
        for i in range(n_bytes):
            into[i] = part[i]
        into_address += n_bytes


@compiled
def _write_difference(into_address: int, n_elems: int, start_elem: int, numbers: I64) -> None:
    """As payloads.Differences, to the bit."""
    now = array_at(numbers[NOW] + 4 * start_elem, n_elems, np.float32)
    base = array_at(numbers[OLD] + 4 * start_elem, n_elems, np.float32)
    n_residual = n_elems if numbers[RESIDUAL] != 0 else 0
    residual = array_at(numbers[RESIDUAL] + 4 * start_elem, n_residual, np.float32)
    encode_at(numbers[CODEC_NUMBER], now, base, residual, into_address)


@compiled
def _send_pull(columns: Columns, links: Links, texts: Texts, scratch: Scratch, numbers: I64) -> None:
    """Send the requests that may be sent."""
    begin_turns(columns, now_s())
    requests, chunks = columns.flow.requests, columns.chunks
    while True:
        slot = next_request(columns, now_s())
        if slot == NONE:
            break
        socket, chunk = links.socket[requests.lane[slot]], requests.chunk[slot]
        if socket == 0:
            continue
        n_header = write_get_chunk(
            scratch.header, texts.run_id, numbers[EPOCH], texts.named, chunks.block[chunk], chunks.offset_bytes[chunk],
            chunks.length_bytes[chunk], numbers[CODEC_NUMBER], requests.request[slot], texts.cause,
            numbers[IS_MOMENTUM] != 0, texts.base,
        )  # fmt: skip
        zmq_send(socket, address_of(scratch.header), n_header, DONTWAIT)


# ---- in ----


@compiled
def _receive(socket: int, messages: Messages) -> int:
    """Take a message into `messages`, whose owner closes it: its number of frames, 1 or 2; 0: there is none.

    One of more frames is invalid: it is dropped, and the next one taken.
    """
    head = address_of(messages)
    body = head + MESSAGE_BYTES
    while True:
        zmq_msg_init(head)
        if zmq_msg_recv(head, socket, DONTWAIT) < 0:
            zmq_msg_close(head)
            return 0
        if zmq_msg_more(head) == 0:
            return 1
        zmq_msg_init(body)
        if zmq_msg_recv(body, socket, DONTWAIT) < 0:
            zmq_msg_close(body)
            zmq_msg_close(head)
            return 0
        if zmq_msg_more(body) == 0:
            return 2
        zmq_msg_close(head)
        more = True
        while more:
            zmq_msg_close(body)
            zmq_msg_init(body)
            more = zmq_msg_recv(body, socket, DONTWAIT) >= 0 and zmq_msg_more(body) != 0
        zmq_msg_close(body)


@compiled
def _hear_push(columns: Columns, links: Links, texts: Texts, scratch: Scratch, numbers: I64) -> int:
    """Take answers; returns how many, or NONE for one that Python must judge."""
    head, value, length, n_heard = address_of(scratch.messages), scratch.value, scratch.length, 0
    for lane in range(len(links.socket)):
        for _ in range(MOST_HEARD if links.socket[lane] != 0 else 0):
            n_frames = _receive(links.socket[lane], scratch.messages)
            if n_frames == 0:
                break
            n_heard += 1
            slot = NONE
            if n_frames == 1 and parse(zmq_msg_data(head), zmq_msg_size(head), value, length):
                if is_ours(value, length, texts.run_id) and value[OP] == ACK:
                    slot = slot_of(columns.flow, lane, value[REQUEST])
            if slot == NONE or columns.flow.requests.chunk[slot] == QUERY:
                numbers[N_FRAMES], numbers[LANE] = n_frames, lane
                return NONE
            zmq_msg_close(head)
            take_ack(columns, slot, value[COMPLETE] != 0, now_s(), value[CREDIT])
    return n_heard


@compiled
def _hear_pull(
    columns: Columns, links: Links, landing: PullLanding, texts: Texts, scratch: Scratch, numbers: I64
) -> int:  # fmt: skip
    """Take chunks; returns how many, NONE for a message that Python must judge, or NONE - 1 for a whole share."""
    head, n_heard = address_of(scratch.messages), 0
    body = head + MESSAGE_BYTES
    for lane in range(len(links.socket)):
        for _ in range(MOST_HEARD if links.socket[lane] != 0 else 0):
            n_frames = _receive(links.socket[lane], scratch.messages)
            if n_frames == 0:
                break
            n_heard += 1
            slot = NONE
            if n_frames == 2:
                slot = _answers(columns, lane, texts, scratch, numbers)
            if slot != NONE:
                # The bytes are written before their checksum is known: nothing counts them unless it is right.
                chunk = columns.flow.requests.chunk[slot]
                n_bytes = columns.chunks.length_bytes[chunk]
                if numbers[N_DIFFERENCES] == 0:
                    found = copy_hashed(landing.into[chunk], zmq_msg_data(body), n_bytes, scratch.acc)
                else:
                    found = _land_differences(landing, chunk, n_bytes, zmq_msg_data(body), numbers)
                if np.uint64(found) != np.uint64(scratch.value[CHECKSUM]):
                    slot = NONE
            if slot == NONE:
                numbers[N_FRAMES], numbers[LANE] = n_frames, lane
                return NONE
            zmq_msg_close(head)
            zmq_msg_close(body)
            if take_landed(columns, slot, scratch.value[CHECKSUM], now_s(), scratch.value[CREDIT]):
                numbers[LANE] = lane
                return NONE - 1
    return n_heard


@compiled
def _land_differences(landing: PullLanding, chunk: int, n_bytes: int, source: int, numbers: I64) -> Any:
    """As payloads.PulledDifferences.land; returns the checksum of what it leads to."""
    n, codec, before = n_bytes // 4, numbers[CODEC_NUMBER], landing.base[chunk]
    into = array_at(landing.into[chunk], n, np.float32)
    for part in range(numbers[N_DIFFERENCES]):
        decode_at(codec, array_at(before, n, np.float32), source + part * encoded_bytes(codec, n), into)
        before = landing.into[chunk]
    return xxh3(landing.into[chunk], n_bytes)


@compiled
def _answers(columns: Columns, lane: int, texts: Texts, scratch: Scratch, numbers: I64) -> int:
    """The slot of the request that the two received frames answer with the chunk that it asked for, or NONE."""
    head, value, length = address_of(scratch.messages), scratch.value, scratch.length
    if not parse(zmq_msg_data(head), zmq_msg_size(head), value, length):
        return NONE
    if not is_ours(value, length, texts.run_id) or value[OP] != CHUNK:
        return NONE
    slot = slot_of(columns.flow, lane, value[REQUEST])
    if slot == NONE:
        return NONE
    chunks, chunk = columns.chunks, columns.flow.requests.chunk[slot]
    is_it = value[BLOCK] == chunks.block[chunk] and value[OFFSET_BYTES] == chunks.offset_bytes[chunk]
    is_it = is_it and value[LENGTH_BYTES] == chunks.length_bytes[chunk] and value[CODEC] == numbers[CODEC_NUMBER]
    is_it = is_it and same(value[VERSION], length[VERSION], texts.named) and value[MOMENTUM] == numbers[IS_MOMENTUM]
    is_it = is_it and same(value[BASE], length[BASE], texts.base)
    n_bytes = max(1, numbers[N_DIFFERENCES]) * encoded_bytes(numbers[CODEC_NUMBER], chunks.length_bytes[chunk] // 4)
    return slot if is_it and zmq_msg_size(head + MESSAGE_BYTES) == n_bytes else NONE


# ---- the loops ----


@compiled
def push(
    columns: Columns, links: Links, held: HeldChunks, source: Source, texts: Texts, scratch: Scratch, numbers: I64,
    free_function: int, until_s: float,
) -> int:  # fmt: skip
    """Send chunks and take their acknowledgements, until until_s at the latest; returns one of the codes."""
    wait_ms = SHORTEST_WAIT_MS
    while True:
        if columns.flow.counts[N_OPEN] == 0:
            return DONE
        began_s, end_s = now_s(), min(until_s, next_deadline_s(columns))
        if began_s >= end_s or atomic_get(address_of(source.wanted)) != 0:
            return AGAIN
        n_sent = _send_push(columns, links, held, source, texts, scratch, numbers, free_function)
        if numbers[SLOT] != NONE:
            return SEND
        n_heard = _hear_push(columns, links, texts, scratch, numbers)
        if n_heard == NONE:
            return UNUSUAL
        if n_heard > 0 or n_sent > 0:
            wait_ms = SHORTEST_WAIT_MS
        if n_heard > 0:
            continue
        longest_ms = _milliseconds(end_s - began_s)
        if _any_held(held):
            longest_ms = min(longest_ms, wait_ms)
            wait_ms *= 2
        if numbers[MAY_WAIT] == 0:
            numbers[WAIT_MS] = longest_ms
            return IDLE
        found = wait(links, numbers, longest_ms)
        if found != DONE:
            return found


@compiled
def pull(
    columns: Columns, links: Links, landing: PullLanding, texts: Texts, scratch: Scratch, numbers: I64, until_s: float
) -> int:
    """Send requests and land their chunks, until until_s at the latest; returns one of the
    codes."""
    while True:
        if columns.flow.counts[N_OPEN] == 0:
            return DONE
        began_s, end_s = now_s(), min(until_s, next_deadline_s(columns))
        if began_s >= end_s:
            return AGAIN
        _send_pull(columns, links, texts, scratch, numbers)
        n_heard = _hear_pull(columns, links, landing, texts, scratch, numbers)
        if n_heard == NONE:
            return UNUSUAL
        if n_heard == NONE - 1:
            return WHOLE
        if n_heard == 0:
            found = wait(links, numbers, _milliseconds(end_s - began_s))
            if found != DONE:
                return found


@compiled
def _milliseconds(wait_s: float) -> int:
    """Rounded up, so that a deadline is over when a wait for it is."""
    return int(wait_s * 1000.0) + 1


@compiled
def _any_held(held: HeldChunks) -> bool:
    for lane in range(len(held.first)):
        if held.first[lane] < held.stop[lane]:
            return True
    return False


@compiled
def wait(links: Links, numbers: I64, longest_ms: int) -> int:
    """Wait for a message: DONE if one may be there; AGAIN for news of a monitor, or a signal; FAILED."""
    found = zmq_poll(address_of(links.items), len(links.items), longest_ms)
    if found < 0:
        return AGAIN if zmq_errno() == EINTR else FAILED
    if found > 0:
        for index in range(numbers[N_SOCKETS], len(links.items)):
            if is_ready(links.items, index):
                return AGAIN
    return DONE


# ---- for Python ----


class TransferLoop(ABC):
    """One transfer's loop, with its memory; for use by the thread of its sockets."""

    UNUSUAL, SEND, WHOLE, IDLE, FAILED = UNUSUAL, SEND, WHOLE, IDLE, FAILED

    def __init__(self, transfer: Transfer, sockets: SlaveSockets, epoch: int, texts: Texts) -> None:
        """transfer: with columns in numpy arrays."""
        _give_up_parked()
        self._columns = transfer.columns
        self._slaves = transfer.slaves
        self._sockets = sockets
        self._sockets_seen = -1
        self._texts = texts
        n_header = PLAIN_BYTES + sum(len(text) for text in texts)
        self._scratch = Scratch(
            new_messages(2), np.zeros(n_header, np.uint8), np.zeros(N_FIELDS, np.int64), np.zeros(N_FIELDS, np.int64),
            np.zeros(8, np.uint64),
        )  # fmt: skip
        self._numbers = np.zeros(N_NUMBERS, np.int64)
        self._numbers[EPOCH], self._numbers[SLOT], self._numbers[MAY_WAIT] = epoch, NONE, 1
        n = len(self._slaves)
        self._links = Links(np.zeros(n, np.int64), poll_items(), np.zeros((n, 2), np.int64))

    def run(self, until_s: float) -> int:
        """Send and receive, until until_s (time.monotonic) at the latest; returns a code."""
        if self._sockets_seen != self._sockets.changes:
            dealers = [self._sockets.dealer(slave) for slave in self._slaves]
            self._links.socket[:] = [0 if dealer is None else dealer.underlying for dealer in dealers]
            connected = [dealer for dealer in dealers if dealer is not None]
            self._links = self._links._replace(items=poll_items(*connected, *self._sockets.monitors()))
            self._numbers[N_SOCKETS] = len(connected)
            self._sockets_seen = self._sockets.changes
        return self._run(until_s)

    def wait(self) -> int:
        """After IDLE: until there may be something to do; AGAIN, DONE or FAILED."""
        return wait(self._links, self._numbers, self._numbers[WAIT_MS])

    @property
    def slot(self) -> int:
        """After SEND: the slot of the request that Python must send."""
        return int(self._numbers[SLOT])

    def message(self) -> tuple[str, bytes, memoryview | None]:
        """After UNUSUAL: the message, as SlaveSockets.receive() gives it. Once for each."""
        head, *body = (ReceivedFrame(self._scratch.messages, index) for index in range(self._numbers[N_FRAMES]))
        return self._slaves[self._numbers[LANE]], head.bytes, body[0].buffer if body else None

    @abstractmethod
    def _run(self, until_s: float) -> int: ...


class PushLoop(TransferLoop):
    """The loop of a push. Call close() at its end, or the memory of payloads may be given back too early."""

    def __init__(
        self, transfer: Transfer, sockets: SlaveSockets, epoch: int, texts: Texts, attempt: int, places: Places,
        payloads: Payloads,
    ) -> None:  # fmt: skip
        super().__init__(transfer, sockets, epoch, texts)
        codec, chunks, n_lanes = payloads.codec, self._columns.chunks, len(self._slaves)
        self._numbers[ATTEMPT], self._numbers[CODEC_NUMBER] = attempt, int(codec)
        wanted = np.zeros(1, np.int64)
        if isinstance(payloads.lock, SharedLock):
            wanted, self._numbers[MAY_WAIT] = payloads.lock.wanted, 0
        self._first_byte = places.first_bytes(np.asarray(chunks.block), np.asarray(chunks.offset_bytes))
        lengths = np.asarray(chunks.length_bytes)
        wire_bytes = {n_bytes: encoded_bytes(codec, n_bytes // FLOAT32_BYTES) for n_bytes in set(lengths.tolist())}
        n, none = len(lengths), np.zeros(0, np.int64)
        self._source = Source(
            np.zeros(n + 1, np.int64), none, none, self._first_byte // FLOAT32_BYTES,
            np.array([wire_bytes[n_bytes] for n_bytes in lengths.tolist()], np.int64),
            np.full(n, 0 if payloads.gated else 1, np.uint8), wanted,
        )  # fmt: skip
        ring, ends = (n_lanes, MOST_REQUESTS), np.zeros(n_lanes, np.int64)
        self._held = HeldChunks(np.zeros(ring, np.int64), np.zeros(ring, np.int64), ends, ends.copy())
        self._memory: list[object] = []

    def read_from(self, parts: Sequence[U8]) -> None:
        """The payloads are the bytes of these arrays from now on, which are the flat vector one after the other."""
        self._memory.append(parts)
        lengths = np.asarray(self._columns.chunks.length_bytes)
        first_piece, addresses, n_bytes = _pieces(self._first_byte, lengths, parts)
        self._source = self._source._replace(first_piece=first_piece, address=addresses, n_bytes=n_bytes)

    def write_differences(self, now: U8, difference: Difference) -> None:
        """The payloads are differences to this vector. now: the bytes of a float32 vector."""
        self._memory.append((now, difference))
        self._numbers[NOW], self._numbers[OLD] = address(now), address(difference.base)
        self._numbers[RESIDUAL] = 0 if difference.residual is None else address(difference.residual)

    def ready(self, chunk: int) -> None:
        """After SEND of this chunk: it is there, the next run sends it."""
        self._source.ready[chunk] = 1

    def sent(self) -> None:
        """After SEND: Python sent the request."""
        self._numbers[SLOT] = NONE

    def close(self) -> None:
        """Keep the memory of the payloads until libzmq has given it back, however long that takes."""
        _park(self._links.handed, self._memory)

    def _run(self, until_s: float) -> int:
        return push(
            self._columns, self._links, self._held, self._source, self._texts, self._scratch, self._numbers, freed(),
            until_s,
        )  # fmt: skip


class PullLoop(TransferLoop):
    """The loop of a pull."""

    def __init__(
        self, transfer: Transfer, sockets: SlaveSockets, epoch: int, texts: Texts, places: Places | BlockPlaces, flat:
        U8, *, momentum: bool, differences: PulledDifferences | None = None,
    ) -> None:  # fmt: skip
        """flat: the bytes of the vector in which chunks land, at their places. differences: fetch these; texts names
        their base."""
        super().__init__(transfer, sockets, epoch, texts)
        self._numbers[IS_MOMENTUM], self._numbers[CODEC_NUMBER] = momentum, F32
        self._memory = (flat, differences)
        chunks = self._columns.chunks
        places_bytes = places.first_bytes(np.asarray(chunks.block), np.asarray(chunks.offset_bytes))
        base = places_bytes
        if differences is not None:
            self._numbers[CODEC_NUMBER], self._numbers[N_DIFFERENCES] = int(differences.codec), differences.n
            base = address(differences.theta) + places_bytes
        self._landing = PullLanding(address(flat) + places_bytes, base)

    def _run(self, until_s: float) -> int:
        return pull(self._columns, self._links, self._landing, self._texts, self._scratch, self._numbers, until_s)


def texts_of(run_id: str, named: PushId | Version, cause: str, base: Version | None = None) -> Texts:
    """The texts of a transfer's headers. base: of a pull's differences."""
    no_base = np.zeros(0, np.uint8)
    return Texts(text_of(run_id), part_of(named), text_of(cause), no_base if base is None else part_of(base))


def _pieces(first_byte: I64, n_bytes: I64, parts: Sequence[U8]) -> tuple[I64, I64, I64]:
    """The columns first_piece, address and n_bytes of Source for chunks at these places of the flat vector."""
    edges = np.cumsum([0, *(part.nbytes for part in parts)])
    homes = np.array([address(part) for part in parts], np.int64)
    first = np.searchsorted(edges, first_byte, "right") - 1
    last = np.searchsorted(edges, first_byte + n_bytes, "left") - 1
    first_piece = np.zeros(len(first_byte) + 1, np.int64)
    np.cumsum(last - first + 1, out=first_piece[1:])
    chunk = np.repeat(np.arange(len(first_byte)), last - first + 1)
    part = np.arange(first_piece[-1]) - first_piece[chunk] + first[chunk]
    start = np.maximum(first_byte[chunk], edges[part])
    stop = np.minimum(first_byte[chunk] + n_bytes[chunk], edges[part + 1])
    return first_piece, homes[part] + start - edges[part], stop - start


_parked: list[tuple[I64, object]] = []
"""Counters of Links.handed, and memory that libzmq had not given back when its transfer ended."""
_parked_lock = threading.Lock()


def _park(handed: I64, memory: object) -> None:
    """Keep the counters of Links.handed and the memory of the payloads until libzmq has given everything back."""
    with _parked_lock:
        _parked.append((handed, memory))
    _give_up_parked()


def _give_up_parked() -> None:
    """What libzmq has given back. Each transfer looks when it begins and when it ends: nothing tells when the last
    payload of a closed socket comes back."""
    with _parked_lock:
        _parked[:] = [(counts, kept) for counts, kept in _parked if (counts[:, SENT] != counts[:, BACK]).any()]


def warm_up() -> None:
    """Compile both loops, or load them from the cache: most of a minute, or a few hundredths of a second."""
    layout = Layout((Parameter("w", (1,), "float32", "w"),))
    placement = PlacementSpec((SlaveAddress("s", ""),), (0,), b"")  # a slave that is away: nothing is sent
    settings, texts = TransferSettings(FLOAT32_BYTES, 1), texts_of("run", Version(1, 1), "cause")
    shares, places = chunks_by_slave(layout, placement, (0,), FLOAT32_BYTES), Places(layout)
    flat = np.zeros(1, np.float32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = SlaveSockets(context, placement, FLOAT32_BYTES)
    push = PushTransfer(shares, settings, 0.0, arrays=True)
    pull = PullTransfer(shares, {}, settings, 0.0, arrays=True)
    payloads = Parameters(flat, places)
    PushLoop(push, sockets, 1, texts, 1, places, payloads).run(-math.inf)
    PullLoop(pull, sockets, 1, texts, places, bytes_of(flat), momentum=False).run(-math.inf)
    context.term()
