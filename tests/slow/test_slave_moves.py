"""A slave takes blocks from two others over real links, and puts the shadow of its new shard into a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.run_for_workers import CHUNK_BYTES, RUN, DataSlave
from support.waiting import NO_LIMIT_S

from dips.core.chunks import digest_of_array
from dips.core.clock import SystemClock
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, SlaveId, Version
from dips.core.layout import Block, Layout, Parameter
from dips.core.messages import MoveBlocks, PlacementSpec, SlaveAddress, SnapshotInfo
from dips.core.net import carry_numba
from dips.core.net.carriers import Common
from dips.core.net.data_header import DataHeader
from dips.core.placement import Placement
from dips.slave.disk import LocalDisk
from dips.slave.mover import Mover
from dips.slave.ring import Ring
from dips.slave.state.moves import WINDOW_CHUNKS

BLOCK_ELEMS = 3 * WINDOW_CHUNKS * CHUNK_BYTES // 4
LAYOUT = Layout((Parameter("w", (3 * BLOCK_ELEMS - 5,), "float32", "w"),), BLOCK_ELEMS)
VERSION = Version(1, 3)
THETA, MOMENTUM = (np.random.default_rng(seed).normal(size=LAYOUT.n_elems).astype(np.float32) for seed in (1, 2))


class Source(DataSlave):
    """Holds blocks of the version."""

    def __init__(self, slave_id: str, blocks: list[Block]) -> None:
        self._shards = [
            np.concatenate([values[block.start_elem : block.stop_elem] for block in blocks])
            for values in (THETA, MOMENTUM)
        ]
        super().__init__(slave_id, blocks)

    def _chunk(self, header: DataHeader) -> list[bytes]:
        self.versions = {VERSION: self._shards[header.momentum]}
        answer, payload = super()._chunk(header)
        answer = replace(DataHeader.decode(answer), momentum=header.momentum).encode()
        return [answer, payload]


@pytest.fixture
def sources() -> Iterator[list[Source]]:
    sources = [Source("s0", [LAYOUT.blocks[0], LAYOUT.blocks[2]]), Source("s1", [LAYOUT.blocks[1]])]
    yield sources
    for source in sources:
        source.close()


def placed(sources: list[Source], *names: str, slave_of_block: tuple[int, ...]) -> PlacementSpec:
    placement = Placement(tuple(SlaveId(name) for name in names), slave_of_block)
    endpoints = {source.slave_id: source.endpoint for source in sources}
    addresses = tuple(SlaveAddress(name, endpoints.get(name, "tcp://127.0.0.1:1")) for name in names)
    return PlacementSpec(addresses, slave_of_block, placement.placement_hash)


def move_of(sources: list[Source]) -> MoveBlocks:
    """All blocks go to the slave `new`."""
    digests = [digest_of_array(values, LAYOUT.blocks, CHUNK_BYTES) for values in (THETA, MOMENTUM)]
    before = placed(sources, "s0", "s1", slave_of_block=(0, 1, 0))
    after = placed(sources, "new", slave_of_block=(0, 0, 0))
    return MoveBlocks(
        RoundId(1, 2), VERSION, Version(1, 4), LAYOUT, LAYOUT.layout_hash, after, before, 4, 2, digests[0], digests[1]
    )


class Moving:
    """The slave `new`, which has a disk and no blocks."""

    def __init__(self, directory: Path) -> None:
        self.ring = Ring(LocalDisk(directory), RUN, "new", 1)
        self.ring.scan()

    def run(self, move: MoveBlocks, cancel_when: threading.Event | None = None) -> SnapshotInfo:
        with ThreadPoolExecutor(1) as disk, ThreadPoolExecutor(1) as mine:
            mover = Mover("new", RUN, 1, move, CHUNK_BYTES, None, self.ring, disk, SystemClock(), None)
            moved = mine.submit(mover.run)
            if cancel_when is not None:
                assert cancel_when.wait(NO_LIMIT_S)
                mover.cancel()
            return moved.result(NO_LIMIT_S)

    def refused(self, move: MoveBlocks, cancel_when: threading.Event | None = None) -> Refused:
        with pytest.raises(Refused) as refused:
            self.run(move, cancel_when)
        assert self.ring.infos() == ()
        return refused.value


@pytest.fixture(params=["python", "compiled"])
def moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Moving:
    if request.param == "compiled":
        carry_numba.warm_up()
    monkeypatch.setattr("dips.slave.mover.Common", partial(Common, loop=request.param))
    return Moving(tmp_path)


def test_a_cancelled_move_ends_while_it_waits(moving: Moving, sources: list[Source]) -> None:
    asked = threading.Event()

    def say_nothing(header: DataHeader) -> None:
        sources[1].mute = True
        asked.set()

    sources[1].hook = say_nothing
    refused = moving.refused(move_of(sources), cancel_when=asked)
    assert refused.code is RefusalCode.BUSY
    assert refused.sentence == f"round {RoundId(1, 2)} was given up"
