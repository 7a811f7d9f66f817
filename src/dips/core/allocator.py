"""Allocates memory for parameters and frames in large pages, which are touched once and reused.

A page that is touched for the first time costs the kernel a fault and the clearing of the page: with pages of 4 KiB
that is slower than the network, and malloc by default gives each freed frame of 1 MiB back to the kernel and faults it
in again. Knows nothing of what the memory is for. Only speed depends on what the system grants here, never a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

HUGE_PAGE_BYTES = 2 << 20

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
"""mallopt's parameters, from glibc's malloc.h."""

_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses more (half of HEAP_MAX_SIZE on 64-bit systems)."""

_KEPT_BYTES = 1 << 30


PIECE_ELEMS = 16 << 20
"""Touched at once: numpy lets no other thread run meanwhile, and these 64 MiB take about 30 ms."""


def zeros(*shape: int, touched: Callable[[int], None] | None = None) -> F32:
    """A float32 array of zeros whose pages are really there, beginning at a page's edge.

    touched: called with the bytes of each piece once they are there. Raises MemoryError when the system has no such
    range left.
    """
    n_bytes = 4 * math.prod(shape)
    flat = _mapped(n_bytes).view(np.float32)[: n_bytes // 4]
    for begin in range(0, len(flat), PIECE_ELEMS):
        piece = flat[begin : begin + PIECE_ELEMS]
        piece.fill(0)
        if touched is not None:
            touched(piece.nbytes)
    return flat.reshape(shape)


def zeros_in_file(directory: Path, *shape: int) -> F32:
    """A float32 array of zeros in a file without a name, whose blocks are reserved and freed with the array.

    The system keeps its pages in memory while there is room, and writes and drops them when there is none. Raises
    OSError when the disk has no room or the directory cannot be used, MemoryError as zeros() does.
    """
    n_bytes = 4 * math.prod(shape)
    with tempfile.TemporaryFile(dir=directory) as file:
        # A page of a hole that finds no block on a full disk later would end the process (SIGBUS).
        os.posix_fallocate(file.fileno(), 0, max(1, n_bytes))
        try:
            pages = mmap.mmap(file.fileno(), max(1, n_bytes), flags=mmap.MAP_SHARED)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{n_bytes} bytes of a file cannot be mapped: {error}") from error
    return np.frombuffer(pages, np.uint8)[:n_bytes].view(np.float32).reshape(shape)


def _mapped(n_bytes: int) -> NDArray[np.uint8]:
    """Fresh pages that belong to the array; at a large page's edge when at least one fits."""
    is_large = n_bytes >= HUGE_PAGE_BYTES
    # Private: shared anonymous memory is shmem to Linux, which has large pages of its own rules, and none by default.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, max(1, n_bytes) + HUGE_PAGE_BYTES * is_large, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{n_bytes} bytes cannot be mapped: {error}") from error
    if is_large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    begin = -array.ctypes.data % HUGE_PAGE_BYTES if is_large else 0
    return array[begin : begin + n_bytes]


def keep_freed_memory() -> bool:
    """Have malloc reuse what was freed, frames above all, in place of giving it back to the kernel.

    To be called once, at a process's start. Returns whether this system's malloc accepted it, as glibc's
    does.
    """
    return _told_malloc(
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),  # set by hand, it no longer moves with what is freed
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, HUGE_PAGE_BYTES),
    )


def keep_one_heap() -> bool:
    """Have all threads share malloc's first heap, for a process whose threads do not depend on its speed.

    By default glibc gives threads up to eight heaps for each processor. What one thread frees is of no use in another's
    heap: connections that are accepted here and freed there then take several times their memory. To be called once,
    at a process's start. Returns whether this system's malloc accepted it.
    """
    return _told_malloc((_M_ARENA_MAX, 1))


def _told_malloc(*wanted: tuple[int, int]) -> bool:
    """Whether it took these parameters."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in wanted)
