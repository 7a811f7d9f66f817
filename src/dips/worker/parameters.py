"""The driver's interface to a model: its layout, a copy of its parameters, and a way to replace them.

The driver knows no framework; TorchParameters (worker/torch_model.py) and the tests' numpy model are two
implementations. Every method is called only on the training thread, at a step boundary.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import FLOAT32_BYTES, Chunk, Layout, checksum, chunks_of
from dips.core.net.payloads import HashingCopy, SnapshotReady, bytes_of


class ChunkSums:
    """Takes the checksums of a push's chunks while a store copies the model to the push vector.

    A chunk that lies within one array is copied and hashed in one pass, at the price of the copy. Any other is hashed
    when the last of it has come, while it is in the cache. copy() and copied() are called in ascending order.
    """

    def __init__(self, layout: Layout, chunk_bytes: int, into: NDArray[np.float32], copy: HashingCopy) -> None:
        self._chunks = chunks_of(layout.blocks, chunk_bytes)
        self._edges = list(accumulate((chunk.length_bytes for chunk in self._chunks), initial=0))
        self._sums: list[int | None] = [None] * len(self._chunks)
        self._into = bytes_of(into)
        self._copy = copy
        self._run_begins = self._run_ends = 0  # the bytes that were copied last, and those before them without a gap

    def copy(self, source: NDArray[np.float32], start_elem: int) -> None:
        """Copy the flat array `source` to elements [start_elem, start_elem + its length) of the vector."""
        read, first = bytes_of(source), FLOAT32_BYTES * start_elem
        begin, end = first, first + read.size
        chunk = bisect_right(self._edges, begin) - 1
        while begin < end:
            stop = min(self._edges[chunk + 1], end)
            piece, into = read[begin - first : stop - first], self._into[begin:stop]
            if piece.size == self._chunks[chunk].length_bytes:
                self._sums[chunk] = self._copy(into, piece)
            else:
                np.copyto(into, piece)
                self.copied(begin // FLOAT32_BYTES, stop // FLOAT32_BYTES)
            begin, chunk = stop, chunk + 1
        self.copied(start_elem, end // FLOAT32_BYTES)

    def copied(self, start_elem: int, stop_elem: int) -> None:
        """Elements [start_elem, stop_elem) are in the vector now: take the checksums that lack of whole chunks."""
        begin, end = FLOAT32_BYTES * start_elem, FLOAT32_BYTES * stop_elem
        if begin > self._run_ends:
            self._run_begins = self._run_ends = begin
        # The first chunk that is neither done nor begun before this run.
        chunk = max(bisect_left(self._edges, self._run_begins), bisect_right(self._edges, self._run_ends) - 1)
        while chunk < len(self._chunks) and self._edges[chunk + 1] <= end:
            if self._sums[chunk] is None:
                self._sums[chunk] = checksum(self._into[self._edges[chunk] : self._edges[chunk + 1]])
            chunk += 1
        self._run_ends = max(end, self._run_ends)

    def by_chunk(self) -> dict[Chunk, int]:
        """The checksums that were taken."""
        return {chunk: sum for chunk, sum in zip(self._chunks, self._sums, strict=True) if sum is not None}


class ParameterStore(Protocol):
    """The cluster's live parameters. Flat vectors are float32 of layout().n_elems elements, in layout order."""

    def layout(self) -> Layout: ...

    def snapshot(self, into: NDArray[np.float32]) -> None:
        """Copy the live parameters into a flat vector."""
        ...

    def install(self, flat: NDArray[np.float32]) -> None:
        """Overwrite the live parameters; the inner optimizer's state stays."""
        ...

    def reset_inner_optimizer(self) -> None:
        """Forget the inner optimizer's state (moments), as after non-finite parameters."""
        ...


@runtime_checkable
class StreamingStore(ParameterStore, Protocol):
    """A store that chooses the memory of flat vectors, and copies to it while its caller does other things."""

    def empty(self, n_elems: int) -> NDArray[np.float32]:
        """A vector of any content, in the memory that is fastest for snapshots and installs."""
        ...

    def begin_snapshot(self, into: NDArray[np.float32], sums: ChunkSums | None = None) -> SnapshotReady | None:
        """Copy the present live parameters; None: already complete. They may change while the copy goes on.

        sums: of `into`; takes the checksums of chunks of which everything is copied by the time this returns.
        """
        ...

    def live(self) -> Sequence[NDArray[np.float32]] | None:
        """The memory of the live parameters, one flat array after the other in layout order; None: it is not float32
        on the host, or in too many pieces.
        """
        ...


@runtime_checkable
class RoundingStore(ParameterStore, Protocol):
    """A store with parameters in fewer bits than float32, which hold the installed values only rounded."""

    @property
    def rounds(self) -> bool:
        """Whether it has any such parameter."""
        ...

    def add_rounded_off(
        self, flat: NDArray[np.float32], installed: NDArray[np.float32], start_elem: int, stop_elem: int
    ) -> None:
        """flat = installed + (flat - installed as rounded by install()), elements [start_elem, stop_elem) of such
        parameters: the change by steps since, without the rounding. Other elements stay. May be called on any thread.
        """
        ...
