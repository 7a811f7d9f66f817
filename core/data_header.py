"""The header of one data-flow message: what worker and slave say beside the raw bytes of a chunk.

Mirrors DataHeader in protos/data.proto. Reading a header never allocates from a length that it claims: the
caller compares `length_bytes` with the frame that arrived. This module decides nothing about pushes or
versions; it only refuses what no slave and no worker may act on (another protocol, another run).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from dips.core.chunks import checksum
from dips.core.codec_protobuf import decode, encode
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId, Version
from dips.core.messages import Refusal
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION

MAX_HEADER_BYTES = 64 * 1024
"""A longer header is refused unread. The longest honest one is MISSING: 2048 entries of at most 19 bytes."""

MAX_MISSING = 2048
"""Entries of one MISSING answer; the worker sends these chunks and asks again for the rest."""

_TRAILER_TAG = b"\x91\x01"
"""Protobuf's key of field 18 as fixed64: (18 << 3) | 1 as a varint."""

_TRAILER_BYTES = len(_TRAILER_TAG) + 8


class DataOp(IntEnum):
    """What a data-flow message asks or answers."""

    PUT_CHUNK = 1
    QUERY_MISSING = 2
    GET_CHUNK = 3
    ACK = 4
    MISSING = 5
    CHUNK = 6
    REFUSED = 7


REQUESTS = frozenset({DataOp.PUT_CHUNK, DataOp.QUERY_MISSING, DataOp.GET_CHUNK})
"""What a worker may send; the rest are a slave's answers."""

WITH_PAYLOAD = frozenset({DataOp.PUT_CHUNK, DataOp.CHUNK})
"""Operations whose header is followed by one payload frame."""


class Codec(IntEnum):
    """How the payload is written. NONE stands in messages without payload."""

    NONE = 0
    F32 = 1


@dataclass(frozen=True, order=True)
class MissingChunk:
    """A chunk that a push still lacks on this slave."""

    block: int
    offset_bytes: int


@dataclass(frozen=True)
class DataHeader:
    """One header. Field meanings and units stand in protos/data.proto; a field that an op does not use is 0 or None."""

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
    protocol: int = PROTOCOL_VERSION
    header_checksum: int = field(default=0, compare=False, repr=False)
    """As it was read; encode() computes its own."""

    def encode(self) -> bytes:
        """The header frame, ending with the checksum of the bytes before it."""
        body = encode(self if not self.header_checksum else replace(self, header_checksum=0))
        return body + _TRAILER_TAG + checksum(body).to_bytes(8, "little")

    @classmethod
    def decode(cls, frame: bytes | memoryview) -> DataHeader:
        """Parse a header frame. Raises Refused(MALFORMED) for anything else: a damaged byte, an unknown op or codec."""
        if len(frame) > MAX_HEADER_BYTES:
            raise Refused(
                RefusalCode.MALFORMED,
                f"a data header of {len(frame)} bytes is longer than the {MAX_HEADER_BYTES} that are read",
            )
        _check_trailer(bytes(frame))
        header = decode(bytes(frame), cls)
        _check_fields(header)
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


def _check_trailer(frame: bytes) -> None:
    """A damaged block or offset must not send right bytes to a wrong place: the payload's checksum cannot see it."""
    body, tag, claimed = frame[:-_TRAILER_BYTES], frame[-_TRAILER_BYTES:-8], frame[-8:]
    if tag != _TRAILER_TAG or checksum(body) != int.from_bytes(claimed, "little"):
        raise Refused(RefusalCode.MALFORMED, "a data header is damaged: its bytes are not those that were sent")


def _check_fields(header: DataHeader) -> None:
    """What an op needs must be there, so that no reader has to ask again."""
    if header.op in (DataOp.PUT_CHUNK, DataOp.QUERY_MISSING) and header.push is None:
        raise _malformed(header, "it names no push")
    if header.op in (DataOp.GET_CHUNK, DataOp.CHUNK) and header.version is None:
        raise _malformed(header, "it names no version")
    if header.op is DataOp.REFUSED and header.refusal is None:
        raise _malformed(header, "it carries no refusal")


def _malformed(header: DataHeader, why: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, f"a data header with op {header.op.name}: {why}")
