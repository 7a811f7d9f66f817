"""A share: the part of a layout's flat vector that one rank of a cluster owns, pushes and pulls.

Shapes: the whole vector has layout.n_elems elements, a share's own vector n_elems, its runs one after the other. A run
begins and ends at the edges of chunks, so that a chunk has one owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dips.core.chunks import Chunk, chunks_of
from dips.core.layout import FLOAT32_BYTES, Layout

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Share:
    """Runs of elements [starts[i], stops[i]) of the whole vector, ascending, none empty, no two adjacent.

    starts, stops: int64, (n_runs,); no run at all: a rank that owns nothing.
    """

    starts: I64
    stops: I64

    @classmethod
    def whole(cls, layout: Layout) -> Share:
        """The only share of a cluster of one rank."""
        return cls(np.array([0], np.int64), np.array([layout.n_elems], np.int64))

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> Share:
        """The share of these [start, stop) runs, ascending; adjacent ones are joined. Raises ValueError where two
        overlap, or one is empty.
        """
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if start >= stop or (joined and start < joined[-1][1]):
                raise ValueError(f"the run [{start}, {stop}) is empty, or overlaps the one before it")
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        table = np.array(joined, np.int64).reshape(-1, 2)
        return cls(table[:, 0].copy(), table[:, 1].copy())

    @cached_property
    def n_elems(self) -> int:
        """Elements of the share's own vector."""
        return int((self.stops - self.starts).sum())

    @cached_property
    def places(self) -> I64:
        """Where each run begins in the share's own vector, (n_runs,)."""
        lengths = self.stops - self.starts
        places: I64 = np.cumsum(lengths) - lengths
        return places

    def runs(self) -> list[tuple[int, int]]:
        """The runs, as [start, stop) of the whole vector."""
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    def n_elems_before(self, elem: int) -> int:
        """How many of its elements are before this one of the whole vector; they come first in its own."""
        return int(np.clip(elem - self.starts, 0, self.stops - self.starts).sum())

    def owns(self, start_elem: int, stop_elem: int) -> bool:
        """Whether all of [start_elem, stop_elem) is in one run."""
        run = int(np.searchsorted(self.starts, start_elem, "right")) - 1
        return run >= 0 and stop_elem <= int(self.stops[run])

    def place_of(self, elem: int) -> int:
        """Where this element of the whole vector is in the share's own one. Raises ValueError where it is not owned."""
        run = int(np.searchsorted(self.starts, elem, "right")) - 1
        if run < 0 or elem >= int(self.stops[run]):
            raise ValueError(f"element {elem} is not in this share")
        return int(self.places[run]) + elem - int(self.starts[run])

    def places_of(self, elems: I64) -> I64:
        """place_of() for each of these elements, of any shape. Raises ValueError where one is not owned."""
        run = np.searchsorted(self.starts, elems, "right") - 1
        if elems.size and (run.min() < 0 or bool((elems >= self.stops[run]).any())):
            raise ValueError("some of these elements are not in this share")
        places: I64 = self.places[run] + elems - self.starts[run] if elems.size else elems.copy()
        return places

    def chunks(self, layout: Layout, chunk_bytes: int) -> list[Chunk]:
        """The share's chunks, in (block, offset) order. Raises ValueError where a chunk is in it only in part."""
        chosen: list[Chunk] = []
        blocks = layout.blocks
        for chunk in chunks_of(blocks, chunk_bytes):
            start = blocks[chunk.block_id].start_elem + chunk.offset_bytes // FLOAT32_BYTES
            if self.owns(start, start + chunk.length_bytes // FLOAT32_BYTES):
                chosen.append(chunk)
        if sum(chunk.length_bytes for chunk in chosen) != FLOAT32_BYTES * self.n_elems:
            raise ValueError(f"the share does not consist of whole chunks of {chunk_bytes} bytes")
        return chosen
