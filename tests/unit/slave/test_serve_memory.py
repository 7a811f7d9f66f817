"""The data port's compiled loop, run as twins: hostile messages are answered as by the port alone, and no access of the
loop is outside its buffers. tests/slow/test_serve_guarded.py has the compiled form."""

from __future__ import annotations

import random

import pytest
from support.hostile_data import Traffic
from support.served_port import Both, TwinLoop

WITHOUT_SUMS, WITH_SUMS = 1024, 65536
"""Chunks of whole pieces are measured when they land."""


each_size = pytest.mark.parametrize("chunk_bytes", [WITHOUT_SUMS, WITH_SUMS])


@each_size
def test_right_messages_are_served_by_the_loop(chunk_bytes: int) -> None:
    traffic, rng = Traffic(chunk_bytes), random.Random(1)
    both = Both(traffic, TwinLoop)
    both.feed(traffic.right(rng) for _ in range(200))
    assert both.served > 100


@each_size
def test_hostile_messages_touch_nothing_outside(chunk_bytes: int) -> None:
    traffic, rng = Traffic(chunk_bytes), random.Random(2)
    both = Both(traffic, TwinLoop)
    both.feed(traffic.hostile(rng) for _ in range(400))
    assert both.left > 150


@each_size
def test_keys_are_looked_up_inside_of_their_table(chunk_bytes: int) -> None:
    """Every listed key but those of another cluster pushes and reads; ids that are not listed are left to Python."""
    traffic, rng = Traffic(chunk_bytes), random.Random(4)
    both = Both(traffic, TwinLoop, keyed=True)
    both.feed(traffic.right(rng) for _ in range(250))
    assert both.served > 40
    assert both.left > 80
    both.feed(traffic.hostile(rng) for _ in range(150))


@pytest.mark.parametrize(("routing_id", "served"), [(b"1", 4), (b"1234567", 4), (b"12345678", 0), (b"", 0)])
def test_the_loop_knows_readers_by_short_routing_ids_once_python_has_met_them(routing_id: bytes, served: int) -> None:
    traffic = Traffic(WITHOUT_SUMS)
    both = Both(traffic, TwinLoop, peer=routing_id)
    both.feed([traffic.get(chunk).encode()] for chunk in traffic.chunks()[:5])
    assert (both.served, both.left) == (served, 5 - served)
