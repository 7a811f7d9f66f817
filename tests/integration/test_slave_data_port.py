"""A slave's real data port under wrong, damaged, oversized and senseless input: each is refused, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

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

from dips.core.chunks import digest_of_array
from dips.core.ids import RoundId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import Settings, Staged
from dips.core.net.data_header import DataOp
from dips.slave import data_server

A = push_id("a")
BLOCKS = list(LAYOUT.blocks)
VALUES = np.random.default_rng(5).standard_normal(LAYOUT.n_elems).astype(np.float32)
DIGEST = digest_of_array(VALUES, BLOCKS, 1024)
MAX_CHUNK_BYTES = 8192


@pytest.fixture(autouse=True, params=["python", "compiled"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_server, "AUTO", request.param)


@dataclass
class Scene:
    link: SlaveLink
    client: DataClient
    endpoint: str

    async def still_works(self) -> None:
        """The push completes, from this client, with the digest of its bytes."""
        assert await self.client.put_all(A, VALUES) == DIGEST
        assert await self.link.expect(Staged) == Staged(A, 1, DIGEST)

    async def beat_with_refusals(self, at_least: int) -> None:
        async with asyncio.timeout(NO_LIMIT_S):
            while (await self.link.beat(len(self.link.beats))).refused_chunks < at_least:
                pass

    def reconnect(self) -> DataClient:
        self.client.close()
        self.client = DataClient(self.endpoint, BLOCKS)
        return self.client


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with MasterForSlaves() as master:
        config = slave_config(tmp_path / "s0", master.address, max_chunk_bytes=MAX_CHUNK_BYTES, tape=tmp_path / "tape")
        async with slave_here(config):
            link = await master.accept()
            hello = await link.configured(configure_for(placement_over("s0")))
            link.send(open_staging(A, 0))
            scene = Scene(link, DataClient(hello.data_endpoint, BLOCKS), hello.data_endpoint)
            first = await scene.client.put_patiently(A, VALUES, scene.client.chunks()[0])
            assert first.op is DataOp.ACK
            yield scene
            scene.client.close()


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(scene: Scene) -> None:
    flooder = DataClient(scene.endpoint, BLOCKS)
    chunk = flooder.chunks()[1]
    await flooder.send_frames(flooder.put_header(A, VALUES, chunk).encode(), bytes(MAX_CHUNK_BYTES + (64 << 10) + 1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flooder.receive(), 0.5)
    await scene.still_works()
    answer = await flooder.missing(A)
    assert answer.complete
    flooder.close()


async def test_raw_garbage_on_the_port_is_dropped(scene: Scene) -> None:
    host, port = scene.endpoint.removeprefix("tcp://").split(":")
    rng = random.Random(4)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(4096), b"\xff" + bytes(8) + b"\x7f" + rng.randbytes(99)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await asyncio.wait_for(reader.read(256), 0.2) if garbage[0] == 0xFF else None
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await scene.still_works()


async def test_large_chunks_arrive_whole_while_rounds_go_on(tmp_path: Path) -> None:
    """What is read while the next version is made is never torn (I3 of docs/architecture.md)."""
    layout = Layout((Parameter("w", (700_001,), "float32", "w"),), block_elems=500_000)
    values = np.random.default_rng(8).standard_normal(layout.n_elems).astype(np.float32)
    master = MasterForSlaves(settings=Settings(heartbeat_s=0.1))
    async with master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.configured(configure_for(placement_over("s0", layout=layout), slots=1, layout=layout))
        client = DataClient(hello.data_endpoint, list(layout.blocks), 1 << 20)
        link.send(open_staging(A, 0))
        await client.put_all(A, values)
        await link.expect(Staged)
        await link.publish(prepare_of(RoundId(1, 1), Version(1, 0), [A], None))
        reader = DataClient(hello.data_endpoint, list(layout.blocks), 1 << 20)
        for n in range(1, 5):
            pulling = asyncio.create_task(reader.pull(Version(1, n - 1)))
            await link.publish(prepare_of(RoundId(1, n + 1), Version(1, n), [A], Version(1, n - 1), scale=0.0))
            np.testing.assert_array_equal(await pulling, values)
        client.close()
        reader.close()
