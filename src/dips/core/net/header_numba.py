"""The data header in compiled code: the same bytes as core/net/data_header.py, for loops that have no interpreter.

parse() accepts *plain* headers only: those that DataHeader.decode() accepts and whose encode() is the same bytes again,
of at most PLAIN_BYTES, with ASCII texts, and without a refusal or missing chunks. Each message between two correct ends
that moves a chunk is one. Every other header, a right one that is merely unusual too, is False here: the caller leaves
it to DataHeader, which alone says what is wrong. So this module refuses nothing, and no header means one thing to
compiled code and another to Python.

A parsed header is two arrays, indexed by field: `value`, int64 (N_FIELDS,), the number, or the address where the bytes
of a text or of a part begin; `length`, int64 (N_FIELDS,), how many bytes, 0 for a number, ABSENT for a field that is
not there (its value is 0). Numbers are at least 0 and at most MOST_NUMBER, so the sum of two does not overflow; only
CHECKSUM is any 64 bits. The addresses lie in the frame, so they hold as long as the frame does.

Writers write into `buf`, uint8, from `at` on, and return where the next field begins: -1 as soon as the buffer's end is
reached, and for every further field then. Fields are written in the order of their numbers, and 0 and "" not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import NDArray

from dips.core.ids import PushId, Version
from dips.core.math.simd_numba import address_of, compiled, peek8, peek64
from dips.core.math.xxh3_numba import xxh3
from dips.core.net.data_header import DataOp
from dips.core.net.messages_pb2 import write_push_id, write_version
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.core.wire import Codec
from dips.protos import common_pb2, data_pb2

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

_header = data_pb2.DataHeader
PROTOCOL = _header.PROTOCOL_FIELD_NUMBER
RUN_ID = _header.RUN_ID_FIELD_NUMBER
EPOCH = _header.EPOCH_FIELD_NUMBER
OP = _header.OP_FIELD_NUMBER
PUSH = _header.PUSH_FIELD_NUMBER
ATTEMPT = _header.ATTEMPT_FIELD_NUMBER
VERSION = _header.VERSION_FIELD_NUMBER
BLOCK = _header.BLOCK_FIELD_NUMBER
OFFSET_BYTES = _header.OFFSET_BYTES_FIELD_NUMBER
LENGTH_BYTES = _header.LENGTH_BYTES_FIELD_NUMBER
CODEC = _header.CODEC_FIELD_NUMBER
CHECKSUM = _header.CHECKSUM_FIELD_NUMBER
REQUEST = _header.REQUEST_FIELD_NUMBER
CAUSE_ID = _header.CAUSE_ID_FIELD_NUMBER
COMPLETE = _header.COMPLETE_FIELD_NUMBER
CREDIT = _header.CREDIT_FIELD_NUMBER
MOMENTUM = _header.MOMENTUM_FIELD_NUMBER
BASE = _header.BASE_FIELD_NUMBER
N_FIELDS = max(field.number for field in _header.DESCRIPTOR.fields) + 1

ABSENT = -1

PLAIN_BYTES = 512
"""Of the longest plain header: enough for texts of a hundred bytes."""

TRAILER_BYTES = 10
"""The key of header_checksum, 2 bytes, and 8 bytes."""

MOST_NUMBER = 2**62 - 1

PUT_CHUNK, QUERY_MISSING, GET_CHUNK = int(DataOp.PUT_CHUNK), int(DataOp.QUERY_MISSING), int(DataOp.GET_CHUNK)
ACK, CHUNK = int(DataOp.ACK), int(DataOp.CHUNK)
REFUSED = int(DataOp.REFUSED)
F32 = int(Codec.F32)

_VARINT, _BYTES = 0, 2
"""Protobuf's wire types. A header that has a field of another kind is not plain."""

_TRAILER_KEY = (_header.HEADER_CHECKSUM_FIELD_NUMBER << 3) | 1
_TRAILER_FIRST, _TRAILER_SECOND = (_TRAILER_KEY & 0x7F) | 0x80, _TRAILER_KEY >> 7


def _most_of(field: Any) -> int:
    """The largest number of a field of a plain header; 0: a text or a part; -1: no plain header has this field."""
    if field.number == CHECKSUM:
        return 2**64 - 1
    if field.enum_type is not None:
        return int(max(field.enum_type.values_by_number))
    numbers = {
        FieldDescriptor.TYPE_BOOL: 1,
        FieldDescriptor.TYPE_UINT32: 2**32 - 1,
        FieldDescriptor.TYPE_UINT64: MOST_NUMBER,
        FieldDescriptor.TYPE_STRING: 0,
    }
    return 0 if field.number in (PUSH, VERSION, BASE) else numbers.get(field.type, -1)


_KIND = np.full(N_FIELDS, -1, np.int64)
_MOST = np.zeros(N_FIELDS, np.uint64)
for _field in _header.DESCRIPTOR.fields:
    if (_most := _most_of(_field)) >= 0:
        _KIND[_field.number] = _VARINT if _most else _BYTES
        _MOST[_field.number] = _most


# ---- reading ----


@compiled
def parse(address: int, n_bytes: int, value: I64, length: I64) -> bool:
    """Whether the n_bytes at the address are a plain header; then `value` and `length` say its fields."""
    if n_bytes < TRAILER_BYTES or n_bytes > PLAIN_BYTES:
        return False
    end = address + n_bytes - TRAILER_BYTES
    if peek8(end) != np.uint64(_TRAILER_FIRST) or peek8(end + 1) != np.uint64(_TRAILER_SECOND):
        return False
    if xxh3(address, n_bytes - TRAILER_BYTES) != peek64(end + 2):
        return False
    for field in range(N_FIELDS):
        value[field], length[field] = 0, ABSENT
    at, last = address, 0
    while at < end:
        key, at = _varint(at, end)
        if at < 0:
            return False
        field, kind = _int(key >> np.uint64(3)), _int(key & np.uint64(7))
        if field <= last or field >= N_FIELDS or kind != _KIND[field]:
            return False
        last = field
        number, at = _varint(at, end)
        if at < 0:
            return False
        if kind == _VARINT:
            if number == np.uint64(0) or number > _MOST[field]:
                return False
            value[field], length[field] = _int(number), 0
        else:
            if number > np.uint64(end - at):
                return False
            size = _int(number)
            value[field], length[field] = at, size
            at += size
            if not _is_plain(field, value[field], at):
                return False
    op = value[OP]
    if op == PUT_CHUNK or op == QUERY_MISSING:
        return bool(length[PUSH] != ABSENT)
    if op == GET_CHUNK or op == CHUNK:
        return bool(length[VERSION] != ABSENT)
    return bool(op != 0 and op != REFUSED)


@compiled
def is_ours(value: I64, length: I64, run_id: U8) -> bool:
    """As DataHeader.check_common(): whether a parsed header is of a protocol that is spoken here, and of this run."""
    spoken = PROTOCOL_MIN <= value[PROTOCOL] <= PROTOCOL_VERSION
    return spoken and same(value[RUN_ID], length[RUN_ID], run_id)


@compiled
def same(address: int, n_bytes: int, expected: U8) -> bool:
    """Whether a text or part of a parsed header is these bytes. An absent text is b""."""
    if max(n_bytes, 0) != len(expected):
        return False
    for index in range(len(expected)):
        if peek8(address + index) != np.uint64(expected[index]):
            return False
    return True


@compiled
def _varint(at: int, end: int) -> tuple[np.uint64, int]:
    """The number at `at`, and where it ends; -1 unless it ends before `end`, has 64 bits, and no byte too many."""
    number, shift = np.uint64(0), np.uint64(0)
    while at < end:
        byte = peek8(at)
        at += 1
        if shift == np.uint64(63) and byte > np.uint64(1):
            return number, -1
        number |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return number, at if byte != np.uint64(0) or shift == np.uint64(0) else -1
        shift += np.uint64(7)
    return number, -1


@compiled
def _int(number: np.uint64) -> int:
    """The same 64 bits: numba makes a float of int64 + uint64."""
    return np.int64(number)  # type: ignore[return-value]


@compiled
def _is_plain(field: int, at: int, end: int) -> bool:
    """Whether the bytes [at, end) of a text or part are what encode() writes."""
    if field == VERSION or field == BASE:
        return _two_numbers(at, end)
    if field == PUSH:
        return _push(at, end)
    return _text(at, end)


@compiled
def _text(at: int, end: int) -> bool:
    """ASCII, and not empty."""
    if at >= end:
        return False
    for place in range(at, end):
        if peek8(place) >= np.uint64(0x80):
            return False
    return True


@compiled
def _push(at: int, end: int) -> bool:
    """A PushId: cluster = 1, a text; incarnation = 2, always there; seq = 3."""
    if at < end and peek8(at) == np.uint64(1 << 3 | _BYTES):
        size, at = _varint(at + 1, end)
        if at < 0 or size > np.uint64(end - at) or not _text(at, at + _int(size)):
            return False
        at += _int(size)
    if at >= end or peek8(at) != np.uint64(2 << 3 | _BYTES):
        return False
    size, at = _varint(at + 1, end)
    if at < 0 or size > np.uint64(end - at) or not _two_numbers(at, at + _int(size)):
        return False
    return _optional_number(at + _int(size), end, 3) == end


@compiled
def _two_numbers(at: int, end: int) -> bool:
    """A Version or an Incarnation: fields 1 and 2, both numbers."""
    at = _optional_number(at, end, 1)
    return at >= 0 and _optional_number(at, end, 2) == end


@compiled
def _optional_number(at: int, end: int, field: int) -> int:
    """Where a number other than 0 ends; `at` where another field or `end` comes next; -1 for a 0 or a damaged one."""
    if at < end and peek8(at) == np.uint64(field << 3 | _VARINT):
        number, at = _varint(at + 1, end)
        return at if number != np.uint64(0) else -1
    return at


# ---- writing ----


@compiled
def put(buf: U8, at: int, field: int, number: np.uint64) -> int:
    """A number."""
    if number == np.uint64(0):
        return at
    return _put_varint(buf, _put_varint(buf, at, np.uint64(field << 3 | _VARINT)), number)


@compiled
def put_bytes(buf: U8, at: int, field: int, data: U8) -> int:
    """A text."""
    return put_span(buf, at, field, address_of(data), len(data) if len(data) > 0 else ABSENT)


@compiled
def put_part(buf: U8, at: int, field: int, data: U8) -> int:
    """A part, serialised: written even if it has no bytes."""
    return put_span(buf, at, field, address_of(data), len(data))


@compiled
def put_span(buf: U8, at: int, field: int, address: int, n_bytes: int) -> int:
    """A text or part of a parsed header; nothing where n_bytes is ABSENT."""
    if n_bytes == ABSENT:
        return at
    at = _put_varint(buf, _put_varint(buf, at, np.uint64(field << 3 | _BYTES)), np.uint64(n_bytes))
    if at < 0 or n_bytes > len(buf) - at:
        return -1
    for index in range(n_bytes):
        buf[at + index] = np.uint8(peek8(address + index))
    return at + n_bytes


@compiled
def seal(buf: U8, at: int) -> int:
    """The trailer. Returns the header's length; -1 if the buffer was too short."""
    if at < 0 or len(buf) - at < TRAILER_BYTES:
        return -1
    found = xxh3(address_of(buf), at)
    buf[at], buf[at + 1] = np.uint8(_TRAILER_FIRST), np.uint8(_TRAILER_SECOND)
    for index in range(8):
        buf[at + 2 + index] = np.uint8((found >> np.uint64(8 * index)) & np.uint64(0xFF))
    return at + TRAILER_BYTES


@compiled
def _put_varint(buf: U8, at: int, number: np.uint64) -> int:
    while True:
        if at < 0 or at >= len(buf):
            return -1
        if number < np.uint64(0x80):
            buf[at] = np.uint8(number)
            return at + 1
        buf[at] = np.uint8((number & np.uint64(0x7F)) | np.uint64(0x80))
        number >>= np.uint64(7)
        at += 1


# ---- whole headers ----
#
# Each returns the header's length, or -1 where it does not fit into `buf`. run_id and cause are texts; push and version
# are parts (part_of()). What an answer repeats of its request comes from the parsed request.


def text_of(text: str) -> U8:
    """The bytes of a run id or cause within a header, for `same`, is_ours() and the writers."""
    return np.frombuffer(text.encode(), np.uint8).copy()


def part_of(named: PushId | Version) -> U8:
    """The bytes of a push or version within a header, likewise."""
    if isinstance(named, Version):
        version = common_pb2.Version()
        write_version(named, version)
        return np.frombuffer(version.SerializeToString(), np.uint8).copy()
    push = common_pb2.PushId()
    write_push_id(named, push)
    return np.frombuffer(push.SerializeToString(), np.uint8).copy()


@compiled
def write_put_chunk(
    buf: U8, run_id: U8, epoch: int, push: U8, attempt: int, block: int, offset_bytes: int, length_bytes: int,
    codec: int, checksum: np.uint64, request: int, cause: U8,
) -> int:  # fmt: skip
    """The request to take a chunk of a push."""
    at = _begin(buf, run_id, epoch, PUT_CHUNK)
    at = put_part(buf, at, PUSH, push)
    at = put(buf, at, ATTEMPT, np.uint64(attempt))
    at = _place(buf, at, block, offset_bytes)
    at = put(buf, at, LENGTH_BYTES, np.uint64(length_bytes))
    at = put(buf, at, CODEC, np.uint64(codec))
    at = put(buf, at, CHECKSUM, checksum)
    at = put(buf, at, REQUEST, np.uint64(request))
    return seal(buf, put_bytes(buf, at, CAUSE_ID, cause))


@compiled
def write_get_chunk(
    buf: U8, run_id: U8, epoch: int, version: U8, block: int, offset_bytes: int, length_bytes: int, codec: int,
    request: int, cause: U8, momentum: bool, base: U8,
) -> int:  # fmt: skip
    """The request for a chunk of a version's parameters, or of its momentum; codec not F32: of the differences to
    `base`, which no other request has."""
    at = _begin(buf, run_id, epoch, GET_CHUNK)
    at = put_part(buf, at, VERSION, version)
    at = _place(buf, at, block, offset_bytes)
    at = put(buf, at, LENGTH_BYTES, np.uint64(length_bytes))
    at = put(buf, at, CODEC, np.uint64(codec))
    at = put(buf, at, REQUEST, np.uint64(request))
    at = put_bytes(buf, at, CAUSE_ID, cause)
    at = put(buf, at, MOMENTUM, np.uint64(momentum))
    return seal(buf, at if codec == F32 else put_part(buf, at, BASE, base))


@compiled
def write_ack(buf: U8, run_id: U8, epoch: int, value: I64, length: I64, complete: bool, credit: int) -> int:
    """The answer to the parsed PUT_CHUNK."""
    at = _begin(buf, run_id, epoch, ACK)
    at = put_span(buf, at, PUSH, value[PUSH], length[PUSH])
    at = put(buf, at, ATTEMPT, np.uint64(value[ATTEMPT]))
    at = _place(buf, at, value[BLOCK], value[OFFSET_BYTES])
    at = put(buf, at, REQUEST, np.uint64(value[REQUEST]))
    at = put_span(buf, at, CAUSE_ID, value[CAUSE_ID], length[CAUSE_ID])
    at = put(buf, at, COMPLETE, np.uint64(complete))
    return seal(buf, put(buf, at, CREDIT, np.uint64(credit)))


@compiled
def write_chunk(
    buf: U8, run_id: U8, epoch: int, value: I64, length: I64, codec: int, checksum: np.uint64, credit: int
) -> int:
    """The answer to the parsed GET_CHUNK; its payload follows: value[LENGTH_BYTES] bytes, or differences in `codec`."""
    at = _begin(buf, run_id, epoch, CHUNK)
    at = put_span(buf, at, VERSION, value[VERSION], length[VERSION])
    at = _place(buf, at, value[BLOCK], value[OFFSET_BYTES])
    at = put(buf, at, LENGTH_BYTES, np.uint64(value[LENGTH_BYTES]))
    at = put(buf, at, CODEC, np.uint64(codec))
    at = put(buf, at, CHECKSUM, checksum)
    at = put(buf, at, REQUEST, np.uint64(value[REQUEST]))
    at = put_span(buf, at, CAUSE_ID, value[CAUSE_ID], length[CAUSE_ID])
    at = put(buf, at, CREDIT, np.uint64(credit))
    at = put(buf, at, MOMENTUM, np.uint64(value[MOMENTUM]))
    return seal(buf, put_span(buf, at, BASE, value[BASE], length[BASE]))


@compiled
def _begin(buf: U8, run_id: U8, epoch: int, op: int) -> int:
    at = put(buf, 0, PROTOCOL, np.uint64(PROTOCOL_VERSION))
    at = put_bytes(buf, at, RUN_ID, run_id)
    at = put(buf, at, EPOCH, np.uint64(epoch))
    return put(buf, at, OP, np.uint64(op))


@compiled
def _place(buf: U8, at: int, block: int, offset_bytes: int) -> int:
    return put(buf, put(buf, at, BLOCK, np.uint64(block)), OFFSET_BYTES, np.uint64(offset_bytes))
