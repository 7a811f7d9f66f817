"""The slave's shell on real memory and a real disk, with a data port that needs no socket: rounds, starts, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from support.manual_clock import ManualClock
from support.slave_bench import commit
from support.slave_wire import LAYOUT, RUN, configure_for, open_staging, placement_over, prepare_of, push_id
from support.waiting import NO_LIMIT_S, until

from dips.core import messages
from dips.core.errors import ConfigError, DipsError, FatalError, LocalProtocolError, RefusalCode, Refused
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.layout import checksum, chunks_of, digest_of_array
from dips.core.math.outer_numpy import gram, outer_step
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.observe.tape import Tape, read_tape
from dips.core.wire import Codec
from dips.slave import calculation
from dips.slave.data_port import DataPort, Figures
from dips.slave.data_server import DataServer
from dips.slave.memory import F32
from dips.slave.push_evidence import PushEvidence
from dips.slave.ring import SnapshotStore
from dips.slave.shell import SlaveShell
from dips.slave.state import effects
from dips.slave.state.slave import SlaveMachine

B = TypeVar("B")
CHUNK_BYTES = 1024
SETTINGS = messages.Settings(chunk_bytes=CHUNK_BYTES)
PLACEMENT = placement_over("s0")
BLOCKS = list(LAYOUT.blocks)
V0, V1, V2 = (Version(1, v) for v in range(3))
R1, R2, R3 = (RoundId(1, n) for n in (1, 2, 3))
A, B_PUSH = push_id("a", 2), push_id("b")
RECORD = b'{"the": "record"}'
HASH = hashlib.sha256(RECORD).digest()
SEED, *OURS = (np.random.default_rng(7).standard_normal((3, LAYOUT.n_elems)).astype(np.float32)) / np.float32(9)


class Data:
    """A DataServer whose thread is the caller's; what is not for the port itself may be kept back."""

    is_compiled = False

    def __init__(self, staged: Callable[[effects.PushStaged], object]) -> None:
        self.port = DataPort(RUN, staged)
        self.allowed: Sequence[messages.AllowedKey] = ()
        self.reading: asyncio.Queue[Callable[[], None]] | None = None
        """When there is one: what waits until the port reads older versions no more."""
        self.figures = Figures()

    def do(self, call: Callable[..., None], *args: Any) -> None:
        if call == self.port.set_allowed:
            (self.allowed,) = args
        elif self.reading is None or getattr(call, "__self__", None) is self.port:
            call(*args)
        else:
            self.reading.put_nowait(lambda: call(*args))


class Slave:
    def __init__(self, directory: Path, settings: messages.Settings, clock: ManualClock) -> None:
        self.store = SnapshotStore(directory, RUN, "s0", 3)
        self.problems = self.store.scan()
        self.tape_file = directory.parent / "s0.tape.jsonl"
        self.data = Data(lambda staged: self.shell._loop.call_soon_threadsafe(self.shell.handle, staged))
        state = SlaveMachine(
            RUN, "s0", "tcp://127.0.0.1:1", 1 << 20, 1 << 20, self.store.promise.epoch, self.store.ring.infos(), b"k"
        )
        self.tape = Tape(self.tape_file, "slave", "s0", clock)
        evidence = PushEvidence(directory, RUN, "s0")
        self.shell = SlaveShell(
            state, "s0", 1 << 20, self.store, cast(DataServer, self.data), self.tape, clock, evidence, compute_threads=1
        )
        self.heard: asyncio.Queue[messages.SlaveMessage] = asyncio.Queue()
        self.closed: list[str] = []
        self.shell.send, self.shell.close_link = self.heard.put_nowait, self.closed.append
        self.settings, self.epoch = settings, 1

    def tell(self, body: messages.CommandBody) -> None:
        incarnation = Incarnation(self.epoch, 1)
        self.shell.handle(messages.SlaveCommand(RUN, self.epoch, incarnation, "cause", body))

    async def hear(self, kind: type[B]) -> B:
        message = await asyncio.wait_for(asyncio.shield(self._next()), 60)
        assert isinstance(message.body, kind), message.body
        return message.body

    async def _next(self) -> messages.SlaveMessage:
        """What is said next; raises the error that ends the slave instead."""
        said = asyncio.ensure_future(self.heard.get())
        either: list[asyncio.Future[Any]] = [said, self.shell.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if said.done():
            return said.result()
        said.cancel()
        raise AssertionError(self.shell.ended.result())

    async def join(self, epoch: int = 1) -> messages.SlaveHello:
        self.epoch = epoch
        self.shell.handle(effects.Linked())
        hello = await self.hear(messages.SlaveHello)
        self.tell(messages.Welcome(messages.Hello(1, 1), self.settings))
        assert await self.hear(messages.Promised) == messages.Promised(epoch)
        return hello

    async def stage(self, push: PushId, slot: int, values: F32) -> None:
        self.tell(open_staging(push, slot))
        data = values.tobytes()
        for chunk in chunks_of(BLOCKS, CHUNK_BYTES):
            start = BLOCKS[chunk.block_id].start_elem * 4 + chunk.offset_bytes
            payload = data[start : start + chunk.length_bytes]
            header = DataHeader(
                RUN, self.epoch, DataOp.PUT_CHUNK, 1, push, 1, None, *chunk, Codec.F32, checksum(payload)
            )
            answer = self.data.port.answer([memoryview(header.encode()), memoryview(payload)])
            assert answer.header.op is DataOp.ACK, answer.header.refusal
        assert await self.hear(messages.Staged) == messages.Staged(
            push, 1, digest_of_array(values, BLOCKS, CHUNK_BYTES)
        )

    async def round(self, round_id: RoundId, to: Version, from_version: Version | None, *pushes: PushId) -> bytes:
        self.tell(prepare_of(round_id, to, pushes, from_version))
        digest = (await self.hear(messages.Prepared)).digest
        self.tell(messages.Commit(round_id, to, HASH, RECORD))
        assert await self.hear(messages.Flipped) == messages.Flipped(round_id, to)
        return digest

    async def seeded(self) -> None:
        await self.join()
        self.tell(configure_for(PLACEMENT))
        assert await self.hear(messages.Ready) == messages.Ready(None)
        await self.stage(push_id("a"), 0, SEED)
        await self.round(R1, V0, None, push_id("a"))

    def theta(self, version: Version) -> F32:
        return self.data.port.readable[version].theta

    def tape_says(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in read_tape(self.tape_file) if line["kind"] in kinds]


@asynccontextmanager
async def slave_on(tmp_path: Path, settings: messages.Settings = SETTINGS) -> AsyncIterator[Slave]:
    slave = Slave(tmp_path / "s0", settings, ManualClock())
    try:
        yield slave
    finally:
        await slave.shell.close()
        slave.tape.close()
        slave.store.close()


async def test_a_round_measures_computes_keeps_evidence_and_serves_what_the_reference_says(tmp_path: Path) -> None:
    async with slave_on(tmp_path, replace(SETTINGS, memory_files="versions")) as slave:
        await slave.seeded()
        for slot, (push, values) in enumerate(zip((A, B_PUSH), OURS, strict=True), 1):
            await slave.stage(push, slot, values)
        slave.tell(messages.Measure(R2, V0, (messages.StagedPush(A, 1), messages.StagedPush(B_PUSH, 1))))
        measured, staging = await slave.hear(messages.Measured), np.stack(OURS)
        expected = [gram(SEED, staging, np.arange(2), b.start_elem, b.stop_elem)[0] for b in BLOCKS]
        assert [found.gram for found in measured.blocks] == [(g[0, 0], g[0, 1], g[1, 1]) for g in expected]
        assert np.isnan(measured.directions).all(), "from no version that is known"
        digest = await slave.round(R2, V1, V0, A, B_PUSH)
        theta, momentum = np.empty_like(SEED), np.empty_like(SEED)
        outer_step(
            SEED, np.zeros_like(SEED), staging, np.arange(2), np.array([0.5, 0.5], np.float32),
            1.0, 0.7, 0.8, 0.8, 1.0, theta, momentum, 0, len(SEED),
        )  # fmt: skip
        np.testing.assert_array_equal(slave.theta(V1), theta)
        np.testing.assert_array_equal(slave.theta(V0), SEED)
        assert slave.data.port.current == V1
        assert digest == digest_of_array(theta, BLOCKS, CHUNK_BYTES)
        slave.tell(messages.ListShard(R3, V1))
        sums = [
            [checksum(whole[4 * BLOCKS[c.block_id].start_elem + c.offset_bytes :][: c.length_bytes])
             for c in chunks_of(BLOCKS, CHUNK_BYTES)]
            for whole in (theta.tobytes(), momentum.tobytes())
        ]  # fmt: skip
        assert await slave.hear(messages.ShardList) == messages.ShardList(R3, tuple(sums[0]), tuple(sums[1]))
        names = {path.name for path in (tmp_path / "s0" / "pushes").iterdir()}
        assert names == {"round-r1.1.json", "r1.1-0.safetensors", "round-r1.2.json", "r1.2-0.safetensors",
                         "r1.2-1.safetensors"}  # fmt: skip
        assert [line["version"] for line in slave.tape_says("committed")] == ["1:0", "1:1"]
        samples = slave.shell.counts.collect()["job_seconds"].samples
        jobs = {sample.labels["kind"]: sample.value for sample in samples if sample.name.endswith("_count")}
        assert jobs == {"load": 1, "prepare": 2, "commit": 2, "measure": 1, "list": 1}
        slave.tell(messages.SendCommitRecord(V1, R2))
        assert await slave.hear(messages.CommitRecord) == messages.CommitRecord(V1, R2, RECORD)
        slave.tell(prepare_of(R3, V2, [A], V1))
        await slave.hear(messages.Prepared)
        slave.tell(messages.Commit(R3, V2, b"not its hash", RECORD))
        await slave.hear(messages.Flipped)
        for asked, code in (((V2, R3), RefusalCode.DIGEST), ((V2, R2), RefusalCode.VERSION_GONE)):
            slave.tell(messages.SendCommitRecord(*asked))
            refusal = (await slave.hear(messages.CommitRecord)).refusal
            assert refusal is not None
            assert refusal.code is code
        slave.tell(messages.StopSlave("the run is over"))
        assert await slave.shell.ended == "the run is over"


async def test_a_later_start_loads_what_was_committed_and_refuses_what_has_another_digest(tmp_path: Path) -> None:
    async with slave_on(tmp_path) as slave:
        await slave.seeded()
        slave.tell(messages.Commit(R1, V0, b"not its hash", RECORD))
        assert await slave.hear(messages.Flipped) == messages.Flipped(R1, V0)
        await slave.stage(A, 1, OURS[0])
        newest = await slave.round(R2, V1, V0, A)
        slave.tell(messages.ListShard(R3, V1))
        listed = await slave.hear(messages.ShardList)
    digest = digest_of_array(SEED, BLOCKS, CHUNK_BYTES)
    load: dict[str, Any] = {
        "load": V0, "load_round": R1, "load_digest": digest, "commit_hash": HASH, "commit_record": RECORD,
    }  # fmt: skip
    async with slave_on(tmp_path) as slave:
        assert slave.problems == []
        hello = await slave.join(epoch=2)
        assert (hello.promised_epoch, [info.version for info in hello.snapshots]) == (1, [V1, V0])
        slave.tell(configure_for(PLACEMENT, **{**load, "load": V1, "load_round": R2, "load_digest": newest}))
        assert await slave.hear(messages.Ready) == messages.Ready(V1, newest)
        slave.tell(messages.ListShard(R3, V1))
        assert await slave.hear(messages.ShardList) == listed, "the momentum too"
        slave.tell(configure_for(PLACEMENT, **load))
        assert await slave.hear(messages.Ready) == messages.Ready(V0, digest)
        np.testing.assert_array_equal(slave.theta(V0), SEED)
        _, line = slave.tape_says("snapshot_loaded")
        assert (line["version"], line["round"], line["digest"]) == ("1:0", "r1.1", digest.hex())
        named: dict[str, Any] = {
            **load, "load": Version(3, 0), "load_round": RoundId(3, 1), "origin": V0, "origin_round": R1,
        }  # fmt: skip
        slave.tell(configure_for(PLACEMENT, **named))
        assert await slave.hear(messages.Ready) == messages.Ready(Version(3, 0), digest)
        assert [info.version for info in slave.store.ring.infos()] == [Version(3, 0)], "what came after it is lost"
    async with slave_on(tmp_path) as slave:
        await slave.join(epoch=3)
        with (tmp_path / "s0" / "ring-0.safetensors").open("r+b") as file:  # it breaks after hello
            file.seek(-1, 2)
            file.write(b"?")
        slave.tell(configure_for(PLACEMENT, **named))
        assert (await slave.hear(messages.ConfigureRefused)).refusal.code is RefusalCode.DISK
        assert not any(info.committed for info in slave.store.ring.infos())
        assert len(slave.closed) == 1, "the next hello lacks it"


async def test_a_snapshot_whose_parameters_are_not_those_of_its_digest_is_not_served(tmp_path: Path) -> None:
    async with slave_on(tmp_path) as slave:
        await slave.seeded()
        ring = slave.store.ring
        wrong = replace(ring.infos()[0], version=V1, round=R2, digest=b"another", committed=False)
        ring.write_shadow(wrong, SEED, np.zeros_like(SEED))
        ring.commit(wrong, HASH, RECORD)
    async with slave_on(tmp_path) as slave:
        await slave.join(epoch=2)
        load: dict[str, Any] = {"load": V1, "load_round": R2, "load_digest": b"another", "commit_hash": HASH}
        slave.tell(configure_for(PLACEMENT, **load, commit_record=RECORD))
        refusal = (await slave.hear(messages.ConfigureRefused)).refusal
        assert (refusal.code, b"another".hex() in refusal.sentence) == (RefusalCode.DIGEST, True)
        assert slave.data.port.readable == {}


async def test_a_round_that_was_given_up_leaves_no_shadow_in_memory_or_on_the_disk(tmp_path: Path) -> None:
    async with slave_on(tmp_path) as slave:
        await slave.seeded()
        await slave.stage(A, 1, OURS[0])
        slave.tell(prepare_of(R2, V1, [A], V0))
        await slave.hear(messages.Prepared)
        assert [info.version for info in slave.store.ring.infos()] == [V1, V0]
        slave.tell(messages.AbortRound(R2, "a slave was lost"))
        slave.tell(prepare_of(R3, V1, [A], V0, scale=3e38, outer_lr=1e5))
        refused = await slave.hear(messages.RoundRefused)
        assert (refused.command, refused.refusal.code) == ("prepare", RefusalCode.NONFINITE)
        ring = slave.store.ring  # on a disk with a thread of its own
        await asyncio.to_thread(until, lambda: [info.version for info in ring.infos()] == [V0], "the shadow is gone")
        await slave.round(RoundId(1, 4), V1, V0, A)
        slave.tell(messages.CloseStaging(A))
        assert slave.data.port.figures().beat.staging_open == 1


async def test_a_move_of_blocks_is_sealed_on_the_disk_and_leaves_it_when_it_is_given_up(tmp_path: Path) -> None:
    async with slave_on(tmp_path) as slave:
        await slave.seeded()
        here = configure_for(PLACEMENT).placement
        digests = (digest_of_array(of, BLOCKS, CHUNK_BYTES) for of in (SEED, np.zeros_like(SEED)))
        slave.tell(messages.MoveBlocks(R2, V0, V1, LAYOUT, LAYOUT.layout_hash, here, here, 4, 2, *digests))
        assert await slave.hear(messages.Prepared) == messages.Prepared(R2, digest_of_array(SEED, BLOCKS, CHUNK_BYTES))
        assert [info.version for info in slave.store.ring.infos()] == [V1, V0]
        slave.tell(messages.AbortRound(R2, "the operator took it back"))
        slave.tell(messages.SendCommitRecord(V0, R1))  # by the same thread of the disk
        assert (await slave.hear(messages.CommitRecord)).record == RECORD
        assert [info.version for info in slave.store.ring.infos()] == [V0]


async def test_versions_stay_readable_while_they_are_retained_and_until_the_port_has_left_them(tmp_path: Path) -> None:
    async with slave_on(tmp_path, replace(SETTINGS, memory_files="stagings")) as slave:
        await slave.join()
        slave.tell(configure_for(PLACEMENT, pinned_versions=1))
        await slave.hear(messages.Ready)
        await slave.stage(A, 0, SEED)
        await slave.round(R1, V0, None, A)
        slave.tell(messages.Retain((V0,)))
        for n in (2, 3):
            await slave.round(RoundId(1, n), Version(1, n - 1), Version(1, n - 2), A)
        assert set(slave.data.port.readable) == {V0, V1, V2}
        slave.tell(messages.Retain(()))
        assert set(slave.data.port.readable) == {V1, V2}
        slave.data.reading = asyncio.Queue()
        slave.tell(prepare_of(RoundId(1, 4), Version(1, 3), [A], V2))
        await slave.hear(messages.Prepared)
        slave.tell(commit(RoundId(1, 4), Version(1, 3)))
        left = await asyncio.wait_for(slave.data.reading.get(), 60)
        assert slave.shell.state.shard.busy, "the data port still reads the version that leaves"
        left()
        assert await slave.hear(messages.Flipped) == messages.Flipped(RoundId(1, 4), Version(1, 3))


async def test_versions_are_saved_behind_the_rounds_and_a_disk_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, durability="async")
    async with slave_on(tmp_path, settings) as slave:
        told, write = asyncio.Event(), slave.store.ring.write_committed
        slave.shell.saved = told.set

        def full(*arguments: Any) -> None:
            raise Refused(RefusalCode.DISK, "full", 0.001)

        monkeypatch.setattr(slave.store.ring, "write_committed", full)
        await slave.seeded()
        await asyncio.wait_for(told.wait(), 60)
        assert slave.shell.state.shard.saving.durable is None
        assert slave.store.ring.infos() == ()
        monkeypatch.setattr(slave.store.ring, "write_committed", write)
        while slave.shell.state.shard.saving.durable is None:
            told.clear()
            await asyncio.wait_for(told.wait(), 60)
        assert slave.shell.state.shard.saving.durable == V0
        (saved,) = slave.store.ring.infos()
        assert (saved.version, saved.committed, saved.commit_hash) == (V0, True, HASH)
        assert [line["version"] for line in slave.tape_says("persisted")] == ["1:0"]


async def test_a_round_waits_for_a_save_that_reads_what_it_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the version before its base: the momentum of the next one takes the place of that one's."""
    async with slave_on(tmp_path, replace(SETTINGS, durability="async")) as slave:
        shell, go_on, first, is_saved = slave.shell, threading.Event(), threading.Event(), list[bool]()
        write: Any = slave.store.ring.write_committed
        prepare, saved_to_file = calculation.prepare, shell._saved_to_file

        def held(*arguments: Any) -> None:
            assert go_on.wait(NO_LIMIT_S)
            *others, has_read = arguments

            def noted_too() -> None:
                first.set()  # the next version's save may begin at once, and reads other arrays
                has_read()

            write(*others, noted_too)

        def noted(*arguments: Any) -> Any:
            is_saved.append(shell._saving is None or first.is_set())
            return prepare(*arguments)

        async def released() -> None:
            go_on.set()
            await saved_to_file()

        shell._pushes = None  # evidence is written by the thread that is held
        monkeypatch.setattr(slave.store.ring, "write_committed", held)
        monkeypatch.setattr(calculation, "prepare", noted)
        await slave.seeded()
        await slave.stage(A, 1, OURS[0])
        await slave.round(R2, V1, V0, A)
        monkeypatch.setattr(shell, "_saved_to_file", released)
        await slave.round(R3, V2, V1, A)
        go_on.set()
    assert is_saved == [True, False, True]


async def test_a_promise_that_cannot_be_kept_and_a_bug_end_the_slave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    async with slave_on(tmp_path) as slave:
        monkeypatch.setattr(slave.store.promise, "save", broken)
        slave.shell.handle(effects.Linked())
        slave.tell(messages.Welcome(messages.Hello(1, 1), SETTINGS))
        with pytest.raises(FatalError, match="epoch 1 cannot be promised"):
            await slave.shell.ended
    async with slave_on(tmp_path) as slave:
        await slave.seeded()
        monkeypatch.setattr(slave.store.ring, "drop_shadow", broken)
        slave.tell(prepare_of(R2, V1, [push_id("a")], V0))
        await slave.hear(messages.Prepared)
        slave.tell(messages.AbortRound(R2, "x"))
        with pytest.raises(LocalProtocolError, match="a bug in the slave: OSError"):
            await slave.shell.ended
    for error, kind in ((ConfigError("first"), ConfigError), (ValueError("first"), LocalProtocolError)):
        async with slave_on(tmp_path) as slave:
            slave.shell.fail(error)
            slave.shell.fail(DipsError("second"))
            with pytest.raises(kind, match="first"):
                await slave.shell.ended


async def test_what_the_machine_wants_of_link_and_keys_is_done(tmp_path: Path) -> None:
    async with slave_on(tmp_path) as slave:
        await slave.join(epoch=4)
        assert slave.data.port.epoch == 4
        keys = (messages.AllowedKey(messages.KeyRole.CLUSTER, "a", b"k" * 32),)
        slave.tell(messages.Allow(keys))
        assert slave.data.allowed == keys
        slave.tell(configure_for(placement_over("s1")))
        assert (await slave.hear(messages.ConfigureRefused)).refusal.code is RefusalCode.CONFIG
        slave.epoch = 3
        slave.tell(messages.Welcome(messages.Hello(1, 1), SETTINGS))
        assert len(slave.closed) == 1
        slave.epoch = 5
        slave.tell(messages.Welcome(messages.Hello(7, 9), SETTINGS))
        with pytest.raises(Refused) as refused:
            await slave.shell.ended
        assert refused.value.code is RefusalCode.PROTOCOL_VERSION


async def test_refused_messages_and_connections_are_on_the_tape_once_a_beat_and_each_reason_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with slave_on(tmp_path) as slave:
        slave.shell.note_refusals()
        for total in (3, 3, 7):
            beat = messages.SlaveBeat(refused_chunks=total, refused_connections=total + 1, refused_connection="no key")
            slave.data.figures, slave.data.port.last_refusal = Figures(beat), "a wrong chunk"
            slave.shell.note_refusals()
        found = slave.tape_says("refused_chunk", "refused_connection")
        assert [(line["kind"], line["count"], line["total"], line["last_reason"]) for line in found] == [
            ("refused_connection", 4, 4, "no key"),
            ("refused_chunk", 3, 3, "a wrong chunk"),
            ("refused_connection", 4, 8, "no key"),
            ("refused_chunk", 4, 7, "a wrong chunk"),
        ]
        logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert ["no key" in logged[0], "a wrong chunk" in logged[1], len(logged)] == [True, True, 2]
