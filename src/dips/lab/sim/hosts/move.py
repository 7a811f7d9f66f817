"""Simulates a slave's move of blocks for a RESHARD: pulls from the other slaves, over lossy datagrams.

Does what dips.slave.mover does on its thread: own chunks from memory, the others from the slaves that have them, both
tensors checked against their digests, then the file. A cancelled move ends soon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dips.core.chunks import Chunk, chunks_of, shard_digest
from dips.core.errors import RefusalCode, Refused
from dips.core.messages import MoveBlocks, SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.transfer import PullTransfer
from dips.lab.sim.arithmetic import Key, Value
from dips.lab.sim.content import key_of
from dips.lab.sim.hosts.shard_memory import SimulatedShardMemory
from dips.lab.sim.hosts.transfer import PullCarrier
from dips.lab.sim.world import SlaveProcess
from dips.slave.memory import bytes_of
from dips.slave.ring import Ring
from dips.slave.state.checks import own_blocks
from dips.slave.state.moves import cancelled, given_up, settings_of_moves

Place = tuple[Key, bool]
"""A chunk, and whether it is of the momentum."""


class SimulatedMove:
    """One MoveBlocks. `ended` is called once: with the shadow's info when the file is durable, or why there is none.

    epoch: the slave's present promise. later_on_disk: runs an action on the slave's disk, in its turn.
    """

    def __init__(
        self,
        host: SlaveProcess,
        ring: Ring,
        epoch: Callable[[], int],
        later_on_disk: Callable[[Callable[[], None]], None],
        move: MoveBlocks,
        chunk_bytes: int,
        pull_wire: str,
        ended: Callable[[SnapshotInfo | Refused], None],
    ) -> None:
        self.host, self._world, self._ring = host, host.world, ring
        self._epoch, self._later_on_disk = epoch, later_on_disk
        self._move, self._chunk_bytes, self._pull_wire = move, chunk_bytes, pull_wire
        self._ended = ended
        self._over = False
        self._values: dict[Place, Value] = {}
        self._pulls: list[PullCarrier] = []
        self._n_pulled = 0

    def begin(self, memory: SimulatedShardMemory | None) -> None:
        """Take the chunks that are in memory, and request the others."""
        move = self._move
        mine: list[Chunk] = []
        theirs: dict[int, list[Chunk]] = {}
        for block in own_blocks(self.host.name, move):
            source = move.sources.slave_of_block[block.block_id]
            chunks = chunks_of([block], self._chunk_bytes)
            own = move.sources.slaves[source].slave_id == self.host.name
            (mine if own else theirs.setdefault(source, [])).extend(chunks)
        if mine:
            assert memory is not None, "the state checked that the version is here"
            self._take(mine, memory)
        for source, chunks in sorted(theirs.items()):
            for momentum in (False, True):
                self._pulls.append(self._pull(move.sources.slaves[source].slave_id, chunks, momentum))
        for pull in self._pulls:
            pull.pump()
        self._maybe_write()

    def _pull(self, source: str, chunks: list[Chunk], momentum: bool) -> PullCarrier:
        settings, move = settings_of_moves(self._chunk_bytes), self._move
        transfer = PullTransfer({source: chunks}, None, settings, self._world.kernel.now_s)
        return PullCarrier(
            self._world, self.host, transfer, move.sources, self._world.run_id, self._epoch(), move.from_version,
            lambda result: self._pulled(result, momentum), momentum=momentum,
        )  # fmt: skip

    def _pulled(self, result: PullTransfer | Mapping[Key, Value], momentum: bool) -> None:
        if isinstance(result, PullTransfer):
            self.end(given_up(result))
            return
        self._values |= {(key, momentum): value for key, value in result.items()}
        self._n_pulled += 1
        self._maybe_write()

    def _take(self, chunks: list[Chunk], memory: SimulatedShardMemory) -> None:
        assert memory.current is not None, "the state checked that the version is here"
        for chunk in chunks:
            header = DataHeader(
                "", 0, DataOp.GET_CHUNK, 0, block=chunk.block_id, offset_bytes=chunk.offset_bytes,
                length_bytes=chunk.length_bytes,
            )  # fmt: skip
            index = memory.map.find(header).index
            self._values[key_of(chunk), False] = memory.parts.chunk(memory.current.theta, index)
            self._values[key_of(chunk), True] = memory.parts.chunk(memory.current.momentum, index)

    def cancel(self) -> None:
        """Cancel the move."""
        self.host.kernel.after(0.0, self.host, self.end, cancelled(self._move))

    def end(self, result: SnapshotInfo | Refused) -> None:
        if not self._over:
            self._over = True
            self._values = {}
            for pull in self._pulls:
                pull.stop()
            if isinstance(result, Refused):
                self._ring.drop_stream()
            self._ended(result)

    # ---- the file ----

    def _maybe_write(self) -> None:
        if not self._over and self._n_pulled == len(self._pulls):
            self._later_on_disk(self._write)

    def _write(self) -> None:
        """Raises what a disk does."""
        if self._over:
            return
        try:
            info = self._seal()
        except Refused as refused:
            self.end(refused)
            return
        self.end(info)

    def _seal(self) -> SnapshotInfo:
        move, ring, arithmetic = self._move, self._ring, self._world.plan.arithmetic
        blocks = own_blocks(self.host.name, move)
        parts = arithmetic.shard(blocks, self._chunk_bytes, 0, self._pull_wire)
        chunks = chunks_of(blocks, self._chunk_bytes)
        tensors = []
        for momentum, digest in ((False, move.theta_digest), (True, move.momentum_digest)):
            values = [self._values[key_of(chunk), momentum] for chunk in chunks]
            if shard_digest([arithmetic.checksum(value) for value in values]) != digest:
                raise Refused(RefusalCode.DIGEST, "what was moved is not what was listed")
            tensors.append(parts.to_array(parts.assemble(values)))
        info = SnapshotInfo(
            move.to_version, move.round, move.layout_hash, move.placement.placement_hash, move.theta_digest, False
        )
        stream = ring.begin_stream(info, tensors[0].size, parts.empty_residual().size)
        for tensor in tensors:
            stream.write(bytes_of(tensor))
        stream.write_no_residual()
        ring.seal_stream(stream, info)
        return info
