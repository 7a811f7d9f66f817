"""Carries out the effects of the slave's state machine: memory, disk, data port, tape, messages to the master.

Runs on the control thread's event loop. Arithmetic runs on the one thread "dips-outer", the disk on the one
thread "dips-disk"; jobs come back as events. Never decides anything itself, and never reports a failed job as
done: a refusal is an event, any other error ends the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from dips.core import messages
from dips.core.clock import Clock
from dips.core.errors import DipsError, FatalError, LocalProtocolError, RefusalCode, Refused
from dips.core.ids import Incarnation
from dips.core.layout import shard_digest
from dips.core.math import landing_numba, outer_numba, wire_numba
from dips.core.math.compiling import watched, where_kept
from dips.core.net.security import Security
from dips.core.net.zmq_sockets import CurvePair
from dips.core.observe.logs import ChangeLogger
from dips.core.observe.metrics import Families
from dips.core.observe.tape import Starting, Tape
from dips.core.threads import Threads
from dips.slave import calculation, serve_numba
from dips.slave.data_server import DataServer
from dips.slave.memory import F32, U8, MemoryFiles, ShardMemory, residual_bytes_of
from dips.slave.metrics import Counts, families_at, kind_of
from dips.slave.mover import Mover
from dips.slave.push_evidence import PushEvidence
from dips.slave.ring import SnapshotStore, disk_refusal
from dips.slave.state import effects
from dips.slave.state.checks import cancelled, own_blocks
from dips.slave.state.shard import to_refusal
from dips.slave.state.slave import SlaveMachine

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("dips.slave")


class SlaveShell:
    """Runs one slave. `ended` resolves with the reason of a StopSlave, or raises the error that ends the process."""

    def __init__(
        self,
        state: SlaveMachine,
        slave_id: str,
        memory_bytes: int,
        store: SnapshotStore,
        data: DataServer,
        tape: Tape,
        clock: Clock,
        pushes: PushEvidence | None = None,
        compute_threads: int = 0,
        curve: CurvePair | None = None,
    ) -> None:
        self.state = state
        self._slave_id = slave_id
        self._memory_bytes = memory_bytes
        self._store = store
        self._ring = store.ring
        self._pushes = pushes
        self._data = data
        self._tape = tape
        self._clock = clock
        self._changes = ChangeLogger(log)
        self._loop = asyncio.get_running_loop()
        self._memory: ShardMemory | None = None
        self._outer = ThreadPoolExecutor(1, "dips-outer")
        self._threads = Threads(compute_threads)
        self._disk = ThreadPoolExecutor(1, "dips-disk")
        self._moving = ThreadPoolExecutor(1, "dips-move")
        self._curve = curve
        self._mover: Mover | None = None
        self._unwanted_move = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling: asyncio.Future[None] | None = None
        self._saving: asyncio.Future[None] | None = None
        self._saving_theta: F32 | None = None
        self._said: Counter[str] = Counter()  # refusals that the tape has, by kind
        self.counts = Counts(clock)
        self.starts = ""
        """What the start does that may take minutes, for the beats; empty when it is over."""
        self.send: Callable[[messages.SlaveMessage], object] = lambda _: None
        self.close_link: Callable[[str], object] = lambda _: None
        self.saved: Callable[[], object] = lambda: None
        """Called when a version was written behind the rounds (durability async): the next beat says so."""
        self.ended: asyncio.Future[str] = self._loop.create_future()

    async def warm_up(self) -> None:
        """Compile the kernels before a round needs them: compiling holds the interpreter lock."""
        starting = Starting("kernels", log, self._tape, self._clock, quiet_s=0.0)
        modules = [outer_numba, wire_numba, landing_numba, *([serve_numba] if self._data.is_compiled else [])]
        kept = where_kept()

        def tell(name: str, done: int, of: int) -> None:
            self.starts = f"compiles kernels, {done} of {of}"
            starting.compiles(name, done, of, kept)

        with watched(tell, *modules):
            for kernels in modules:
                await self._loop.run_in_executor(self._outer, kernels.warm_up)
        self.starts = ""
        starting.end()

    async def measure_memory(self) -> float:
        """Bytes a second that this machine's memory moves. Call it before the slave serves."""
        return await self._on(self._outer, calculation.memory_bytes_per_s, self._threads)

    def look(self, security: Security) -> Families:
        """The state at this moment, for metrics; on the event loop."""
        return families_at(self.counts, self._slave_id, self.state, self._memory, security)

    def handle(self, event: effects.Event) -> None:
        """Give the state machine an event and carry out its effects, in order. Any error ends the process: a caller on
        the event loop could only log it, and the effects behind it are lost."""
        if isinstance(event, effects.Unlinked):
            self.counts.count_kind("unlinked")
        try:
            for effect in self.state.handle(event, self._clock.monotonic_s()):
                self._carry_out(effect)
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the process with this error; one that was not raised on purpose is a bug, and the log has its trace."""
        if self.ended.done():
            return
        if isinstance(error, Exception) and not isinstance(error, DipsError):
            log.critical("a bug in the slave", exc_info=error)
            error = LocalProtocolError(f"a bug in the slave: {type(error).__name__}: {error}")
        self.ended.set_exception(error)

    async def close(self) -> None:
        """Let the disk finish the write under way, drop the rest. Call after the data server stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in (self._moving, self._outer, self._disk):
            executor.shutdown(wait=True, cancel_futures=True)
        self._threads.close()
        if self.ended.done() and not self.ended.cancelled():
            self.ended.exception()

    # ---- effects ----

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SendUp(body):
                self.send(messages.SlaveMessage(self.state.caller(), body))
            case effects.Record():
                self.counts.count_kind(effect.kind)
                self._tape.write(effect.kind, effect.cause, **effect.fields)
            case effects.Log(level, key, sentence, because):
                self._changes.report(key, sentence, level, because)
            case effects.HoldSlots(slots):
                self._data.do(self._data.port.hold, slots)
            case effects.Serve(epoch):
                self._data.do(self._data.port.set_epoch, epoch)
            case messages.Allow(keys):
                self._data.do(self._data.port.set_allowed, keys)
            case effects.CloseLink(sentence):
                self.close_link(sentence)
            case messages.StopSlave(reason):
                if not self.ended.done():
                    self.ended.set_result(reason)
            case effects.GiveUp(refusal):
                self.fail(Refused(refusal.code, refusal.sentence))
            case effects.SavePromise(epoch):
                self._spawn(self._save_promise(epoch))
            case effects.DropShadow(shadow):
                if self._memory is not None:  # a slave without blocks may have moved some to its disk
                    self._memory.drop_shadow()
                self._spawn(self._on(self._disk, self._ring.drop_shadow, shadow))
            case messages.Retain(versions):
                if self._memory is not None:
                    self._memory.pin(versions)
                    self._settle()
            case effects.SaveVersion():
                self._spawn(self._save(effect, *self._held_for_saving(effect.info)))
            case effects.SaveLater(delay_s):
                self._spawn(self._later(delay_s, effects.SaveAgain()))
            case messages.SlaveCommand(body=messages.SendCommitRecord() as body):
                self._spawn(self._read_record(effect.incarnation, body))
            case effects.Run():
                self._spawn(self._job(effect))
            case effects.CancelMove(number):
                self._unwanted_move = number
                if self._mover is not None:
                    self._mover.cancel()
            case _:
                raise LocalProtocolError(f"no one carries out {type(effect).__name__}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self.reap)

    def reap(self, task: asyncio.Task[None]) -> None:
        """End the process if this task ended with an error."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _job(self, run: effects.Run) -> None:
        event: effects.Done | effects.Failed
        try:
            await asyncio.sleep(run.delay_s)
            with self.counts.job(kind_of(run)):
                event = await self._do(run)
        except Refused as refused:
            event = effects.Failed(run.number, to_refusal(refused), self._ring.infos())
        self.handle(event)

    async def _do(self, run: effects.Run) -> effects.Done:
        """Do a command. Raises Refused; then nothing that counts has changed."""
        result: messages.SnapshotInfo | messages.Measured | messages.ShardList | None
        match run.command:
            case (messages.Configure() | messages.Commit()) as command if run.shadow is not None:
                result = await self._commit(run, command, run.shadow)
            case messages.Configure() as command:
                result = await self._load(run, command)
            case messages.Prepare() as command:
                result = await self._prepare(run, command)
            case messages.MoveBlocks() as command:
                result = await self._move(run, command)
            case messages.Measure() as command:
                return effects.Done(run.number, await self._measure(run, command))
            case messages.ListShard(round_id):  # a RESHARD begins
                memory = self._made()
                assert memory.current is not None
                arguments = (memory.momentum, memory.blocks, memory.map.chunk_bytes)
                sums = await self._on(self._outer, calculation.chunk_checksums, *arguments)
                return effects.Done(
                    run.number, messages.ShardList(round_id, tuple(memory.current.checksums), tuple(sums))
                )
            case command:
                raise LocalProtocolError(f"no one carries out {type(command).__name__}")
        return effects.Done(run.number, result, self._ring.infos())

    async def _on(self, executor: Executor, function: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(executor, function, *args)

    # ---- versions that the data port may read ----

    def _settle(self) -> None:
        """Give the data port the readable versions; `_settled` waits until it reads nothing else."""
        memory = self._made()
        info = memory.current.info if memory.current is not None else None
        current = info.version if info is not None else None
        settling = self._settling = self._on_port(self._data.port.set_readable, memory.readable(), current)
        settling.add_done_callback(lambda _: memory.left() if settling is self._settling else None)

    async def _settled(self) -> None:
        if self._settling is not None:
            await self._settling

    def _resolve_soon(self, future: asyncio.Future[None]) -> None:
        self._loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

    def _on_port(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[None]:
        """Have the data port's thread do this call; done when it was."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._data.do(call, *args, **kwargs)
        self._data.do(self._resolve_soon, done)
        return done

    def _made(self) -> ShardMemory:
        if self._memory is None:
            raise LocalProtocolError("a round reached a slave without memory")
        return self._memory

    # ---- jobs ----

    async def _save_promise(self, epoch: int) -> None:
        try:
            await self._on(self._disk, self._store.promise.save, epoch)
        except OSError as error:
            raise FatalError(
                f"epoch {epoch} cannot be promised, {self._store.directory} fails: {error.strerror}; free or replace "
                "the slave's disk and start it again"
            ) from error
        self.handle(effects.PromiseSaved(epoch))

    async def _load(self, run: effects.Run, body: messages.Configure) -> messages.SnapshotInfo | None:
        """Make memory and fill it. Returns the version that it holds then."""
        await self._settled()
        await self._saved_to_file()
        await self._on_port(self._data.port.set_memory, None, None)
        self._memory = self._settling = self._saving_theta = None
        blocks = own_blocks(self._slave_id, body)
        await self._on(self._disk, self._ring.close_round)
        chunk_bytes, pull_wire = run.settings.chunk_bytes, run.settings.pull_wire
        residual_bytes = residual_bytes_of(blocks, chunk_bytes, pull_wire)
        await self._on(self._disk, self._ring.make, sum(block.n_elems for block in blocks), residual_bytes)
        slots, room = body.staging_slots, self._memory_bytes
        starting = Starting("memory", log, self._tape, self._clock)
        files = MemoryFiles(self._store.directory, run.settings.memory_files, body.pinned_versions)
        arguments = (blocks, chunk_bytes, slots, room, starting.touched, files, pull_wire)
        memory = await self._on(self._outer, ShardMemory, *arguments)
        starting.end()
        current = None if run.source is None else await self._fill(memory, body, run.source)
        await self._on_port(self._data.port.set_memory, memory.map, memory.staging)
        self._memory = memory
        self._settle()
        await self._settled()
        return current

    async def _fill(
        self, memory: ShardMemory, body: messages.Configure, source: messages.SnapshotInfo
    ) -> messages.SnapshotInfo:
        """Read a snapshot into fresh memory and check it against the digest of its COMMIT."""
        theta = memory.take().theta
        await self._on(
            self._disk, self._ring.load, source, theta, memory.next_momentum, memory.next_residual.data
        )  # fmt: skip
        sums = await self._on(self._outer, calculation.chunk_checksums, theta, memory.blocks, memory.map.chunk_bytes)
        if shard_digest(sums) != body.load_digest:
            raise Refused(
                RefusalCode.DIGEST,
                f"the snapshot of version {source.version} has digest {shard_digest(sums).hex()}, its COMMIT names "
                f"{body.load_digest.hex()}",
            )
        # The snapshot durably gets the name and the COMMIT that the master has for it.
        assert body.load is not None
        assert body.load_round is not None
        named = replace(source, version=body.load, round=body.load_round, restored_timeline=0)
        commit = (body.commit_hash, body.commit_record)
        source, problems = await self._on(self._disk, self._ring.adopt, source, named, body.origin, *commit)
        self._warn(problems)
        memory.name_shadow(source, sums)
        memory.flip(source)
        self._tape.write(
            "snapshot_loaded", "", version=str(source.version), round=str(source.round), digest=source.digest.hex()
        )
        return source

    def _warn(self, problems: list[str]) -> None:
        for problem in problems:
            log.warning("%s", problem)

    async def _measure(self, run: effects.Run, body: messages.Measure) -> messages.Measured:
        memory = self._made()
        assert memory.current is not None
        assert memory.current.info is not None
        version, theta = memory.current.info.version, memory.current.theta
        slots, bases = [slot.number for slot in run.slots], [slot.base for slot in run.slots]
        known = self._data.port.known(version)
        blocks = await self._on(self._outer, calculation.measure, memory, theta, slots, known, self._threads)
        way = await self._on(self._outer, calculation.directions, memory, version, theta, slots, bases)
        zero = await self._on(self._outer, calculation.all_zero, memory, slots)
        return messages.Measured(body.round, blocks, way, zero)

    async def _prepare(self, run: effects.Run, body: messages.Prepare) -> messages.SnapshotInfo:
        """Compute the shadow. Returns its name."""
        await self._settled()
        memory, slots = self._made(), [slot.number for slot in run.slots]
        if memory.current is not None and memory.current.theta is not self._saving_theta:
            # The version before it may still be on its way to the disk, and the next shadow's momentum takes its place
            # (its theta is not overwritten before the round after that). So a disk that is slower than the rounds slows
            # them down, and memory needs no copy (docs/storage.md).
            await self._saved_to_file()
        made = self.state.shard.made
        assert made is not None
        shadow = await self._on(self._outer, memory.take)
        theta = memory.current.theta if memory.current is not None else None
        try:
            with self.counts.update(memory.n_elems, len(slots)):
                sums = await self._on(
                    self._outer, calculation.prepare, memory, theta, shadow.theta, body, slots, self._threads,
                    shadow.difference,
                )  # fmt: skip
            info = messages.SnapshotInfo(
                body.to_version, body.round, made.layout_hash, made.placement_hash, shard_digest(sums), committed=False
            )
            memory.name_shadow(info, sums, body.from_version)
            if self._pushes is not None:
                pushes, sizes = [memory.staging[slot] for slot in slots], memory.map.chunk_bytes
                try:
                    await self._on(self._disk, self._pushes.write, body, info, pushes, sizes, memory.pull_wire)
                except OSError as error:
                    raise disk_refusal(f"the record of the pushes of round {info.round}", error) from error
            if run.durable:
                with self.counts.snapshot():
                    await self._on(
                        self._disk, self._ring.write_shadow, info, shadow.theta, memory.next_momentum,
                        memory.next_residual.data,
                    )  # fmt: skip
        except BaseException:
            memory.drop_shadow()
            raise
        return info

    async def _commit(
        self, run: effects.Run, body: messages.Configure | messages.Commit, shadow: messages.SnapshotInfo
    ) -> messages.SnapshotInfo:
        """Make the shadow in memory the current version. Returns its name."""
        memory = self._made()
        info = replace(shadow, committed=True, commit_hash=body.commit_hash)
        if run.durable:
            assert memory.shadow is not None
            arrays = (memory.shadow.theta, memory.next_momentum, body.commit_record, memory.next_residual.data)
            with self.counts.snapshot():
                await self._on(self._disk, self._ring.write_committed, info, *arrays)
        memory.flip(info)
        self._settle()
        await self._settled()
        if run.durable:
            self._warn(await self._on(self._disk, self._ring.tidy, info))
        return info

    async def _move(self, run: effects.Run, body: messages.MoveBlocks) -> messages.SnapshotInfo:
        """Assemble a shard of another placement in a file. Returns its name."""
        await self._saved_to_file()
        if run.number == self._unwanted_move:
            raise cancelled(body)
        link = self.state.link
        mover = self._mover = Mover(
            self._slave_id, link.run_id, link.promised_epoch, body, run.settings.chunk_bytes, self._memory, self._ring,
            self._disk, self._clock, self._curve, run.settings.pull_wire,
        )  # fmt: skip
        try:
            return await self._on(self._moving, mover.run)
        finally:
            mover.cancel()  # also where this task is
            self._mover = None

    # ---- durability "async" ----

    def _held_for_saving(self, info: messages.SnapshotInfo) -> tuple[F32, F32, U8]:
        """The arrays of the current version. No round may write into them until they are in the file."""
        memory = self._made()
        if memory.current is None or memory.current.info != info:
            raise LocalProtocolError(f"version {info.version} must be saved and is not the current one")
        self._saving, self._saving_theta = self._loop.create_future(), memory.current.theta
        return memory.current.theta, memory.momentum, memory.residual.data

    async def _save(self, effect: effects.SaveVersion, theta: F32, momentum: F32, residual: U8) -> None:
        saving, info = self._saving, effect.info
        assert saving is not None
        event: effects.SaveEvent
        try:
            with self.counts.snapshot():
                await self._on(
                    self._disk, self._ring.write_committed, info, theta, momentum, effect.commit_record, residual,
                    lambda: self._resolve_soon(saving),
                )  # fmt: skip
            event = effects.Saved(effect.number, info, self._ring.infos())
        except Refused as refused:
            event = effects.SaveFailed(effect.number, to_refusal(refused))
        finally:
            if not saving.done():
                saving.set_result(None)
        self.handle(event)
        self.saved()

    async def _later(self, delay_s: float, event: effects.Event) -> None:
        await asyncio.sleep(delay_s)
        self.handle(event)

    async def _saved_to_file(self) -> None:
        """Return when no array of memory is on its way into a file."""
        if self._saving is not None:
            await self._saving

    # ---- reading COMMIT records ----

    async def _read_record(self, asked_by: Incarnation | None, command: messages.SendCommitRecord) -> None:
        version, round_id = command.version, command.round
        try:
            record, commit_hash = await self._on(self._disk, self._ring.record, version, round_id)
            if hashlib.sha256(record).digest() != commit_hash:
                sentence = f"the COMMIT record of {version} ({round_id}) does not have the hash that was committed"
                raise Refused(RefusalCode.DIGEST, sentence)
            answer = messages.CommitRecord(version, round_id, record)
        except Refused as refused:
            answer = messages.CommitRecord(version, round_id, refusal=to_refusal(refused))
        self.handle(effects.RecordRead(asked_by, answer))

    # ---- beats ----

    def note_refusals(self) -> None:
        """Record refused messages on the tape, at most one line a beat (I16 of docs/architecture.md)."""
        beat, port = self._data.figures.beat, self._data.port
        for kind, total, reason, what in (
            ("refused_connection", beat.refused_connections, beat.refused_connection, "connections"),
            ("refused_chunk", beat.refused_chunks, port.last_refusal, "data messages"),
        ):
            fresh, self._said[kind] = total - self._said[kind], total
            if fresh:
                self._tape.write(kind, "", count=fresh, total=total, last_reason=reason)
            if fresh and reason:
                self._changes.report(kind, f"{what} are refused, the last: {reason}", "WARNING")
