"""A share of the flat vector: its places, its chunks, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core.layout import Layout, Parameter, Share, chunks_of
from dips.core.net.payloads import Places

LAYOUT = Layout((Parameter("a.w", (5, 7), "float32", "a"), Parameter("b.w", (40,), "float32", "b")), block_elems=16)
CHUNK_BYTES = 24
CHUNKS = chunks_of(LAYOUT.blocks, CHUNK_BYTES)


def span(chunk_index: int) -> tuple[int, int]:
    block, offset_bytes, length_bytes = CHUNKS[chunk_index]
    start = LAYOUT.blocks[block].start_elem + offset_bytes // 4
    return start, start + length_bytes // 4


@given(st.sets(st.integers(0, len(CHUNKS) - 1)))
def test_places_and_chunks_are_those_of_the_owned_elements(owned: set[int]) -> None:
    share = Share.of_runs(span(index) for index in sorted(owned))
    elems = [elem for index in sorted(owned) for elem in range(*span(index))]
    assert share.n_elems == len(elems)
    assert [elem for start, stop in share.runs() for elem in range(start, stop)] == elems
    places, many = list(range(len(elems))), np.array(elems, np.int64)
    assert [share.place_of(elem) for elem in elems] == places == share.places_of(many).tolist()
    assert share.places_of(many[::-1].reshape(1, -1)).tolist() == [places[::-1]]
    assert share.places_of(many[:0]).size == 0
    assert share.chunks(LAYOUT, CHUNK_BYTES) == [CHUNKS[index] for index in sorted(owned)]
    for elem in {-1, *range(LAYOUT.n_elems), LAYOUT.n_elems} - set(elems):
        assert not share.owns(elem, elem + 1)
        for look in (share.place_of, lambda one: share.places_of(np.array([*elems[:1], one]))):
            with pytest.raises(ValueError, match="not in this share"):
                look(elem)


def test_the_whole_model_is_one_run() -> None:
    share = Share.whole(LAYOUT)
    assert share.runs() == [(0, LAYOUT.n_elems)]
    assert share.chunks(LAYOUT, CHUNK_BYTES) == CHUNKS
    assert np.array_equal(share.places, [0])


@pytest.mark.parametrize("runs", [[(0, 4), (3, 8)], [(5, 5)], [(8, 9), (0, 1)]])
def test_runs_must_ascend_and_hold_something(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="empty, or overlaps"):
        Share.of_runs(runs)


def test_a_share_of_parts_of_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="whole chunks"):
        Share.of_runs([(0, 7)]).chunks(LAYOUT, CHUNK_BYTES)


@given(st.sets(st.integers(0, len(CHUNKS) - 1), min_size=1))
def test_compiled_loops_find_a_chunk_where_the_python_loop_does(owned: set[int]) -> None:
    share = Share.of_runs(span(index) for index in sorted(owned))
    places, chunks = Places(LAYOUT, share), [CHUNKS[index] for index in sorted(owned)]
    blocks, offsets = (np.array([getattr(c, name) for c in chunks]) for name in ("block_id", "offset_bytes"))
    assert places.first_bytes(blocks, offsets).tolist() == [places.bytes_at(chunk).start for chunk in chunks]
    assert sum(places.bytes_at(chunk).stop - places.bytes_at(chunk).start for chunk in chunks) == 4 * share.n_elems
