"""Lands one chunk from a frame in its slot: checks, decodes and measures it while its bytes are in the cache.

Touches bytes, never a table: the data thread (slave/data_port.py) admits the chunk before and notes the result
afterwards. So landings of different chunks may run on several threads at once; everything that takes time here releases
the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dips.core.chunks import Buffer as Bytes
from dips.core.errors import RefusalCode, Refused
from dips.core.layout import FLOAT32_BYTES
from dips.core.math import outer_numba as kernels
from dips.core.math import wire_numba
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


class Receipts:
    """Sums of every slot. theta_number: counts the versions that chunks were measured with; from 1 on."""

    def __init__(self, shard: ShardMap, n_slots: int) -> None:
        self.shard = shard
        self.theta_number = NEVER
        self._squared = np.zeros((n_slots, shard.n_pieces), np.float64)
        self._measured = np.full((n_slots, shard.n_chunks), NEVER, np.int64)
        self._bad = np.zeros((n_slots, shard.n_chunks), np.int64)
        self.n_places = min(n_slots * (n_slots - 1) // 2, KEPT_PRODUCTS)
        self._products = np.zeros((self.n_places, shard.n_pieces), np.float64)
        self._pair_of = np.zeros((self.n_places, shard.n_chunks), np.int64)
        self._taken_with = np.full((self.n_places, shard.n_chunks), NEVER, np.int64)
        self.chunk_of_piece = _chunk_of_piece(shard)

    @property
    def n_bytes(self) -> int:
        """Memory of all sums; part of a slave's memory_bytes (core/placement.py)."""
        arrays = (self._squared, self._measured, self._bad, self._products, self._pair_of, self._taken_with)
        return sum(array.nbytes for array in arrays) + self.chunk_of_piece.nbytes

    def new_theta(self) -> None:
        """Another version became the current one."""
        self.theta_number += 1

    def clear(self, slot: int) -> None:
        """Forget a slot, for another push."""
        self._measured[slot] = NEVER
        n_slots = len(self._measured)
        self._taken_with[(self._pair_of // n_slots == slot) | (self._pair_of % n_slots == slot)] = NEVER

    def squared_of(self, slot: int, landing: Landing) -> F64:
        """The place of a chunk's sums."""
        return self._squared[slot, landing.pieces]

    def note(self, slot: int, landing: Landing, bad: int, theta_number: int) -> None:
        """A chunk landed with `bad` non-finite elements; theta_number NEVER: its sums were not taken."""
        self._bad[slot, landing.index] = bad
        self._measured[slot, landing.index] = theta_number
        if theta_number == NEVER:
            self._give_back(slot, landing.index)

    def companions(self, slot: int, landing: Landing) -> list[tuple[int, F64]]:
        """Other slots that have the chunk, measured with this theta, with the place of the products; none if many."""
        numbers = self._measured[:, landing.index].tolist()
        others = [other for other, number in enumerate(numbers) if number == self.theta_number and other != slot]
        if len(others) > MOST_COMPANIONS:
            return []
        self._give_back(slot, landing.index)
        pieces = landing.pieces
        places = [(other, self._claim(self._code(slot, other), landing.index)) for other in others]
        return [(other, self._products[place, pieces]) for other, place in places if place is not None]

    def note_products(self, slot: int, other: int, landing: Landing, theta_number: int) -> None:
        """The products that companions() asked for are taken."""
        code, chunk = self._code(slot, other), landing.index
        for place in range(self.n_places):
            if self._pair_of[place, chunk] == code and self._taken_with[place, chunk] == _PENDING:
                self._taken_with[place, chunk] = theta_number

    def known(self) -> KnownReceipts:
        """The sums that are valid for the current theta."""
        return KnownReceipts(self, self.theta_number)

    def _claim(self, code: int, chunk: int) -> int | None:
        """Claim a place for a pair's products of this chunk; None while all are in use, or soon will be."""
        for place, number in enumerate(self._taken_with[:, chunk].tolist()):
            if number not in (_PENDING, self.theta_number):
                self._pair_of[place, chunk], self._taken_with[place, chunk] = code, _PENDING
                return place
        return None

    def _give_back(self, slot: int, chunk: int) -> None:
        """Release the places of a landing that took no products."""
        numbers = self._taken_with[:, chunk].tolist()
        for place, number in enumerate(numbers):
            if number == _PENDING and slot in divmod(int(self._pair_of[place, chunk]), len(self._measured)):
                self._taken_with[place, chunk] = NEVER

    def _code(self, slot: int, other: int) -> int:
        return min(slot, other) * len(self._measured) + max(slot, other)


@dataclass(frozen=True)
class KnownReceipts:
    """Sums of complete pushes that were taken on receipt, for the theta with this number."""

    receipts: Receipts
    theta_number: int

    def squared(self, slot: int) -> tuple[F64, Bools]:
        """Piece sums of (theta - x)^2, and which of them are known; both (n_pieces,)."""
        receipts = self.receipts
        return receipts._squared[slot], self._of_pieces(receipts._measured[slot])

    def products(self, slot: int, other: int) -> tuple[F64, Bools] | None:
        """Piece sums of (theta - x)(theta - y), and which of them are known; None: none was taken."""
        receipts, sums, known = self.receipts, None, None
        code = receipts._code(slot, other)
        for place in range(receipts.n_places):
            here = receipts._pair_of[place] == code
            if not here.any():
                continue
            valid = self._of_pieces(np.where(here, receipts._taken_with[place], NEVER))
            sums = receipts._products[place] if sums is None else np.where(valid, receipts._products[place], sums)
            known = valid if known is None else known | valid
        return None if sums is None or known is None else (sums, known)

    def bad(self, slot: int) -> I64:
        """Non-finite elements of each chunk (n_chunks,), in (block, offset) order; known of every complete push."""
        counts: I64 = self.receipts._bad[slot]
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
        place.first_chunk + np.arange(n_pieces(place.block.n_elems), dtype=np.int64) // per_chunk
        for place in shard.places.values()
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# ---- landing ---------------------------------------------------------------------------------------------------------


F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Companion:
    """Another push that has the same chunk: its slot of staging memory, its values, and the place of the products."""

    slot: int
    values: F32
    products: F64


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
    companions: list[Companion] = field(default_factory=list)
    bad: int = 0

    def run(self) -> None:
        """Land the chunk and count its non-finite elements.

        Raises Refused(CHUNK) for damaged bytes; then none has landed.
        """
        found = self.checksum(self.payload)
        if found != self.header.checksum:
            header = self.header
            raise Refused(
                RefusalCode.CHUNK,
                f"block {header.block}, offset {header.offset_bytes} of push {header.push}: the payload's checksum "
                f"is {found:016x}, its header says {header.checksum:016x}; send it again",
            )
        if self.staging.slot.wire is Codec.F32:
            values = np.frombuffer(self.payload, np.float32)
            if self.theta is None or self.squared is None:
                self.bad = kernels.land(self.into, values)
            else:
                self.bad = kernels.land_measured(self.into, values, self.theta, self.squared)
            # What landed bypassed the caches; the frame's bytes are still in them, for the products.
        else:
            assert self.base is not None, "differences are admitted only while their base is in memory"
            payload, values = np.frombuffer(self.payload, np.uint8), self.into
            wire_numba.decode(self.staging.slot.wire, self.base, payload, self.into)
            if self.theta is None or self.squared is None:
                self.bad = kernels.land(self.into, self.into)
            else:
                self.bad = kernels.measure_landed(self.into, self.theta, self.squared)
        for companion in self.companions:
            assert self.theta is not None, "products are taken with a theta"
            kernels.products(self.theta, values, companion.values, companion.products)
