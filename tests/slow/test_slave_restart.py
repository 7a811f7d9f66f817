"""A slave process that is killed at any point of a round comes back with what was committed, and no less."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import slave_wire
from support.master_for_slaves import MasterForSlaves, SlaveLink

from dips.core import messages as m
from dips.core.errors import TERMINATED
from dips.core.ids import RoundId, Version
from dips.slave.config import SlaveConfig

A = slave_wire.push_id("a")
BLOCKS = list(slave_wire.LAYOUT.blocks)
PLACEMENT = slave_wire.placement_over("s0")
RNG = np.random.default_rng(6)
VALUES, OTHER = (RNG.standard_normal(slave_wire.LAYOUT.n_elems).astype(np.float32) for _ in range(2))
V0, V1 = Version(1, 0), Version(1, 1)
R1, R2 = RoundId(1, 1), RoundId(1, 2)


@pytest.fixture
async def master() -> AsyncIterator[MasterForSlaves]:
    async with MasterForSlaves() as master:
        yield master


@pytest.fixture
def config(tmp_path: Path, master: MasterForSlaves) -> SlaveConfig:
    return slave_wire.slave_config(tmp_path / "s0", master.address, tape=tmp_path / "tape.jsonl")


async def meet(master: MasterForSlaves, epoch: int) -> tuple[SlaveLink, m.SlaveHello]:
    link = await master.accept()
    hello = await link.hello()
    await link.welcome(epoch)
    return link, hello


async def stage(link: SlaveLink, endpoint: str, values: np.ndarray, seq: int, epoch: int = 1) -> None:
    client = slave_wire.DataClient(endpoint, BLOCKS)
    link.send(slave_wire.open_staging(slave_wire.push_id("a", seq), 0))
    await client.put_all(slave_wire.push_id("a", seq), values, epoch=epoch)
    await link.expect(m.Staged)
    client.close()


async def seeded(master: MasterForSlaves, config: SlaveConfig) -> tuple[slave_wire.SlaveProcess, SlaveLink, str]:
    """A new slave process that has committed version 0."""
    process = await slave_wire.SlaveProcess.start(config)
    link, hello = await meet(master, 1)
    link.send(slave_wire.configure_for(PLACEMENT))
    await link.expect(m.Ready)
    await stage(link, hello.data_endpoint, VALUES, 1)
    await link.publish(slave_wire.prepare_of(R1, V0, [A], None), b"hash0", b'{"round": 1}')
    return process, link, hello.data_endpoint


def load(info: m.SnapshotInfo) -> dict[str, Any]:
    return {
        "load": info.version,
        "load_round": info.round,
        "load_digest": info.digest,
        "commit_hash": b"hash1",
        "commit_record": b'{"round": 2}',
    }


async def pulled(endpoint: str, version: Version) -> np.ndarray:
    client = slave_wire.DataClient(endpoint, BLOCKS)
    values = await client.pull(version)
    client.close()
    return values


async def test_killed_before_the_commit_the_shadow_is_promoted(master: MasterForSlaves, config: SlaveConfig) -> None:
    process, link, endpoint = await seeded(master, config)
    await stage(link, endpoint, OTHER, 2)
    link.send(slave_wire.prepare_of(R2, V1, [slave_wire.push_id("a", 2)], V0))
    prepared = await link.expect(m.Prepared)
    await process.kill()

    process = await slave_wire.SlaveProcess.start(config)
    link, hello = await meet(master, 2)
    shadow, base = hello.snapshots
    assert (shadow.version, shadow.round, shadow.committed, shadow.digest) == (V1, R2, False, prepared.digest)
    assert base.version == V0
    link.send(slave_wire.configure_for(PLACEMENT, **load(shadow)))
    assert await link.expect(m.Ready) == m.Ready(V1, prepared.digest)
    after = await pulled(hello.data_endpoint, V1)
    await process.kill()

    process = await slave_wire.SlaveProcess.start(config)
    link, hello = await meet(master, 3)
    promoted = hello.snapshots[0]
    assert (promoted.version, promoted.committed, promoted.commit_hash) == (V1, True, b"hash1")
    link.send(slave_wire.configure_for(PLACEMENT, **load(promoted)))
    await link.expect(m.Ready)
    np.testing.assert_array_equal(await pulled(hello.data_endpoint, V1), after)
    await stage(link, hello.data_endpoint, VALUES, 3, epoch=3)
    link.send(slave_wire.prepare_of(RoundId(3, 1), Version(1, 2), [slave_wire.push_id("a", 3)], V1))
    resumed = await link.expect(m.Prepared)
    assert await _uninterrupted(config.directory.parent) == resumed.digest
    assert (await process.end())[0] == TERMINATED


async def _uninterrupted(directory: Path) -> bytes:
    """The digest of the third version when no process is killed: momentum must have come back to the bit too."""
    async with MasterForSlaves() as master:
        config = slave_wire.slave_config(directory / "unkilled", master.address)
        process, link, endpoint = await seeded(master, config)
        await stage(link, endpoint, OTHER, 2)
        await link.publish(slave_wire.prepare_of(R2, V1, [slave_wire.push_id("a", 2)], V0), b"hash1")
        await stage(link, endpoint, VALUES, 3)
        link.send(slave_wire.prepare_of(RoundId(1, 3), Version(1, 2), [slave_wire.push_id("a", 3)], V1))
        prepared = await link.expect(m.Prepared)
        await process.end()
        return prepared.digest
