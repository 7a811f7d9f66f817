"""The data port's usual messages in compiled code: received, landed and answered without the interpreter and its lock.

serve() takes messages from the ROUTER socket as slave/data_server.py does. It serves a chunk of an open push, and a
request for a chunk of a version's parameters; every other message comes back with its frames still in place, and Python
serves it as if there were no such loop. So nothing is refused here, and no sentence of a refusal is written twice.

What it knows stands in tables (Tables) that Python makes again whenever something changed; what landed it notes in the
columns of slave/state/staging.py and slave/landing.py themselves, by their own functions. The rest of what it did it
counts, and Python takes these counts after each call (Loop.settle).

Memory that libzmq still reads after a call, since an answer's payload is the version's own memory, is Lent.

Nothing raises here, and every access to memory that no array bounds is one of the named functions of
core/math/simd_numba.py, core/math/landing_numba.py and core/net/zmq_numba.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq
from numba.extending import register_jitable
from numpy.typing import NDArray

from dips.core.math.landing_numba import land, land_difference, land_difference_measured, land_measured
from dips.core.math.outer_numba import take_products
from dips.core.math.outer_numpy import LANES, n_pieces
from dips.core.math.simd_numba import address, address_of, array_at, compiled, peek8
from dips.core.messages import AllowedKey, KeyRole
from dips.core.net.header_numba import (
    ABSENT,
    ATTEMPT,
    BASE,
    BLOCK,
    CHECKSUM,
    CODEC,
    EPOCH,
    F32,
    GET_CHUNK,
    LENGTH_BYTES,
    MOMENTUM,
    N_FIELDS,
    OFFSET_BYTES,
    OP,
    PLAIN_BYTES,
    PUSH,
    PUT_CHUNK,
    VERSION,
    is_ours,
    parse,
    part_of,
    same,
    text_of,
    write_ack,
    write_chunk,
)
from dips.core.net.zmq_numba import (
    DONTWAIT,
    EAGAIN,
    EHOSTUNREACH,
    EINTR,
    MESSAGE_BYTES,
    POLL_ITEM,
    SNDMORE,
    Messages,
    PollItems,
    ReceivedFrame,
    freed,
    is_ready,
    new_messages,
    now_s,
    number_of_user,
    poll_items,
    zmq_errno,
    zmq_msg_close,
    zmq_msg_data,
    zmq_msg_init,
    zmq_msg_init_data,
    zmq_msg_init_size,
    zmq_msg_more,
    zmq_msg_move,
    zmq_msg_recv,
    zmq_msg_send,
    zmq_msg_size,
    zmq_poll,
    zmq_send,
)
from dips.core.wire import Codec, encoded_bytes, n_scales
from dips.slave import landing
from dips.slave.data_port import DataPort, Reader, rows_of_arrays
from dips.slave.landing import MOST_COMPANIONS, NEVER, Receipts, Sums, claim_companions, note_products, note_sums
from dips.slave.state.admission import owner_of
from dips.slave.state.staging import (
    N_LANDED,
    NEW,
    PIECE_BYTES,
    SAME,
    Landed,
    Places,
    ShardMap,
    Staging,
    find_chunk,
    has_landed,
    note_landed,
)

for _rule in (
    *(find_chunk, has_landed, note_landed, n_scales, encoded_bytes, n_pieces),
    *(landing.pair_code, landing.give_back, landing.claim, note_sums, claim_companions, note_products),
):
    register_jitable(_rule)

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]

MOST_MESSAGES = 32
"""Messages of one call of serve(), since posted calls of the control side wait for its end: 32 chunks are about 10 ms
of work."""

TOGETHER = 4
"""Acknowledgements that wait for each other while there are messages to be received: the I/O thread wakes once."""

PUSH_BYTES, VERSION_BYTES, USER_BYTES = 256, 32, 64
"""A push whose id is longer, as bytes, is served by Python. A version is two numbers, a user id is a key."""

MOST_PEERS = 256
"""Readers of a port without keys, all on this machine, that are known at a time; Python serves the others. With keys
the list says who they are, and each is served here."""

ANSWER_BYTES = 2 * PLAIN_BYTES
"""An answer repeats texts of a plain request and adds two numbers."""

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
NONE = int(Codec.NONE)

ENOUGH, IDLE, NEWS, UNUSUAL, COMPLETE, FAILED = range(6)
"""Why serve() returned: after MOST_MESSAGES; no message came for long enough; a poll item other than the socket is
ready; a message is left to Python; a push became complete, and its acknowledgement is held; libzmq failed."""

ROW, N_FRAMES, MORE, ERRNO, HELD, N_SERVED, SERVED_BYTES = range(7)
"""What it says (`told`): the complete row; frames of the message that is left, behind the routing id, and whether
further ones wait in the socket; libzmq's error; acknowledgements that are held; messages that it served."""

SENT, FREED_AGAIN = 0, 1
"""Counts of payloads that were handed to libzmq, and that it gave back."""


# ---- tables ----


class Rows(NamedTuple):
    """The slots of staging memory; s of them."""

    open: I64  # (s,): 1 where there is a push that is served here
    push: U8  # (s, PUSH_BYTES): its id as bytes
    push_bytes: I64  # (s,)
    attempt: I64  # (s,)
    codec: I64  # (s,)
    base: I64  # (s,): address of the parameters that differences are relative to; 0 where they are not here
    owner: I64  # (s,): the cluster's number (Keys.owner); -1: no listed key is its
    credit: I64  # (s,)
    landed: U8  # (s, c), this and the next two: the columns of all slots (staging.Landed)
    checksums: U64  # (s, c)
    counts: I64  # (s, 2)
    came: I64  # (s, 2): bytes of parameters and of payloads since Loop.settle


class Versions(NamedTuple):
    """The versions that can be read; v of them."""

    version: U8  # (v, VERSION_BYTES): as bytes
    version_bytes: I64  # (v,)
    address: I64  # (v,): of the parameters
    checksums: U64  # (v, c)
    codec: I64  # (v,): of the version's difference; NONE: there is none
    difference: I64  # (v,): its address
    base: U8  # (v, VERSION_BYTES): to which version, as bytes
    base_bytes: I64  # (v,)
    before: I64  # (v,): the row of that version; -1: it cannot be read
    starts: I64  # (c + 1,): where the chunks' payloads begin in each difference


class Keys(NamedTuple):
    """The listed keys; k of them, none for a port without keys."""

    user: U8  # (k, USER_BYTES), ascending
    owner: I64  # (k,): number of its owner, the same for all keys of a cluster's ranks


class Readers(NamedTuple):
    """Who reads versions; r of them: the owners of keys, by number, or MOST_PEERS places for connections without keys,
    the used ones first."""

    peer: U64  # (MOST_PEERS,): short_id() of the routing id; 0: unused. (0,) with keys
    credit: I64  # (r,)
    came: I64  # (r,): bytes served since Loop.settle


class Tables(NamedTuple):
    """What serve() decides with."""

    run_id: U8
    epoch: int
    keyed: bool
    chunk_bytes: int
    staging: int  # address
    row_bytes: int
    theta: int  # address of the current version's parameters
    theta_number: int  # NEVER: no sums are taken
    places: Places
    sums: Sums
    rows: Rows
    versions: Versions
    keys: Keys
    readers: Readers


class ServeScratch(NamedTuple):
    """Memory of serve(), without meaning before and after, but for messages that it leaves."""

    messages: Messages  # routing id, header, payload; then routing ids of held acknowledgements
    held: U8  # (TOGETHER, ANSWER_BYTES)
    held_bytes: I64  # (TOGETHER,)
    answer: U8  # (ANSWER_BYTES,)
    value: I64  # (N_FIELDS,) of the parsed header, and length
    length: I64
    acc: U64
    lanes: F64
    others: I64  # (MOST_COMPANIONS,), and claimed
    claimed: I64


# ---- compiled ----


@compiled
def serve(
    router: int, items: PollItems, until_s: float, refresh_s: float, tables: Tables, scratch: ServeScratch, lent: I64,
    free: int, told: I64,
) -> int:  # fmt: skip
    """Serve messages until there is something for Python: ENOUGH, IDLE, NEWS, UNUSUAL, COMPLETE or FAILED.

    router: the socket's address; items: of the socket, then of whatever else ends the wait. until_s: monotonic time at
    which it returns if it has nothing to do; once it served a message, that is after refresh_s at the latest. lent
    (2,): SENT and FREED_AGAIN; free: freed().
    """
    messages = address_of(scratch.messages)
    peer, head, body = messages, messages + MESSAGE_BYTES, messages + 2 * MESSAGE_BYTES
    value, length = scratch.value, scratch.length
    told[:] = 0
    while told[N_SERVED] < MOST_MESSAGES:
        error = _receive(router, peer)
        if error == EAGAIN:
            if not _flush(router, scratch, told):
                return FAILED
            left_ms = _left_ms(until_s)
            if left_ms == 0:
                return IDLE
            if zmq_poll(address_of(items), np.int32(len(items)), left_ms) <= 0:
                return IDLE  # or a signal came; `items` say nothing then
            for index in range(1, len(items)):
                if is_ready(items, index):
                    return NEWS
            continue
        if error == 0:
            error = _receive(router, head)
            if error != 0:
                zmq_msg_close(peer)
        if error != 0:
            told[ERRNO] = error
            return FAILED
        n_frames, more = 1, zmq_msg_more(head)
        if more:
            error = _receive(router, body)
            if error != 0:
                zmq_msg_close(peer)
                zmq_msg_close(head)
                told[ERRNO] = error
                return FAILED
            n_frames, more = 2, zmq_msg_more(body)
        row, chunk, completed = -1, -1, False
        if not more and parse(zmq_msg_data(head), zmq_msg_size(head), value, length):
            if is_ours(value, length, tables.run_id):
                if n_frames == 2 and value[OP] == PUT_CHUNK:
                    row, completed = _put(tables, scratch, head, body)
                elif n_frames == 1 and value[OP] == GET_CHUNK:
                    chunk = _get(tables, scratch, peer, head, body, lent, free)
        if row < 0 and chunk < 0:
            told[N_FRAMES], told[MORE] = n_frames, more
            return UNUSUAL if _flush(router, scratch, told) else FAILED
        told[N_SERVED] += 1
        if told[N_SERVED] == 1:
            until_s = min(until_s, now_s() + refresh_s)
        if row >= 0:
            if completed and not _flush(router, scratch, told):
                return FAILED
            _hold(tables, scratch, told, row, peer)
            zmq_msg_close(head)
            zmq_msg_close(body)
            if completed:
                told[ROW] = row
                return COMPLETE
            if told[HELD] == TOGETHER and not _flush(router, scratch, told):
                return FAILED
        else:
            zmq_msg_close(head)
            told[SERVED_BYTES] += value[LENGTH_BYTES]
            if not _send_chunk(router, scratch, peer, body, chunk, told):
                return FAILED
    return ENOUGH if _flush(router, scratch, told) else FAILED


@compiled
def _left_ms(until_s: float) -> int:
    """Milliseconds until then for zmq_poll: -1 for ever, 0 when it is over."""
    if until_s == np.inf:
        return -1
    return int(np.ceil(max(0.0, until_s - now_s()) * 1000.0))


@compiled
def _receive(router: int, message: int) -> int:
    """Receive a frame into `message`. Returns 0, or the error; then there is no message to be closed."""
    while True:
        zmq_msg_init(message)
        if zmq_msg_recv(message, router, np.int32(DONTWAIT)) >= 0:
            return 0
        error = int(zmq_errno())
        zmq_msg_close(message)
        if error != EINTR:
            return error


@compiled
def _put(tables: Tables, scratch: ServeScratch, head: int, body: int) -> tuple[int, bool]:
    """Land a chunk. Returns the push's row and whether this made it complete; row -1: it is left to Python."""
    value, rows, places, sums = scratch.value, tables.rows, tables.places, tables.sums
    row = _row_of(rows, value, scratch.length)
    if row < 0 or value[EPOCH] < tables.epoch:
        return -1, False
    if tables.keyed and (rows.owner[row] < 0 or rows.owner[row] != _owner(tables.keys, head)):
        return -1, False
    block, offset_bytes, length_bytes, codec = value[BLOCK], value[OFFSET_BYTES], value[LENGTH_BYTES], value[CODEC]
    chunk = find_chunk(places, tables.chunk_bytes, block, offset_bytes, length_bytes)
    if chunk < 0 or codec != rows.codec[row] or (codec != F32 and rows.base[row] == 0):
        return -1, False
    n, n_bytes = length_bytes // FLOAT32_BYTES, zmq_msg_size(body)
    if n_bytes != encoded_bytes(codec, n):
        return -1, False
    of = Landed(rows.landed[row], rows.checksums[row], rows.counts[row])
    checksum: Any = np.uint64(value[CHECKSUM])
    before = has_landed(of, chunk, checksum)
    if before != NEW:
        return (row, False) if before == SAME else (-1, False)
    start, source, number = places.start_byte[block] + offset_bytes, zmq_msg_data(body), tables.theta_number
    piece, pieces = places.first_piece[block] + offset_bytes // PIECE_BYTES, n_pieces(n)
    into = array_at(tables.staging + row * tables.row_bytes + start, n, np.float32)
    sums.measured[row, chunk] = NEVER  # the bytes land before their checksum is known
    if number == NEVER and codec == F32:
        found, bad = land(into, source, scratch.acc)
    elif number == NEVER:
        base = array_at(rows.base[row] + start, n, np.float32)
        found, bad = land_difference(codec, into, source, n_bytes, base, scratch.acc)
    else:
        theta = array_at(tables.theta + start, n, np.float32)
        squared = _part_of(sums.squared, row, piece, pieces)
        if codec == F32:
            found, bad = land_measured(into, source, theta, squared, scratch.acc, scratch.lanes)
        else:
            base = array_at(rows.base[row] + start, n, np.float32)
            found, bad = land_difference_measured(
                codec, into, source, n_bytes, base, theta, squared, scratch.acc, scratch.lanes
            )
    if found != checksum:
        return -1, False
    n_others = 0
    if number != NEVER:
        n_others = claim_companions(sums, row, chunk, number, scratch.others, scratch.claimed)
        theta = array_at(tables.theta + start, n, np.float32)
        values = array_at(source, n, np.float32) if codec == F32 else into  # what landed is in no cache, the frame is
        for index in range(n_others):
            other = array_at(tables.staging + scratch.others[index] * tables.row_bytes + start, n, np.float32)
            take_products(theta, values, other, _part_of(sums.products, scratch.claimed[index], piece, pieces))
    note_sums(sums, row, chunk, bad, number)
    for index in range(n_others):
        note_products(sums, row, scratch.others[index], chunk, number)
    rows.came[row, 0] += length_bytes
    rows.came[row, 1] += n_bytes
    return row, note_landed(of, chunk, checksum, length_bytes)


@compiled
def _row_of(rows: Rows, value: I64, length: I64) -> int:
    """The row of the header's push and attempt, or -1."""
    for row in range(len(rows.open)):
        if rows.open[row] and value[ATTEMPT] == rows.attempt[row]:
            if same(value[PUSH], length[PUSH], rows.push[row, : rows.push_bytes[row]]):
                return row
    return -1


@compiled
def _owner(keys: Keys, head: int) -> int:
    """The owner's number of the key by whose connection the message came; -1: it is not listed."""
    number = number_of_user(head, keys.user)
    return int(keys.owner[number]) if number >= 0 else -1


@compiled
def _part_of(sums: F64, row: int, first: int, n: int) -> Any:
    """sums[row, first : first + n]."""
    return array_at(address_of(sums) + FLOAT64_BYTES * (row * sums.shape[1] + first), n, np.float64)


@compiled
def _get(tables: Tables, scratch: ServeScratch, peer: int, head: int, body: int, lent: I64, free: int) -> int:
    """Make the answer to a request for a chunk: its header in scratch.answer, its payload in `body`. Returns the
    header's length; -1: it is left to Python."""
    value, length, versions, readers = scratch.value, scratch.length, tables.versions, tables.readers
    reader = _owner(tables.keys, head) if tables.keyed else _reader(readers, short_id(peer))
    if reader < 0 or value[MOMENTUM]:
        return -1
    block, offset_bytes, length_bytes = value[BLOCK], value[OFFSET_BYTES], value[LENGTH_BYTES]
    chunk = find_chunk(tables.places, tables.chunk_bytes, block, offset_bytes, length_bytes)
    if chunk < 0:
        return -1
    for index in range(len(versions.address)):
        if same(value[VERSION], length[VERSION], versions.version[index, : versions.version_bytes[index]]):
            place, n_bytes, codec, n_parts = versions.address[index], length_bytes, F32, 1
            place += tables.places.start_byte[block] + offset_bytes
            if length[BASE] != ABSENT:
                codec = versions.codec[index]
                n_parts = _differences(versions, index, value, length)
                place = versions.difference[index] + versions.starts[chunk]
                n_bytes = versions.starts[chunk + 1] - versions.starts[chunk]
                if n_parts == 0 or n_parts * n_bytes >= length_bytes:
                    return -1
            checksum, credit = versions.checksums[index, chunk], readers.credit[reader]
            n = write_chunk(scratch.answer, tables.run_id, tables.epoch, value, length, codec, checksum, credit)
            if n < 0:
                return -1
            if n_parts > 1:
                if zmq_msg_init_size(body, n_parts * n_bytes) < 0:
                    return -1
                _join(zmq_msg_data(body), versions, index, n_parts, versions.starts[chunk], n_bytes)
            elif zmq_msg_init_data(body, place, n_bytes, free, address_of(lent) + 8 * FREED_AGAIN) < 0:
                return -1
            else:
                lent[SENT] += 1
            readers.came[reader] += n_parts * n_bytes
            return n
    return -1


@compiled
def _differences(versions: Versions, index: int, value: I64, length: I64) -> int:
    """How many differences lead from the header's base to the version in this row; 0: not all are here."""
    codec, n = value[CODEC], 0
    while index >= 0 and codec != NONE and versions.codec[index] == codec and n < len(versions.before):
        n += 1
        if same(value[BASE], length[BASE], versions.base[index, : versions.base_bytes[index]]):
            return n
        index = versions.before[index]
    return 0


@compiled
def _join(into_address: int, versions: Versions, index: int, n_parts: int, start: int, n_bytes: int) -> None:
    """Write a chunk's last n_parts differences up to the version in this row, oldest first."""
    for part in range(n_parts - 1, -1, -1):
        into = array_at(into_address + part * n_bytes, n_bytes, np.uint8)
        source = array_at(versions.difference[index] + start, n_bytes, np.uint8)
        for i in range(n_bytes):
            into[i] = source[i]
        index = versions.before[index]


@compiled
def short_id(message: int) -> Any:
    """A routing id of 1 to 7 bytes as one number, its length first; 0 for any other."""
    n, place = zmq_msg_size(message), zmq_msg_data(message)
    if n < 1 or n > 7:
        return np.uint64(0)
    number = np.uint64(n)
    for index in range(n):
        number = number << np.uint64(8) | peek8(place + index)
    return number


@compiled
def _reader(readers: Readers, number: Any) -> int:
    for index in range(len(readers.peer)):
        if readers.peer[index] == np.uint64(0):
            return -1
        if readers.peer[index] == number:
            return index
    return -1


@compiled
def _hold(tables: Tables, scratch: ServeScratch, told: I64, row: int, peer: int) -> None:
    """Write the acknowledgement of a chunk of this row, and keep it with its routing id."""
    rows, at = tables.rows, told[HELD]
    complete = rows.counts[row, N_LANDED] == rows.landed.shape[1]
    scratch.held_bytes[at] = write_ack(
        scratch.held[at], tables.run_id, tables.epoch, scratch.value, scratch.length, complete, rows.credit[row]
    )
    place = address_of(scratch.messages) + MESSAGE_BYTES * (3 + at)
    zmq_msg_init(place)
    zmq_msg_move(place, peer)
    told[HELD] = at + 1


@compiled
def _flush(router: int, scratch: ServeScratch, told: I64) -> bool:
    """Send what is held. False: libzmq failed, told[ERRNO] says how."""
    for index in range(told[HELD]):
        peer = address_of(scratch.messages) + MESSAGE_BYTES * (3 + index)
        if _reaches(router, peer, told):
            n_bytes = scratch.held_bytes[index]
            if _send(router, address_of(scratch.held) + index * scratch.held.shape[1], n_bytes, DONTWAIT, told) < 0:
                return False
    told[HELD] = 0
    return bool(told[ERRNO] == 0)


flush = _flush
"""For Python, to send the acknowledgement that COMPLETE holds."""


@compiled
def _send_chunk(router: int, scratch: ServeScratch, peer: int, body: int, n_header: int, told: I64) -> bool:
    """Send the answer that _get() made. False as for _flush()."""
    if not _reaches(router, peer, told):
        zmq_msg_close(body)
        return bool(told[ERRNO] == 0)
    if _send(router, address_of(scratch.answer), n_header, SNDMORE | DONTWAIT, told) < 0:
        zmq_msg_close(body)
        return False
    if _send_message(router, body, DONTWAIT) < 0:
        told[ERRNO] = zmq_errno()
        zmq_msg_close(body)
        return False
    return True


@compiled
def _reaches(router: int, peer: int, told: I64) -> bool:
    """Begin an answer with its routing id. A peer that is gone or does not read loses it, and asks again."""
    if _send_message(router, peer, SNDMORE | DONTWAIT) >= 0:
        return True
    error = int(zmq_errno())
    zmq_msg_close(peer)
    if error != EHOSTUNREACH and error != EAGAIN:
        told[ERRNO] = error
    return False


@compiled
def _send_message(router: int, message: int, flags: int) -> int:
    while True:
        sent = zmq_msg_send(message, router, np.int32(flags))
        if sent >= 0 or zmq_errno() != EINTR:
            return int(sent)


@compiled
def _send(router: int, place: int, n_bytes: int, flags: int, told: I64) -> int:
    while True:
        sent = zmq_send(router, place, n_bytes, np.int32(flags))
        if sent >= 0:
            return int(sent)
        error = int(zmq_errno())
        if error != EINTR:
            told[ERRNO] = error
            return -1


# ---- for Python ----


class Lent:
    """Arrays whose bytes libzmq may read until it has given back every payload of one socket."""

    def __init__(self) -> None:
        self.counts = np.zeros(2, np.int64)
        """SENT, FREED_AGAIN; libzmq's thread writes the second one."""
        self._arrays: list[Any] = []

    @property
    def over(self) -> bool:
        return bool(self.counts[SENT] == self.counts[FREED_AGAIN])

    def keep(self, arrays: Sequence[Any]) -> None:
        """From now on the payloads are parts of these; earlier ones are kept as long as one may be under way."""
        earlier = [] if self.over else [a for a in self._arrays if all(a is not array for array in arrays)]
        self._arrays = [*arrays, *earlier]


class ServeLoop:
    """serve(), with the tables of one data port. On the data thread only.

    renew() before serve() whenever the port's tables changed, and settle() after it.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = text_of(run_id)
        self._scratch = ServeScratch(
            *(new_messages(3 + TOGETHER), np.zeros((TOGETHER, ANSWER_BYTES), np.uint8), np.zeros(TOGETHER, np.int64)),
            *(np.zeros(ANSWER_BYTES, np.uint8), np.zeros(N_FIELDS, np.int64), np.zeros(N_FIELDS, np.int64)),
            *(np.zeros(8, np.uint64), np.zeros(LANES, np.float64)),
            *(np.zeros(MOST_COMPANIONS, np.int64), np.zeros(MOST_COMPANIONS, np.int64)),
        )
        self._told = np.zeros(8, np.int64)
        self._lent = Lent()
        self._parked: list[Lent] = []
        self._items = np.zeros(0, POLL_ITEM)
        self._router: zmq.Socket[bytes] | None = None
        self._stagings: list[Staging | None] = []
        self._listed: Mapping[str, AllowedKey] | None = None
        self._keys, self._owners = _keys_of({})
        self._names: list[Reader] = []
        self._readers = _no_readers(MOST_PEERS, 0)
        self._checksums: dict[Any, tuple[Any, U64]] = {}
        self._arrays: list[Any] = []
        self._tables = self._tables_of(DataPort(run_id, lambda staged: None))

    def watch(self, router: zmq.Socket[bytes], items: PollItems) -> None:
        """Serve this socket, which stands first in `items`; what was sent by another before may still be on its way."""
        if self._router is not None:
            self._parked.append(self._lent)
            self._lent = Lent()
            self._lent.keep(self._arrays)
            if self._listed is None:
                self._forget_peers()
        self._router, self._items = router, items

    @property
    def holds_memory(self) -> bool:
        """Whether memory of a closed socket's payloads waits to be given up: then call give_up() now and again."""
        return bool(self._parked)

    def give_up(self) -> None:
        """Give up the memory that libzmq no longer reads."""
        self._parked = [lent for lent in self._parked if not lent.over]

    def serve(self, until_s: float, refresh_s: float) -> int:
        """As serve() above. Raises zmq.ZMQError where that says FAILED."""
        assert self._router is not None
        why = serve(
            self._router.underlying, self._items, until_s, refresh_s, self._tables, self._scratch, self._lent.counts,
            freed(), self._told,
        )  # fmt: skip
        self._check(why != FAILED)
        return why

    def flush(self) -> None:
        """After COMPLETE: send the acknowledgement."""
        assert self._router is not None
        self._check(flush(self._router.underlying, self._scratch, self._told))

    def _check(self, went_well: bool) -> None:
        if not went_well:
            raise zmq.ZMQError(int(self._told[ERRNO]))

    @property
    def complete(self) -> Staging:
        """After COMPLETE: the push."""
        staging = self._stagings[int(self._told[ROW])]
        assert staging is not None
        return staging

    def left(self) -> tuple[bytes, list[ReceivedFrame], bool]:
        """After UNUSUAL: the message's routing id, its first frames, and whether further ones wait in the socket."""
        messages, n_frames = self._scratch.messages, int(self._told[N_FRAMES])
        frames = [ReceivedFrame(messages, 1 + index) for index in range(n_frames)]
        return ReceivedFrame(messages, 0).bytes, frames, bool(self._told[MORE])

    def is_ready(self, index: int) -> bool:
        """After NEWS: whether this poll item is ready."""
        return bool(self._items[index]["revents"])

    def settle(self, port: DataPort) -> bool:
        """Have the port count what the last call did, and take the new credits. Returns whether it did anything."""
        if not self._told[N_SERVED]:
            return False
        rows, readers = self._tables.rows, self._readers
        for row in np.flatnonzero(rows.came[:, 1]).tolist():
            staging = self._stagings[row]
            assert staging is not None
            port.note_came(staging, *rows.came[row].tolist())
            rows.came[row] = 0
        for number in np.flatnonzero(readers.came).tolist():
            port.note_served(self._names[number], int(readers.came[number]))
            readers.came[number] = 0
        self._give_credits(port, reads=bool(self._told[SERVED_BYTES]))
        return True

    def _give_credits(self, port: DataPort, *, reads: bool) -> None:
        for row, staging in enumerate(self._stagings):
            if staging is not None:
                self._tables.rows.credit[row] = port.push_credit(staging)
        if reads:
            for number, reader in enumerate(self._names):
                self._readers.credit[number] = port.pull_credit(reader)

    def meet(self, port: DataPort, peer: bytes) -> None:
        """A reader whose request Python has just served: its next ones are served here. With keys they are already."""
        if self._listed is not None or not 1 <= len(peer) <= 7 or peer in self._names:
            return
        if len(self._names) == MOST_PEERS:
            self._forget_peers()
        number = len(self._names)
        self._names.append(peer)
        self._readers.credit[number] = port.pull_credit(peer)
        self._readers.peer[number] = int.from_bytes(bytes([len(peer)]) + peer, "big")

    def _forget_peers(self) -> None:
        self._names.clear()
        self._readers.peer[:] = 0

    # ---- making the tables ----

    def renew(self, port: DataPort) -> None:
        """The port's tables changed."""
        self._tables = self._tables_of(port)
        self._lent.keep(self._arrays)
        self._give_credits(port, reads=True)

    def _tables_of(self, port: DataPort) -> Tables:
        self._take_keys(port)
        shard, staging, receipts = port.shard, port.staging, port.receipts
        served = shard is not None and staging is not None and _is_plain(staging, len(staging) * shard.n_bytes)
        self._arrays, self._stagings = [], []
        if not served or shard is None or staging is None or receipts is None:
            no_shard = ShardMap((), PIECE_BYTES)
            return Tables(
                self._run_id, port.epoch, port.admission is not None, PIECE_BYTES, 0, 0, 0, NEVER, _places(no_shard),
                Receipts(no_shard, 0).sums, self._rows(port), self._versions(port, no_shard), self._keys, self._readers,
            )  # fmt: skip
        versions, current = self._versions(port, shard), port.readable.get(port.current) if port.current else None
        theta = current.theta if current is not None and _is_plain(current.theta, shard.n_bytes) else None
        measured = theta is not None and shard.whole_pieces
        self._arrays.append(staging)
        return Tables(
            self._run_id, port.epoch, port.admission is not None, shard.chunk_bytes, address(staging), shard.n_bytes,
            address(theta) if theta is not None else 0, receipts.theta_number if measured else NEVER, _places(shard),
            receipts.sums, self._rows(port), versions, self._keys, self._readers,
        )  # fmt: skip

    def _take_keys(self, port: DataPort) -> None:
        """Make the tables of the listed keys, if the list is another one: it may have thousands."""
        if port.admission is None or port.admission.keys is self._listed:
            return
        self._listed = port.admission.keys
        self._keys, self._owners = _keys_of(self._listed)
        self._names = list(self._owners)
        self._readers = _no_readers(0, len(self._names))

    def _rows(self, port: DataPort) -> Rows:
        arrays = (port.table.rows if port.table is not None else None) or rows_of_arrays(0, 0)
        n_slots = len(arrays.landed)
        self._stagings = [None] * n_slots
        is_open, push_bytes, attempt, codec, base_at, owner, credit = np.zeros((7, n_slots), np.int64)
        rows = Rows(
            *(is_open, np.zeros((n_slots, PUSH_BYTES), np.uint8), push_bytes, attempt, codec, base_at, owner, credit),
            *(*arrays, np.zeros((n_slots, 2), np.int64)),
        )
        for staging in port.table.stagings() if port.table is not None else ():
            slot, push = staging.slot, part_of(staging.slot.push)
            row = slot.number
            if len(push) > PUSH_BYTES:
                continue
            self._stagings[row] = staging
            rows.open[row], rows.attempt[row], rows.codec[row] = 1, slot.attempt, slot.wire
            rows.push[row, : len(push)], rows.push_bytes[row] = push, len(push)
            rows.owner[row] = self._owners.get(owner_of(KeyRole.CLUSTER, slot.push.cluster), -1)
            base = port.readable.get(slot.base) if slot.base is not None else None
            if base is not None and port.shard is not None and _is_plain(base.theta, port.shard.n_bytes):
                rows.base[row] = address(base.theta)
        return rows

    def _versions(self, port: DataPort, shard: ShardMap) -> Versions:
        known, self._checksums = self._checksums, {}
        for version, buffer in port.readable.items():
            if len(buffer.checksums) == shard.n_chunks and _is_plain(buffer.theta, shard.n_bytes):
                before = known.get(version)
                if before is None or before[0] is not buffer.checksums:
                    before = (buffer.checksums, np.array(buffer.checksums, np.uint64))
                self._checksums[version] = before
        n, rows = len(self._checksums), {version: index for index, version in enumerate(self._checksums)}
        names, numbers = (n, VERSION_BYTES), np.zeros((6, n), np.int64)
        checksums_of, starts = np.zeros((n, shard.n_chunks), np.uint64), np.zeros(shard.n_chunks + 1, np.int64)
        versions = Versions(
            np.zeros(names, np.uint8), numbers[0], numbers[1], checksums_of, numbers[2], numbers[3],
            np.zeros(names, np.uint8), numbers[4], numbers[5], starts,
        )  # fmt: skip
        for version, (_, checksums) in self._checksums.items():
            index, name, buffer = rows[version], part_of(version), port.readable[version]
            versions.version[index, : len(name)], versions.version_bytes[index] = name, len(name)
            versions.address[index], versions.checksums[index] = address(buffer.theta), checksums
            self._arrays.append(buffer.theta)
            difference, base = buffer.difference, buffer.base
            if difference is not None and base is not None:
                name = part_of(base)
                versions.base[index, : len(name)], versions.base_bytes[index] = name, len(name)
                versions.codec[index], versions.difference[index] = difference.codec, address(difference.data)
                versions.before[index], versions.starts[:] = rows.get(base, -1), difference.starts
                self._arrays.append(difference.data)
        return versions


def _is_plain(array: Any, n_bytes: int) -> bool:
    """Whether the array is so many bytes of float32, one after the other."""
    return bool(array.dtype == np.float32 and array.flags.c_contiguous and array.nbytes == n_bytes)


def _keys_of(listed: Mapping[str, AllowedKey]) -> tuple[Keys, dict[str, int]]:
    """The table of these keys, by user id, and their owners' numbers."""
    owners: dict[str, int] = {}
    users = sorted(listed)
    owner = [owners.setdefault(owner_of(listed[user].role, listed[user].owner), len(owners)) for user in users]
    user = np.array(bytearray("".join(users), "ascii"), np.uint8).reshape(-1, USER_BYTES)
    return Keys(user, np.array(owner, np.int64)), owners


def _no_readers(n_peers: int, n_owners: int) -> Readers:
    return Readers(np.zeros(n_peers, np.uint64), *np.zeros((2, n_peers or n_owners), np.int64))


def _places(shard: ShardMap) -> Places:
    return Places(*(np.array(column, np.int64) for column in shard.places))


def warm_up() -> None:
    """Compile (or load from the cache) everything, so that the first message is not slow."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        loop = ServeLoop("")
        loop.watch(router, poll_items(router))
        loop.serve(-math.inf, 0.0)
        loop.flush()
