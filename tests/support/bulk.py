"""Many parameters with values that tell one place from another, for transfers without a master."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from support.waiting import NO_LIMIT_S

from dips.core import allocator
from dips.core.ids import ClusterId, Incarnation, PushId, SlaveId, Version
from dips.core.layout import Layout, Parameter, shard_digest
from dips.core.math import outer_numba
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net.transfer import TransferSettings
from dips.core.placement import Placement
from dips.slave import serve_numba
from dips.slave.calculation import chunk_checksums
from dips.slave.data_server import DataServer
from dips.slave.memory import ThetaBuffer
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import ShardMap, Slot

F32 = NDArray[np.float32]
RUN, SLAVE, EPOCH = "run", "s0", 1
VERSION = Version(1, 0)
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


class BulkPort:
    """A data server for one push. Use as a context."""

    def __init__(self, bulk: Bulk) -> None:
        outer_numba.warm_up()
        serve_numba.warm_up()
        self._bulk, self._blocks = bulk, bulk.layout.blocks
        self._rows = allocator.zeros(1, bulk.n_elems)
        self.digest = b""
        self.crashed: list[BaseException] = []
        self.server = DataServer("127.0.0.1", 0, RUN, bulk.chunk_bytes, self._note, self.crashed.append)

    def _note(self, staged: PushStaged) -> None:
        self.digest = staged.digest

    def __enter__(self) -> Self:
        self.server.start()
        self.server.do(self.server.port.set_epoch, EPOCH)
        self.server.do(self.server.port.set_memory, ShardMap(self._blocks, self._bulk.chunk_bytes), self._rows)
        self.server.do(self.server.port.hold, [Slot(PUSH, 1, 0, 1)])
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
        assert not self.crashed

    def serve_what_was_pushed(self) -> bytes:
        """It can be pulled as VERSION from then on; its digest."""
        sums, served = chunk_checksums(self._rows[0], self._blocks, self._bulk.chunk_bytes), threading.Event()
        self.server.do(self.server.port.set_readable, {VERSION: ThetaBuffer(self._rows[0], None, sums)}, None)
        self.server.do(served.set)
        assert served.wait(NO_LIMIT_S)
        return shard_digest(sums)
