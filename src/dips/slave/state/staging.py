"""Keeps which chunks of each push have landed, and decides on every PUT_CHUNK before a byte is copied.

Pure: it knows block ids, lengths and checksums, never the bytes. It must never accept a chunk that is not one
of this slave's, let a second sender change a landed chunk, or call a push complete before every chunk landed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dips.core.errors import LocalProtocolError, RefusalCode, Refused
from dips.core.ids import PushId, Version
from dips.core.layout import FLOAT32_BYTES, Block, shard_digest
from dips.core.math.outer_numpy import PIECE_ELEMS, n_pieces
from dips.core.messages import OpenStaging, Staged, StagedPush, StagingProgress
from dips.core.net.data_header import MAX_MISSING, DataHeader, MissingChunk
from dips.core.wire import Codec, encoded_bytes

# ---- slots -----------------------------------------------------------------------------------------------------------
#
# Which push is in which slot of staging memory, for the state machine.
#
# Slots is the only table that decides it. Every other place (jobs, the data port's StagingTable, receipts) holds the
# Slots that came from here, or their numbers. The data port runs on another thread and may be behind: its reports name
# their opening, and count only while it is the present one.


@dataclass(frozen=True)
class Slot:
    """A push in a slot of staging memory."""

    push: PushId
    attempt: int
    number: int
    opening: int = 0  # counts how often slots were opened again, so that late reports of an earlier one are recognised
    wire: Codec = Codec.F32  # a difference codec is decoded against the parameters of `base`
    base: Version | None = None  # the version that the push was made from; None for a seed


class Slots:
    """The open slots of this incarnation."""

    def __init__(self) -> None:
        self._of_push: dict[PushId, Slot] = {}
        self._digests: dict[PushId, bytes] = {}  # of the complete ones
        self._openings = 0

    def __len__(self) -> int:
        return len(self._of_push)

    def all(self) -> tuple[Slot, ...]:
        return tuple(self._of_push.values())

    def clear(self) -> None:
        self._of_push.clear()
        self._digests.clear()

    def open(self, body: OpenStaging) -> Slot | None:
        """Open a slot; the same push in the same slot, written in the same way, is adopted with what has landed.

        None for an older attempt.
        """
        wire = Codec.F32 if body.wire is Codec.NONE else body.wire  # a master of an earlier release says nothing
        known = self._of_push.get(body.push)
        if known is not None and body.attempt < known.attempt and known.number == body.slot:
            return None
        if known is not None and (known.number, known.wire, known.base) == (body.slot, wire, body.base):
            slot = replace(known, attempt=body.attempt)
        else:
            for push in [p for p, s in self._of_push.items() if s.number == body.slot or p == body.push]:
                self.close(push)
            self._openings += 1
            slot = Slot(body.push, body.attempt, body.slot, self._openings, wire, body.base)
        self._of_push[body.push] = slot
        return slot

    def close(self, push: PushId) -> None:
        self._of_push.pop(push, None)
        self._digests.pop(push, None)

    def number_of(self, push: PushId) -> int | None:
        known = self._of_push.get(push)
        return None if known is None else known.number

    def staged(self, slot: Slot, digest: bytes) -> Staged | None:
        """Note a complete push. None when that opening is over, or a newer attempt will report it."""
        known = self._of_push.get(slot.push)
        if known is None or known.opening != slot.opening:
            return None
        self._digests[slot.push] = digest
        return Staged(slot.push, slot.attempt, digest) if slot.attempt == known.attempt else None

    def all_staged(self) -> list[Staged]:
        """Every complete push, in push order, to report again after the stream was lost."""
        return [Staged(p, self._of_push[p].attempt, digest) for p, digest in sorted(self._digests.items())]

    def complete(self, pushes: Iterable[StagedPush]) -> tuple[Slot, ...]:
        """The slots of complete pushes, in the order given. Raises Refused(UNKNOWN_PUSH)."""
        out = []
        for named in pushes:
            known = self._of_push.get(named.push)
            if known is None or named.push not in self._digests or known.attempt != named.attempt:
                have = "it is not here" if known is None else f"here is attempt {known.attempt}"
                state = "" if known is None or named.push in self._digests else ", not complete"
                raise Refused(RefusalCode.UNKNOWN_PUSH, f"push {named.push}, attempt {named.attempt}: {have}{state}")
            out.append(known)
        return tuple(out)


# ---- staging ---------------------------------------------------------------------------------------------------------


OPENING_RETRY_S = 0.05
"""Pause before a chunk is sent again. A ticket may reach the worker before OpenStaging reaches the slave, since both
leave the master at the same time."""


@dataclass(slots=True)
class Landing:
    """The place of one chunk: bytes [start_byte, start_byte + length_bytes) of a shard, number `index` of its chunks.

    Never changed after it is made; one is made for each chunk, and unfrozen that is several times faster.
    """

    index: int
    start_byte: int
    length_bytes: int
    # the piece (core/math/outer_numpy.py) of the shard that begins with it; only where chunks are whole pieces
    first_piece: int = 0

    @property
    def elems(self) -> slice:
        """The same range in elements."""
        start = self.start_byte // FLOAT32_BYTES
        return slice(start, start + self.length_bytes // FLOAT32_BYTES)

    @property
    def pieces(self) -> slice:
        """The shard's pieces that it consists of."""
        return slice(self.first_piece, self.first_piece + n_pieces(self.length_bytes // FLOAT32_BYTES))


# What runs for each chunk is a plain function over columns: lists in the interpreter, arrays where the compiled loop of
# the data port (slave/serve_numba.py) runs the same function on the same columns.

Ints = Any
"""A column of whole numbers: a list, or a one-dimensional array."""

PIECE_BYTES = PIECE_ELEMS * FLOAT32_BYTES

NOT_HELD, WRONG_OFFSET, WRONG_LENGTH = -1, -2, -3
"""What find_chunk says of a chunk that is none of this slave's."""

NEW, SAME, OTHER = 0, 1, 2
"""What has landed of a chunk: nothing, bytes with this checksum, other bytes."""

N_LANDED, LANDED_BYTES = 0, 1
"""Places in Landed.counts."""


class Places(NamedTuple):
    """Where each block is in the shard's memory; indexed by block id, -1 for blocks that this slave does not hold."""

    start_byte: Ints
    n_bytes: Ints
    first_chunk: Ints
    first_piece: Ints


class Landed(NamedTuple):
    """What of one push has landed; or, with one axis more before the others, what has landed in each slot."""

    landed: Ints  # of each chunk: 1 once its bytes are in memory and verified, else 0
    checksums: Ints  # of each chunk that has landed, xxh3-64 as it was sent
    counts: Ints  # N_LANDED chunks, LANDED_BYTES


def find_chunk(places: Places, chunk_bytes: int, block: int, offset_bytes: int, length_bytes: int) -> int:
    """The number of the chunk that a peer names so; NOT_HELD, WRONG_OFFSET or WRONG_LENGTH unless it is exactly one."""
    if block < 0 or block >= len(places.start_byte) or places.start_byte[block] < 0:
        return NOT_HELD
    block_bytes = places.n_bytes[block]
    if offset_bytes < 0 or offset_bytes >= block_bytes or offset_bytes % chunk_bytes != 0:
        return WRONG_OFFSET
    if length_bytes != min(chunk_bytes, block_bytes - offset_bytes):
        return WRONG_LENGTH
    return places.first_chunk[block] + offset_bytes // chunk_bytes  # type: ignore[no-any-return]


def has_landed(of: Landed, chunk: int, checksum: int) -> int:
    """NEW, SAME or OTHER."""
    if not of.landed[chunk]:
        return NEW
    return SAME if of.checksums[chunk] == checksum else OTHER


def note_landed(of: Landed, chunk: int, checksum: int, length_bytes: int) -> bool:
    """Note that the verified bytes of a chunk are in memory. Returns whether this made the push complete."""
    if of.landed[chunk]:
        return False
    of.checksums[chunk] = checksum
    of.landed[chunk] = 1
    of.counts[N_LANDED] += 1
    of.counts[LANDED_BYTES] += length_bytes
    return of.counts[N_LANDED] == len(of.landed)  # type: ignore[no-any-return]


class ShardMap:
    """Maps (block, offset, length), as a peer names a chunk, to its place in this slave's shard.

    blocks: this slave's, in block-id order, one after the other in memory. chunk_bytes: size of a data-flow frame.
    """

    def __init__(self, blocks: Sequence[Block], chunk_bytes: int) -> None:
        self.blocks = tuple(blocks)
        self.chunk_bytes = chunk_bytes
        n_ids = 1 + max((block.block_id for block in blocks), default=-1)
        self.places = Places(*([-1] * n_ids for _ in Places._fields))
        start_byte = first_chunk = first_piece = 0
        for block in blocks:
            row = (start_byte, block.n_bytes, first_chunk, first_piece)
            for column, value in zip(self.places, row, strict=True):
                column[block.block_id] = value
            start_byte += block.n_bytes
            first_chunk += -(-block.n_bytes // chunk_bytes)
            first_piece += n_pieces(block.n_elems)
        self.n_bytes = start_byte
        self.n_chunks = first_chunk
        self.n_pieces = first_piece
        self._block_ids = [block.block_id for block in blocks]
        self._first_chunks = [self.places.first_chunk[block.block_id] for block in blocks]

    @property
    def whole_pieces(self) -> bool:
        """Whether every chunk begins with a piece, so that it can be measured by itself."""
        return self.chunk_bytes % PIECE_BYTES == 0

    def find(self, header: DataHeader) -> Landing:
        """The chunk that a header names. Raises Refused(CHUNK) unless it is exactly one of this slave's chunks."""
        block, offset_bytes, places = header.block, header.offset_bytes, self.places
        index = find_chunk(places, self.chunk_bytes, block, offset_bytes, header.length_bytes)
        if index < 0:
            raise _chunk(header, self._what_is_wrong(index, header))
        first_piece = places.first_piece[block] + offset_bytes // PIECE_BYTES
        return Landing(index, places.start_byte[block] + offset_bytes, header.length_bytes, first_piece)

    def _what_is_wrong(self, why: int, header: DataHeader) -> str:
        if why == NOT_HELD:
            return "this slave does not hold the block: read the placement again"
        block_bytes = self.places.n_bytes[header.block]
        if why == WRONG_OFFSET:
            return f"the offset must be a multiple of {self.chunk_bytes} below the block's {block_bytes} bytes"
        length = min(self.chunk_bytes, block_bytes - header.offset_bytes)
        return f"the length is {header.length_bytes} bytes, this chunk has {length}"

    def first_from(self, block: int, offset_bytes: int) -> int:
        """The number of the first chunk that does not begin before this place, which may be anywhere; n_chunks: none
        does."""
        at = bisect_left(self._block_ids, block)
        if at == len(self.blocks):
            return self.n_chunks
        first: int = self._first_chunks[at]
        if self._block_ids[at] > block:
            return first
        n_chunks = -(-self.blocks[at].n_bytes // self.chunk_bytes)
        return first + min(-(-offset_bytes // self.chunk_bytes), n_chunks)

    def chunk_at(self, index: int) -> MissingChunk:
        """Inverse of find, for the answer to QUERY_MISSING."""
        if not 0 <= index < self.n_chunks:
            raise LocalProtocolError(f"chunk {index} is not one of this shard's {self.n_chunks}")
        at = bisect_right(self._first_chunks, index) - 1
        return MissingChunk(self.blocks[at].block_id, (index - self._first_chunks[at]) * self.chunk_bytes)


@dataclass
class Staging:
    """What has landed in one slot."""

    slot: Slot
    columns: Landed

    @property
    def n_landed(self) -> int:
        return int(self.columns.counts[N_LANDED])

    @property
    def landed_bytes(self) -> int:
        return int(self.columns.counts[LANDED_BYTES])

    @property
    def complete(self) -> bool:
        return self.n_landed == len(self.columns.landed)

    def digest(self) -> bytes:
        """Digest of the whole shard of this push, as the sender computes it. Only for a complete one."""
        if not self.complete:
            n_chunks = len(self.columns.landed)
            raise LocalProtocolError(f"push {self.slot.push} has {self.n_landed} of {n_chunks} chunks")
        return shard_digest(self.columns.checksums)


class StagingTable:
    """What has landed in each open slot of one shard. It belongs to the data port; Slots decides which ones are open.

    rows: the columns of all slots, in arrays, so that the compiled loop works on the same ones; None: lists.
    """

    def __init__(self, shard: ShardMap, rows: Landed | None = None) -> None:
        self.shard = shard
        self.rows = rows
        self._open: dict[PushId, Staging] = {}

    def hold(self, slots: Iterable[Slot]) -> list[Staging]:
        """Hold these slots and no others: a new opening begins with no chunks, another attempt keeps what has landed.

        Returns the stagings that are new or have another attempt.
        """
        before, self._open, changed = self._open, {}, []
        for slot in slots:
            known = before.get(slot.push)
            if known is None or known.slot != slot:
                if known is not None and replace(known.slot, attempt=slot.attempt) == slot:
                    known.slot = slot
                else:
                    known = Staging(slot, self._cleared(slot.number))
                changed.append(known)
            self._open[slot.push] = known
        return changed

    def _cleared(self, number: int) -> Landed:
        """The columns of a slot, for a push that begins."""
        if self.rows is None:
            return Landed([0] * self.shard.n_chunks, [0] * self.shard.n_chunks, [0, 0])
        row = Landed(*(columns[number] for columns in self.rows))
        row.landed[:], row.counts[:] = 0, 0
        return row

    def admit(self, header: DataHeader, payload_bytes: int) -> tuple[Staging, Landing, bool]:
        """Decide on a PUT_CHUNK: the staging, the chunk's place, and whether it has landed already.

        Raises Refused: UNKNOWN_PUSH, CHUNK for what is not one of this slave's chunks, DIGEST when the chunk
        landed before with other bytes. Changes nothing.
        """
        staging = self.find(header.push, header.attempt)
        wire = staging.slot.wire
        if header.codec is not wire:
            raise _chunk(header, f"the codec is {header.codec.name}, the ticket of this push says {wire.name}")
        landing = self.shard.find(header)
        expected = encoded_bytes(wire, landing.length_bytes // FLOAT32_BYTES)
        if payload_bytes != expected:
            sentence = f"the payload has {payload_bytes} bytes, {header.length_bytes} of parameters take {expected}"
            raise _chunk(header, sentence)
        before = has_landed(staging.columns, landing.index, header.checksum)
        if before == OTHER:
            raise Refused(
                RefusalCode.DIGEST,
                f"{_what(header)}: it landed before with checksum {staging.columns.checksums[landing.index]:016x}, "
                f"now it has {header.checksum:016x}; the bytes of a push never change, take a new sequence number",
            )
        return staging, landing, before == SAME

    def land(self, staging: Staging, landing: Landing, checksum: int) -> bool:
        """Note that the verified bytes are in memory. Returns True when this made the push complete."""
        return note_landed(staging.columns, landing.index, checksum, landing.length_bytes)

    def find(self, push: PushId | None, attempt: int) -> Staging:
        """The open staging. Raises Refused(UNKNOWN_PUSH); retry_after_s > 0 where it may still be on its way."""
        staging = self._open.get(push) if push is not None else None
        if staging is None or attempt > staging.slot.attempt:
            raise Refused(
                RefusalCode.UNKNOWN_PUSH,
                f"no staging is open for push {push}, attempt {attempt}: ask the master for a ticket, or wait for it",
                OPENING_RETRY_S,
            )
        if attempt < staging.slot.attempt:
            raise Refused(
                RefusalCode.UNKNOWN_PUSH,
                f"push {push}: attempt {attempt} was replaced by {staging.slot.attempt}, send with the new ticket",
            )
        return staging

    def missing(self, staging: Staging, block: int = 0, offset_bytes: int = 0) -> tuple[MissingChunk, ...]:
        """The first MAX_MISSING chunks from this place on that have not landed, in (block, offset) order."""
        out: list[MissingChunk] = []
        landed = staging.columns.landed
        for index in range(self.shard.first_from(block, offset_bytes), len(landed)):
            if not landed[index]:
                out.append(self.shard.chunk_at(index))
                if len(out) == MAX_MISSING:
                    break
        return tuple(out)

    def stagings(self) -> tuple[Staging, ...]:
        """The open stagings."""
        return tuple(self._open.values())

    def progress(self) -> tuple[StagingProgress, ...]:
        """The progress of every open push, for the heartbeat; in push order."""
        return tuple(StagingProgress(push, s.slot.attempt, s.landed_bytes) for push, s in sorted(self._open.items()))


def find_version(shard: ShardMap, header: DataHeader, readable: Collection[Version]) -> Landing:
    """The place of the chunk that a GET_CHUNK asks for. Raises Refused(VERSION_GONE) or Refused(CHUNK)."""
    if header.version not in readable:
        kept = ", ".join(str(version) for version in sorted(readable)) or "none"
        raise Refused(
            RefusalCode.VERSION_GONE,
            f"version {header.version} is not kept here (kept: {kept}): begin the pull again",
        )
    return shard.find(header)


def _what(header: DataHeader) -> str:
    about = f"push {header.push}" if header.push is not None else f"version {header.version}"
    return f"block {header.block}, offset {header.offset_bytes} of {about}"


def _chunk(header: DataHeader, why: str) -> Refused:
    return Refused(RefusalCode.CHUNK, f"{_what(header)}: {why}")
