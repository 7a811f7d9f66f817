"""A simulated slave's memory: the versions that can be read, the shadow, and the open stagings.

Mirrors dips.slave.memory and dips.slave.data_port chunk by chunk, with the run's arithmetic (dips.lab.sim.arithmetic)
in place of bytes; which chunk is wanted is decided by the slave's own tables (dips.slave.state.staging).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import FLOAT32_BYTES, Block
from dips.core.messages import Measure, Measured, Prepare, SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.wire import WIRE_DTYPES, encoded_bytes, pays
from dips.lab.sim.arithmetic import Arithmetic, Key, Part, Stepped, Value
from dips.slave.state.effects import PushStaged
from dips.slave.state.shard import to_refusal
from dips.slave.state.staging import Landing, ShardMap, Slot, StagingTable, find_version


@dataclass(frozen=True)
class Shard:
    """One version of this slave's chunks, in (block, offset) order."""

    info: SnapshotInfo
    made: Stepped
    base: Version | None = None  # to which made.difference is; None: it has no meaning

    @property
    def theta(self) -> Part:
        return self.made.theta

    @property
    def momentum(self) -> Part:
        return self.made.momentum


@dataclass
class SimulatedShardMemory:
    """The memory that one Configure made."""

    blocks: Sequence[Block]
    chunk_bytes: int
    n_slots: int
    n_buffers: int
    arithmetic: Arithmetic
    pull_wire: str = "float32"
    current: Shard | None = None
    previous: Shard | None = None
    shadow: Shard | None = None
    pins: frozenset[Version] = frozenset()
    readable: dict[Version, Shard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.map = ShardMap(self.blocks, self.chunk_bytes)
        self.table = StagingTable(self.map)
        self.parts = self.arithmetic.shard(self.blocks, self.chunk_bytes, self.n_slots, self.pull_wire)

    # ---- pushes ----

    def decoded(self, slot: Slot, landing: Landing, value: Value) -> Value:
        """A chunk's parameters. Raises Refused(BASE_GONE) when the base of a difference is not here."""
        if not slot.wire.is_difference:
            return value
        base = self.readable.get(slot.base) if slot.base is not None else None
        if base is None:
            raise Refused(RefusalCode.BASE_GONE, f"push {slot.push} is based on {slot.base}, which is not here")
        return self.arithmetic.decoded(slot.wire, self.parts.chunk(base.theta, landing.index), value)

    def landed(self, slot: Slot) -> dict[Key, Value | None]:
        """What has landed in a slot, of each chunk of the shard; None: nothing."""
        table: dict[Key, Value | None] = {}
        staging = self.table.find(slot.push, slot.attempt)
        for index in range(self.map.n_chunks):
            chunk = self.map.chunk_at(index)
            has_landed = staging.columns.landed[index]
            table[chunk.block, chunk.offset_bytes] = self.parts.landed(slot.number, index) if has_landed else None
        return table

    # ---- rounds ----

    def measure(self, body: Measure, slots: Sequence[Slot]) -> Measured:
        """The slave's answer to Measure: Gram matrices and directions."""
        assert self.current is not None, "only a round that follows a version is measured"
        version, theta = self.current.info.version, self.current.theta
        numbers, bases = [slot.number for slot in slots], [slot.base for slot in slots]
        blocks = self.parts.measure(theta, numbers)
        way = self.parts.directions(version, theta, numbers, bases)
        return Measured(body.round, blocks, way, self.parts.all_zero(numbers))

    def prepare(self, body: Prepare, slots: Sequence[Slot]) -> Stepped:
        """What the outer step makes. Raises Refused(BUSY) while no buffer is free, and NONFINITE."""
        if len(self._held()) >= self.n_buffers:
            raise Refused(RefusalCode.BUSY, "all buffers hold versions that are read or pinned", 0.5)
        before = self.current.made if self.current is not None else None
        return self.parts.prepare(before, [slot.number for slot in slots], body)

    def flip(self, shard: Shard) -> None:
        """`shard` becomes the current version."""
        self.previous, self.current, self.shadow = self.current, shard, None
        self.readable = dict(self._held()) | {shard.info.version: shard}

    def pin(self, versions: Sequence[Version]) -> None:
        self.pins = frozenset(versions)
        self.readable = dict(self._held())

    def _held(self) -> dict[Version, Shard]:
        keep = {shard.info.version: shard for shard in (self.current, self.previous) if shard is not None}
        return keep | {v: shard for v, shard in self.readable.items() if v in self.pins}


class SimDataPort:
    """Answers messages as the data port (dips.slave.data_port) does."""

    def __init__(self) -> None:
        self.epoch = 0
        self.memory: SimulatedShardMemory | None = None
        self.refused_chunks = 0
        self.complete: list[PushStaged] = []
        """Results of hold() and put() for the caller."""

    def hold(self, slots: Sequence[Slot]) -> None:
        if self.memory is None:
            return
        for staging in self.memory.table.hold(slots):
            if not staging.n_landed:
                self.memory.parts.clear(staging.slot.number)
            if staging.complete:
                self.complete.append(PushStaged(staging.slot, staging.digest()))

    def answer(self, run_id: str, header: DataHeader, value: Value) -> tuple[DataHeader, Value]:
        """The answer's header, and a chunk's content where the op has one."""
        try:
            header.check_common(run_id)
            return self._serve(header, value)
        except Refused as refused:
            self.refused_chunks += 1
            return DataHeader(run_id, self.epoch, DataOp.REFUSED, header.request, refusal=to_refusal(refused)), None

    def _serve(self, header: DataHeader, value: Value) -> tuple[DataHeader, Value]:
        memory = self.memory
        if memory is None:
            raise Refused(RefusalCode.BUSY, "this slave has no memory yet: it is starting", 0.5)
        if header.op is DataOp.GET_CHUNK:
            return self._get(header, memory)
        if header.epoch < self.epoch:
            raise Refused(RefusalCode.STALE_EPOCH, f"the chunk is of epoch {header.epoch}, now is {self.epoch}")
        if header.op is DataOp.PUT_CHUNK:
            return self._put(header, value, memory)
        staging = memory.table.find(header.push, header.attempt)
        missing = memory.table.missing(staging, header.block, header.offset_bytes)
        return _reply(header, DataOp.MISSING, staging.complete, missing), None

    def _put(self, header: DataHeader, value: Value, memory: SimulatedShardMemory) -> tuple[DataHeader, Value]:
        n_elems = header.length_bytes // FLOAT32_BYTES  # a value has no bytes: its header gives its length
        staging, landing, landed = memory.table.admit(header, encoded_bytes(header.codec, n_elems))
        if not landed:
            if memory.arithmetic.checksum(value) != header.checksum:
                raise Refused(RefusalCode.CHUNK, "the payload's checksum is not what its header says; send it again")
            slot = staging.slot
            memory.parts.land(slot.number, landing.index, memory.decoded(slot, landing, value))
            if memory.table.land(staging, landing, header.checksum):
                self.complete.append(PushStaged(slot, staging.digest()))
        return _reply(header, DataOp.ACK, staging.complete), None

    def _get(self, header: DataHeader, memory: SimulatedShardMemory) -> tuple[DataHeader, Value]:
        find_version(memory.map, header, frozenset(memory.readable))
        assert header.version is not None, "find_version refuses a header without version"
        shard = memory.readable[header.version]
        if header.momentum and (memory.current is None or memory.current.info.version != header.version):
            raise Refused(RefusalCode.VERSION_GONE, f"the momentum of version {header.version} is not kept")
        part, index = shard.momentum if header.momentum else shard.theta, memory.map.find(header).index
        value = memory.parts.chunk(part, index)
        reply = _reply(header, DataOp.CHUNK, False, checksum=memory.arithmetic.checksum(value))
        return reply, value if header.base is None else self._differences(header, memory, index)

    def _differences(self, header: DataHeader, memory: SimulatedShardMemory, index: int) -> tuple[Value, ...]:
        """As dips.slave.data_port: a chunk's differences from header.base to header.version, oldest first."""
        codec, parts, version = WIRE_DTYPES[memory.pull_wire], list[Value](), header.version
        while version != header.base and version is not None:
            shard = memory.readable.get(version)
            if shard is None or shard.base is None or codec is not header.codec or header.momentum:
                break
            parts.append(memory.parts.written(shard.made.difference, index))
            version = shard.base
        if version != header.base or not pays(codec, len(parts)):
            raise Refused(RefusalCode.BASE_GONE, f"the differences of {header.version} to {header.base} are not here")
        return tuple(reversed(parts))


def _reply(
    header: DataHeader, op: DataOp, complete: bool, missing: tuple[object, ...] = (), checksum: int = 0
) -> DataHeader:
    return DataHeader(
        header.run_id, header.epoch, op, header.request, header.push, header.attempt, header.version, header.block,
        header.offset_bytes, header.length_bytes, header.codec, checksum, missing=missing, complete=complete,  # type: ignore[arg-type]
        momentum=header.momentum, base=header.base,
    )  # fmt: skip
