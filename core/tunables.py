"""What glibc's malloc reads once, when a process starts: so whoever starts a process must say it."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"

LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""malloc asks for large pages (glibc 2.35 and newer; others ignore it)."""


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose frames, and interpreter, are to stand in large pages: each page of 4 KiB that
    is touched must be looked up first, on a virtual machine twice. Whoever has tunables of his own keeps those."""
    return {VARIABLE: LARGE_PAGES, **environment}
