"""Computes on a slave's memory: Gram matrices, the outer step, checksums (docs/algorithm.md). No input or output.

Shapes: n = elements of the shard, p = its pieces (core/math/outer_numpy.py), k = pushes of the round in cluster-id
order; theta, momentum (n,) float32, staging (slots, n) float32. Called on the executor thread "dips-outer"; kernels and
checksums release the interpreter lock, so that beats and the data port go on. No bit depends on the number of threads.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import FLOAT32_BYTES, Block, checksum, chunks_of
from dips.core.math import outer_numba as kernels
from dips.core.math import wire_numba
from dips.core.math.outer_numpy import F64, I64, PIECE_ELEMS
from dips.core.messages import BlockGram, Prepare
from dips.core.threads import Threads, split
from dips.slave.landing import KnownReceipts
from dips.slave.memory import F32, EncodedShard, ShardMemory, bytes_of

ONE_THREAD = Threads(1)

PARTS_PER_THREAD = 4
"""Parts of the work for each thread: when one thread is delayed, the others take the parts that are left."""


def measure(
    memory: ShardMemory,
    theta: F32,
    slots: Sequence[int],
    known: KnownReceipts | None = None,
    threads: Threads = ONE_THREAD,
) -> tuple[BlockGram, ...]:
    """The Gram matrix of the slots' pseudo-gradients at theta, block by block (docs/algorithm.md, MEASURE).

    known: sums of complete pushes that were taken with this theta on receipt; only the others are computed. Averaged
    blocks belong to no norm: their sums are zero, and only their non-finite elements count.
    """
    sums, nonfinite = _piece_sums(memory, theta, slots, known, threads)
    places, ids = memory.map.places, [block.block_id for block in memory.blocks]
    first_pieces = np.array([*(places.first_piece[i] for i in ids), memory.map.n_pieces], np.int64)
    uppers = kernels.block_totals(sums, first_pieces).T.tolist()
    first = first_pieces.tolist()
    if known is not None:
        nonfinite = np.array([known.bad(slot) for slot in slots], np.int64)
        first = [*(places.first_chunk[i] for i in ids), memory.map.n_chunks]
    ends = np.concatenate([np.zeros((len(slots), 1), np.int64), np.cumsum(nonfinite, axis=1)], axis=1)[:, first]
    bads = np.diff(ends, axis=1).T.tolist()
    return tuple(
        BlockGram(block.block_id, (0.0,) * len(upper) if block.averaged else tuple(upper), tuple(bad))
        for block, upper, bad in zip(memory.blocks, uppers, bads, strict=True)
    )


def all_zero(memory: ShardMemory, slots: Sequence[int]) -> tuple[bool, ...]:
    """For each slot, whether every trained element of its push is 0: no training makes such parameters of a whole
    model. Of any other push the first piece says so."""
    edges = (*range(0, memory.n_trained, PIECE_ELEMS), memory.n_trained)
    return tuple(not any(memory.staging[slot, a:b].any() for a, b in pairwise(edges)) for slot in slots)


def _piece_sums(
    memory: ShardMemory, theta: F32, slots: Sequence[int], known: KnownReceipts | None, threads: Threads
) -> tuple[F64, I64]:
    """((k (k + 1) / 2, p) sums of each pair, upper triangle by rows; (k, p) non-finite elements)."""
    edges, k = _edges(memory, PIECE_ELEMS), len(slots)
    pairs = [(slots[i], slots[j]) for i in range(k) for j in range(i, k)]
    sums = np.zeros((len(pairs), len(edges) - 1), np.float64)
    nonfinite = np.zeros((k, len(edges) - 1), np.int64)
    missing = np.ones(sums.shape, np.bool_)
    if known is not None:
        for pair, (slot, other) in enumerate(pairs):
            found = known.squared(slot) if slot == other else known.products(slot, other)
            if found is not None:
                sums[pair], missing[pair] = found[0], ~found[1]
    # A pass for all pairs reads k + 1 vectors, one for a single pair reads three.
    n_missing = missing.sum(axis=0)
    by_pass = 3 * n_missing > k + 1
    all_slots = np.asarray(slots, np.int64)

    def all_pairs(pieces: I64) -> None:
        kernels.measure_pieces(theta, memory.staging, all_slots, edges, pieces, sums, nonfinite)

    _share(threads, all_pairs, np.flatnonzero(by_pass))
    for pair, (slot, other) in enumerate(pairs):

        def one_pair(pieces: I64, pair: int = pair, slot: int = slot, other: int = other) -> None:
            x, y = memory.staging[slot], memory.staging[other]
            kernels.multiply_pieces(theta, x, y, edges, pieces, sums[pair])

        _share(threads, one_pair, np.flatnonzero(missing[pair] & ~by_pass))
    return sums, nonfinite


def _share(threads: Threads, work: Callable[[I64], None], pieces: I64) -> None:
    parts = split(len(pieces), PARTS_PER_THREAD * threads.n)
    threads.run(lambda part: work(pieces[part[0] : part[1]]), parts)


def _edges(memory: ShardMemory, step: int) -> I64:
    """Edges of pieces or chunks of `step` elements: number i of the shard is the elements [edges[i], edges[i + 1])."""
    starts = [np.arange(start, stop, step) for _, start, stop in memory.spans()]
    return np.concatenate([*starts, [memory.n_elems]]).astype(np.int64)


# ---- directions ------------------------------------------------------------------------------------------------------
#
# Measures the direction in which each cluster moved, on a sample of the elements (docs/algorithm.md, Direction).
#
# The Gram matrix of MEASURE compares pseudo-gradients with the current version: in a stale push they contain the
# reverse of the model's movement meanwhile, and late in a run that part is the larger one. The cluster's own movement
# is theta_base - theta_j, and its base is seldom still in memory. So a slave keeps every stride-th element of the last
# versions: at most SAMPLE_ELEMS x KEPT_VERSIONS float32, 8 MiB whatever the model's size. Only cosines are computed
# from it; no version ever depends on it.


SAMPLE_ELEMS = 65_536
"""Cosines of so many elements are off by about 1 / sqrt(m) = 0.004; they are compared with values above 0.1."""

KEPT_VERSIONS = 32
"""Bases older than this are not known: about what s_max allows of 8 clusters."""


def directions(
    memory: ShardMemory, version: Version, theta: F32, slots: Sequence[int], bases: Sequence[Version | None]
) -> tuple[float, ...]:
    """The movements of the slots' clusters from their bases, at theta of `version`, which is kept as a base for later.

    The upper triangle by rows of the 2k x 2k Gram matrix of p_1 .. p_k, s_1 .. s_k, estimated for the shard.
    p_j = theta_base - theta_j is the movement of cluster j, s_j = theta_base - theta that of the model meanwhile.
    Where a base is not known both are NaN, and so are their products.
    """
    # The stride is odd, so that no power of two makes it take the same few columns of every matrix.
    k, sample = len(slots), slice(0, memory.n_trained, max(1, -(-memory.n_trained // SAMPLE_ELEMS)) | 1)
    now = theta[sample]
    if version not in memory.samples:
        memory.samples[version] = now.copy()
    while len(memory.samples) > KEPT_VERSIONS:
        del memory.samples[next(iter(memory.samples))]
    vectors = np.full((2 * k, len(now)), np.nan, np.float32)
    with np.errstate(all="ignore"):
        for j, (slot, at) in enumerate(zip(slots, bases, strict=True)):
            base = memory.samples.get(at) if at is not None else None
            if base is not None:
                vectors[j] = base - memory.staging[slot, sample]
                vectors[k + j] = base - now
    gram, _ = kernels.gram(np.zeros_like(now), vectors, np.arange(2 * k, dtype=np.int64), 0, len(now))
    scale = memory.n_trained / max(1, len(now))
    return tuple(scale * float(gram[i, j]) for i in range(2 * k) for j in range(i, 2 * k))


# ---- the outer step --------------------------------------------------------------------------------------------------


def prepare(
    memory: ShardMemory,
    theta: F32 | None,
    out: F32,
    body: Prepare,
    slots: Sequence[int],
    threads: Threads = ONE_THREAD,
    difference: EncodedShard | None = None,
) -> list[int]:
    """Compute the next theta into `out` and its momentum into memory.next_momentum (docs/algorithm.md, PREPARE).

    Elements from memory.n_trained on are averaged, with momentum zero. difference: where the run's pull_wire rounds
    versions, gets that of `out` to theta; then memory.next_residual gets what rounding lost. Both have no meaning for
    the seed but that its residual is zero.

    theta: the current version's, None for the seed. Returns the checksums of the new theta's chunks. Raises
    Refused(NONFINITE) when an element of either is NaN or infinite.
    """
    all_slots, weights = np.asarray(slots, np.int64), np.asarray(body.weights, np.float32)
    chunks = _edges(memory, memory.map.chunk_bytes // FLOAT32_BYTES)
    n_trained = int(np.searchsorted(chunks, memory.n_trained))

    def step(part: tuple[int, int]) -> tuple[int, list[int]]:
        first, last = part
        start, stop = int(chunks[first]), int(chunks[last])
        if theta is None:
            bad = kernels.seed_step(memory.staging, slots[0], out, memory.next_momentum, start, stop)
            return bad, checksums_of(first, last)
        if difference is not None:
            return published_step(theta, difference, first, last)
        middle = min(max(first, n_trained), last)
        bad, checksums = kernels.step_chunks(
            theta,
            memory.momentum,
            memory.staging,
            all_slots,
            weights,
            body.scale,
            body.outer_lr,
            body.momentum_decay,
            body.momentum_lookahead,
            body.gradient_weight,
            out,
            memory.next_momentum,
            chunks[first : middle + 1],
        )
        bad += kernels.average_step(
            theta, memory.staging, all_slots, weights, body.averaged_share, out, memory.next_momentum,
            int(chunks[middle]), stop,
        )  # fmt: skip
        return bad, checksums.tolist() + checksums_of(middle, last)

    def published_step(theta: F32, difference: EncodedShard, first: int, last: int) -> tuple[int, list[int]]:
        """Chunk by chunk, so that what is rounded is still in the cache. No block is averaged (check_rounding)."""
        bad, checksums = 0, []
        for i in range(first, last):
            here = slice(int(chunks[i]), int(chunks[i + 1]))
            found = kernels.outer_step(
                theta, memory.momentum, memory.staging, all_slots, weights, body.scale, body.outer_lr,
                body.momentum_decay, body.momentum_lookahead, body.gradient_weight, out, memory.next_momentum,
                here.start, here.stop,
            )  # fmt: skip
            rounded = wire_numba.publish(
                difference.codec, out[here], theta[here], memory.residual.of(i), difference.of(i),
                memory.next_residual.of(i),
            )  # fmt: skip
            bad += found or rounded
            checksums.append(checksum(out[here]))
        return bad, checksums

    def checksums_of(first: int, last: int) -> list[int]:
        return [checksum(out[chunks[i] : chunks[i + 1]]) for i in range(first, last)]

    if theta is None:
        memory.next_residual.data.fill(0)

    done = threads.run(step, split(len(chunks) - 1, PARTS_PER_THREAD * threads.n))
    bad = sum(found for found, _ in done)
    if bad:
        raise Refused(RefusalCode.NONFINITE, f"round {body.round} would give {bad} elements that are NaN or infinite")
    return [value for _, checksums in done for value in checksums]


def chunk_checksums(values: F32, blocks: Sequence[Block], chunk_bytes: int) -> list[int]:
    """xxh3-64 of each chunk of these blocks, in (block id, offset) order."""
    data = bytes_of(values)
    out, start = [], 0
    for block in blocks:
        for chunk in chunks_of([block], chunk_bytes):
            begin = start + chunk.offset_bytes
            out.append(checksum(data[begin : begin + chunk.length_bytes]))
        start += block.n_bytes
    return out


# ---- memory speed ----------------------------------------------------------------------------------------------------
#
# Measures the speed of this machine's memory, the lower bound of the outer step's time, once at a slave's start.
#
# An in-place scale of an array that no cache holds reads and writes each line once, as the outer step does with most of
# its data (benchmarks/bench_update.py measures the same bound more carefully).


BYTES = 64 << 20
"""Size of the array: more than most processors' caches. Allocated for a tenth of a second, before other uses."""

TRIES = 3


def memory_bytes_per_s(threads: Threads) -> float:
    """Bytes read and written a second by all threads together: the best of a few tries, as other programs run too."""
    with mmap.mmap(-1, BYTES) as pages:  # not malloc, which may keep freed memory
        return 2 * BYTES / _best_s(threads, np.frombuffer(pages, np.float32))


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
