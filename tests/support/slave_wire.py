"""What surrounds a slave in a test: the slave itself (in this process or in its own), and a cluster's data client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from support.waiting import NO_LIMIT_S

from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, SlaveId, Version
from dips.core.layout import Block, Chunk, Layout, Parameter, checksum, chunks_of, digest_of_array
from dips.core.messages import Configure, OpenStaging, PlacementSpec, Prepare, SlaveAddress, StagedPush
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.placement import Placement
from dips.core.wire import Codec
from dips.slave.config import SlaveConfig
from dips.slave.process import serve

F32 = NDArray[np.float32]
RUN = "run"
CHUNK_BYTES = 1024

LAYOUT = Layout(
    tuple(Parameter(f"layers.{i}.weight", (n,), "float32", f"layers.{i}") for i, n in enumerate((700, 300, 513, 64))),
    block_elems=400,
)
"""1577 elements in 6 blocks, none a multiple of a chunk."""


def push_id(cluster: str, seq: int = 1) -> PushId:
    return PushId(ClusterId(cluster), Incarnation(1, 1), seq)


def put_of(chunk: Chunk, push: PushId, body: bytes, attempt: int = 1) -> DataHeader:
    place = (chunk.block_id, chunk.offset_bytes, chunk.length_bytes)
    return DataHeader(RUN, 1, DataOp.PUT_CHUNK, 1, push, attempt, None, *place, Codec.F32, checksum(body))


def placement_over(*slaves: str, layout: Layout = LAYOUT) -> Placement:
    """The layout's blocks dealt to the slaves in turn."""
    names = tuple(SlaveId(slave) for slave in slaves)
    return Placement(names, tuple(block.block_id % len(names) for block in layout.blocks))


def configure_for(placement: Placement, slots: int = 4, layout: Layout = LAYOUT, **load: Any) -> Configure:
    addresses = tuple(SlaveAddress(slave, "tcp://127.0.0.1:1") for slave in placement.slaves)
    spec = PlacementSpec(addresses, placement.slave_of_block, placement.placement_hash)
    return replace(Configure(layout, layout.layout_hash, spec, slots), **load)


def open_staging(push: PushId, slot: int, attempt: int = 1, base: Version | None = None) -> OpenStaging:
    return OpenStaging(push, attempt, slot, base, fence=0, tokens=100)


def prepare_of(
    round_id: RoundId, to: Version, pushes: Sequence[PushId], from_version: Version | None, **changes: Any
) -> Prepare:
    n = len(pushes)
    body = Prepare(
        round_id,
        from_version,
        to,
        tuple(StagedPush(push, 1) for push in pushes),
        tuple([1.0 / n] * n),
        scale=1.0,
        outer_lr=0.7,
        momentum_decay=0.8,
        momentum_lookahead=0.8,
        gradient_weight=1.0,
    )
    return replace(body, **changes)


def shard_of(values: F32, placement: Placement, slave: str, layout: Layout = LAYOUT) -> F32:
    blocks = placement.blocks_of(SlaveId(slave), layout)
    return np.concatenate([values[block.start_elem : block.stop_elem] for block in blocks])


class DataClient:
    """A DEALER that pushes to one slave."""

    def __init__(self, endpoint: str, blocks: Sequence[Block]) -> None:
        self.blocks = list(blocks)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._requests = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def chunks(self) -> list[Chunk]:
        return chunks_of(self.blocks, CHUNK_BYTES)

    def payload(self, shard: F32, chunk: Chunk) -> bytes:
        start = sum(block.n_bytes for block in self.blocks if block.block_id < chunk.block_id) + chunk.offset_bytes
        return shard.tobytes()[start : start + chunk.length_bytes]

    async def put(self, push: PushId, shard: F32, chunk: Chunk) -> DataHeader:
        self._requests += 1
        payload = self.payload(shard, chunk)
        header = replace(put_of(chunk, push, payload), request=self._requests)
        await self._socket.send_multipart([header.encode(), payload])
        (frame,) = await asyncio.wait_for(self._socket.recv_multipart(), NO_LIMIT_S)
        answer = DataHeader.decode(frame)
        assert answer.request == self._requests
        return answer

    async def put_all(self, push: PushId, shard: F32) -> bytes:
        for chunk in self.chunks():
            answer = await self.put_patiently(push, shard, chunk)
            assert answer.op is DataOp.ACK, answer.refusal
        return digest_of_array(shard, self.blocks, CHUNK_BYTES)

    async def put_patiently(self, push: PushId, shard: F32, chunk: Chunk) -> DataHeader:
        """Send a chunk again for as long as the slave invites it: OpenStaging may still be on its way."""
        async with asyncio.timeout(NO_LIMIT_S):
            while True:
                answer = await self.put(push, shard, chunk)
                if answer.refusal is None or not answer.refusal.retry_after_s:
                    return answer
                await asyncio.sleep(answer.refusal.retry_after_s / 10)


def slave_config(directory: Path, master: str, slave_id: str = "s0", **knobs: Any) -> SlaveConfig:
    ours = {"run_id": RUN, "slave_id": slave_id, "master": master, "directory": directory, "insecure": True}
    return SlaveConfig(**{**ours, **knobs})


@contextlib.asynccontextmanager
async def slave_here(config: SlaveConfig) -> AsyncIterator[asyncio.Task[bool]]:
    stop = asyncio.Event()
    task = asyncio.create_task(serve(config, stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, NO_LIMIT_S)


PROGRAM = (
    "import json, sys; from dips.slave.config import SlaveConfig; from dips.slave.process import run; "
    "sys.exit(run(SlaveConfig(**json.loads(sys.argv[1]))))"
)


@dataclass
class SlaveProcess:
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, config: SlaveConfig) -> SlaveProcess:
        text = json.dumps(config.model_dump(mode="json"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, text, stderr=asyncio.subprocess.PIPE
        )
        return cls(process)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.communicate()

    async def end(self) -> tuple[int, str]:
        """SIGTERM if it still runs; its exit code and what it said on stderr."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.wait()

    async def wait(self) -> tuple[int, str]:
        _, said = await asyncio.wait_for(self.process.communicate(), NO_LIMIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()
