"""Simulates a slave's process around the real SlaveMachine: its jobs take time, its disk may fail, its stream may
break.

Does what dips.slave.shell and dips.slave.control do, on virtual time and with the run's arithmetic
(dips.lab.sim.arithmetic) in place of numbers. A move of blocks for a RESHARD does what dips.slave.mover does on its
thread: own chunks from memory, the others from the slaves that have them, over lossy datagrams, both tensors checked
against their digests, then the file. A cancelled move ends soon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dips.core.errors import DipsError, RefusalCode, Refused
from dips.core.files import TEMPORARY
from dips.core.ids import Incarnation, RoundId
from dips.core.layout import Chunk, chunks_of, shard_digest
from dips.core.messages import (
    Allow,
    Commit,
    CommitRecord,
    Configure,
    ListShard,
    Measure,
    MoveBlocks,
    Prepare,
    Refusal,
    Retain,
    SendCommitRecord,
    ShardList,
    SlaveBeat,
    SlaveCommand,
    SlaveMessage,
    SnapshotInfo,
    StopSlave,
)
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.transfer import PullTransfer
from dips.lab.sim.arithmetic import F32, Key, ShardArithmetic, Stepped, Value
from dips.lab.sim.content import key_of
from dips.lab.sim.disks import PowerLossError, SlaveDisk
from dips.lab.sim.hosts.shard_memory import Shard, SimDataPort, SimulatedShardMemory
from dips.lab.sim.hosts.transfer import PullCarrier
from dips.lab.sim.kernel import Action
from dips.lab.sim.network import End, Stream
from dips.lab.sim.world import Away, SlaveProcess, World
from dips.slave.disk import Promise
from dips.slave.memory import bytes_of
from dips.slave.ring import Ring
from dips.slave.state import effects
from dips.slave.state.admission import Admission
from dips.slave.state.checks import cancelled, given_up, own_blocks, settings_of_moves
from dips.slave.state.shard import to_refusal
from dips.slave.state.slave import SlaveMachine

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


DIAL_S = 0.3
FIRST_COMMAND_S = 10.0

FOR_GOOD = frozenset(
    {
        RefusalCode.PROTOCOL_VERSION,
        RefusalCode.RUN_ID,
        RefusalCode.CONFIG,
        RefusalCode.UNKNOWN_NAME,
        RefusalCode.NAME_TAKEN,
    }
)


class SlaveHost(SlaveProcess):
    """One slave process; its disk outlives it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.disk = SlaveDisk(name, world.plan.disk_bytes)
        self.state: SlaveMachine | None = None
        self.ring = self._new_ring()
        self.promise = Promise(self.disk)
        self.port = SimDataPort()
        self.overflow = False
        self._stream: tuple[Stream, End] | None = None
        self._got_command = False
        self.said: list[tuple[int, SlaveMessage]] = []
        self._link = 0
        self._disk_free_s = 0.0
        self.move: SimulatedMove | None = None
        self._unwanted = 0

    # ---- start and end ----

    @property
    def endpoint(self) -> str:
        """The data endpoint: another port in each incarnation."""
        return f"tcp://{self.name}:{self.generation}"

    def boot(self) -> None:
        """Start: every snapshot is read back; incomplete ones are skipped."""
        self.begin_process()
        self.port = SimDataPort()
        self.admission = Admission()
        self._stream, self._disk_free_s = None, 0.0
        self.move, self._unwanted = None, 0
        self.ring = self._new_ring()
        try:
            for name in self.disk.names():
                if name.startswith(TEMPORARY):
                    self.disk.remove(name)
            for problem in self.ring.scan():
                self.kernel.aside(self.name, problem)
            self.promise = Promise(self.disk)
        except PowerLossError as loss:
            self.struck_dead(str(loss))
            return
        self.state = SlaveMachine(
            self.world.run_id,
            self.name,
            self.endpoint,
            self.world.plan.slave_memory_bytes,
            self.world.plan.max_chunk_bytes,
            self.promise.epoch,
            self.ring.infos(),
            self.world.key_of(self),
            self.disk.identity(self.world.draw),
            self.world.plan.snapshots_kept,
        )
        self.world.began(self, self.disk.identity(self.world.draw))
        self._dial()

    def _new_ring(self) -> Ring:
        return Ring(self.disk, self.world.run_id, self.name, self.world.plan.snapshots_kept)

    def kill(self) -> None:
        """kill -9 or a power cut: memory and unsynced data are lost."""
        if self.alive:
            self.world.killed("slave")
        self.end()

    def end(self) -> None:
        for what in self.disk.crash(self.kernel.rng):
            self.world.fired(what)
        self._die()

    def _die(self) -> None:
        self.end_process()
        self.state = None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream[0].close(stream[1])

    # ---- the stream ----

    def _dial(self) -> None:
        master = self.world.some_master()
        if master is None or self._stream is not None or self.world.net.is_cut(self.name, master.at):
            if self._stream is None:
                self.kernel.after(self.kernel.jitter(2 * DIAL_S), self, self._dial)
            return
        number = self._link = self.world.next_token()
        mine = End(self.name, self, self._hear, self._hung_up)
        theirs = End(
            master.at,
            master,
            lambda message: master.slave_said(number, message),
            lambda _: master.link_down(number),
        )
        stream = Stream(self.world.net, mine, theirs)
        self._stream, self._got_command = (stream, mine), False
        self.kernel.after(0.0, master, master.attached, number, stream, theirs)
        self.handle(effects.Linked())
        self.kernel.after(self.world.plan.config.settings.heartbeat_s, self, self._beat, number)
        self.kernel.after(FIRST_COMMAND_S, self, self._no_command, number)

    def _no_command(self, number: int) -> None:
        if number == self._link and not self._got_command:
            self.drop_stream("nothing was heard after hello")

    def _hear(self, command: SlaveCommand) -> None:
        self._got_command = True
        if self.world.slaves[self.name] is not self:
            # Its name was free for long enough. The operator ends the second process, so nothing more follows from it.
            self.world.name_taken(self)
            self.end()
            return
        self.handle(command)

    def _hung_up(self, refusal: Refusal | None) -> None:
        self._stream = None
        if refusal is not None and refusal.code in FOR_GOOD and not refusal.retry_after_s > 0:
            self.world.gave_up(self, Refused(refusal.code, refusal.sentence))
            return
        if refusal is not None and refusal.code is RefusalCode.FENCED:
            self.handle(effects.Fenced())
        self.handle(effects.Unlinked(refusal.sentence if refusal else "the stream broke"))
        self.kernel.after(self.kernel.jitter(DIAL_S), self, self._dial)

    def drop_stream(self, why: str) -> None:
        """End the stream on this side and connect again."""
        if self._stream is None:
            return
        (stream, end), self._stream = self._stream, None
        stream.close(end)
        self.handle(effects.Unlinked(why))
        self.kernel.after(self.kernel.jitter(DIAL_S), self, self._dial)

    def reset_stream(self) -> None:
        """Reset the stream at any time."""
        if self._stream is not None:
            self._stream[0].break_now()

    @property
    def linked(self) -> bool:
        return self._stream is not None

    def _beat(self, number: int) -> None:
        if number != self._link or self._stream is None or self.state is None:
            return
        if self.state.link.attached:
            progress = self.port.memory.table.progress() if self.port.memory else ()
            durable = self.state.shard.saving.durable
            self._send(SlaveBeat(0, 0, self.port.refused_chunks, 0, len(progress), progress, durable))
        self.kernel.after(self.world.plan.config.settings.heartbeat_s, self, self._beat, number)

    def _send(self, body: Any) -> None:
        if self._stream is None or self.state is None:
            return
        stream, end = self._stream
        message = SlaveMessage(self.state.caller(), body)
        self.said = [*self.said[-20:], (self._link, message)]
        stream.send(end, message)

    # ---- events and effects ----

    def handle(self, event: effects.Event) -> None:
        if self.state is None:
            return
        try:
            for number, effect in enumerate(self.state.handle(event, self.kernel.now_s)):
                if number and self.dies_after and self.dies_here():
                    self.struck_dead("crash_slave_in_step")
                if self.alive:
                    self._carry_out(effect)
        except (DipsError, AssertionError, LookupError, ValueError, TypeError) as error:
            self.world.bug(self.name, error)
            self._die()

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SendUp(body):
                self._send(body)
            case effects.Record():
                self.world.tape("slave", self, effect.kind, effect.cause, effect.fields)
            case effects.Log(_, key, sentence):
                self.world.log(self.name, key, sentence)
            case effects.HoldSlots(slots):
                self.port.hold(slots)
                self._say_staged()
            case effects.Serve(epoch):
                self.port.epoch = epoch
            case effects.CloseLink(sentence):
                self.kernel.after(0.0, self, self.drop_stream, sentence)
            case StopSlave(reason):
                self.kernel.note(self.name, f"stops: {reason}")
                self._die()
                self.world.slave_stopped(self)
            case effects.GiveUp(refusal):
                self.world.gave_up(self, Refused(refusal.code, refusal.sentence))
            case effects.SavePromise(epoch):
                self._later_on_disk(self._on_disk, self._save_promise, epoch)
            case effects.DropShadow(shadow):
                if self.port.memory is not None and self.port.memory.shadow is not None:
                    self.port.memory.shadow = None
                    self.ring.drop_shadow(shadow)
                else:  # moved, which only the disk has
                    self._later_on_disk(self._on_disk, self.ring.drop_shadow, shadow)
            case Allow(keys):
                self.admission.set_keys(keys)
            case Retain(versions):
                if self.port.memory is not None:
                    self.port.memory.pin(versions)
            case effects.Run():
                self.kernel.after(effect.delay_s + self.world.job_s(self, effect), self, self._job, effect, self._do)
            case effects.CancelMove(number):
                self._unwanted = number
                if self.move is not None:
                    self.move.cancel()
            case effects.SaveVersion():
                shard = self._made().current
                assert shard is not None, "a save is of what memory holds"
                assert shard.info == effect.info, "only the current version is saved"
                self._later_on_disk(self._on_disk, self._save_version, effect, shard, snapshot=True)
            case effects.SaveLater(delay_s):
                self.kernel.after(delay_s, self, self.handle, effects.SaveAgain())
            case SlaveCommand(body=SendCommitRecord() as body):
                self._later_on_disk(self._on_disk, self._read_record, effect.incarnation, body)
            case _:
                raise LookupError(f"no one carries out {type(effect).__name__}")

    # ---- jobs ----

    def _job(self, run: effects.Run, work: Callable[[effects.Run], None]) -> None:
        try:
            self._on_disk(work, run)
        except Refused as refused:
            self.handle(effects.Failed(run.number, to_refusal(refused), self.ring.infos()))

    def _do(self, run: effects.Run) -> None:
        """Do a command, as dips.slave.shell does. Raises Refused."""
        match run.command:
            case (Configure() | Commit()) as command if run.shadow is not None:
                self._done(run, self._commit(run, command, run.shadow))
            case Configure() as command:
                self._done(run, self._load(run, command))
            case Measure() as command:
                self.handle(effects.Done(run.number, self._made().measure(command, run.slots)))
            case Prepare() as command:
                self._prepare(run, command)
            case ListShard(round_id):
                self.handle(effects.Done(run.number, self._list(round_id)))
            case MoveBlocks() as command:
                if self._unwanted == run.number:
                    raise cancelled(command)
                self.move = SimulatedMove(
                    self, self.ring, lambda: self.state.link.promised_epoch if self.state else 0,
                    lambda action: self._later_on_disk(self._on_disk, action), command, run.settings.chunk_bytes,
                    run.settings.pull_wire, lambda result: self._moved(run, result),
                )  # fmt: skip
                self.move.begin(self.port.memory)

    def _done(self, run: effects.Run, result: SnapshotInfo | None) -> None:
        self.handle(effects.Done(run.number, result, self.ring.infos()))

    def _on_disk(self, work: Callable[[Any], None], *args: Any) -> None:
        """Run an action on the disk: power may fail within any step of it. An unexpected error ends the process."""
        errors = self.disk.errors_seen
        try:
            work(*args)
        except PowerLossError as loss:
            self.struck_dead(str(loss))
        except OSError as error:
            self.kernel.note(self.name, f"ends: {error}")
            self.end()
            self.world.died(self)
        finally:
            if self.disk.errors_seen != errors:
                self.world.fired("slave_disk_error")

    def _later_on_disk(self, action: Action, *args: Any, snapshot: bool = False) -> None:
        """Run an action on the disk's single thread, in the order of requests. snapshot: it writes a whole one."""
        took_s = self.world.write_s(self, snapshot=snapshot) * self.disk.fsync_factor
        self._disk_free_s = max(self._disk_free_s, self.kernel.now_s) + took_s
        self.kernel.at(self._disk_free_s, self, action, *args)

    def _save_promise(self, epoch: int) -> None:
        self.promise.save(epoch)
        self.handle(effects.PromiseSaved(epoch))

    def _load(self, run: effects.Run, body: Configure) -> SnapshotInfo | None:
        self.port.memory = None
        blocks = own_blocks(self.name, body)
        settings, arithmetic = run.settings, self.world.plan.arithmetic
        memory = SimulatedShardMemory(
            blocks, settings.chunk_bytes, body.staging_slots, 3 + body.pinned_versions, arithmetic, settings.pull_wire
        )
        self.ring.close_round()
        self.ring.make(memory.parts.empty_array().size, memory.parts.empty_residual().size)
        if run.source is not None:
            memory.flip(self._fill(memory, body, run.source))
        self.port.memory = memory
        return memory.current.info if memory.current else None

    def _fill(self, memory: SimulatedShardMemory, body: Configure, source: SnapshotInfo) -> Shard:
        parts = memory.parts
        theta, momentum, residual = parts.empty_array(), parts.empty_array(), parts.empty_residual()
        self.ring.load(source, theta, momentum, residual)
        loaded = parts.from_array(theta)
        if parts.digest(loaded) != body.load_digest:
            raise Refused(RefusalCode.DIGEST, f"the snapshot of {source.version} has another digest than its COMMIT")
        assert body.load is not None, "a source is of a version"
        assert body.load_round is not None, "and of its round"
        named = replace(source, version=body.load, round=body.load_round)
        info, problems = self.ring.adopt(source, named, body.origin, body.commit_hash, body.commit_record)
        self._warn(problems)
        if info != source:
            self.world.manifest(self, info, body.commit_record)
        return Shard(info, Stepped(loaded, parts.from_array(momentum), parts.residual_from(residual)))

    def _warn(self, problems: list[str]) -> None:
        for problem in problems:
            self.kernel.aside(self.name, problem)

    def _prepare(self, run: effects.Run, body: Prepare) -> None:
        """After the computation, write the file to the disk."""
        memory = self._made()
        if self.overflow:
            self.overflow = False
            self.world.fired("overflow_in_prepare")
            raise Refused(RefusalCode.NONFINITE, f"round {body.round} would give 2 elements that are NaN or infinite")
        stepped = memory.prepare(body, run.slots)
        made = self.state.shard.made if self.state is not None else None
        assert made is not None, "prepares only once configured"
        info = SnapshotInfo(
            body.to_version,
            body.round,
            made.layout_hash,
            made.placement_hash,
            memory.parts.digest(stepped.theta),
            False,
        )
        memory.shadow = Shard(info, stepped, body.from_version if stepped.difference is not None else None)
        if run.durable:
            self._later_on_disk(self._job, run, self._write_shadow, snapshot=True)
        else:
            self._done(run, info)

    def _write_shadow(self, run: effects.Run) -> None:
        memory = self._made()
        shadow, parts = memory.shadow, memory.parts
        assert shadow is not None, "one job at a time"
        try:
            self.ring.write_shadow(shadow.info, *_arrays(parts, shadow), parts.residual_bytes(shadow.made.residual))
        except Refused:
            memory.shadow = None
            raise
        self._done(run, shadow.info)

    def _commit(self, run: effects.Run, body: Configure | Commit, shadow: SnapshotInfo) -> SnapshotInfo:
        memory = self._made()
        held = memory.shadow
        assert held is not None, "the state commits only a shadow that exists"
        info = replace(shadow, committed=True, commit_hash=body.commit_hash)
        if run.durable:
            self._write_committed(replace(held, info=info), body.commit_record)
        memory.flip(replace(held, info=info))
        if run.durable:
            self._warn(self.ring.tidy(info))
        return info

    def _write_committed(self, shard: Shard, record: bytes) -> None:
        """Write the manifest, and before it the file unless it is there already."""
        parts = self._made().parts
        residual = parts.residual_bytes(shard.made.residual)
        self.ring.write_committed(shard.info, *_arrays(parts, shard), record, residual)
        self.world.manifest(self, shard.info, record)

    def _save_version(self, effect: effects.SaveVersion, shard: Shard) -> None:
        """Durability async: write a version that was committed in memory to disk."""
        try:
            self._write_committed(replace(shard, info=effect.info), effect.commit_record)
        except Refused as refused:
            self.handle(effects.SaveFailed(effect.number, to_refusal(refused)))
            return
        self.handle(effects.Saved(effect.number, effect.info, self.ring.infos()))

    # ---- a RESHARD ----

    def _list(self, round_id: RoundId) -> ShardList:
        memory = self._made()
        assert memory.current is not None, "the state lists only what is here"
        current, parts, checksum = memory.current, memory.parts, self.world.plan.arithmetic.checksum
        theta, momentum = (
            tuple(checksum(parts.chunk(part, index)) for index in range(memory.map.n_chunks))
            for part in (current.theta, current.momentum)
        )
        return ShardList(round_id, theta, momentum)

    def _moved(self, run: effects.Run, result: SnapshotInfo | Refused) -> None:
        self.move = None
        if isinstance(result, Refused):
            self.handle(effects.Failed(run.number, to_refusal(result), self.ring.infos()))
        else:
            self._done(run, result)

    def _read_record(self, asked_by: Incarnation | None, command: SendCommitRecord) -> None:
        version, round_id = command.version, command.round
        try:
            record, commit_hash = self.ring.record(version, round_id)
            if hashlib.sha256(record).digest() != commit_hash:
                raise Refused(RefusalCode.DIGEST, f"the record of {version} has another hash than was committed")
            answer = CommitRecord(version, round_id, record)
        except Refused as refused:
            answer = CommitRecord(version, round_id, b"", to_refusal(refused))
        self.handle(effects.RecordRead(asked_by, answer))

    def _made(self) -> SimulatedShardMemory:
        assert self.port.memory is not None, "a round reached a slave without memory"
        return self.port.memory

    # ---- the data port ----

    def asked(
        self,
        header: DataHeader,
        value: Value,
        answer: Callable[[DataHeader, Value], None],
        key: bytes = b"",
        away: Away = lambda why: None,
    ) -> None:
        admitted = not self.world.plan.config.encrypted or self._admits(key, header, answer, away)
        if admitted and self.state is not None:
            answer(*self.port.answer(self.world.run_id, header, value))
            self._say_staged()

    def _admits(self, key: bytes, header: DataHeader, answer: Callable[[DataHeader, Value], None], away: Away) -> bool:
        """What CURVE and ZAP do at a slave's port, by the real list; a peer that is not admitted is told so here."""
        if not self.admission.listed(key.hex()):
            away("the key is not on the master's list")
            return False
        try:
            self.admission.check(key.hex(), header)
        except Refused as refused:
            refusal = Refusal(refused.code, refused.sentence, refused.retry_after_s)
            answer(DataHeader(header.run_id, header.epoch, DataOp.REFUSED, header.request, refusal=refusal), None)
            return False
        return True

    def _say_staged(self) -> None:
        complete, self.port.complete = self.port.complete, []
        for event in complete:
            memory = self.port.memory
            if memory is not None and self.world.plan.arithmetic.remembers:
                self.world.staged(self.name, event.slot.push, event.slot.wire, memory.landed(event.slot))
            self.kernel.after(0.0, self, self.handle, event)


def _arrays(parts: ShardArithmetic, shard: Shard) -> tuple[F32, F32]:
    """theta and momentum, as snapshot files have them."""
    return parts.to_array(shard.theta), parts.to_array(shard.momentum)
