"""Cuts blocks into chunks, and computes their checksums and the digest of one slave's shard of a push or a version.

Digest of a shard: xxh3-128 over the little-endian xxh3-64 checksums of its chunks in (block id, offset)
order. Sender and receiver compute it from checksums that they have anyway, in any order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from dips.core.layout import Block

Buffer = bytes | bytearray | memoryview | NDArray[np.generic]


class Chunk(NamedTuple):
    """Bytes [offset_bytes, offset_bytes + length_bytes) of a block: one data-flow frame.

    A tuple, so that a model of many thousand tiny tensors is sorted and looked up fast.
    """

    block_id: int
    offset_bytes: int
    length_bytes: int


def chunks_of(blocks: Iterable[Block], chunk_bytes: int) -> list[Chunk]:
    """The chunks of the blocks, block by block; only a block's last chunk may be shorter than chunk_bytes."""
    return [
        Chunk(block.block_id, offset, min(chunk_bytes, block.n_bytes - offset))
        for block in blocks
        for offset in range(0, block.n_bytes, chunk_bytes)
    ]


def checksum(payload: Buffer) -> int:
    """xxh3-64 of the payload; releases the interpreter lock."""
    # numpy arrays are buffers at run time; numpy's annotations say so only from Python 3.12 on.
    return xxhash.xxh3_64_intdigest(cast(bytes, payload))


def shard_digest(checksums: Sequence[int] | NDArray[np.uint64]) -> bytes:
    """The digest of a shard, 16 bytes; checksums in (block id, offset) order."""
    return xxhash.xxh3_128_digest(np.asarray(checksums, dtype="<u8").tobytes())


def digest_of_array(values: NDArray[np.float32], blocks: Sequence[Block], chunk_bytes: int) -> bytes:
    """Digest of a shard that is in memory: `values` holds the blocks one after the other."""
    data = np.ascontiguousarray(values).view(np.uint8)
    checksums: list[int] = []
    start = 0
    for block in blocks:
        for chunk in chunks_of([block], chunk_bytes):
            begin = start + chunk.offset_bytes
            checksums.append(checksum(data[begin : begin + chunk.length_bytes]))
        start += block.n_bytes
    return shard_digest(checksums)
