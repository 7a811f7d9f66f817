"""The data port's compiled loop over real sockets, with guard pages around everything that it may touch.

Each runs in a process of its own: an access outside ends it, and the test says where. `make fuzz` sends more.
"""

from __future__ import annotations

import pytest
from support.checked_memory import in_child
from support.served_port import flip_every_bit, send_hostile


@pytest.mark.parametrize("chunk_bytes", [1024, 65536])
def test_hostile_messages(chunk_bytes: int) -> None:
    assert in_child(send_hostile, chunk_bytes, 1, 12_000) == ""


def test_every_bit_of_every_header() -> None:
    assert in_child(flip_every_bit, 1024) == ""
