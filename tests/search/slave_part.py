"""The slave in a search: the real SlaveMachine and StagingTable; in place of bytes, the pieces of work that each
version and each push is made of.

The disk keeps what a real one keeps over a kill -9: the promise, and a file for each snapshot. A job is done within
the step that began it, so a kill falls before or after it, never into the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.layout import checksum, chunks_of, shard_digest
from dips.core.messages import (
    BlockGram,
    Commit,
    CommitRecord,
    Configure,
    ListShard,
    Measure,
    Measured,
    MoveBlocks,
    PlacementSpec,
    Prepare,
    Refusal,
    Retain,
    SendCommitRecord,
    ShardList,
    SlaveCommand,
    SlaveMessage,
    SnapshotInfo,
    StopSlave,
)
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.wire import Codec, encoded_bytes
from dips.slave.state import effects
from dips.slave.state.checks import cancelled
from dips.slave.state.slave import SlaveMachine
from dips.slave.state.staging import ShardMap, Slot, Staging, StagingTable
from search.bounds import BLOCK_BYTES, LAYOUT, RUN, T0_S
from search.copying import Out, share
from search.master_part import keep_no_story

PieceNames = tuple[str, ...]
"""Which pieces of work a model is made of, in the order in which they were merged."""

NORM = 0.5
SNAPSHOTS_KEPT = 3


@dataclass(frozen=True)
class SnapshotOnDisk:
    """A snapshot on disk."""

    info: SnapshotInfo
    blocks: tuple[int, ...]  # those that it holds
    content: PieceNames
    record: bytes = b""  # of the COMMIT, once there was one


SlotContent = tuple[PieceNames | None, ...]
"""One slot of staging memory: the push content of each chunk, None when no chunk has arrived since it was opened."""

TORN = "torn"
"""Content of a push whose chunks are not of one sending."""

share(ShardMap)


@cache
def shard_map(blocks: tuple[int, ...], chunk_bytes: int) -> ShardMap:
    """The positions of the chunks of these blocks; one map for all slaves that hold them."""
    return ShardMap([LAYOUT.blocks[block] for block in blocks], chunk_bytes)


@cache
def sums_of(blocks: tuple[int, ...], chunk_bytes: int, content: PieceNames, momentum: bool = False) -> tuple[int, ...]:
    """A checksum for each chunk of these blocks of a content, in (block, offset) order; momentum has its own."""
    kind = "momentum" if momentum else "theta"
    words = f"{kind}:{','.join(content)}"
    chunks = chunks_of([LAYOUT.blocks[block] for block in blocks], chunk_bytes)
    return tuple(checksum(f"{chunk.block_id}:{chunk.offset_bytes}:{words}".encode()) for chunk in chunks)


@cache
def digest_of(blocks: tuple[int, ...], chunk_bytes: int, content: PieceNames, momentum: bool = False) -> bytes:
    """The digest of one slave's share of a content: equal for the same content, whichever round made it."""
    return shard_digest(sums_of(blocks, chunk_bytes, content, momentum))


def blocks_of(placement: PlacementSpec, slave: str) -> tuple[int, ...]:
    """The blocks of one slave; none if the placement does not name it."""
    names = [address.slave_id for address in placement.slaves]
    return tuple(block for block, holder in enumerate(placement.slave_of_block) if names[holder] == slave)


@cache
def put_chunk(
    blocks: tuple[int, ...], chunk_bytes: int, index: int, push: PushId, attempt: int, epoch: int, content: PieceNames
) -> DataHeader:
    """The header with which one chunk of a push goes to the slave that holds these blocks."""
    chunk = chunks_of([LAYOUT.blocks[block] for block in blocks], chunk_bytes)[index]
    return DataHeader(
        RUN, epoch, DataOp.PUT_CHUNK, 0, push, attempt, None, chunk.block_id, chunk.offset_bytes, chunk.length_bytes,
        Codec.F32, sums_of(blocks, chunk_bytes, content)[index],
    )  # fmt: skip


def is_bad(content: PieceNames) -> bool:
    """Whether a part of the content is not finite."""
    return any(work.endswith("!") for work in content)


class SlavePart:
    """A slave through all its incarnations. link: its stream to the master, if it has one."""

    def __init__(self, name: str, chunk_bytes: int = BLOCK_BYTES, started: bool = True) -> None:
        self.name = name
        self.chunk_bytes = chunk_bytes
        self.promised = 0
        self.disk: dict[tuple[Version, RoundId], SnapshotOnDisk] = {}
        self.link: int | None = None
        self._restart()
        self.stopped = not started

    def _restart(self) -> None:
        self.memory: dict[Version, tuple[RoundId, PieceNames]] = {}
        self.shadow: SnapshotOnDisk | None = None
        self.table: StagingTable | None = None
        self.staging: dict[int, SlotContent] = {}
        self.served = 0
        self.pins: tuple[Version, ...] = ()
        self.blocks: tuple[int, ...] = ()
        self.stopped = False
        self.move: tuple[int, MoveBlocks] | None = None
        # All processes of a name have one identity: a process that comes back has waited for as long as it must.
        self.state = SlaveMachine(
            RUN, self.name, f"tcp://{self.name}:1", 1 << 30, 1 << 20, self.promised, self._infos(),
            directory_id=self.name.encode(), snapshots_kept=SNAPSHOTS_KEPT,
        )  # fmt: skip
        keep_no_story(self.state.story)

    # ---- actions ----

    def dial(self, link: int) -> list[Out]:
        self.link = link
        return self._handle(effects.Linked())

    def unlinked(self, fenced: bool) -> list[Out]:
        self.link = None
        outs = self._handle(effects.Fenced()) if fenced else []
        return [*outs, *self._handle(effects.Unlinked("it broke"))]

    def hear(self, command: SlaveCommand) -> list[Out]:
        return self._handle(command)

    def put(self, headers: Sequence[DataHeader], payload: PieceNames) -> list[Out]:
        """Chunks arrive, one after another; a refused one changes nothing."""
        outs: list[Out] = []
        for header in headers:
            try:
                outs += self._put(header, payload)
            except Refused:
                pass
        return outs

    def _put(self, header: DataHeader, payload: PieceNames) -> list[Out]:
        """As dips.slave.data_port does it."""
        table = self.table
        if table is None or header.epoch < self.served:
            raise Refused(RefusalCode.STALE_EPOCH, "of an older epoch, or no memory yet")
        staging, landing, landed = table.admit(header, encoded_bytes(header.codec, header.length_bytes // 4))
        if landed:
            return []
        chunks = list(self.staging[staging.slot.number])
        chunks[landing.index] = payload
        self.staging[staging.slot.number] = tuple(chunks)
        return self._say_staged(staging) if table.land(staging, landing, header.checksum) else []

    def _say_staged(self, staging: Staging) -> list[Out]:
        return self._handle(effects.PushStaged(staging.slot, staging.digest()))

    def _payload(self, slot: Slot) -> PieceNames:
        """The content of a slot of staging memory."""
        contents = set(self.staging[slot.number])
        content = contents.pop() if len(contents) == 1 else None
        return content if content is not None else (TORN,)

    def start(self) -> list[Out]:
        """The operator starts the process."""
        self._restart()
        return []

    def is_not_wanted(self) -> list[Out]:
        """The run does not use it: the process ends."""
        self.stopped = True
        return []

    def moved(self, content: PieceNames | None) -> list[Out]:
        """All blocks of another placement are here and on disk; None: a slave that has some of them does not send
        them."""
        assert self.move is not None
        (job, move), self.move = self.move, None
        if content is None:
            return self._move_failed(job, RefusalCode.VERSION_GONE, "a block is not to be had")
        blocks = blocks_of(move.placement, self.name)
        digests = [digest_of(blocks, self.chunk_bytes, content, momentum) for momentum in (False, True)]
        if digests != [move.theta_digest, move.momentum_digest]:
            return self._move_failed(job, RefusalCode.DIGEST, "what was moved is not what was listed")
        info = SnapshotInfo(
            move.to_version, move.round, move.layout_hash, move.placement.placement_hash, move.theta_digest, False
        )
        self.disk[info.version, info.round] = SnapshotOnDisk(info, blocks, content)
        return self._handle(effects.Done(job, info, self._infos()))

    def _move_failed(self, job: int, code: RefusalCode, why: str) -> list[Out]:
        return self._handle(effects.Failed(job, Refusal(code, why, 1.0)))

    def kill(self) -> list[Out]:
        """kill -9, and another process over the same directory."""
        self.link = None
        self._restart()
        return []

    def lose_version(self) -> list[Out]:
        """The disk returns to its state before the newest committed version."""
        newest = max(file.info.version for file in self.disk.values() if file.info.committed)
        self.disk = {key: file for key, file in self.disk.items() if key[0] < newest}
        return self.kill()

    @property
    def n_committed(self) -> int:
        return sum(file.info.committed for file in self.disk.values())

    def empty_disk(self) -> list[Out]:
        self.disk = {}
        return self.kill()

    # ---- queries of the search ----

    def digest(self, file: SnapshotOnDisk) -> bytes:
        """The digest of a snapshot."""
        return digest_of(file.blocks, self.chunk_bytes, file.content)

    @property
    def shard(self) -> ShardMap:
        """The content of the blocks that it was configured to hold."""
        return shard_map(self.blocks, self.chunk_bytes)

    def knows(self, push: PushId, attempt: int) -> bool:
        """Whether the data port accepts chunks of exactly this attempt."""
        try:
            return self.table is not None and self.table.find(push, attempt) is not None
        except Refused:
            return False

    def readable(self, version: Version) -> tuple[RoundId, PieceNames] | None:
        return self.memory.get(version)

    # ---- effects ----

    def _handle(self, event: effects.Event) -> list[Out]:
        outs: list[Out] = []
        for effect in self.state.handle(event, T0_S):
            outs += self._carry_out(effect)
        return outs

    def _carry_out(self, effect: effects.Effect) -> list[Out]:
        match effect:
            case effects.SendUp(body):
                return [("up", self.link, SlaveMessage(self.state.caller(), body))] if self.link is not None else []
            case effects.Record():
                return [("fact", effect.kind, effect.cause, effect.fields)]
            case effects.CloseLink():
                return [("hang up", self.link)]
            case effects.SavePromise(epoch):
                self.promised = max(self.promised, epoch)
                return self._handle(effects.PromiseSaved(epoch))
            case effects.HoldSlots(slots):
                return self._hold(slots)
            case effects.Serve(epoch):
                self.served = epoch
            case Retain(versions):
                self.pins = versions
            case effects.DropShadow(shadow):
                self.shadow = None
                self.disk = {key: file for key, file in self.disk.items() if file.info != shadow}
            case StopSlave() | effects.GiveUp():
                self.stopped = True
                return [("hang up", self.link)]
            case effects.Log():
                pass
            case effects.Run():
                return self._do(effect)
            case effects.CancelMove(job):
                if self.move is None or self.move[0] != job:
                    return []
                refused, self.move = cancelled(self.move[1]), None
                return self._handle(effects.Failed(job, Refusal(refused.code, refused.sentence, 1.0)))
            case SlaveCommand(body=SendCommitRecord() as asked):
                return self._read_record(effect.incarnation, asked.version, asked.round)
            case _:
                raise TypeError(f"the search does not execute {type(effect).__name__}")
        return []

    def _do(self, run: effects.Run) -> list[Out]:
        """Do a command at once, apart from a move, which waits for other slaves."""
        match run.command:
            case (Configure() | Commit()) as command if run.shadow is not None:
                info = self._commit(run.shadow, command.commit_hash, command.commit_record, run.durable)
                return self._handle(effects.Done(run.number, info, self._infos()))
            case Configure() as command:
                return self._load(run.number, command, run.source)
            case Measure(round_id):
                measured = Measured(round_id, self._measure(run.slots))
                return self._handle(effects.Done(run.number, measured))
            case Prepare() as command:
                info = self._prepare(command, run.slots, run.durable)
                return self._handle(effects.Done(run.number, info, self._infos()))
            case ListShard(round_id):
                current = self.memory[max(self.memory)][1]
                sums = [sums_of(self.blocks, self.chunk_bytes, current, momentum) for momentum in (False, True)]
                return self._handle(effects.Done(run.number, ShardList(round_id, sums[0], sums[1])))
            case MoveBlocks() as command:
                self.move = (run.number, command)
        return []

    def _hold(self, slots: tuple[Slot, ...]) -> list[Out]:
        """Unused slots are cleared: their content makes no difference."""
        changed = [] if self.table is None else self.table.hold(slots)
        for staging in changed:
            if not staging.n_landed:
                self.staging[staging.slot.number] = (None,) * self.shard.n_chunks
        used = {staging.slot.number for staging in self.table.stagings()} if self.table is not None else set()
        self.staging = {number: content for number, content in self.staging.items() if number in used}
        return [out for staging in changed if staging.complete for out in self._say_staged(staging)]

    def _infos(self) -> tuple[SnapshotInfo, ...]:
        return tuple(file.info for _, file in sorted(self.disk.items(), key=lambda item: item[0], reverse=True))

    def _load(self, job: int, configure: Configure, source: SnapshotInfo | None) -> list[Out]:
        self.memory, self.shadow, self.staging = {}, None, {}
        self.blocks = blocks_of(configure.placement, self.name)
        self.table = StagingTable(self.shard)
        current = None
        if source is not None:
            file = self.disk[source.version, source.round]
            if self.digest(file) != configure.load_digest:
                wrong = Refusal(RefusalCode.DIGEST, "the snapshot is not what was committed")
                return self._handle(effects.Failed(job, wrong))
            source = self._named(source, configure)
            current = self._commit(source, configure.commit_hash, configure.commit_record)
        return self._handle(effects.Done(job, current, self._infos()))

    def _named(self, source: SnapshotInfo, configure: Configure) -> SnapshotInfo:
        """Rename the origin after a rollback, and drop the versions after it."""
        assert configure.load is not None, "something is loaded"
        assert configure.load_round is not None, "a version has a round"
        if (source.version, source.round) == (configure.load, configure.load_round):
            return source
        file = self.disk.pop((source.version, source.round))
        named = replace(source, version=configure.load, round=configure.load_round)
        self.disk = {key: other for key, other in self.disk.items() if key[0] < source.version}
        self.disk[named.version, named.round] = replace(file, info=named)
        return named

    def _read_record(self, asked_by: Incarnation | None, version: Version, round_id: RoundId) -> list[Out]:
        file = self.disk.get((version, round_id))
        gone = CommitRecord(version, round_id, b"", Refusal(RefusalCode.VERSION_GONE, "it is not here"))
        answer = CommitRecord(version, round_id, file.record) if file is not None and file.record else gone
        return self._handle(effects.RecordRead(asked_by, answer))

    def _measure(self, slots: tuple[Slot, ...]) -> tuple[BlockGram, ...]:
        payloads = [self._payload(slot) for slot in slots]
        pairs = [(i, j) for i in range(len(slots)) for j in range(i, len(slots))]
        gram = tuple(NORM * NORM * (1.0 if i == j else 0.9) for i, j in pairs)
        bad = tuple(4 if is_bad(payload) else 0 for payload in payloads)
        return tuple(BlockGram(block, gram, bad) for block in self.blocks)

    def _prepare(self, prepare: Prepare, slots: tuple[Slot, ...], durable: bool) -> SnapshotInfo:
        base: PieceNames = ()
        if prepare.from_version is not None:
            base = self.memory[prepare.from_version][1]
        content = (*base, *(work for slot in slots for work in self._payload(slot)))
        made = self.state.shard.made
        assert made is not None
        digest = digest_of(self.blocks, self.chunk_bytes, content)
        info = SnapshotInfo(prepare.to_version, prepare.round, made.layout_hash, made.placement_hash, digest, False)
        self.shadow = SnapshotOnDisk(info, self.blocks, content)
        self.disk = {key: file for key, file in self.disk.items() if file.info.committed}
        if durable:
            self.disk[info.version, info.round] = self.shadow
        return info

    def _commit(self, shadow: SnapshotInfo, commit_hash: bytes, record: bytes, durable: bool = True) -> SnapshotInfo:
        """The manifest becomes durable, and memory flips."""
        info = replace(shadow, committed=True, commit_hash=commit_hash)
        file = self.disk.get((shadow.version, shadow.round)) or self.shadow
        assert file is not None, "a shadow is on disk or in memory"
        if durable:
            self.disk[info.version, info.round] = SnapshotOnDisk(info, file.blocks, file.content, record)
        newest = sorted({file.info.version for file in self.disk.values()}, reverse=True)[:SNAPSHOTS_KEPT]
        self.disk = {key: file for key, file in self.disk.items() if key[0] in newest}
        self.memory[info.version] = (info.round, file.content)
        kept = {*sorted(self.memory, reverse=True)[:2], *self.pins}
        self.memory = {version: held for version, held in self.memory.items() if version in kept}
        self.shadow = None
        return info


def canonical(part: SlavePart) -> None:
    """Restart used-up numbers, so that equal states are equal."""
    shard = part.state.shard
    if shard.job is None:
        shard._jobs = part.state._mute_job = 0
    if not len(part.state.slots):
        part.state.slots._openings = 0
