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


@given(n_bytes=st.integers(LONGEST_SHORT + 1, 9 * BLOCK_BYTES), cut=st.integers(0, 9))
def test_in_parts(n_bytes: int, cut: int) -> None:
    """Blocks may be taken in any number of steps; the last bytes are for finish, also where they are a whole block."""
    acc, at, n_blocks = np.empty(8, np.uint64), address(BYTES), (n_bytes - 1) // BLOCK_BYTES
    first = min(cut, n_blocks)
    start(acc)
    update(acc, at, first)
    update(acc, at + BLOCK_BYTES * first, n_blocks - first)
    assert finish(acc, at + n_bytes, n_bytes - BLOCK_BYTES * n_blocks, n_bytes) == expected(0, n_bytes)
