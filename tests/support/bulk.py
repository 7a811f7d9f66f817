"""Many parameters with values that tell one place from another, for transfers without a master."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dips.core.ids import ClusterId, Incarnation, PushId, SlaveId
from dips.core.layout import Layout, Parameter
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net.transfer import TransferSettings
from dips.core.placement import Placement

F32 = NDArray[np.float32]
RUN, SLAVE, EPOCH = "run", "s0", 1
PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
TILE_ELEMS = 1 << 20

SILENCE_S = 30.0
"""A busy machine keeps silent for seconds; a chunk that is lost must not be taken for that, nor that for a lost one."""


@dataclass(frozen=True)
class Bulk:
    n_tensors: int
    tensor_elems: int
    block_elems: int
    chunk_bytes: int

    @cached_property
    def layout(self) -> Layout:
        names = (f"layers.{i}.w" for i in range(self.n_tensors))
        shape = (self.tensor_elems,)
        return Layout(tuple(Parameter(name, shape, "float32", name[:-2]) for name in names), self.block_elems)

    @property
    def n_elems(self) -> int:
        return self.n_tensors * self.tensor_elems

    @property
    def n_chunks(self) -> int:
        return sum(-(-block.n_bytes // self.chunk_bytes) for block in self.layout.blocks)

    def placement(self, endpoint: str) -> PlacementSpec:
        placed = Placement((SlaveId(SLAVE),), tuple(0 for _ in self.layout.blocks))
        return PlacementSpec((SlaveAddress(SLAVE, endpoint),), placed.slave_of_block, placed.placement_hash)

    def settings(self, window_chunks: int = 64) -> TransferSettings:
        return TransferSettings(self.chunk_bytes, window_chunks, silence_s=SILENCE_S, stall_s=2 * SILENCE_S)

    def fill(self, flat: F32) -> None:
        for place, values in self._tiles():
            flat[place] = values

    def wrong_elems(self, flat: F32) -> int:
        return sum(int(np.count_nonzero(flat[place] != values)) for place, values in self._tiles())

    def _tiles(self) -> Iterator[tuple[slice, F32]]:
        tile = np.random.default_rng(0).uniform(-1, 1, min(TILE_ELEMS, self.n_elems)).astype(np.float32)
        for n, begin in enumerate(range(0, self.n_elems, TILE_ELEMS)):
            end = min(begin + TILE_ELEMS, self.n_elems)
            yield slice(begin, end), tile[: end - begin] + np.float32(2 * n)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Bulk:
        return cls(**json.loads(text))
