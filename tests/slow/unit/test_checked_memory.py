"""Compiled functions on addresses stay within guard pages, and a guard page ends a process that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.checked_memory import in_child
from support.guarded_kernels import land_chunks, overwrite, parse_headers, touch


@pytest.mark.parametrize(
    ("act", "arguments"),
    [(touch, (True, 100)), (touch, (False, -1)), (overwrite, ())],
    ids=["behind", "before", "write"],
)
def test_a_guard_page_ends_a_process(act: Callable[..., None], arguments: tuple[object, ...]) -> None:
    assert "SIGSEGV" in in_child(act, *arguments)


def test_a_guard_page_lets_right_reads_pass() -> None:
    assert in_child(touch, True, 0, 99) == ""
    assert in_child(touch, False, 0, 99) == ""


def test_the_compiled_parser_and_writer_stay_within_guard_pages() -> None:
    assert in_child(parse_headers, 6, 3000) == ""


def test_compiled_landing_stays_within_guard_pages() -> None:
    assert in_child(land_chunks) == ""
