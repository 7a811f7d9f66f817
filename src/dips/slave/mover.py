"""Assembles a slave's shard of another placement, for a RESHARD: own blocks from memory, the others from the slaves
that have them, directly into a snapshot file (docs/decisions/0019-reshard.md).

Runs on the thread "dips-move", which owns the sockets; the file is written on "dips-disk", block by block, so that a
promise never waits for a peer. Needs one block of memory. Never seals a file whose checksums differ from
those of the master's lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
import zmq

from dips.core.chunks import checksum, chunks_of, shard_digest
from dips.core.clock import Clock
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.layout import Block
from dips.core.messages import MoveBlocks, SlaveAddress, SnapshotInfo
from dips.core.net.addresses import require_loopback
from dips.core.net.data_header import MAX_HEADER_BYTES, DataHeader, DataOp
from dips.core.net.zmq_sockets import CurvePair, as_client
from dips.core.wire import Codec
from dips.slave.calculation import chunk_checksums
from dips.slave.memory import F32, ShardMemory, bytes_of
from dips.slave.ring import Ring
from dips.slave.state.checks import own_blocks
from dips.slave.state.fetching import WINDOW_CHUNKS, ChunkRequest, Fetch, cancelled

T = TypeVar("T")

LONGEST_POLL_S = 0.1
"""Within this time a cancelled move stops."""

HANDSHAKE_MS = 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000


class Mover:
    """One move of blocks. run() returns the shadow's info, or raises Refused."""

    def __init__(
        self,
        slave_id: str,
        run_id: str,
        epoch: int,
        move: MoveBlocks,
        chunk_bytes: int,
        memory: ShardMemory | None,
        ring: Ring,
        disk: Executor,
        clock: Clock,
        curve: CurvePair | None,
    ) -> None:
        """memory: holds the version that is moved; None for a slave without blocks. disk: the thread of the disk."""
        self._slave_id = slave_id
        self._run_id, self._epoch = run_id, epoch
        self._move = move
        self.chunk_bytes = chunk_bytes
        self._memory = memory
        self._ring, self._disk = ring, disk
        self._clock = clock
        self.curve = curve
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Cancel the move, from any thread: run() ends soon, with Refused."""
        self._cancelled.set()

    def run(self) -> SnapshotInfo:
        """Move blocks. Raises Refused: DIGEST, DISK, BUSY (a source does not answer, or cancelled), VERSION_GONE."""
        move = self._move
        blocks = own_blocks(self._slave_id, move)
        info = SnapshotInfo(
            move.to_version, move.round, move.layout_hash, move.placement.placement_hash, move.theta_digest, False
        )
        stream = self._on_disk(self._ring.begin_stream, info, sum(block.n_elems for block in blocks))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sources = _Sources(context, self)
        try:
            for momentum, digest in ((False, move.theta_digest), (True, move.momentum_digest)):
                sums: list[int] = []
                for block in blocks:
                    data = self._block(block, momentum, sources)
                    sums += chunk_checksums(np.frombuffer(data, np.float32), [block], self.chunk_bytes)
                    self._on_disk(stream.write, data)
                if shard_digest(sums) != digest:
                    what = "momentum" if momentum else "parameters"
                    raise Refused(RefusalCode.DIGEST, f"the {what} that were moved are not those that were listed")
            self._on_disk(self._ring.seal_stream, stream, info)
        except BaseException:
            self._on_disk(self._ring.drop_stream)
            raise
        finally:
            context.destroy(linger=0)
        return info

    def _block(self, block: Block, momentum: bool, sources: _Sources) -> memoryview:
        """The bytes of one block, valid until the next call."""
        spec = self._move.sources
        address = spec.slaves[spec.slave_of_block[block.block_id]]
        if address.slave_id != self._slave_id:
            return sources.fetch(address, block, momentum)
        memory = self._memory
        assert memory is not None, "the state checked that the version is here"
        assert memory.current is not None, "likewise"
        array: F32 = memory.momentum if momentum else memory.current.theta
        start = memory.map.places.start_byte[block.block_id]
        return bytes_of(array)[start : start + block.n_bytes]

    def _on_disk(self, function: Callable[..., T], *args: Any) -> T:
        if self._cancelled.is_set() and function != self._ring.drop_stream:
            raise cancelled(self._move)
        return self._disk.submit(function, *args).result()

    # ---- fetching ----

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def carry(self, fetch: Fetch, link: _Link, momentum: bool, into: memoryview) -> None:
        """Fetch one block. Raises Refused when the slave cannot give it, or the move was cancelled."""
        now_s = self.now_s
        while not fetch.done:
            if self._cancelled.is_set():
                raise cancelled(self._move)
            for action in fetch.actions(now_s()):
                if isinstance(action, ChunkRequest):
                    link.send(self._header(action, momentum).encode())
                else:
                    link.connect()
            if fetch.failure is not None:
                raise fetch.failure
            pause_s = min(max(0.0, fetch.next_deadline_s() - now_s()), LONGEST_POLL_S)
            for frames in link.receive(pause_s):
                self._receive(fetch, frames, momentum, into)

    def _header(self, ask: ChunkRequest, momentum: bool) -> DataHeader:
        chunk = ask.chunk
        return DataHeader(
            self._run_id, self._epoch, DataOp.GET_CHUNK, ask.request, version=self._move.from_version,
            block=chunk.block_id, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=Codec.F32,
            momentum=momentum,
        )  # fmt: skip

    def _receive(self, fetch: Fetch, frames: list[bytes], momentum: bool, into: memoryview) -> None:
        try:
            header = DataHeader.decode(frames[0])
            header.check_common(self._run_id)
        except Refused:
            return  # answers no request: a lost answer is requested again
        chunk, now_s = fetch.wanted(header.request), self._clock.monotonic_s()
        if chunk is None:
            return
        if header.op is DataOp.REFUSED and header.refusal is not None:
            fetch.refused(header.request, header.refusal, now_s)
            return
        payload = frames[1] if len(frames) == 2 else b""
        asked = (*chunk, self._move.from_version, momentum)
        said = (header.block, header.offset_bytes, header.length_bytes, header.version, header.momentum)
        if header.op is not DataOp.CHUNK or said != asked or len(payload) != chunk.length_bytes:
            fetch.damaged(header.request, "it answered with another chunk", now_s)
        elif checksum(payload) != header.checksum:
            fetch.damaged(header.request, f"the checksum of {chunk} is wrong", now_s)
        else:
            into[chunk.offset_bytes : chunk.offset_bytes + chunk.length_bytes] = payload
            fetch.landed(header.request, now_s)


class _Sources:
    """The other slaves, and the one block of memory in which their bytes land."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mover: Mover) -> None:
        self._context = context
        self._mover = mover
        self._links: dict[str, _Link] = {}
        self._scratch = np.empty(0, np.uint8)

    def fetch(self, address: SlaveAddress, block: Block, momentum: bool) -> memoryview:
        mover = self._mover
        if len(self._scratch) < block.n_bytes:
            self._scratch = np.empty(block.n_bytes, np.uint8)
        link = self._links.get(address.slave_id)
        if link is None:
            link = self._links[address.slave_id] = _Link(self._context, address, mover.chunk_bytes, mover.curve)
            link.connect()
        into = self._scratch[: block.n_bytes].data
        chunks = chunks_of([block], mover.chunk_bytes)
        mover.carry(Fetch(address.slave_id, chunks, mover.now_s()), link, momentum, into)
        return into


class _Link:
    """A DEALER socket to one slave's data port."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: SlaveAddress,
        chunk_bytes: int,
        curve: CurvePair | None,
    ) -> None:
        if curve is None:
            try:
                require_loopback(address.data_endpoint, f"the data endpoint of slave {address.slave_id}")
            except ConfigError as error:
                raise Refused(RefusalCode.NOT_LOOPBACK, str(error)) from error
        self._context = context
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._curve = curve
        self._socket: zmq.Socket[bytes] | None = None

    def connect(self) -> None:
        """Open a new socket: late answers to the old one are lost."""
        if self._socket is not None:
            self._socket.close(linger=0)
        dealer = self._socket = self._context.socket(zmq.DEALER)
        options: Mapping[int, int] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 2 * WINDOW_CHUNKS + 2,
            zmq.RCVHWM: 2 * WINDOW_CHUNKS + 2,
            zmq.MAXMSGSIZE: self._chunk_bytes + MAX_HEADER_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: MAX_RECONNECT_MS,
        }
        for option, value in options.items():
            dealer.setsockopt(option, value)
        if self._curve is not None:
            try:
                as_client(dealer, self._curve, self._address.curve_key)
            except ConfigError as error:
                raise Refused(RefusalCode.CONFIG, f"slave {self._address.slave_id}: {error}") from error
        dealer.connect(self._address.data_endpoint)

    def send(self, header: bytes) -> None:
        """Send without blocking: a message that does not fit counts as lost, and is sent again after a silence."""
        assert self._socket is not None, "connected before"
        try:
            self._socket.send(header, zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self, timeout_s: float) -> list[list[bytes]]:
        """Arrived messages, waiting at most timeout_s for the first. Those with too many frames are dropped."""
        assert self._socket is not None, "connected before"
        out: list[list[bytes]] = []
        if not self._socket.poll(round(timeout_s * 1000)):
            return out
        while len(out) < 2 * WINDOW_CHUNKS:
            try:
                frames = [self._socket.recv(zmq.NOBLOCK)]
            except zmq.Again:
                break
            while self._socket.getsockopt(zmq.RCVMORE):
                frame = self._socket.recv()
                if len(frames) <= 2:
                    frames.append(frame)
            if len(frames) <= 2:
                out.append(frames)
        return out
