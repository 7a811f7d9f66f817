"""Memory for parameters: zeros at a page's edge, in large pages where the system has them."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dips.core import allocator


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (4, 1 << 18), (1 << 20,), (0, 7)])
def test_zeros_of_any_shape_begin_at_a_page_and_can_be_written(shape: tuple[int, ...]) -> None:
    array = allocator.zeros(*shape)
    assert array.shape == shape
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert not array.any()
    assert array.size == 0 or array.ctypes.data % mmap.PAGESIZE == 0
    array.fill(1.5)
    assert array.sum() == 1.5 * array.size


def test_a_large_array_begins_at_a_large_page() -> None:
    array = allocator.zeros(allocator.HUGE_PAGE_BYTES // 4)
    assert array.ctypes.data % allocator.HUGE_PAGE_BYTES == 0


def test_large_pages_are_asked_for() -> None:
    """Private anonymous memory: shared memory would silently have small pages."""
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc/self/smaps is Linux's")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel was built without large pages")
    array = allocator.zeros(16 << 18)
    begin = array.ctypes.data
    with open("/proc/self/smaps") as file:
        flags = _flags_of_mapping(file.read().splitlines(), begin)
    assert "hg" in flags
    assert "sh" not in flags


def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", Small)
    array = allocator.zeros(allocator.HUGE_PAGE_BYTES // 4)
    array.fill(1.5)
    assert array.sum() == 1.5 * array.size


@pytest.mark.parametrize(
    ("platform", "answers", "kept"),
    [("linux", (1, 1, 1), True), ("linux", (1, 0, 1), False), ("linux", None, False), ("darwin", (1, 1, 1), False)],
)
def test_freed_memory_is_kept_where_malloc_says_so(
    platform: str, answers: tuple[int, ...] | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(answers or ())
    libc = SimpleNamespace(**({} if answers is None else {"mallopt": lambda name, value: next(left)}))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: libc))
    assert allocator.keep_freed_memory() is kept


def _flags_of_mapping(lines: list[str], address: int) -> list[str]:
    inside = False
    for line in lines:
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the array is in no mapping")
