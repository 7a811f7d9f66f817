"""A slave over real sockets: configured, pushed to, measured, prepared, committed, pulled from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from support.master_for_slaves import MasterForSlaves
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

from dips.core.chunks import digest_of_array
from dips.core.ids import RoundId, Version
from dips.core.math.outer_numpy import gram, outer_step
from dips.core.messages import (
    Commit,
    CommitRecord,
    Flipped,
    Measure,
    Measured,
    Prepared,
    Ready,
    SendCommitRecord,
    Settings,
    Staged,
    StagedPush,
)
from dips.slave.ring import Ring

PLACEMENT = placement_over("s0")
BLOCKS = list(LAYOUT.blocks)


async def test_a_seed_and_a_round_of_two_pushes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    seed = rng.standard_normal(LAYOUT.n_elems).astype(np.float32)
    ours = [seed + rng.standard_normal(LAYOUT.n_elems).astype(np.float32) / np.float32(50) for _ in range(2)]
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.hello()
        assert hello.promised_epoch == 0
        assert hello.snapshots == ()
        await link.welcome()
        link.send(configure_for(PLACEMENT))
        assert await link.expect(Ready) == Ready(None)

        client = DataClient(hello.data_endpoint, BLOCKS)
        v0, v1 = Version(1, 0), Version(1, 1)
        link.send(open_staging(push_id("a"), 0))
        digest = await client.put_all(push_id("a"), seed)
        assert await link.expect(Staged) == Staged(push_id("a"), 1, digest)
        link.send(prepare_of(RoundId(1, 1), v0, [push_id("a")], None))
        assert (await link.expect(Prepared)).digest == digest
        link.send(Commit(RoundId(1, 1), v0, b"hash", b"{}"))
        assert await link.expect(Flipped) == Flipped(RoundId(1, 1), v0)
        np.testing.assert_array_equal(await client.pull(v0), seed)

        pushes = [push_id("a", 2), push_id("b", 1)]
        for slot, (push, values) in enumerate(zip(pushes, ours, strict=True)):
            link.send(open_staging(push, slot))
            await client.put_all(push, values)
            assert (await link.expect(Staged)).push == push
        link.send(Measure(RoundId(1, 2), v0, tuple(StagedPush(push, 1) for push in pushes)))
        measured = await link.expect(Measured)
        staging = np.stack(ours)
        for block, found in zip(BLOCKS, measured.blocks, strict=True):
            expected, nonfinite = gram(seed, staging, np.arange(2), block.start_elem, block.stop_elem)
            assert found.block == block.block_id
            assert found.gram == (expected[0, 0], expected[0, 1], expected[1, 1])
            assert found.nonfinite_elems == tuple(nonfinite)

        link.send(prepare_of(RoundId(1, 2), v1, pushes, v0, weights=(0.25, 0.75), scale=0.5))
        prepared = await link.expect(Prepared)
        theta, momentum = np.empty_like(seed), np.empty_like(seed)
        outer_step(
            seed, np.zeros_like(seed), staging, np.arange(2), np.array([0.25, 0.75], np.float32),
            0.5, 0.7, 0.8, 0.8, 1.0, theta, momentum, 0, len(seed),
        )  # fmt: skip
        assert prepared.digest == digest_of_array(theta, BLOCKS, 1024)
        link.send(Commit(RoundId(1, 2), v1, b"hash", b"{}"))
        await link.expect(Flipped)
        np.testing.assert_array_equal(await client.pull(v1), theta)
        np.testing.assert_array_equal(await client.pull(v0), seed)
        client.close()


async def test_messages_may_be_as_long_as_the_run_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the default of max_message_bytes."""
    settings = Settings(heartbeat_s=0.1, chunk_bytes=1024, max_message_bytes=256 << 20)
    record = bytes(65 << 20)
    commit_hash = hashlib.sha256(record).digest()
    monkeypatch.setattr(Ring, "record", lambda ring, version, round_id: (record, commit_hash))
    async with MasterForSlaves(settings=settings) as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        await link.welcome()
        link.send(SendCommitRecord(Version(1, 0), RoundId(1, 1)))
        answer = await link.expect(CommitRecord)
        assert hashlib.sha256(answer.record).digest() == commit_hash
