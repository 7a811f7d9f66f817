"""Chunks tile blocks; digests depend on the bytes and their places, and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.wire_values import layouts

from dips.core.layout import Block, Layout, checksum, chunks_of, digest_of_array, shard_digest


@given(layout=layouts, chunk_elems=st.integers(1, 50))
def test_chunks_tile_every_block(layout: Layout, chunk_elems: int) -> None:
    chunks = chunks_of(layout.blocks, 4 * chunk_elems)
    for block in layout.blocks:
        own = [chunk for chunk in chunks if chunk.block_id == block.block_id]
        ends = [0, *(chunk.offset_bytes + chunk.length_bytes for chunk in own)]
        assert [chunk.offset_bytes for chunk in own] == ends[:-1]
        assert ends[-1] == block.n_bytes
        assert all(chunk.length_bytes == 4 * chunk_elems for chunk in own[:-1])
        assert own[-1].length_bytes <= 4 * chunk_elems
    assert chunks == sorted(chunks)


def test_a_checksum_is_xxh3_64_of_the_bytes_whatever_holds_them() -> None:
    values = np.arange(12, dtype="<f4")
    data = values.tobytes()
    wanted = xxhash.xxh3_64(data).intdigest()
    holders = (data, bytearray(data), memoryview(data), values, values.reshape(3, 4))
    assert {checksum(holder) for holder in holders} == {wanted}


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=10, max_size=10))
def test_sender_and_receiver_agree_on_a_shard(values: list[float]) -> None:
    blocks = [Block(1, "a", 100, 7), Block(4, "b", 300, 3)]
    array = np.array(values, dtype=np.float32)
    data = array.tobytes()
    # A receiver knows checksums by place, in any order of arrival.
    landed = {
        chunk: checksum(data[(0 if chunk.block_id == 1 else 28) + chunk.offset_bytes :][: chunk.length_bytes])
        for chunk in random.Random(0).sample(chunks_of(blocks, 8), 6)
    }
    assert shard_digest([landed[chunk] for chunk in sorted(landed)]) == digest_of_array(array, blocks, 8)


def test_a_digest_takes_checksums_from_a_list_or_an_array() -> None:
    checksums = [0, 1, 2**64 - 1]
    assert shard_digest(checksums) == shard_digest(np.array(checksums, dtype=np.uint64))
    assert shard_digest(checksums) == xxhash.xxh3_128_digest(np.array(checksums, "<u8").tobytes())
    assert len(shard_digest(checksums)) == 16
