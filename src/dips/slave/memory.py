"""The slave's memory: a ring of theta buffers, two momentum buffers and staging memory, allocated once.

Shapes: n = elements of this slave's blocks, one block after the other in block-id order; theta and momentum
(n,) float32, staging (slots, n) float32.

One caller at a time: the control thread, or the job that it awaits. A buffer of a version that can still be
read is never written (I3 of docs/architecture.md); when pins hold every buffer the round is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dips.core import allocator
from dips.core.errors import LocalProtocolError, RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import FLOAT32_BYTES, Block
from dips.core.messages import SnapshotInfo
from dips.core.placement import BYTES_PER_CHECKSUM, shard_bytes_needed
from dips.core.wire import RESIDUAL_CODEC, WIRE_DTYPES, Codec, encoded_block_bytes, encoded_bytes
from dips.slave.state.staging import ShardMap

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

RING_BUFFERS = 3
"""Buffers for theta of v, v-1 and v+1; pins need more."""

BUSY_RETRY_S = 0.5

DISK_RETRY_S = 1.0
"""Wait before room or a write that the disk refused is asked for again, where it is."""


@dataclass(frozen=True)
class MemoryFiles:
    """Where a slave keeps what is not in memory of its own: files without names, in its directory (docs/storage.md)."""

    directory: Path
    which: str = "none"  # one of core/placement.py's MEMORY_FILES
    pins: int = 0  # versions besides v and v-1 for which there is room on the disk


@dataclass(frozen=True)
class EncodedShard:
    """The payloads of a shard's chunks in a difference codec, one after the other. c chunks."""

    codec: Codec
    data: U8  # all payloads; empty where the run's pull_wire is float32
    starts: I64  # (c + 1,): where each begins, and the end of the last

    def of(self, chunk: int) -> U8:
        """The payload of chunk number `chunk`."""
        payload: U8 = self.data[self.starts[chunk] : self.starts[chunk + 1]]
        return payload


@dataclass
class ThetaBuffer:
    """One theta: what readers of the version hold."""

    theta: F32
    info: SnapshotInfo | None = None
    checksums: Sequence[int] = ()  # xxh3-64 of each chunk, in (block, offset) order
    momentum: F32 | None = None  # of the current version only
    difference: EncodedShard | None = None  # to the theta of `base`; None where the run's pull_wire is float32
    base: Version | None = None  # None: the difference has no meaning, as of a version that was loaded


class ShardMemory:
    """All arrays of a shard. memory_bytes bounds them together with the notes on the shard's chunks and pieces
    (slave/data_port.py, slave/state/staging.py); not the samples of old versions (slave/calculation.py: <= 8 MiB).

    Raises Refused(MEMORY) when not even the ring fits.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        chunk_bytes: int,
        staging_slots: int,
        memory_bytes: int,
        touched: Callable[[int, int], None] | None = None,
        files: MemoryFiles | None = None,
        pull_wire: str = "float32",
    ) -> None:
        """touched: called with (bytes made so far, bytes in all) while the memory is made. files: None: all is in
        memory. pull_wire: one of core/wire.py's WIRE_DTYPES. Raises Refused(DISK) where they find no room.
        """
        self._files = files or MemoryFiles(Path())
        which = self._files.which
        self.blocks = tuple(blocks)
        self.map = ShardMap(blocks, chunk_bytes)
        self.n_elems = self.map.n_bytes // FLOAT32_BYTES
        self.n_trained = sum(block.n_elems for block in blocks if not block.averaged)
        """Elements [0, n_trained) are trained: averaged blocks have the highest ids, so that they come last."""
        elems = (block.n_elems for block in blocks)
        spare = memory_bytes - shard_bytes_needed(elems, chunk_bytes, staging_slots, 0, which, pull_wire)
        if spare < 0:
            raise Refused(
                RefusalCode.MEMORY,
                f"{self.n_elems} elements do not fit {memory_bytes} bytes: raise this slave's memory_bytes",
            )
        self.pull_wire = WIRE_DTYPES[pull_wire]
        of_buffer = (0 if which == "versions" else self.map.n_bytes) + BYTES_PER_CHECKSUM * self.map.n_chunks
        if self.pull_wire.is_difference:
            of_buffer += sum(encoded_block_bytes(self.pull_wire, block.n_elems, chunk_bytes) for block in blocks)
        more = spare // max(1, of_buffer)
        self.max_buffers = RING_BUFFERS + (min(more, self._files.pins) if which == "versions" else more)
        of_bytes, done_bytes = (staging_slots + RING_BUFFERS + 2) * self.map.n_bytes, 0

        def touched_some(n_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += n_bytes
            if touched is not None:
                touched(done_bytes, of_bytes)

        if which == "none":
            self.staging = _touched((staging_slots, self.n_elems), touched_some)
        else:
            self.staging = self._in_file(staging_slots, self.n_elems)
            touched_some(self.staging.nbytes)
        self._buffers: list[ThetaBuffer] = []
        for _ in range(RING_BUFFERS):
            self._buffers.append(self._buffer(touched_some))
        self._momentum = [_touched((self.n_elems,), touched_some) for _ in range(2)]
        self._residual = [self._encoded(RESIDUAL_CODEC) for _ in range(2)]
        self.samples: dict[Version, F32] = {}  # some elements of the versions measured last (slave/calculation.py)
        self.current: ThetaBuffer | None = None
        self.previous: ThetaBuffer | None = None
        self.shadow: ThetaBuffer | None = None
        self._pins: frozenset[Version] = frozenset()
        self._readable: dict[Version, ThetaBuffer] = {}
        self._leaving: list[ThetaBuffer] = []

    @property
    def momentum(self) -> F32:
        """The current version's momentum."""
        return self._momentum[0]

    @property
    def next_momentum(self) -> F32:
        """The shadow's momentum."""
        return self._momentum[1]

    @property
    def residual(self) -> EncodedShard:
        """What rounding lost of the current version and those before it; no bytes where pull_wire is float32."""
        return self._residual[0]

    @property
    def next_residual(self) -> EncodedShard:
        """The shadow's residual."""
        return self._residual[1]

    def bytes_by_use(self) -> dict[str, int]:
        """Bytes of all arrays in memory of the process's own, by use: 0 for those in files, whose pages the system may
        take back."""
        which = self._files.which
        by_use = {
            "theta": 0 if which == "versions" else sum(buffer.theta.nbytes for buffer in self._buffers),
            "momentum": sum(m.nbytes for m in self._momentum),
            "staging": self.staging.nbytes if which == "none" else 0,
        }
        if self.pull_wire.is_difference:
            by_use["difference"] = sum(b.difference.data.nbytes for b in self._buffers if b.difference is not None)
            by_use["residual"] = sum(residual.data.nbytes for residual in self._residual)
        return by_use

    def spans(self) -> list[tuple[Block, int, int]]:
        """Each block with its first and last-plus-one element in this memory."""
        out, start = [], 0
        for block in self.blocks:
            out.append((block, start, start + block.n_elems))
            start += block.n_elems
        return out

    def take(self) -> ThetaBuffer:
        """A buffer to write the shadow into. Raises Refused(BUSY) while every one is read or pinned."""
        if self.shadow is not None:
            raise LocalProtocolError("a second shadow was begun while there is one")
        held = {id(buffer) for buffer in (*self._readable.values(), *self._leaving)}
        for buffer in self._buffers:
            if id(buffer) not in held:
                buffer.base = None
                self.shadow = buffer
                return buffer
        if len(self._buffers) >= self.max_buffers:
            raise Refused(
                RefusalCode.BUSY,
                f"all {len(self._buffers)} buffers of this slave hold versions that are read or pinned: raise its "
                "memory_bytes or wait for the pulls to end",
                BUSY_RETRY_S,
            )
        self._buffers.append(self._buffer())
        self.shadow = self._buffers[-1]
        return self.shadow

    def name_shadow(self, info: SnapshotInfo, checksums: Sequence[int], base: Version | None = None) -> None:
        """The shadow is complete: from now on it may become the current version. base: of its difference, if that is
        complete too."""
        assert self.shadow is not None
        self.shadow.info, self.shadow.checksums = info, checksums
        self.shadow.base = base if self.pull_wire.is_difference else None

    def drop_shadow(self) -> None:
        if self.shadow is not None:
            self.shadow.info, self.shadow = None, None

    def flip(self, info: SnapshotInfo) -> None:
        """The shadow becomes the current version; the current one becomes the previous one."""
        if self.shadow is None or self.shadow.info is None or self.shadow.info.version != info.version:
            raise LocalProtocolError(f"version {info.version} was flipped to, but there is no such shadow")
        self.shadow.info = info
        self.previous, self.current, self.shadow = self.current, self.shadow, None
        self._momentum.reverse()
        self._residual.reverse()
        self.current.momentum = self.momentum
        if self.previous is not None:
            self.previous.momentum = None
        self._sort_out()

    def pin(self, versions: Iterable[Version]) -> None:
        """Keep these versions readable, if they still are; release all others except current and previous."""
        self._pins = frozenset(versions)
        self._sort_out()

    def readable(self) -> Mapping[Version, ThetaBuffer]:
        """The versions that the data port may serve."""
        return dict(self._readable)

    def left(self) -> None:
        """The data port now reads only readable(): buffers of other versions may be written again."""
        for buffer in self._leaving:
            buffer.info = None
        self._leaving = []

    def _buffer(self, touched: Callable[[int], None] | None = None) -> ThetaBuffer:
        difference = self._encoded(self.pull_wire) if self.pull_wire.is_difference else None
        if self._files.which != "versions":
            return ThetaBuffer(_touched((self.n_elems,), touched), difference=difference)
        theta = self._in_file(self.n_elems)
        if touched is not None:
            touched(theta.nbytes)
        return ThetaBuffer(theta, difference=difference)

    def _encoded(self, codec: Codec) -> EncodedShard:
        """Room for the payloads of all chunks, all zeros; none where the run publishes float32."""
        sizes = [0] * self.map.n_chunks
        if self.pull_wire.is_difference:
            of_chunk = self.map.chunk_bytes // FLOAT32_BYTES
            sizes = [
                encoded_bytes(codec, min(of_chunk, block.n_elems - start))
                for block in self.blocks
                for start in range(0, block.n_elems, of_chunk)
            ]
        starts = np.zeros(self.map.n_chunks + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        n_bytes = int(starts[-1])
        room = _touched((-(-n_bytes // FLOAT32_BYTES),))
        return EncodedShard(codec, room.view(np.uint8)[:n_bytes], starts)

    def _in_file(self, *shape: int) -> F32:
        directory, n_bytes = self._files.directory, FLOAT32_BYTES * math.prod(shape)
        try:
            return allocator.zeros_in_file(directory, *shape)
        except MemoryError as error:
            raise Refused(RefusalCode.MEMORY, f"{error}: raise the limit of this slave's address space") from error
        except OSError as error:
            raise Refused(
                RefusalCode.DISK,
                f"{directory} has no room for {n_bytes} bytes of memory_files: {error.strerror}; "
                "free space on the slave's disk, or set the master's memory_files to none",
                DISK_RETRY_S,
            ) from error

    def _sort_out(self) -> None:
        keep: dict[Version, ThetaBuffer] = {}
        for buffer in (self.current, self.previous):
            if buffer is not None and buffer.info is not None:
                keep[buffer.info.version] = buffer
        keep |= {version: self._readable[version] for version in self._pins if version in self._readable}
        self._leaving += [buffer for version, buffer in self._readable.items() if version not in keep]
        self._readable = keep


def residual_bytes_of(blocks: Iterable[Block], chunk_bytes: int, pull_wire: str) -> int:
    """Length of the residual of a shard of these blocks: of a version's third tensor, in memory and in its file."""
    if not WIRE_DTYPES[pull_wire].is_difference:
        return 0
    return sum(encoded_block_bytes(RESIDUAL_CODEC, block.n_elems, chunk_bytes) for block in blocks)


def bytes_of(array: F32) -> memoryview:
    """The raw bytes of a contiguous array, without a copy; also of an empty one, which memoryview.cast refuses."""
    return array.reshape(-1).view(np.uint8).data


def _touched(shape: tuple[int, ...], touched: Callable[[int], None] | None = None) -> F32:
    """Zeros whose pages are really allocated: a lack of memory must show now, not in the middle of a round."""
    try:
        return allocator.zeros(*shape, touched=touched)
    except MemoryError as error:
        raise Refused(
            RefusalCode.MEMORY, f"this host has no {4 * math.prod(shape)} bytes left: lower the slave's memory_bytes"
        ) from error
