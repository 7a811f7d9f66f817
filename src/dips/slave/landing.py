"""Lands one chunk from a frame in its slot: copies, decodes, checks and measures it while its bytes are in the cache.

Touches bytes, never a table: the data thread (slave/data_port.py) admits the chunk before and notes the result
afterwards. So landings of different chunks may run on several threads at once; everything that takes time here releases
the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import RefusalCode, Refused
from dips.core.layout import FLOAT32_BYTES
from dips.core.layout import Buffer as Bytes
from dips.core.layout import checksum as xxh3_64
from dips.core.math.landing_numba import land_chunk
from dips.core.math.outer_numba import products
from dips.core.math.outer_numpy import n_pieces
from dips.core.net.data_header import DataHeader
from dips.core.placement import KEPT_PRODUCTS
from dips.core.wire import Codec
from dips.slave.state.staging import Landing, ShardMap, Staging

# ---- receipts --------------------------------------------------------------------------------------------------------
#
# Keeps sums over the staged pushes that were taken on receipt, so that MEASURE need not read their bytes again.
#
# Sums are kept piece by piece (core/math/outer_numpy.py), each with the number of the theta that it was taken with: a
# version that flips in between makes them invalid, and they count as unknown. Written by the data thread
# only; the slots of complete pushes do not change, so any thread may read those.
#
# Shapes: slots of staging memory s, the shard's pieces p and chunks c.


F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = 0
"""The number that means no theta."""

_PENDING = -1
"""Marks products whose landing is under way."""

MOST_COMPANIONS = 2
"""Products are taken with at most this many other pushes of the same chunk. Each reads the other's chunk from memory
once: for k pushes k (k - 1) / 2 reads, while a pass of MEASURE reads k + 1. So they are worth it up to k = 3, where the
network's time hides them as well."""

assert MOST_COMPANIONS * (MOST_COMPANIONS + 1) // 2 == KEPT_PRODUCTS
"""Places for pairs: a push that lands with at most two others makes three pairs. More useful ones arise only when
pushes land at the same moment; MEASURE computes those, so that any number of pushes needs the memory of three pairs."""


class Sums(NamedTuple):
    """The columns of Receipts; plain functions work on them, here and in the compiled loop (slave/serve_numba.py)."""

    squared: F64  # (s, p): sums of (theta - x)^2
    measured: I64  # (s, c): number of the theta that they were taken with, or NEVER
    bad: I64  # (s, c): non-finite elements
    products: F64  # (places, p): sums of (theta - x)(theta - y)
    pair_of: I64  # (places, c): of which pair (pair_code)
    taken_with: I64  # (places, c): as measured, or _PENDING


def pair_code(sums: Sums, slot: int, other: int) -> int:
    """The number of a pair of slots."""
    return min(slot, other) * len(sums.measured) + max(slot, other)


def note_sums(sums: Sums, slot: int, chunk: int, bad: int, theta_number: int) -> None:
    """A chunk landed with `bad` non-finite elements; theta_number NEVER: its sums were not taken."""
    sums.bad[slot, chunk] = bad
    sums.measured[slot, chunk] = theta_number
    if theta_number == NEVER:
        give_back(sums, slot, chunk)


def give_back(sums: Sums, slot: int, chunk: int) -> None:
    """Release the places of a landing that took no products."""
    for place in range(len(sums.taken_with)):
        pair, n_slots = sums.pair_of[place, chunk], len(sums.measured)
        if sums.taken_with[place, chunk] == _PENDING and (pair // n_slots == slot or pair % n_slots == slot):
            sums.taken_with[place, chunk] = NEVER


def claim(sums: Sums, code: int, chunk: int, theta_number: int) -> int:
    """Claim a place for a pair's products of this chunk; -1 while all are in use, or soon will be."""
    for place in range(len(sums.taken_with)):
        number = sums.taken_with[place, chunk]
        if number != _PENDING and number != theta_number:
            sums.pair_of[place, chunk], sums.taken_with[place, chunk] = code, _PENDING
            return place
    return -1


def claim_companions(sums: Sums, slot: int, chunk: int, theta_number: int, others: I64, places: I64) -> int:
    """Find the other slots that have the chunk, measured with this theta, and claim places for the products with them.

    others and places (MOST_COMPANIONS,) are filled; returns how many there are, none if they are many.
    """
    n_found = n_claimed = 0
    for other in range(len(sums.measured)):
        if other != slot and sums.measured[other, chunk] == theta_number:
            if n_found == MOST_COMPANIONS:
                return 0
            others[n_found] = other
            n_found += 1
    give_back(sums, slot, chunk)
    for i in range(n_found):
        place = claim(sums, pair_code(sums, slot, others[i]), chunk, theta_number)
        if place >= 0:
            others[n_claimed], places[n_claimed] = others[i], place
            n_claimed += 1
    return n_claimed


def note_products(sums: Sums, slot: int, other: int, chunk: int, theta_number: int) -> None:
    """The products of a claimed place are taken."""
    code = pair_code(sums, slot, other)
    for place in range(len(sums.taken_with)):
        if sums.pair_of[place, chunk] == code and sums.taken_with[place, chunk] == _PENDING:
            sums.taken_with[place, chunk] = theta_number


class Receipts:
    """Sums of every slot, whose memory is a part of a slave's memory_bytes (core/placement.py).

    theta_number: counts the versions that chunks were measured with; from 1 on."""

    def __init__(self, shard: ShardMap, n_slots: int) -> None:
        self.shard = shard
        self.theta_number = NEVER
        self.n_places = min(n_slots * (n_slots - 1) // 2, KEPT_PRODUCTS)
        self.sums = Sums(
            np.zeros((n_slots, shard.n_pieces), np.float64),
            np.full((n_slots, shard.n_chunks), NEVER, np.int64),
            np.zeros((n_slots, shard.n_chunks), np.int64),
            np.zeros((self.n_places, shard.n_pieces), np.float64),
            np.zeros((self.n_places, shard.n_chunks), np.int64),
            np.full((self.n_places, shard.n_chunks), NEVER, np.int64),
        )
        self.chunk_of_piece = _chunk_of_piece(shard)
        self._others, self._claimed = np.zeros(MOST_COMPANIONS, np.int64), np.zeros(MOST_COMPANIONS, np.int64)

    def new_theta(self) -> None:
        """Another version became the current one."""
        self.theta_number += 1

    def clear(self, slot: int) -> None:
        """Forget a slot, for another push."""
        sums, n_slots = self.sums, len(self.sums.measured)
        sums.measured[slot] = NEVER
        sums.taken_with[(sums.pair_of // n_slots == slot) | (sums.pair_of % n_slots == slot)] = NEVER

    def companions(self, slot: int, landing: Landing) -> list[tuple[int, F64]]:
        """As claim_companions: other slots, with the place of the products."""
        n = claim_companions(self.sums, slot, landing.index, self.theta_number, self._others, self._claimed)
        others, places = self._others[:n].tolist(), self._claimed[:n].tolist()
        return [(other, self.sums.products[place, landing.pieces]) for other, place in zip(others, places, strict=True)]


@dataclass(frozen=True)
class KnownReceipts:
    """Sums of complete pushes that were taken on receipt, for the theta with this number."""

    receipts: Receipts
    theta_number: int

    def squared(self, slot: int) -> tuple[F64, Bools]:
        """Piece sums of (theta - x)^2, and which of them are known; both (n_pieces,)."""
        sums = self.receipts.sums
        return sums.squared[slot], self._of_pieces(sums.measured[slot])

    def products(self, slot: int, other: int) -> tuple[F64, Bools] | None:
        """Piece sums of (theta - x)(theta - y), and which of them are known; None: none was taken."""
        columns, found, known = self.receipts.sums, None, None
        code = pair_code(columns, slot, other)
        for place in range(self.receipts.n_places):
            # Copied before the pair is read: other pushes land meanwhile, and claim() gives them places of an older
            # theta. One that has the current number keeps its pair.
            taken_with = columns.taken_with[place].copy()
            here = columns.pair_of[place] == code
            if not here.any():
                continue
            valid = self._of_pieces(np.where(here, taken_with, NEVER))
            found = columns.products[place] if found is None else np.where(valid, columns.products[place], found)
            known = valid if known is None else known | valid
        return None if found is None or known is None else (found, known)

    def bad(self, slot: int) -> I64:
        """Non-finite elements of each chunk (n_chunks,), in (block, offset) order; known of every complete push."""
        counts: I64 = self.receipts.sums.bad[slot]
        return counts

    def _of_pieces(self, measured: I64) -> Bools:
        here: Bools = measured[self.receipts.chunk_of_piece] == self.theta_number
        return here


def _chunk_of_piece(shard: ShardMap) -> I64:
    """The chunk that each piece is in (n_pieces,); where chunks are not whole pieces nothing is measured on receipt."""
    if not shard.whole_pieces:
        return np.zeros(shard.n_pieces, np.int64)
    per_chunk = n_pieces(shard.chunk_bytes // FLOAT32_BYTES)
    parts = [
        shard.places.first_chunk[block.block_id] + np.arange(n_pieces(block.n_elems), dtype=np.int64) // per_chunk
        for block in shard.blocks
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# ---- landing ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LandingJob:
    """A chunk that was admitted. Shapes: m elements of the chunk, p pieces of it."""

    header: DataHeader
    staging: Staging
    landing: Landing
    payload: memoryview
    checksum: Callable[[Bytes], int]
    into: F32  # (m,), where it lands
    base: F32 | None = None  # (m,) of the version that differences are relative to
    # (m,) of the current version, and squared (p,) for the sums against it; both None when there is no version or
    # chunks are not whole pieces
    theta: F32 | None = None
    squared: F64 | None = None
    theta_number: int = 0
    # other pushes that have the chunk: slot of staging memory, values, and the place of the products with them
    companions: list[tuple[int, F32, F64]] = field(default_factory=list)
    bad: int = 0

    def run(self) -> Refused | None:
        """Land the chunk and count its non-finite elements. Returns the refusal (CHUNK) of damaged bytes, for end().
        Everything that takes time here releases the interpreter lock.

        The bytes are copied and hashed in one pass, so they are in the slot before their checksum is known. What a
        refused chunk leaves there has no meaning, nor have the sums: it counts as not landed, and the right bytes
        overwrite it.
        """
        wire = self.staging.slot.wire
        found, self.bad = land_chunk(wire, self.into, self.payload, self.base, self.theta, self.squared)
        if self.checksum is not xxh3_64:
            found = self.checksum(self.payload)
        if found != self.header.checksum:
            header = self.header
            return Refused(
                RefusalCode.CHUNK,
                f"block {header.block}, offset {header.offset_bytes} of push {header.push}: the payload's checksum "
                f"is {found:016x}, its header says {header.checksum:016x}; send it again",
            )
        # What landed bypassed the caches; the frame's bytes are still in them, for the products.
        values = np.frombuffer(self.payload, np.float32) if wire is Codec.F32 else self.into
        for _, other_values, place in self.companions:
            assert self.theta is not None, "products are taken with a theta"
            products(self.theta, values, other_values, place)
        return None
