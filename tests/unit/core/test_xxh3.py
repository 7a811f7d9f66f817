"""core/math/xxh3_numba.py has the bits of the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dips.core.math.simd_numba import address
from dips.core.math.xxh3_numba import BLOCK_BYTES, LONGEST_SHORT, finish, start, update, xxh3

BYTES = np.random.default_rng(7).integers(0, 256, 3 * 2**20 + 64).astype(np.uint8)


def expected(offset: int, n_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(BYTES[offset : offset + n_bytes].data)


@pytest.mark.parametrize("offset", [0, 1, 7, 33])
def test_every_length_has_the_bits_of_the_package(offset: int) -> None:
    at = address(BYTES) + offset
    wrong = [n_bytes for n_bytes in range(3001) if xxh3(at, n_bytes) != expected(offset, n_bytes)]
    assert not wrong


@pytest.mark.parametrize("n_bytes", [2**20, 2**20 - 4, 2**20 + 1, 3 * 2**20, 3 * 2**20 - 1023])
def test_long_inputs(n_bytes: int) -> None:
    assert xxh3(address(BYTES) + 3, n_bytes) == expected(3, n_bytes)


@given(seed=st.binary(max_size=600))
def test_any_bytes(seed: bytes) -> None:
    data = np.frombuffer(seed, np.uint8)
    assert xxh3(address(data), len(data)) == xxhash.xxh3_64_intdigest(seed)


@given(n_bytes=st.integers(LONGEST_SHORT + 1, 9 * BLOCK_BYTES), cut=st.integers(0, 9))
def test_in_parts(n_bytes: int, cut: int) -> None:
    """Blocks may be taken in any number of steps; the last bytes are for finish, also where they are a whole block."""
    acc, at, n_blocks = np.empty(8, np.uint64), address(BYTES), (n_bytes - 1) // BLOCK_BYTES
    first = min(cut, n_blocks)
    start(acc)
    update(acc, at, first)
    update(acc, at + BLOCK_BYTES * first, n_blocks - first)
    assert finish(acc, at + n_bytes, n_bytes - BLOCK_BYTES * n_blocks, n_bytes) == expected(0, n_bytes)
