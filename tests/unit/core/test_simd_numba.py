"""core/math/simd_numba.py: memory by its address. Its vectors are tested with the kernels that use them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core.math import simd_numba

WORD = 0xF1E2D3C4B5A69788


@simd_numba.compiled
def peeked(at: int) -> tuple[int, int, int]:
    return simd_numba.peek8(at), simd_numba.peek32(at), simd_numba.peek64(at)


@simd_numba.compiled
def counted(at: int, n: int) -> int:
    last = 0
    for _ in range(n):
        last = simd_numba.atomic_add(at, 3)
    return last


@simd_numba.compiled
def counter(at: int) -> int:
    found: int = simd_numba.atomic_get(at)
    return found


@simd_numba.compiled
def folded(a: int, b: int) -> int:
    found: int = simd_numba.mulhi_fold(np.uint64(a), np.uint64(b))
    return found


@pytest.mark.parametrize("shift", range(9))
def test_memory_is_read_at_any_address(shift: int) -> None:
    wanted = b"\xff" + WORD.to_bytes(8, "little")
    memory = np.frombuffer(bytes([7]) * shift + wanted + bytes([7]) * 16, np.uint8)
    at = simd_numba.address(memory) + shift
    assert peeked(at) == (
        0xFF,
        int.from_bytes(wanted[:4], "little"),
        int.from_bytes(wanted[:8], "little"),
    )


def test_threads_that_count_at_once_lose_nothing() -> None:
    place = np.zeros(1, np.int64)
    threads = [threading.Thread(target=counted, args=(simd_numba.address(place), 20_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter(simd_numba.address(place)) == place[0] == 3 * 4 * 20_000
    assert counted(simd_numba.address(place), 1) == 3 * 4 * 20_000, "the value before"


@given(a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_both_halves_of_the_product_are_folded(a: int, b: int) -> None:
    assert folded(np.uint64(a), np.uint64(b)) == (a * b >> 64) ^ (a * b & (2**64 - 1))  # type: ignore[arg-type]
