"""Placement: every block has one slave, loads are even, a model that does not fit is refused; and a placed model is
dealt again with few blocks moved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire_values import layouts

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, SlaveId
from dips.core.layout import Layout, Parameter
from dips.core.messages import BlockGram, Measured
from dips.core.net.codec_protobuf import encode
from dips.core.placement import Placement, check_measured, memory_bytes_needed, place, redeal, shard_bytes_needed

PLENTY = 1 << 40
CHUNK_BYTES = 1024


def model(*sizes: int, block_elems: int = 100) -> Layout:
    rows = (Parameter(f"layers.{i}.w", (size,), "float32", f"layers.{i}") for i, size in enumerate(sizes))
    return Layout(tuple(rows), block_elems)


def slaves(n: int, memory_bytes: int = PLENTY) -> list[tuple[SlaveId, int]]:
    return [(SlaveId(f"s-{i}"), memory_bytes) for i in range(n)]


def loads(placement: Placement, layout: Layout) -> list[int]:
    return [sum(b.n_elems for b in placement.blocks_of(slave, layout)) for slave in placement.slaves]


@given(layout=layouts, n_slaves=st.integers(1, 5))
def test_every_block_is_on_exactly_one_slave_and_loads_differ_by_at_most_one_block(
    layout: Layout, n_slaves: int
) -> None:
    placement = place(layout, slaves(n_slaves), staging_slots=2, pins=1, chunk_bytes=CHUNK_BYTES)
    held = [block for slave in placement.slaves for block in placement.blocks_of(slave, layout)]
    assert sorted(block.block_id for block in held) == list(range(len(layout.blocks)))
    largest = max(block.n_elems for block in layout.blocks)
    assert max(loads(placement, layout)) - min(loads(placement, layout)) <= largest


def test_a_slave_with_twice_the_memory_gets_twice_the_blocks() -> None:
    layout = model(*[100] * 30)
    memory = [(SlaveId("small"), 10**6), (SlaveId("wide"), 2 * 10**6)]
    placement = place(layout, memory, 1, 0, CHUNK_BYTES)
    assert dict(zip(placement.slaves, loads(placement, layout), strict=True)) == {"small": 1000, "wide": 2000}


def test_the_order_in_which_slaves_came_does_not_matter() -> None:
    layout = model(250, 90, 310)
    assert place(layout, slaves(3), 1, 0, CHUNK_BYTES) == place(layout, slaves(3)[::-1], 1, 0, CHUNK_BYTES)


def test_the_hash_is_the_same_on_every_machine_and_release() -> None:
    placement = place(model(250, 90), slaves(2), 1, 0, CHUNK_BYTES)
    assert placement.slave_of_block == (0, 1, 1, 0)
    assert placement.placement_hash.hex() == "388bd7211915f0187effda2a57faf9738a5c3acdd74eeb22395c625dd4cb8424"


def test_another_slave_or_another_deal_is_another_hash() -> None:
    names = (SlaveId("a"), SlaveId("b"))
    placements = [
        Placement(names, (0, 1)),
        Placement(names, (1, 0)),
        Placement(names[::-1], (0, 1)),
        Placement((*names, SlaveId("c")), (0, 1)),
    ]
    assert len({placement.placement_hash for placement in placements}) == 4


def test_memory_is_20_bytes_an_element_and_4_for_each_slot_and_pin() -> None:
    """As docs/capacity.md says to operators; what is kept in files counts for them alone."""
    assert memory_bytes_needed(1000, staging_slots=0, pins=0) == 20_000
    assert memory_bytes_needed(1000, staging_slots=4, pins=6) == 60_000
    needed = shard_bytes_needed([100], CHUNK_BYTES, staging_slots=2, pins=1)
    assert loads(place(model(100, 100), slaves(2, needed), 2, 1, CHUNK_BYTES), model(100, 100)) == [100, 100]


def test_a_model_that_is_too_big_is_refused_with_the_sum() -> None:
    needed = shard_bytes_needed([100], CHUNK_BYTES, staging_slots=2, pins=1)
    with pytest.raises(Refused) as caught:
        place(model(100, 100), slaves(2, needed - 1), 2, 1, CHUNK_BYTES)
    assert caught.value.code is RefusalCode.MEMORY
    assert all(f"{n_bytes} bytes" in caught.value.sentence for n_bytes in (2 * needed, 2 * needed - 2))


def test_slaves_without_memory_are_refused() -> None:
    with pytest.raises(Refused) as caught:
        place(model(1), slaves(2, 0), 1, 0, CHUNK_BYTES)
    assert caught.value.code is RefusalCode.MEMORY


def test_a_model_whose_gram_matrices_fit_into_no_message_is_refused_before_any_round() -> None:
    placement = Placement((SlaveId("a"), SlaveId("b")), (0,) * 100 + (1,) * 40)
    clusters = 30
    grams = tuple(
        BlockGram(block, (1.0,) * (clusters * (clusters + 1) // 2), (2**63,) * clusters) for block in range(100)
    )
    largest = len(encode(Measured(RoundId(2**63, 2**63), grams)))
    with pytest.raises(Refused, match="lower max_clusters") as caught:
        check_measured(placement, clusters, largest - 1)
    assert caught.value.code is RefusalCode.CONFIG
    check_measured(placement, clusters, int(1.1 * largest))


# ---- a placed model is dealt again ----

SLOTS, PINS = 4, 2


def layout_of(sizes: list[int]) -> Layout:
    """A block for each."""
    return model(*sizes, block_elems=1 << 20)


def names(*indices: int) -> list[SlaveId]:
    return [SlaveId(f"s{i}") for i in indices]


def dealt(layout: Layout, slaves: list[SlaveId], memory: int = PLENTY) -> Placement:
    return place(layout, [(slave, memory) for slave in slaves], SLOTS, PINS, CHUNK_BYTES)


def again(layout: Layout, before: Placement, slaves: list[SlaveId], memory: int = PLENTY) -> Placement:
    return redeal(layout, before, [(slave, memory) for slave in slaves], SLOTS, PINS, CHUNK_BYTES)


def moved(before: Placement, after: Placement) -> int:
    pairs = zip(before.slave_of_block, after.slave_of_block, strict=True)
    return sum(before.slaves[old] != after.slaves[new] for old, new in pairs)


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
    assert all(loads(after, layout)), "every slave holds something"
    assert after == again(layout, before, names(*new)), "the same deal in every life of the master"


def test_one_more_slave_takes_its_share_and_nothing_else_moves() -> None:
    layout = layout_of([100] * 40)
    before = dealt(layout, names(0, 1))
    after = again(layout, before, names(0, 1, 2))
    assert sorted(loads(after, layout)) == [1300, 1300, 1400]
    assert moved(before, after) == 13


def test_a_removed_slave_gives_its_blocks_away_and_the_others_keep_theirs() -> None:
    layout = layout_of([100] * 40)
    before = dealt(layout, names(0, 1, 2, 3))
    after = again(layout, before, names(0, 2, 3))
    assert moved(before, after) == 10
    assert max(loads(after, layout)) - min(loads(after, layout)) <= 100


def test_shares_follow_memory() -> None:
    layout = layout_of([100] * 40)
    before = dealt(layout, names(0))
    memory = [(SlaveId("s0"), PLENTY), (SlaveId("s1"), 3 * PLENTY)]
    after = redeal(layout, before, memory, SLOTS, PINS, CHUNK_BYTES)
    assert loads(after, layout) == [1000, 3000]


def test_what_finds_no_room_is_refused() -> None:
    layout = layout_of([100] * 10)
    before = dealt(layout, names(0, 1))
    room = 6 * shard_bytes_needed([100], CHUNK_BYTES, SLOTS, PINS)
    with pytest.raises(Refused, match="finds no room on the 1 slaves") as refused:
        again(layout, before, names(0), room)
    assert refused.value.code is RefusalCode.MEMORY
    assert len(again(layout, before, names(0, 1), room).slaves) == 2


def test_a_slave_that_states_less_memory_than_before_gives_blocks_away() -> None:
    layout = layout_of([100] * 10)
    before = dealt(layout, names(0, 1))
    one = shard_bytes_needed([100], CHUNK_BYTES, SLOTS, PINS)
    after = redeal(layout, before, [(SlaveId("s0"), 2 * one), (SlaveId("s1"), PLENTY)], SLOTS, PINS, CHUNK_BYTES)
    assert loads(after, layout)[0] <= 200


def test_more_slaves_than_blocks_are_refused() -> None:
    layout = layout_of([10, 10])
    with pytest.raises(Refused, match="fewer than the 3 slaves"):
        again(layout, dealt(layout, names(0)), names(0, 1, 2))


def test_a_small_slave_gets_the_smallest_block_that_has_room_there() -> None:
    """Though it is fuller with it than the others."""
    layout = layout_of([5000, 10, 40, 4000])
    before = dealt(layout, names(0))
    memory = shard_bytes_needed([10], CHUNK_BYTES, SLOTS, PINS)
    after = redeal(layout, before, [(SlaveId("s0"), PLENTY), (SlaveId("s1"), memory)], SLOTS, PINS, CHUNK_BYTES)
    assert loads(after, layout) == [9040, 10]
    with pytest.raises(Refused, match=f"slave s1 states {memory - 1} bytes") as refused:
        redeal(layout, before, [(SlaveId("s0"), PLENTY), (SlaveId("s1"), memory - 1)], SLOTS, PINS, CHUNK_BYTES)
    assert refused.value.code is RefusalCode.MEMORY
