"""Encodes, parses and checks the header of one data-flow message; the raw bytes of a chunk follow it.

Mirrors DataHeader in protos/data.proto. Reading a header never allocates from a length that it claims: the
caller compares `length_bytes` with the frame that arrived. This module decides nothing about pushes or
versions; it only refuses what no slave and no worker may act on (another protocol, another run).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NoReturn

from google.protobuf.message import DecodeError

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import checksum
from dips.core.messages import MissingChunk as MissingChunk
from dips.core.messages import Refusal
from dips.core.net.messages_pb2 import (
    read_missing_chunk,
    read_refusal,
    write_missing_chunk,
    write_push_id,
    write_refusal,
    write_version,
)
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.core.wire import Codec
from dips.protos import common_pb2, data_pb2
from dips.protos.enums import DataOp as DataOp

MAX_HEADER_BYTES = 64 * 1024
"""A longer header is refused unread. The longest honest one is MISSING: 2048 entries of at most 19 bytes."""

MAX_MISSING = 2048
"""Entries of one MISSING answer; the worker sends these chunks and asks again for the rest."""

_TRAILER_TAG = b"\x91\x01"
"""Protobuf's key of field 18 as fixed64: (18 << 3) | 1 as a varint."""

_TRAILER_BYTES = len(_TRAILER_TAG) + 8


REQUESTS = frozenset({DataOp.PUT_CHUNK, DataOp.QUERY_MISSING, DataOp.GET_CHUNK})
"""What a peer may ask of a slave; the rest are its answers."""

WITH_PAYLOAD = frozenset({DataOp.PUT_CHUNK, DataOp.CHUNK})
"""Operations whose header is followed by one payload frame."""

REFUSED_DATA = (
    *(RefusalCode.BASE_GONE, RefusalCode.BUSY, RefusalCode.CHUNK, RefusalCode.DIGEST, RefusalCode.FENCED),
    *(RefusalCode.KEY, RefusalCode.MALFORMED, RefusalCode.PROTOCOL_VERSION, RefusalCode.RUN_ID),
    *(RefusalCode.STALE_EPOCH, RefusalCode.UNKNOWN_PUSH, RefusalCode.VERSION_GONE),
)
"""What a slave refuses data messages for."""


@dataclass(slots=True, unsafe_hash=True)
class DataHeader:
    """One header. Field meanings and units are in protos/data.proto; a field that an op does not use is 0 or None.

    No code changes one, so it may be hashed. It is not frozen because a frozen one of so many fields takes ten times as
    long to make, and each chunk makes four.
    """

    run_id: str
    epoch: int
    op: DataOp
    request: int
    push: PushId | None = None
    attempt: int = 0
    version: Version | None = None
    block: int = 0
    offset_bytes: int = 0
    length_bytes: int = 0
    codec: Codec = Codec.NONE
    checksum: int = 0
    cause_id: str = ""
    refusal: Refusal | None = None
    missing: tuple[MissingChunk, ...] = ()
    complete: bool = False
    credit: int = 0
    protocol: int = PROTOCOL_VERSION
    momentum: bool = False
    base: Version | None = None
    header_checksum: int = field(default=0, compare=False, repr=False)
    """Of the wire alone: encode() computes it, decode() compares it."""

    def encode(self) -> bytes:
        """The header frame, ending with the checksum of the bytes before it."""
        body = _message(self).SerializeToString()
        return body + _TRAILER_TAG + _checksum(body)

    @classmethod
    def decode(cls, frame: bytes | memoryview) -> DataHeader:
        """Parse a header frame. Raises Refused(MALFORMED) for anything else: a damaged byte, an unknown op or codec."""
        if len(frame) > MAX_HEADER_BYTES:
            raise Refused(
                RefusalCode.MALFORMED,
                f"a data header of {len(frame)} bytes is longer than the {MAX_HEADER_BYTES} that are read",
            )
        data = bytes(frame)
        if data[-_TRAILER_BYTES:-8] != _TRAILER_TAG or data[-8:] != _checksum(data[:-_TRAILER_BYTES]):
            # Right bytes must not go to a wrong block or offset, which the payload's checksum does not cover.
            raise Refused(RefusalCode.MALFORMED, "a data header is damaged: its bytes are not those that were sent")
        try:
            header = _header(data_pb2.DataHeader.FromString(data))
        except DecodeError as error:
            raise Refused(RefusalCode.MALFORMED, f"a DataHeader cannot be parsed: {error}") from error
        # What an op needs must be there, so that no reader has to ask again.
        lacks = ""
        if header.op in (DataOp.PUT_CHUNK, DataOp.QUERY_MISSING) and header.push is None:
            lacks = "it names no push"
        elif header.op in (DataOp.GET_CHUNK, DataOp.CHUNK) and header.version is None:
            lacks = "it names no version"
        elif header.op is DataOp.REFUSED and header.refusal is None:
            lacks = "it carries no refusal"
        if lacks:
            raise Refused(RefusalCode.MALFORMED, f"a data header with op {header.op.name}: {lacks}")
        return header

    def check_common(self, run_id: str) -> None:
        """Refuse what belongs to another protocol or run. Raises Refused(PROTOCOL_VERSION or RUN_ID)."""
        if not PROTOCOL_MIN <= self.protocol <= PROTOCOL_VERSION:
            raise Refused(
                RefusalCode.PROTOCOL_VERSION,
                f"the data header speaks protocol version {self.protocol}, this side {PROTOCOL_MIN} to "
                f"{PROTOCOL_VERSION}: install the same release of dips on both",
            )
        if self.run_id != run_id:
            raise Refused(
                RefusalCode.RUN_ID,
                f"the data header names run {self.run_id[:80]!r}, this side serves run {run_id!r}: "
                "check DIPS_MASTER and the run id",
            )


# Each chunk costs both sides one header read and one written while its bytes are waiting, so the codec of this message
# is not generated: reading it remembers the push or the version that thousands of headers name, and takes a quarter of
# the time.


def _message(header: DataHeader) -> data_pb2.DataHeader:
    message = data_pb2.DataHeader()
    message.protocol = header.protocol
    message.run_id = header.run_id
    message.epoch = header.epoch
    message.op = header.op  # type: ignore[assignment]
    if header.push is not None:
        write_push_id(header.push, message.push)
    message.attempt = header.attempt
    if header.version is not None:
        write_version(header.version, message.version)
    message.block = header.block
    message.offset_bytes = header.offset_bytes
    message.length_bytes = header.length_bytes
    message.codec = header.codec  # type: ignore[assignment]
    message.checksum = header.checksum
    message.request = header.request
    message.cause_id = header.cause_id
    if header.refusal is not None:
        write_refusal(header.refusal, message.refusal)
    for item in header.missing:
        write_missing_chunk(item, message.missing.add())
    message.complete = header.complete
    message.credit = header.credit
    message.momentum = header.momentum
    if header.base is not None:
        write_version(header.base, message.base)
    return message


def _header(message: data_pb2.DataHeader) -> DataHeader:
    """Raises Refused(MALFORMED) for enums and absent parts that no receiver can act on."""
    return DataHeader(
        message.run_id,
        message.epoch,
        _OPS.get(message.op) or _unknown("op", message.op, DataOp),
        message.request,
        _push(message.push) if message.HasField("push") else None,
        message.attempt,
        _version(message.version.timeline, message.version.v) if message.HasField("version") else None,
        message.block,
        message.offset_bytes,
        message.length_bytes,
        _CODECS[message.codec] if message.codec in _CODECS else _unknown("codec", message.codec, Codec),
        message.checksum,
        message.cause_id,
        read_refusal(message.refusal) if message.HasField("refusal") else None,
        tuple(map(read_missing_chunk, message.missing)),
        message.complete,
        message.credit,
        message.protocol,
        message.momentum,
        _version(message.base.timeline, message.base.v) if message.HasField("base") else None,
    )


_OPS = {int(op): op for op in DataOp}
_CODECS = {int(codec): codec for codec in Codec}


def _unknown(name: str, number: int, kind: type[IntEnum]) -> NoReturn:
    raise Refused(RefusalCode.MALFORMED, f"DataHeader.{name}: {number} is not a known {kind.__name__}")


def _push(message: common_pb2.PushId) -> PushId:
    if not message.HasField("incarnation"):
        raise Refused(RefusalCode.MALFORMED, "PushId.incarnation: it is missing")
    return _push_id(message.cluster, message.incarnation.epoch, message.incarnation.n, message.seq)


@lru_cache(maxsize=64)
def _push_id(cluster: str, epoch: int, n: int, seq: int) -> PushId:
    return PushId(ClusterId(cluster), Incarnation(epoch, n), seq)


_version = lru_cache(maxsize=64)(Version)


def _checksum(body: bytes) -> bytes:
    return checksum(body).to_bytes(8, "little")
