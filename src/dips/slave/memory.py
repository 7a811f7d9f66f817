"""The slave's memory: a ring of theta buffers, two momentum buffers and staging memory, allocated once.

Shapes: n = elements of this slave's blocks, one block after the other in block-id order; theta and momentum
(n,) float32, staging (slots, n) float32.

One caller at a time: the control thread, or the job that it awaits. A buffer of a version that can still be
read is never written (I3 of docs/architecture.md); when pins hold every buffer the round is refused.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dips.core import allocator
from dips.core.errors import LocalProtocolError, RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import FLOAT32_BYTES, Block
from dips.core.math import outer_numba as kernels
from dips.core.messages import SnapshotInfo
from dips.core.placement import BYTES_PER_CHECKSUM, shard_bytes_needed
from dips.core.threads import Threads, split
from dips.slave.state.staging import ShardMap

# ---- directions ------------------------------------------------------------------------------------------------------
#
# Measures the direction in which each cluster moved, on a sample of the elements (docs/algorithm.md, Direction).
#
# The Gram matrix of MEASURE compares pseudo-gradients with the current version: in a stale push they contain the
# reverse of the model's movement meanwhile, and late in a run that part is the larger one. The cluster's own movement
# is theta_base - theta_j, and its base is seldom still in memory. So a slave keeps every stride-th element of the last
# versions: at most SAMPLE_ELEMS x KEPT_VERSIONS float32, 8 MiB whatever the model's size. Only cosines are computed
# from it; no version ever depends on it.
#
# Shapes: n elements of the shard, m of them in the sample, k pushes of the round in cluster-id order; theta (n,),
# staging (slots, n), samples (m,), all float32.


F32 = NDArray[np.float32]

SAMPLE_ELEMS = 65_536
"""Cosines of so many elements are off by about 1 / sqrt(m) = 0.004; they are compared with values above 0.1."""

KEPT_VERSIONS = 32
"""Bases older than this are not known: about what s_max allows of 8 clusters."""


class Samples:
    """The sampled elements of the versions that were measured last. One caller at a time."""

    def __init__(self, n_elems: int) -> None:
        """n_elems: the trained elements, which come before all others."""
        self._n_elems = n_elems
        # Odd, so that no power of two makes it take the same few columns of every matrix.
        self._stride = max(1, -(-n_elems // SAMPLE_ELEMS)) | 1
        self._of: dict[Version, F32] = {}

    def keep(self, version: Version, theta: F32) -> None:
        """Keep samples of this version; the oldest is dropped when there are too many."""
        if version not in self._of:
            self._of[version] = theta[: self._n_elems : self._stride].copy()
        while len(self._of) > KEPT_VERSIONS:
            del self._of[next(iter(self._of))]

    def products(
        self, theta: F32, staging: F32, slots: Sequence[int], bases: Sequence[Version | None]
    ) -> tuple[float, ...]:
        """The upper triangle by rows of the 2k x 2k Gram matrix of p_1 .. p_k, s_1 .. s_k, estimated for the shard.

        p_j = theta_base - theta_j is the movement of cluster j, s_j = theta_base - theta that of the model meanwhile.
        Where a base is not known both are NaN, and so are their products.
        """
        k = len(slots)
        now = theta[: self._n_elems : self._stride]
        vectors = np.full((2 * k, len(now)), np.nan, np.float32)
        with np.errstate(all="ignore"):
            for j, (slot, version) in enumerate(zip(slots, bases, strict=True)):
                base = self._of.get(version) if version is not None else None
                if base is not None:
                    vectors[j] = base - staging[slot, : self._n_elems : self._stride]
                    vectors[k + j] = base - now
        gram, _ = kernels.gram(np.zeros_like(now), vectors, np.arange(2 * k, dtype=np.int64), 0, len(now))
        scale = self._n_elems / max(1, len(now))
        return tuple(scale * float(gram[i, j]) for i in range(2 * k) for j in range(i, 2 * k))


# ---- memory ----------------------------------------------------------------------------------------------------------


RING_BUFFERS = 3
"""Buffers for theta of v, v-1 and v+1; pins need more."""

BUSY_RETRY_S = 0.5


@dataclass
class ThetaBuffer:
    """One theta. checksums: xxh3-64 of each chunk, in (block, offset) order. momentum: of the current version only."""

    theta: F32
    info: SnapshotInfo | None = None
    checksums: Sequence[int] = ()
    momentum: F32 | None = None


class ShardMemory:
    """All arrays of a shard. memory_bytes bounds them together with the notes on the shard's chunks and pieces
    (slave/landing.py, slave/state/staging.py); not the samples of old versions (slave/memory.py: <= 8 MiB).

    Raises Refused(MEMORY) when not even the ring fits.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        chunk_bytes: int,
        staging_slots: int,
        memory_bytes: int,
        touched: Callable[[int, int], None] | None = None,
    ) -> None:
        """touched: called with (bytes made so far, bytes in all) while the memory is made."""
        self.blocks = tuple(blocks)
        self.map = ShardMap(blocks, chunk_bytes)
        self.n_elems = self.map.n_bytes // FLOAT32_BYTES
        self.n_trained = sum(block.n_elems for block in blocks if not block.averaged)
        """Elements [0, n_trained) are trained: averaged blocks have the highest ids, so that they come last."""
        elems = (block.n_elems for block in blocks)
        spare = memory_bytes - shard_bytes_needed(elems, chunk_bytes, staging_slots, pins=0)
        if spare < 0:
            raise Refused(
                RefusalCode.MEMORY,
                f"{self.n_elems} elements do not fit {memory_bytes} bytes: raise this slave's memory_bytes",
            )
        self.max_buffers = RING_BUFFERS + spare // max(1, self.map.n_bytes + BYTES_PER_CHECKSUM * self.map.n_chunks)
        of_bytes, done_bytes = (staging_slots + RING_BUFFERS + 2) * self.map.n_bytes, 0

        def touched_some(n_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += n_bytes
            if touched is not None:
                touched(done_bytes, of_bytes)

        self.staging = _touched((staging_slots, self.n_elems), touched_some)
        self._buffers = [ThetaBuffer(_touched((self.n_elems,), touched_some)) for _ in range(RING_BUFFERS)]
        self._momentum = [_touched((self.n_elems,), touched_some) for _ in range(2)]
        self.samples = Samples(self.n_trained)
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

    def bytes_by_use(self) -> dict[str, int]:
        """Bytes of all arrays, by use."""
        theta = sum(buffer.theta.nbytes for buffer in self._buffers)
        return {"theta": theta, "momentum": sum(m.nbytes for m in self._momentum), "staging": self.staging.nbytes}

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(self.bytes_by_use().values())

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
                self.shadow = buffer
                return buffer
        if len(self._buffers) >= self.max_buffers:
            raise Refused(
                RefusalCode.BUSY,
                f"all {len(self._buffers)} buffers of this slave hold versions that are read or pinned: raise its "
                "memory_bytes or wait for the pulls to end",
                BUSY_RETRY_S,
            )
        self._buffers.append(ThetaBuffer(_touched((self.n_elems,))))
        self.shadow = self._buffers[-1]
        return self.shadow

    def name_shadow(self, info: SnapshotInfo, checksums: Sequence[int]) -> None:
        """The shadow is complete: from now on it may become the current version."""
        assert self.shadow is not None
        self.shadow.info, self.shadow.checksums = info, checksums

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

    def _sort_out(self) -> None:
        keep: dict[Version, ThetaBuffer] = {}
        for buffer in (self.current, self.previous):
            if buffer is not None and buffer.info is not None:
                keep[buffer.info.version] = buffer
        keep |= {version: self._readable[version] for version in self._pins if version in self._readable}
        self._leaving += [buffer for version, buffer in self._readable.items() if version not in keep]
        self._readable = keep


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


# ---- memory speed ----------------------------------------------------------------------------------------------------
#
# Measures the speed of this machine's memory, the lower bound of the outer step's time, once at a slave's start.
#
# An in-place scale of an array that no cache holds reads and writes each line once, as the outer step does with most of
# its data (benchmarks/bench_update.py measures the same bound more carefully).


BYTES = 64 << 20
"""Size of the array: more than most processors' caches. Allocated for a tenth of a second, before other uses."""

TRIES = 3


def memory_bytes_per_s(threads: Threads, n_bytes: int = BYTES) -> float:
    """Bytes read and written a second by all threads together: the best of a few tries, as other programs run too."""
    with mmap.mmap(-1, n_bytes) as pages:  # not malloc, which may keep freed memory
        return 2 * n_bytes / _best_s(threads, np.frombuffer(pages, np.float32))


def _best_s(threads: Threads, array: F32) -> float:
    array[:] = 1

    def scale(part: tuple[int, int]) -> None:
        np.multiply(array[part[0] : part[1]], np.float32(1), out=array[part[0] : part[1]])

    best_s = math.inf
    for _ in range(TRIES):
        began_s = time.perf_counter()
        threads.run(scale, split(len(array), 4 * threads.n))
        best_s = min(best_s, max(time.perf_counter() - began_s, 1e-9))
    return best_s
