"""What was learned of the staged pushes while they arrived, so that MEASURE need not read their bytes again.

Sums are kept piece by piece (core/outer_numpy.py), each with the number of the theta that it was taken with: a version
that flips in between makes them worthless, and they are simply not known any more. Written by the data thread only; the
rows of complete pushes do not change, so any thread may read those.

Shapes: rows of staging memory r, the shard's pieces p and chunks c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import FLOAT32_BYTES
from dips.core.outer_numpy import n_pieces
from dips.slave.state.staging import Landing, ShardMap

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = 0
"""The number of no theta."""

MOST_COMPANIONS = 2
"""Products are taken with at most this many other pushes of the same chunk. Each reads the other's chunk from memory
once: for k pushes k (k - 1) / 2 reads, while a pass of MEASURE reads k + 1. So they pay up to k = 3, where they hide
behind the network as well."""


class Receipts:
    """Sums of every staging row. theta_number: counts the versions that chunks were measured with; from 1 on."""

    def __init__(self, shard: ShardMap, n_rows: int) -> None:
        self.shard = shard
        self.theta_number = NEVER
        self._squared = np.zeros((n_rows, shard.n_pieces), np.float64)
        self._measured = np.full((n_rows, shard.n_chunks), NEVER, np.int64)
        self._bad = np.zeros((n_rows, shard.n_chunks), np.int64)
        self._products: dict[tuple[int, int], tuple[F64, I64]] = {}
        self.chunk_of_piece = _chunk_of_piece(shard)

    def new_theta(self) -> None:
        """Another version is the current one now."""
        self.theta_number += 1

    def clear(self, row: int) -> None:
        """Another push takes this row."""
        self._measured[row] = NEVER
        for pair, (_, measured) in self._products.items():
            if row in pair:
                measured[:] = NEVER

    def squared_of(self, row: int, landing: Landing) -> F64:
        """Where the sums of a chunk go."""
        return self._squared[row, landing.first_piece : landing.first_piece + landing.n_pieces]

    def note(self, row: int, landing: Landing, bad: int, theta_number: int) -> None:
        """A chunk landed with `bad` non-finite elements; theta_number NEVER: its sums were not taken."""
        self._bad[row, landing.index] = bad
        self._measured[row, landing.index] = theta_number

    def companions(self, row: int, landing: Landing) -> list[tuple[int, F64]]:
        """Other rows whose chunk is here, measured with this theta, and where products go; none if they are many."""
        here = np.flatnonzero(self._measured[:, landing.index] == self.theta_number).tolist()
        others = [other for other in here if other != row]
        if len(others) > MOST_COMPANIONS:
            return []
        pieces = slice(landing.first_piece, landing.first_piece + landing.n_pieces)
        return [(other, self._pair(row, other)[0][pieces]) for other in others]

    def note_products(self, row: int, other: int, landing: Landing, theta_number: int) -> None:
        self._pair(row, other)[1][landing.index] = theta_number

    def known(self) -> Known:
        """What holds for the current theta."""
        return Known(self, self.theta_number)

    def _pair(self, row: int, other: int) -> tuple[F64, I64]:
        pair = (min(row, other), max(row, other))
        if pair not in self._products:
            measured = np.full(self.shard.n_chunks, NEVER, np.int64)
            self._products[pair] = (np.zeros(self.shard.n_pieces, np.float64), measured)
        return self._products[pair]


@dataclass(frozen=True)
class Known:
    """What receipt told of complete pushes, for the theta with this number."""

    receipts: Receipts
    theta_number: int

    def squared(self, row: int) -> tuple[F64, Bools]:
        """Piece sums of (theta - x)^2, and which of them are known; both (n_pieces,)."""
        receipts = self.receipts
        return receipts._squared[row], self._of_pieces(receipts._measured[row])

    def products(self, row: int, other: int) -> tuple[F64, Bools] | None:
        """Piece sums of (theta - x)(theta - y), and which of them are known; None: none was taken."""
        found = self.receipts._products.get((min(row, other), max(row, other)))
        return None if found is None else (found[0], self._of_pieces(found[1]))

    def bad(self, row: int) -> I64:
        """Non-finite elements of each chunk (n_chunks,), in (block, offset) order; known of every complete push."""
        counts: I64 = self.receipts._bad[row]
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
