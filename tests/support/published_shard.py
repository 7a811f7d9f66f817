"""A slave's memory whose versions are rounded, round after round, and what a reader held of each."""

from __future__ import annotations

import numpy as np
from support.slave_wire import LAYOUT, prepare_of, push_id

from dips.core.ids import RoundId, Version
from dips.core.layout import shard_digest
from dips.core.messages import SnapshotInfo
from dips.core.placement import shard_bytes_needed
from dips.core.threads import Threads
from dips.slave import calculation
from dips.slave.memory import F32, ShardMemory

CHUNK_BYTES = 1024
BLOCKS = LAYOUT.blocks
PUSHES = [push_id("a"), push_id("b")]


def vector(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(LAYOUT.n_elems).astype(np.float32)


def memory_of(pull_wire: str, pins: int = 0) -> ShardMemory:
    needed = shard_bytes_needed([b.n_elems for b in BLOCKS], CHUNK_BYTES, 2, pins, pull_wire=pull_wire)
    return ShardMemory(BLOCKS, CHUNK_BYTES, 2, needed, pull_wire=pull_wire)


class Shard:
    """A slave's memory that makes version after version, each from two pushes near the one before."""

    def __init__(self, pull_wire: str, n_threads: int = 1, pins: int = 0) -> None:
        self.memory = memory_of(pull_wire, pins)
        self._threads = Threads(n_threads)
        self.memory.staging[0] = vector(0)
        self._make(Version(1, 0), None)

    def next(self) -> None:
        assert self.memory.current is not None
        assert self.memory.current.info is not None
        before = self.memory.current.info.version
        for slot in (0, 1):
            self.memory.staging[slot] = self.memory.current.theta + np.float32(0.01) * vector(2 * before.v + slot)
        self._make(before.next(), before)

    def _make(self, version: Version, before: Version | None) -> None:
        memory, n = self.memory, RoundId(1, version.v + 1)
        shadow = memory.take()
        theta = memory.current.theta if memory.current is not None else None
        body = prepare_of(n, version, PUSHES if before else PUSHES[:1], before, weights=(0.5, 0.5), scale=1.0)
        sums = calculation.prepare(
            memory, theta, shadow.theta, body, [0, 1] if before else [0], self._threads, shadow.difference
        )
        info = SnapshotInfo(version, n, b"l", b"p", shard_digest(sums), committed=True)
        memory.name_shadow(info, sums, before)
        memory.flip(info)
        memory.left()

    @property
    def theta(self) -> F32:
        assert self.memory.current is not None
        return self.memory.current.theta
