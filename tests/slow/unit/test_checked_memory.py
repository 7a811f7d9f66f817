"""A guard page ends a process that touches it: what tests of compiled loops on guarded memory rest on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.checked_memory import in_child
from support.guarded_kernels import overwrite, touch


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
