"""core/math/simd_numba.py: memory by its address. Its vectors are tested with the kernels that use them."""

from __future__ import annotations

import threading

import numpy as np

from dips.core.math import simd_numba


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


def test_threads_that_count_at_once_lose_nothing() -> None:
    place = np.zeros(1, np.int64)
    threads = [threading.Thread(target=counted, args=(simd_numba.address(place), 20_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter(simd_numba.address(place)) == place[0] == 3 * 4 * 20_000
    assert counted(simd_numba.address(place), 1) == 3 * 4 * 20_000, "the value before"
