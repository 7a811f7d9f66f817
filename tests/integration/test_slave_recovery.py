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
from safetensors.numpy import load_file
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

from dips.core.chunks import digest_of_array
from dips.core.errors import RefusalCode
from dips.core.ids import PushId, RoundId, Version
from dips.core.math.outer_numpy import outer_step
from dips.core.messages import (
    Commit,
    ConfigureRefused,
    Flipped,
    Prepared,
    Ready,
    Settings,
    SlaveHello,
    SnapshotInfo,
    Staged,
)
from dips.core.observe.tape import read_tape
from dips.core.placement import MEMORY_FILES
from dips.slave.config import SlaveConfig
from dips.slave.disk import LocalDisk

BLOCKS = list(LAYOUT.blocks)
PLACEMENT = placement_over("s0")
RNG = np.random.default_rng(12)
VALUES = [RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for _ in range(6)]
CHUNK_BYTES = 1024


def record_of(v: int) -> bytes:
    return json.dumps({"version": v}).encode()


@dataclass
class Attached:
    """One slave and what the tests say to it."""

    link: SlaveLink
    hello: SlaveHello
    client: DataClient
    epoch: int = 1

    async def push(self, v: int) -> PushId:
        """The staged push of version v, in slot 0."""
        push = push_id("a", v + 1)
        self.link.send(open_staging(push, 0))
        await self.client.put_all(push, VALUES[v], epoch=self.epoch)
        await self.link.expect(Staged)
        return push

    async def prepare(self, v: int) -> Prepared:
        push = await self.push(v)
        before = Version(1, v - 1) if v else None
        self.link.send(prepare_of(RoundId(1, v + 1), Version(1, v), [push], before, scale=0.5))
        return await self.link.expect(Prepared)

    async def step(self, v: int) -> None:
        await self.prepare(v)
        record = record_of(v)
        self.link.send(Commit(RoundId(1, v + 1), Version(1, v), hashlib.sha256(record).digest(), record))
        await self.link.expect(Flipped)

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
    await slave.link.expect(Ready)
    for v in range(versions):
        await slave.step(v)
    return slave


@pytest.fixture
async def master() -> AsyncIterator[MasterForSlaves]:
    async with MasterForSlaves(settings=Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES)) as master:
        yield master


@pytest.fixture
async def late_master() -> AsyncIterator[MasterForSlaves]:
    settings = Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES, durability="async")
    async with MasterForSlaves(settings=settings) as master:
        yield master


@pytest.fixture
def config(tmp_path: Path) -> SlaveConfig:
    return slave_config(tmp_path / "s0", "127.0.0.1:1", tape=tmp_path / "tape.jsonl")


def serving(config: SlaveConfig, master: MasterForSlaves) -> SlaveConfig:
    return config.model_copy(update={"master": master.address})


def on_tape(config: SlaveConfig, kind: str) -> list[dict[str, object]]:
    assert config.tape is not None
    return [line for line in read_tape(config.tape) if line["kind"] == kind]


def committed(infos: Sequence[SnapshotInfo]) -> list[str]:
    return [str(info.version) for info in infos if info.committed]


async def test_rounds_with_memory_in_files_publish_the_same_bits(tmp_path: Path) -> None:
    found: dict[str, list[bytes]] = {}
    for which in MEMORY_FILES:
        settings = Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES, memory_files=which)
        async with MasterForSlaves(settings=settings) as master:
            async with slave_here(slave_config(tmp_path / which, master.address)):
                slave = await seeded(master, 4)
                found[which] = [(await slave.client.pull(Version(1, v))).tobytes() for v in (2, 3)]
                slave.client.close()
    assert found["stagings"] == found["versions"] == found["none"]


async def test_a_setting_that_this_release_does_not_know_is_refused(tmp_path: Path) -> None:
    settings = Settings(heartbeat_s=0.05, chunk_bytes=CHUNK_BYTES, memory_files="tape")
    async with MasterForSlaves(settings=settings) as master, slave_here(slave_config(tmp_path, master.address)):
        slave = await meet(master)
        slave.link.send(configure_for(PLACEMENT))
        refused = await slave.link.expect(ConfigureRefused)
        assert refused.refusal.code is RefusalCode.CONFIG
        assert "memory_files is 'tape'" in refused.refusal.sentence
        slave.client.close()


async def test_it_goes_back_to_a_version_under_a_new_name_and_stays_there(
    master: MasterForSlaves, config: SlaveConfig
) -> None:
    here = serving(config, master)
    async with slave_here(here):
        slave = await seeded(master, 3)
        wanted = await slave.client.pull(Version(1, 1))
        slave.client.close()
    async with slave_here(here):
        slave = await meet(master, 4)
        assert committed(slave.hello.snapshots) == ["1:2", "1:1", "1:0"]
        origin = slave.hello.snapshots[1]
        back = configure_for(
            PLACEMENT,
            load=Version(4, 1),
            load_round=RoundId(4, 9),
            load_digest=origin.digest,
            commit_hash=b"back",
            commit_record=b"{}",
            origin=origin.version,
            origin_round=origin.round,
        )
        for _ in range(2):
            slave.link.send(back)
            assert await slave.link.expect(Ready) == Ready(Version(4, 1), origin.digest)
        np.testing.assert_array_equal(await slave.client.pull(Version(4, 1)), wanted)
        slave.client.close()
    async with slave_here(here):
        slave = await meet(master, 5)
        assert committed(slave.hello.snapshots) == ["4:1", "1:0"]
        slave.link.send(back)
        await slave.link.expect(Ready)
        slave.client.close()
    told = on_tape(here, "rolled_back")
    assert [line["version"] for line in told] == ["4:1", "4:1"]
    assert told[0]["origin"] == "1:1"


async def test_it_begins_empty_and_takes_donated_parameters(master: MasterForSlaves, config: SlaveConfig) -> None:
    async with slave_here(serving(config, master)):
        slave = await seeded(master, 2)
        slave.link.send(configure_for(PLACEMENT, empty=True))
        assert await slave.link.expect(Ready) == Ready(None)
        push = await slave.push(4)
        donated = Version(3, 1)
        slave.link.send(prepare_of(RoundId(3, 1), donated, [push], None))
        assert (await slave.link.expect(Prepared)).digest == digest_of_array(VALUES[4], BLOCKS, CHUNK_BYTES)
        slave.link.send(Commit(RoundId(3, 1), donated, b"h", b"{}"))
        await slave.link.expect(Flipped)
        np.testing.assert_array_equal(await slave.client.pull(donated), VALUES[4])
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
        prepared = asyncio.create_task(slave.link.expect(Prepared))
        n_beats = len(slave.link.beats)
        assert (await slave.link.beat(n_beats + 5)).durable is None
        assert not prepared.done()
        disk.go_on.set()
        await prepared
        record = record_of(2)
        slave.link.send(Commit(RoundId(1, 3), Version(1, 2), hashlib.sha256(record).digest(), record))
        await slave.link.expect(Flipped)
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
        assert await slave.link.expect(Ready) == Ready(newest.version, newest.digest)
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


async def test_recorded_pushes_compute_every_version_again_to_the_bit(
    master: MasterForSlaves, config: SlaveConfig
) -> None:
    here = serving(config, master).model_copy(update={"record_pushes": True})
    async with slave_here(here):
        slave = await seeded(master, 3)
        slave.client.close()
    pushes = here.directory / "pushes"
    theta, momentum = np.empty(0, np.float32), np.zeros(LAYOUT.n_elems, np.float32)
    for v in range(3):
        told = json.loads((pushes / f"round-r1.{v + 1}.json").read_text())
        (accepted,) = told["accepted"]
        row = load_file(pushes / accepted["file"])["push"]
        np.testing.assert_array_equal(row, VALUES[v])
        if told["from_version"] is None:
            theta = row
        else:
            new, buf = np.empty_like(theta), np.empty_like(theta)
            weights = np.array([accepted["weight"]], np.float32)
            scalars = (
                told["scale"], told["outer_lr"], told["momentum_decay"], told["momentum_lookahead"],
                told["gradient_weight"],
            )  # fmt: skip
            outer_step(theta, momentum, row[None], np.arange(1), weights, *scalars, new, buf, 0, len(theta))
            theta, momentum = new, buf
        assert digest_of_array(theta, BLOCKS, told["chunk_bytes"]).hex() == told["digest"]
    assert told["to_version"] == "1:2"
