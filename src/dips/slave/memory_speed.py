"""Measures the speed of this machine's memory, the lower bound of the outer step's time, once at a slave's start.

An in-place scale of an array that no cache holds reads and writes each line once, as the outer step does with most of
its data (benchmarks/bench_update.py measures the same bound more carefully).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np

from dips.core.threads import Threads, split
from dips.slave.memory import F32

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

    parts = split(len(array), 4 * threads.n)
    return min(_time_of(lambda: threads.run(scale, parts)) for _ in range(TRIES))


def _time_of(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return max(time.perf_counter() - began_s, 1e-9)
