"""The master's bench with slaves whose versions have checksums that add up, so that their blocks can be moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import xxhash
from support.master_bench import LAYOUT, Bench, BenchSlave

from dips.core import messages as m
from dips.core.ids import Version
from dips.core.layout import Block, chunks_of, shard_digest


@dataclass
class MovingSlave(BenchSlave):
    """Its digest of a version is that of its blocks' checksums. stopped: it was told to end."""

    stopped: bool = False
    moved: dict[Any, Version] = field(default_factory=dict)

    def digest(self, what: object) -> bytes:
        if not isinstance(what, Version) or self.configure is None:
            return super().digest(what)
        return shard_digest(self.sums(what, self.configure.placement))

    def sums(self, version: Version, placement: m.PlacementSpec, kind: str = "theta") -> list[int]:
        content = self.bench.content_of.get(version, version)  # type: ignore[attr-defined]
        return [
            xxhash.xxh3_64_intdigest(f"{kind} {content} {chunk}".encode())
            for chunk in chunks_of(self.blocks(placement), 1 << 20)
        ]

    def blocks(self, placement: m.PlacementSpec) -> list[Block]:
        own = {i for i, address in enumerate(placement.slaves) if address.slave_id == self.name}
        return [block for block in LAYOUT.blocks if placement.slave_of_block[block.block_id] in own]

    def _listshard(self, body: m.ListShard) -> None:
        if "list" in self.refuse:
            self.say(m.RoundRefused(body.round, "listshard", self.refuse["list"]))
            return
        assert self.configure is not None
        placement = self.configure.placement
        theta, momentum = (tuple(self.sums(body.version, placement, kind)) for kind in ("theta", "momentum"))
        self.say(m.ShardList(body.round, theta, momentum))

    def _moveblocks(self, body: m.MoveBlocks) -> None:
        if "move" in self.refuse:
            self.say(m.RoundRefused(body.round, "moveblocks", self.refuse["move"]))
            return
        self.bench.content_of[body.to_version] = body.from_version  # type: ignore[attr-defined]
        theta = shard_digest(self.sums(body.from_version, body.placement))
        assert shard_digest(self.sums(body.from_version, body.placement, "momentum")) == body.momentum_digest
        theta = self.digests.get(body.to_version, theta)
        info = m.SnapshotInfo(
            body.to_version, body.round, body.layout_hash, body.placement.placement_hash, theta, committed=False
        )
        self.moved[body.round] = body.to_version
        self.snapshots[body.to_version] = info
        self.say(m.Prepared(body.round, theta))

    def _abortround(self, body: m.AbortRound) -> None:
        super()._abortround(body)
        version = self.moved.pop(body.round, None)
        if version is not None and not self.snapshots[version].committed:
            del self.snapshots[version]

    def _configure(self, body: m.Configure) -> None:
        if body.load is not None and body.load in self.snapshots:
            assert self.snapshots[body.load].digest == body.load_digest
            assert self.snapshots[body.load].placement_hash == body.placement.placement_hash
        super()._configure(body)

    def _stopslave(self, body: m.StopSlave) -> None:
        self.stopped, self.alive = True, False


class ReshardBench(Bench):
    """content_of: a version that a RESHARD made, and the one whose parameters it has."""

    def __init__(self, n_slaves: int = 2, **more: Any) -> None:
        super().__init__(n_slaves, **more)
        self.content_of: dict[Version, Version] = {}
        self.slaves = [MovingSlave(self, f"s{i}") for i in range(n_slaves)]

    def slave(self, name: str) -> MovingSlave:
        found = next(slave for slave in self.slaves if slave.name == name)
        assert isinstance(found, MovingSlave)
        return found

    def new_slave(self, name: str) -> MovingSlave:
        slave = MovingSlave(self, name)
        self.slaves.append(slave)
        slave.attach()
        return slave

    def forget_stopped(self) -> None:
        """Processes that ended are no part of later pushes."""
        self.slaves = [slave for slave in self.slaves if slave.alive]

    def reshard(self, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()) -> str:
        sentence: str = self.operate(m.ReshardRequest("", add, remove, reason="test")).sentence
        return sentence

    def placed(self) -> tuple[str, ...]:
        placement = self.state.shared.ledger.placement
        return tuple(placement.slaves) if placement is not None else ()

    def lose_disk(self, name: str) -> None:
        slave = self.slave(name)
        slave.die()
        slave.lose()
        slave.configure = None
        slave.attach()
