"""Assembles a slave's shard of another placement, for a RESHARD: own blocks from memory, the others from the slaves
that have them, directly into a snapshot file (docs/decisions/0019-reshard.md). What rounding lost of a published
version (the residual) is dropped. core/net/transfer.py decides what is requested.

Runs on the thread "dips-move", which owns the sockets; the file is written on "dips-disk", block by block, so that a
promise never waits for a peer. Needs one block of memory. Never seals a file whose checksums differ from
those of the master's lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
import zmq

from dips.core.clock import Clock
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.layout import Block, shard_digest
from dips.core.messages import MoveBlocks, SnapshotInfo
from dips.core.net.addresses import require_loopback
from dips.core.net.carriers import Common, carry_block
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.zmq_sockets import CurvePair
from dips.slave.calculation import chunk_checksums
from dips.slave.memory import F32, ShardMemory, bytes_of, residual_bytes_of
from dips.slave.ring import Ring
from dips.slave.state.checks import cancelled, given_up, own_blocks, settings_of_moves

T = TypeVar("T")


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
        pull_wire: str = "float32",
    ) -> None:
        """memory: holds the version that is moved; None for a slave without blocks. disk: the thread of the disk."""
        self._slave_id = slave_id
        self._common = Common(run_id, epoch, "", move.layout, settings_of_moves(chunk_bytes), curve=curve)
        self._move = move
        self._pull_wire = pull_wire
        self._memory = memory
        self._ring, self._disk = ring, disk
        self._clock = clock
        self._landed: F32 = np.empty(0, np.float32)
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
        n_elems = sum(block.n_elems for block in blocks)
        residual_bytes = residual_bytes_of(blocks, self._common.settings.chunk_bytes, self._pull_wire)
        stream = self._on_disk(self._ring.begin_stream, info, n_elems, residual_bytes)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        links = SlaveSockets(context, move.sources, self._common.settings.chunk_bytes, self._common.curve)
        try:
            for momentum, digest in ((False, move.theta_digest), (True, move.momentum_digest)):
                sums: list[int] = []
                for block in blocks:
                    data = self._block(block, momentum, links)
                    sums += chunk_checksums(np.frombuffer(data, np.float32), [block], self._common.settings.chunk_bytes)
                    self._on_disk(stream.write, data)
                if shard_digest(sums) != digest:
                    what = "momentum" if momentum else "parameters"
                    raise Refused(RefusalCode.DIGEST, f"the {what} that were moved are not those that were listed")
            self._on_disk(stream.write_no_residual)
            self._on_disk(self._ring.seal_stream, stream, info)
        except BaseException:
            self._on_disk(self._ring.drop_stream)
            raise
        finally:
            links.close()
            context.destroy(linger=0)
        return info

    def _block(self, block: Block, momentum: bool, links: SlaveSockets) -> memoryview:
        """The bytes of one block, valid until the next call."""
        spec = self._move.sources
        address = spec.slaves[spec.slave_of_block[block.block_id]]
        if address.slave_id != self._slave_id:
            if len(self._landed) < block.n_elems:
                self._landed = np.empty(block.n_elems, np.float32)
            into, source, version = self._landed[: block.n_elems], address.slave_id, self._move.from_version
            code = RefusalCode.NOT_LOOPBACK
            try:
                if self._common.curve is None:
                    require_loopback(address.data_endpoint, f"the data endpoint of slave {source}")
                code = RefusalCode.CONFIG
                transfer = carry_block(
                    links, self._common, into, source, block, version, self._clock, self._cancelled, momentum=momentum
                )
            except ConfigError as error:
                raise Refused(code, str(error)) from error
            if transfer.failure:
                raise given_up(transfer)
            if not transfer.done:
                raise cancelled(self._move)
            return bytes_of(into)
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
