"""Which chunks are accepted, and when a push is complete."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slave_wire import LAYOUT, push_id, put_of

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId
from dips.core.layout import Block, Chunk, chunks_of, digest_of_array
from dips.core.net.data_header import MAX_MISSING, DataHeader, MissingChunk
from dips.slave.data_port import rows_of_arrays
from dips.slave.state.staging import ShardMap, Slot, StagingTable

CHUNK_BYTES = 1024
BLOCKS = [block for block in LAYOUT.blocks if block.block_id % 2 == 0]
VALUES = np.random.default_rng(1).standard_normal(sum(b.n_elems for b in BLOCKS)).astype(np.float32)
DATA = VALUES.tobytes()
CHUNKS = chunks_of(BLOCKS, CHUNK_BYTES)
A, B = push_id("a"), push_id("b")


def payload(chunk: Chunk) -> bytes:
    start = sum(b.n_bytes for b in BLOCKS if b.block_id < chunk.block_id) + chunk.offset_bytes
    return DATA[start : start + chunk.length_bytes]


def put(chunk: Chunk, push: PushId = A, attempt: int = 1) -> DataHeader:
    return put_of(chunk, push, payload(chunk), attempt)


def arrays(shard: ShardMap) -> StagingTable:
    return StagingTable(shard, rows_of_arrays(3, shard.n_chunks))


@pytest.fixture(params=[StagingTable, arrays])
def table(request: pytest.FixtureRequest) -> StagingTable:
    table: StagingTable = request.param(ShardMap(BLOCKS, CHUNK_BYTES))
    table.hold([Slot(A, 1, 0)])
    return table


def check(table: StagingTable) -> None:
    """No slot holds two pushes (I9 of docs/architecture.md)."""
    numbers = [staging.slot.number for staging in table.stagings()]
    assert len(set(numbers)) == len(numbers)


def land(table: StagingTable, header: DataHeader) -> bool:
    staging, landing, landed = table.admit(header, header.length_bytes)
    check(table)
    return False if landed else table.land(staging, landing, header.checksum)


def refusal(table: StagingTable, header: DataHeader, payload_bytes: int | None = None) -> Refused:
    before = table.progress()
    with pytest.raises(Refused) as caught:
        table.admit(header, header.length_bytes if payload_bytes is None else payload_bytes)
    assert table.progress() == before
    return caught.value


@pytest.mark.parametrize("make", [StagingTable, arrays])
@given(data=st.data())
def test_any_order_and_any_duplicates_end_in_the_same_digest(
    make: Callable[[ShardMap], StagingTable], data: st.DataObject
) -> None:
    table = make(ShardMap(BLOCKS, CHUNK_BYTES))
    (staging,) = table.hold([Slot(A, 1, 0)])
    order = data.draw(st.permutations(range(len(CHUNKS))))
    completed = 0
    for index in order:
        for _ in range(data.draw(st.integers(1, 2))):
            completed += land(table, put(CHUNKS[index]))
        repeat = data.draw(st.integers(0, len(order) - 1))
        if staging.columns.landed[repeat]:
            completed += land(table, put(CHUNKS[repeat]))
    assert completed == 1
    assert staging.complete
    assert staging.digest() == digest_of_array(VALUES, BLOCKS, CHUNK_BYTES)
    assert staging.landed_bytes == len(DATA)
    assert table.missing(staging) == ()


@given(st.sets(st.integers(0, len(CHUNKS) - 1)), st.integers(0, 2**32 - 1) | st.integers(0, 12), st.data())
def test_what_is_missing_is_named_from_any_place_on(landed: set[int], block: int, data: st.DataObject) -> None:
    """Also from one that no block has: the place comes over a socket."""
    offset_bytes = data.draw(st.integers(0, 2000) | st.integers(0, 2**64 - 1))
    table = StagingTable(ShardMap(BLOCKS, CHUNK_BYTES))
    (staging,) = table.hold([Slot(A, 1, 0)])
    for index in landed:
        land(table, put(CHUNKS[index]))
    left = [MissingChunk(c.block_id, c.offset_bytes) for i, c in enumerate(CHUNKS) if i not in landed]
    behind = [item for item in left if (item.block, item.offset_bytes) >= (block, offset_bytes)]
    assert list(table.missing(staging, block, offset_bytes)) == behind


def test_one_answer_names_at_most_max_missing_chunks() -> None:
    big = [Block(0, "l", 0, 256 * (MAX_MISSING + 5))]
    table = StagingTable(ShardMap(big, CHUNK_BYTES))
    (staging,) = table.hold([Slot(A, 1, 0)])
    assert len(table.missing(staging)) == MAX_MISSING


def test_an_early_chunk_is_invited_again_but_a_replaced_attempt_is_not(table: StagingTable) -> None:
    assert refusal(table, put(CHUNKS[0], B)).retry_after_s > 0
    table.hold([Slot(A, 2, 0)])
    late = refusal(table, put(CHUNKS[0], attempt=1))
    assert late.code is RefusalCode.UNKNOWN_PUSH
    assert late.retry_after_s == 0
    assert "replaced by 2" in late.sentence


@pytest.mark.parametrize(("slot", "opening"), [(0, 1), (1, 0)])
def test_another_opening_or_slot_begins_with_nothing(table: StagingTable, slot: int, opening: int) -> None:
    land(table, put(CHUNKS[0]))
    (staging,) = table.hold([Slot(A, 1, slot, opening)])
    assert staging.n_landed == 0
    check(table)


def test_what_is_not_held_any_longer_is_unknown_and_the_rest_keeps_its_chunks(table: StagingTable) -> None:
    land(table, put(CHUNKS[0]))
    (other,) = table.hold([Slot(A, 1, 0), Slot(B, 1, 1)])
    assert (other.slot.push, other.n_landed) == (B, 0)
    assert not land(table, put(CHUNKS[1]))
    assert table.hold([Slot(A, 1, 0)]) == []
    assert [p.landed_bytes for p in table.progress()] == [1600]
    assert refusal(table, put(CHUNKS[0], B)).code is RefusalCode.UNKNOWN_PUSH
    assert table.hold([]) == []
    assert table.progress() == ()


def test_a_slave_without_blocks_has_every_push_at_once() -> None:
    (staging,) = StagingTable(ShardMap([], CHUNK_BYTES)).hold([Slot(A, 1, 0)])
    assert staging.complete
    assert staging.digest() == digest_of_array(np.empty(0, np.float32), [], CHUNK_BYTES)


def test_progress_is_in_push_order(table: StagingTable) -> None:
    table.hold([Slot(push_id("b"), 4, 2), Slot(A, 1, 0)])
    land(table, put(CHUNKS[0]))
    assert [(p.push, p.attempt, p.landed_bytes) for p in table.progress()] == [(A, 1, 1024), (B, 4, 0)]
