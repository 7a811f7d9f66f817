"""A slave goes back, begins empty, hands out records and keeps evidence, over real streams and a real disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.master_for_slaves import MasterForSlaves, SlaveLink
from support.slave_wire import (
    LAYOUT,
    DataClient,
    configure_for,
    open_staging,
    placement_over,
    prepare_of,
    push_id,
    slave_config,
    slave_here,
)
from support.waiting import NO_LIMIT_S

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import PushId, RoundId, Version
from dips.core.observe.tape import read_tape
from dips.core.placement import MEMORY_FILES
from dips.slave.config import SlaveConfig
from dips.slave.disk import LocalDisk
from dips.slave.ring import Ring

BLOCKS = list(LAYOUT.blocks)
PLACEMENT = placement_over("s0")
RNG = np.random.default_rng(12)
VALUES = [RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for _ in range(6)]
CHUNK_BYTES = 1024


def record_of(v: int) -> bytes:
    return json.dumps({"version": v}).encode()


@dataclass
class Attached:
    link: SlaveLink
    hello: messages.SlaveHello
    client: DataClient
    epoch: int = 1

    async def push(self, v: int) -> PushId:
        """The staged push of version v, in slot 0."""
        push = push_id("a", v + 1)
        self.link.send(open_staging(push, 0))
        await self.client.put_all(push, VALUES[v], epoch=self.epoch)
        await self.link.expect(messages.Staged)
        return push

    async def prepare(self, v: int) -> messages.Prepared:
        push = await self.push(v)
        before = Version(1, v - 1) if v else None
        self.link.send(prepare_of(RoundId(1, v + 1), Version(1, v), [push], before, scale=0.5))
        return await self.link.expect(messages.Prepared)

    async def step(self, v: int) -> None:
        await self.prepare(v)
        record = record_of(v)
        self.link.send(messages.Commit(RoundId(1, v + 1), Version(1, v), hashlib.sha256(record).digest(), record))
        await self.link.expect(messages.Flipped)

    async def until_durable(self, version: Version) -> None:
        async with asyncio.timeout(NO_LIMIT_S):
            while (await self.link.beat(len(self.link.beats))).durable != version:
                pass


async def meet(master: MasterForSlaves, epoch: int = 1) -> Attached:
    link = await master.accept()
    hello = await link.hello()
    await link.welcome(epoch)
    return Attached(link, hello, DataClient(hello.data_endpoint, BLOCKS), epoch)


async def seeded(master: MasterForSlaves, versions: int) -> Attached:
    slave = await meet(master)
    slave.link.send(configure_for(PLACEMENT))
    await slave.link.expect(messages.Ready)
    for v in range(versions):
        await slave.step(v)
    return slave


@pytest.fixture
async def master() -> AsyncIterator[MasterForSlaves]:
    async with MasterForSlaves(settings=messages.Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES)) as master:
        yield master


@pytest.fixture
async def late_master() -> AsyncIterator[MasterForSlaves]:
    settings = messages.Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES, durability="async")
    async with MasterForSlaves(settings=settings) as master:
        yield master


@pytest.fixture
def config(tmp_path: Path) -> SlaveConfig:
    return slave_config(tmp_path / "s0", "127.0.0.1:1", tape=tmp_path / "tape.jsonl")


def serving(config: SlaveConfig, master: MasterForSlaves) -> SlaveConfig:
    return config.model_copy(update={"master": master.address})


def on_tape(config: SlaveConfig, kind: str) -> list[dict[str, object]]:
    assert config.tape_used is not None
    return [line for line in read_tape(config.tape_used) if line["kind"] == kind]


def committed(infos: Sequence[messages.SnapshotInfo]) -> list[str]:
    return [str(info.version) for info in infos if info.committed]


async def test_rounds_with_memory_in_files_publish_the_same_bits(tmp_path: Path) -> None:
    found: dict[str, list[bytes]] = {}
    for which in MEMORY_FILES:
        settings = messages.Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES, memory_files=which)
        async with MasterForSlaves(settings=settings) as master:
            async with slave_here(slave_config(tmp_path / which, master.address)):
                slave = await seeded(master, 4)
                found[which] = [(await slave.client.pull(Version(1, v))).tobytes() for v in (2, 3)]
                slave.client.close()
    assert found["stagings"] == found["versions"] == found["none"]


async def test_a_setting_that_this_release_does_not_know_is_refused(tmp_path: Path) -> None:
    settings = messages.Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES, memory_files="tape")
    async with MasterForSlaves(settings=settings) as master, slave_here(slave_config(tmp_path, master.address)):
        slave = await meet(master)
        slave.link.send(configure_for(PLACEMENT))
        refused = await slave.link.expect(messages.ConfigureRefused)
        assert refused.refusal.code is RefusalCode.CONFIG
        assert "memory_files is 'tape'" in refused.refusal.sentence
        slave.client.close()


class SlowDisk:
    """Holds back the writes of snapshots until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.writing = threading.Event(), threading.Event()
        real = LocalDisk.overwrite

        def overwrite(disk: LocalDisk, *what: Any) -> None:
            self.writing.set()
            assert self.go_on.wait(NO_LIMIT_S)
            real(disk, *what)

        monkeypatch.setattr(LocalDisk, "overwrite", overwrite)


async def test_async_rounds_run_ahead_of_the_disk_by_one_and_never_write_what_is_being_saved(
    late_master: MasterForSlaves, config: SlaveConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = serving(config, late_master)
    disk = SlowDisk(monkeypatch)
    async with slave_here(here):
        slave = await seeded(late_master, 1)
        await slave.step(1)
        assert await asyncio.to_thread(disk.writing.wait, NO_LIMIT_S)
        push = await slave.push(2)
        slave.link.send(prepare_of(RoundId(1, 3), Version(1, 2), [push], Version(1, 1), scale=0.5))
        # Version 0 is still on its way to the disk: its momentum is where that of version 2 would be written.
        prepared = asyncio.create_task(slave.link.expect(messages.Prepared))
        n_beats = len(slave.link.beats)
        assert (await slave.link.beat(n_beats + 5)).durable is None
        assert not prepared.done()
        disk.go_on.set()
        await prepared
        record = record_of(2)
        slave.link.send(messages.Commit(RoundId(1, 3), Version(1, 2), hashlib.sha256(record).digest(), record))
        await slave.link.expect(messages.Flipped)
        await slave.until_durable(Version(1, 2))
        slave.client.close()
    persisted = [line["version"] for line in on_tape(here, "persisted")]
    assert persisted[0] == "1:0"
    assert persisted[-1] == "1:2"
    assert [line["durable"] for line in on_tape(here, "committed")] == [False] * 3
    async with slave_here(here):
        slave = await meet(late_master, 2)
        newest = slave.hello.snapshots[0]
        assert (newest.version, newest.committed) == (Version(1, 2), True)
        load: dict[str, Any] = {"load": newest.version, "load_round": newest.round, "load_digest": newest.digest}
        slave.link.send(configure_for(PLACEMENT, **load))
        assert await slave.link.expect(messages.Ready) == messages.Ready(newest.version, newest.digest)
        slave.client.close()


async def test_an_async_version_and_a_sync_one_have_the_same_bits(
    master: MasterForSlaves, late_master: MasterForSlaves, tmp_path: Path
) -> None:
    digests = []
    for name, fake in (("a", master), ("b", late_master)):
        async with slave_here(slave_config(tmp_path / name, fake.address)):
            slave = await seeded(fake, 2)
            digests.append((await slave.prepare(2)).digest)
            slave.client.close()
    assert digests[0] == digests[1]


async def test_messages_may_be_as_long_as_the_run_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the default of max_message_bytes."""
    settings = messages.Settings(heartbeat_s=0.1, chunk_bytes=1024, max_message_bytes=256 << 20)
    record = bytes(65 << 20)
    commit_hash = hashlib.sha256(record).digest()
    monkeypatch.setattr(Ring, "record", lambda ring, version, round_id: (record, commit_hash))
    async with MasterForSlaves(settings=settings) as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        await link.welcome()
        link.send(messages.SendCommitRecord(Version(1, 0), RoundId(1, 1)))
        answer = await link.expect(messages.CommitRecord)
        assert hashlib.sha256(answer.record).digest() == commit_hash
