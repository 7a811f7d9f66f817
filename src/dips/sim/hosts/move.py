"""Simulates a slave's move of blocks for a RESHARD: the real fetching machine (dips.slave.state.fetching) over lossy
datagrams.

Does what dips.slave.mover does on its thread: own chunks from memory, the others from the slaves that have them, both
tensors checked against their digests, then the file. A cancelled move ends soon.
"""

from __future__ import annotations

from collections.abc import Callable

from dips.core.chunks import Chunk, chunks_of, shard_digest
from dips.core.errors import RefusalCode, Refused
from dips.core.messages import MoveBlocks, SlaveAddress, SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.wire import Codec
from dips.sim.arithmetic import Value
from dips.sim.hosts.shard_memory import SimulatedShardMemory
from dips.sim.world import SlaveProcess
from dips.slave.memory import bytes_of
from dips.slave.ring import Ring
from dips.slave.state.checks import own_blocks
from dips.slave.state.fetching import ChunkRequest, Fetch, Reconnect, cancelled

ChunkPlace = tuple[Chunk, bool]
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
        ended: Callable[[SnapshotInfo | Refused], None],
    ) -> None:
        self.host, self._world, self._ring = host, host.world, ring
        self._epoch, self._later_on_disk = epoch, later_on_disk
        self._move, self._chunk_bytes = move, chunk_bytes
        self._ended = ended
        self._over = False
        self._values: dict[ChunkPlace, Value] = {}
        self._fetches: list[_Fetching] = []

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
                self._fetches.append(_Fetching(self, move.sources.slaves[source], chunks, momentum))
        for fetching in self._fetches:
            fetching.pump()
        self._maybe_write()

    def _take(self, chunks: list[Chunk], memory: SimulatedShardMemory) -> None:
        assert memory.current is not None, "the state checked that the version is here"
        for chunk in chunks:
            header = DataHeader(
                "", 0, DataOp.GET_CHUNK, 0, block=chunk.block_id, offset_bytes=chunk.offset_bytes,
                length_bytes=chunk.length_bytes,
            )  # fmt: skip
            index = memory.map.find(header).index
            self._values[chunk, False] = memory.parts.chunk(memory.current.theta, index)
            self._values[chunk, True] = memory.parts.chunk(memory.current.momentum, index)

    def cancel(self) -> None:
        """Cancel the move."""
        self.host.kernel.after(0.0, self.host, self.end, cancelled(self._move))

    # ---- results of fetches ----

    @property
    def over(self) -> bool:
        return self._over

    def header(self, ask: ChunkRequest, momentum: bool) -> DataHeader:
        chunk = ask.chunk
        return DataHeader(
            self._world.run_id, self._epoch(), DataOp.GET_CHUNK, ask.request, version=self._move.from_version,
            block=chunk.block_id, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=Codec.F32,
            momentum=momentum,
        )  # fmt: skip

    def landed(self, chunk: Chunk, momentum: bool, value: Value) -> None:
        self._values[chunk, momentum] = value

    def fetched(self) -> None:
        self._maybe_write()

    def end(self, result: SnapshotInfo | Refused) -> None:
        if not self._over:
            self._over = True
            self._values = {}
            if isinstance(result, Refused):
                self._ring.drop_stream()
            self._ended(result)

    # ---- the file ----

    def _maybe_write(self) -> None:
        if not self._over and all(fetching.fetch.done for fetching in self._fetches):
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
        parts = arithmetic.shard(blocks, self._chunk_bytes, 0)
        chunks = chunks_of(blocks, self._chunk_bytes)
        tensors = []
        for momentum, digest in ((False, move.theta_digest), (True, move.momentum_digest)):
            values = [self._values[chunk, momentum] for chunk in chunks]
            if shard_digest([arithmetic.checksum(value) for value in values]) != digest:
                raise Refused(RefusalCode.DIGEST, "what was moved is not what was listed")
            tensors.append(parts.to_array(parts.assemble(values)))
        info = SnapshotInfo(
            move.to_version, move.round, move.layout_hash, move.placement.placement_hash, move.theta_digest, False
        )
        stream = ring.begin_stream(info, tensors[0].size)
        for tensor in tensors:
            stream.write(bytes_of(tensor))
        ring.seal_stream(stream, info)
        return info


class _Fetching:
    """The fetch of one tensor from one slave."""

    def __init__(self, move: SimulatedMove, source: SlaveAddress, chunks: list[Chunk], momentum: bool) -> None:
        self._move, self._host, self._source, self._momentum = move, move.host, source, momentum
        self._connection = 0
        self._timer_s = -1.0
        self.fetch = Fetch(source.slave_id, chunks, self._host.kernel.now_s)

    def pump(self) -> None:
        """Send due requests, and schedule the check for missing answers."""
        now_s = self._host.kernel.now_s
        if self._move.over or self.fetch.done:
            return
        for action in self.fetch.actions(now_s):
            match action:
                case Reconnect():
                    self._connection += 1
                case ChunkRequest() as ask:
                    self._send(ask)
        if self.fetch.failure is not None:
            self._move.end(self.fetch.failure)
            return
        due_s = self.fetch.next_deadline_s()
        if due_s < self._timer_s or self._timer_s <= now_s:
            self._timer_s = due_s
            self._host.kernel.at(due_s + 1e-6, self._host, self._rang)

    def _rang(self) -> None:
        self._timer_s = -1.0
        self.pump()

    def _send(self, ask: ChunkRequest) -> None:
        host, world, name = self._host, self._host.world, self._source.slave_id
        target = world.slave_at(self._source.data_endpoint)
        if target is None:
            return  # no process listens on that port
        connection = self._connection

        def answer(reply: DataHeader, value: Value) -> None:
            if reply.op is DataOp.CHUNK and world.net.damages():
                value = world.plan.arithmetic.damaged(value)
            world.net.datagram(name, host.name, host, self._hear, connection, reply, value)

        header = self._move.header(ask, self._momentum)
        world.net.datagram(host.name, name, target, target.asked, header, None, answer, world.key_of(host))

    def _hear(self, connection: int, header: DataHeader, value: Value) -> None:
        fetch, now_s = self.fetch, self._host.kernel.now_s
        chunk = fetch.wanted(header.request)
        if self._move.over or connection != self._connection or chunk is None:
            return
        if header.op is DataOp.REFUSED and header.refusal is not None:
            fetch.refused(header.request, header.refusal, now_s)
        elif (header.block, header.offset_bytes, header.momentum) != (*chunk[:2], self._momentum):
            fetch.damaged(header.request, "it answered with another chunk", now_s)
        elif self._host.world.plan.arithmetic.checksum(value) != header.checksum:
            fetch.damaged(header.request, f"the checksum of {chunk} is wrong", now_s)
        else:
            self._move.landed(chunk, self._momentum, value)
            fetch.landed(header.request, now_s)
        self.pump()
        if fetch.done:
            self._move.fetched()
