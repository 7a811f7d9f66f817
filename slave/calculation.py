"""A slave's arithmetic on its memory: Gram matrices, the outer step, checksums (docs/algorithm.md). No input or output.

Shapes: n = elements of the shard, k = pushes of the round in cluster-id order; theta, momentum (n,) float32,
staging (slots, n) float32. Runs on the executor thread "dips-outer"; kernels and checksums release the
interpreter lock, so that beats and the data port go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dips.core import kernels_numba as kernels
from dips.core.chunks import checksum, chunks_of
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import Block
from dips.core.messages import BlockGram, Prepare
from dips.slave.memory import F32, ShardMemory, bytes_of


def measure(memory: ShardMemory, theta: F32, rows: Sequence[int]) -> tuple[BlockGram, ...]:
    """The Gram matrix of the rows' pseudo-gradients at theta, block by block (docs/algorithm.md, MEASURE)."""
    slots = np.asarray(rows, np.int64)
    return tuple(
        _block_gram(block, *kernels.gram(theta, memory.staging, slots, start, stop))
        for block, start, stop in memory.spans()
    )


def _block_gram(block: Block, gram: NDArray[np.float64], nonfinite: NDArray[np.int64]) -> BlockGram:
    k = len(nonfinite)
    upper = tuple(float(gram[i, j]) for i in range(k) for j in range(i, k))
    return BlockGram(block.block_id, upper, tuple(int(count) for count in nonfinite))


def directions(
    memory: ShardMemory, version: Version, theta: F32, rows: Sequence[int], bases: Sequence[Version | None]
) -> tuple[float, ...]:
    """How the rows' clusters moved from their bases, at theta of `version` (slave/directions.py, products)."""
    memory.samples.keep(version, theta)
    return memory.samples.products(theta, memory.staging, rows, bases)


def prepare(memory: ShardMemory, theta: F32 | None, out: F32, body: Prepare, rows: Sequence[int]) -> list[int]:
    """Compute the next theta into `out` and its momentum into memory.next_momentum (docs/algorithm.md, PREPARE).

    theta: the current version's, None for the seed. Returns the checksums of the new theta's chunks. Raises
    Refused(NONFINITE) when an element of either is NaN or infinite.
    """
    if theta is None:
        bad = kernels.seed_step(memory.staging, rows[0], out, memory.next_momentum, 0, memory.n_elems)
    else:
        bad = kernels.outer_step(
            theta,
            memory.momentum,
            memory.staging,
            np.asarray(rows, np.int64),
            np.asarray(body.weights, np.float32),
            body.scale,
            body.outer_lr,
            body.momentum_decay,
            body.momentum_lookahead,
            body.gradient_weight,
            out,
            memory.next_momentum,
            0,
            memory.n_elems,
        )
    if bad:
        raise Refused(RefusalCode.NONFINITE, f"round {body.round} would give {bad} elements that are NaN or infinite")
    return chunk_checksums(out, memory.blocks, memory.map.chunk_bytes)


def chunk_checksums(theta: F32, blocks: Sequence[Block], chunk_bytes: int) -> list[int]:
    """xxh3-64 of each chunk of a shard, in (block id, offset) order."""
    data = bytes_of(theta)
    out, start = [], 0
    for block in blocks:
        for chunk in chunks_of([block], chunk_bytes):
            begin = start + chunk.offset_bytes
            out.append(checksum(data[begin : begin + chunk.length_bytes]))
        start += block.n_bytes
    return out
