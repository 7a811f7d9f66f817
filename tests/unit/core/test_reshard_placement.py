"""A placed model is dealt again: whole, within memory, evenly, and with few blocks moved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import Layout, Parameter
from dips.core.placement import Placement, place, redeal, shard_bytes_needed

SLOTS, PINS, CHUNK = 4, 2, 1024
GIB = 1 << 30


def layout_of(sizes: list[int]) -> Layout:
    return Layout(tuple(Parameter(f"l{i}.w", (n,), "float32", f"l{i}") for i, n in enumerate(sizes)))


def names(*indices: int) -> list[SlaveId]:
    return [SlaveId(f"s{i}") for i in indices]


def dealt(layout: Layout, slaves: list[SlaveId], memory: int = GIB) -> Placement:
    return place(layout, [(slave, memory) for slave in slaves], SLOTS, PINS, CHUNK)


def again(layout: Layout, before: Placement, slaves: list[SlaveId], memory: int = GIB) -> Placement:
    return redeal(layout, before, [(slave, memory) for slave in slaves], SLOTS, PINS, CHUNK)


def moved(before: Placement, after: Placement) -> int:
    pairs = zip(before.slave_of_block, after.slave_of_block, strict=True)
    return sum(before.slaves[old] != after.slaves[new] for old, new in pairs)


def loads(layout: Layout, placement: Placement) -> list[int]:
    return [sum(block.n_elems for block in placement.blocks_of(slave, layout)) for slave in placement.slaves]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 5000), min_size=8, max_size=60),
    st.sets(st.integers(0, 7), min_size=1, max_size=8),
    st.sets(st.integers(0, 7), min_size=1, max_size=8),
)
def test_every_block_is_on_one_of_the_slaves_that_are_wanted(sizes: list[int], old: set[int], new: set[int]) -> None:
    layout = layout_of(sizes)
    before = dealt(layout, names(*sorted(old)))
    after = again(layout, before, names(*new))
    assert after.slaves == tuple(names(*sorted(new)))
    assert len(after.slave_of_block) == len(layout.blocks)
    assert all(loads(layout, after)), "every slave holds something"
    assert after == again(layout, before, names(*new)), "the same deal in every life of the master"


def test_one_more_slave_takes_its_share_and_nothing_else_moves() -> None:
    layout = layout_of([100] * 40)
    before = dealt(layout, names(0, 1))
    after = again(layout, before, names(0, 1, 2))
    assert sorted(loads(layout, after)) == [1300, 1300, 1400]
    assert moved(before, after) == 13


def test_a_removed_slave_gives_its_blocks_away_and_the_others_keep_theirs() -> None:
    layout = layout_of([100] * 40)
    before = dealt(layout, names(0, 1, 2, 3))
    after = again(layout, before, names(0, 2, 3))
    assert moved(before, after) == 10
    assert max(loads(layout, after)) - min(loads(layout, after)) <= 100


def test_shares_follow_memory() -> None:
    layout = layout_of([100] * 40)
    before = dealt(layout, names(0))
    memory = [(SlaveId("s0"), GIB), (SlaveId("s1"), 3 * GIB)]
    after = redeal(layout, before, memory, SLOTS, PINS, CHUNK)
    assert loads(layout, after) == [1000, 3000]


def test_what_finds_no_room_is_refused() -> None:
    layout = layout_of([100] * 10)
    before = dealt(layout, names(0, 1))
    room = 6 * shard_bytes_needed([100], CHUNK, SLOTS, PINS)
    with pytest.raises(Refused, match="finds no room on the 1 slaves") as refused:
        again(layout, before, names(0), room)
    assert refused.value.code is RefusalCode.MEMORY
    assert len(again(layout, before, names(0, 1), room).slaves) == 2


def test_a_slave_that_states_less_memory_than_before_gives_blocks_away() -> None:
    layout = layout_of([100] * 10)
    before = dealt(layout, names(0, 1))
    one = shard_bytes_needed([100], CHUNK, SLOTS, PINS)
    after = redeal(layout, before, [(SlaveId("s0"), 2 * one), (SlaveId("s1"), GIB)], SLOTS, PINS, CHUNK)
    assert loads(layout, after)[0] <= 200


def test_more_slaves_than_blocks_are_refused() -> None:
    layout = layout_of([10, 10])
    with pytest.raises(Refused, match="fewer than the 3 slaves"):
        again(layout, dealt(layout, names(0)), names(0, 1, 2))


def test_a_small_slave_gets_the_smallest_block_that_has_room_there() -> None:
    """Though it is fuller with it than the others."""
    layout = layout_of([5000, 10, 40, 4000])
    before = dealt(layout, names(0))
    memory = shard_bytes_needed([10], CHUNK, SLOTS, PINS)
    after = redeal(layout, before, [(SlaveId("s0"), GIB), (SlaveId("s1"), memory)], SLOTS, PINS, CHUNK)
    assert loads(layout, after) == [9040, 10]
    with pytest.raises(Refused, match=f"slave s1 states {memory - 1} bytes") as refused:
        redeal(layout, before, [(SlaveId("s0"), GIB), (SlaveId("s1"), memory - 1)], SLOTS, PINS, CHUNK)
    assert refused.value.code is RefusalCode.MEMORY
