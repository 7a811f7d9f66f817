"""Whether malloc really takes large pages: in a process of its own, since glibc reads its tunables at the start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dips.core.tunables import VARIABLE, with_large_pages

KIND = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB_OF_HEAP = 64

CHILD = f"""
import ctypes, re
libc = ctypes.CDLL(None)
libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: frames come from the heap, as in a slave
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
for _ in range({MIB_OF_HEAP}):
    ctypes.memset(libc.malloc(1 << 20), 1, 1 << 20)
parts = open("/proc/self/smaps").read().split("[heap]")[1:]
print(sum(int(re.search(r"AnonHugePages: +([0-9]+) kB", part)[1]) for part in parts) // 1024)
"""


def large_mib(environment: dict[str, str]) -> int:
    """Large pages of the heap of a process that filled it, in MiB."""
    command = [sys.executable, "-I", "-c", CHILD]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(not KIND.exists() or "[madvise]" not in KIND.read_text(), reason="large pages: not on request here")
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35),
    reason="this malloc has no such tunable",
)
def test_a_process_that_is_started_so_has_its_heap_in_large_pages() -> None:
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    assert large_mib(plain) == 0
    assert large_mib(with_large_pages(plain)) >= MIB_OF_HEAP // 2
