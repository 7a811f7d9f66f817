"""Chunks and batches: the same bytes for the same range everywhere, and every leased token trained on once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.errors import ConfigError, RemoteProtocolError
from dips.core.messages import DataMode, DataRange
from dips.trainer.corpus import SEPARATOR, Document, all_ranges
from dips.trainer.data import MIN_CHUNKS, ChunkedText, LeasedBatches, make_batch
from dips.trainer.model import IGNORED_TARGET

CHUNK = 64


def documents(n: int = 30, seed: int = 0) -> list[Document]:
    random = np.random.default_rng(seed)
    return [Document(f"0/{i}", bytes(random.integers(1, 256, 200 + 17 * i, dtype=np.uint8))) for i in range(n)]


def text(seed: int = 0, chunk_tokens: int = CHUNK, docs: Sequence[Document] | None = None) -> ChunkedText:
    return ChunkedText(docs if docs is not None else documents(), seed, chunk_tokens)


def whole(chunk: int, pass_index: int = 0) -> DataRange:
    return DataRange(1, pass_index, chunk, 0, CHUNK)


def chunks_of_pass(source: ChunkedText, pass_index: int) -> list[bytes]:
    n_chunks = source.plan.total_tokens // CHUNK
    return [source.tokens_of(whole(chunk, pass_index))[:-1].tobytes() for chunk in range(n_chunks)]


def test_the_plan_counts_whole_chunks() -> None:
    plan = text().plan
    n_bytes = sum(len(d.text) for d in documents()) + 29
    assert (plan.mode, plan.chunk_tokens) == (DataMode.LEASED, CHUNK)
    assert plan.total_tokens == (n_bytes - 1) // CHUNK * CHUNK


@pytest.mark.parametrize(
    "other",
    [
        text(seed=1),
        text(chunk_tokens=CHUNK * 2),
        text(docs=documents(seed=1)),
        text(docs=documents()[:-1]),
        text(docs=[Document("9" + d.key, d.text) for d in documents()]),
    ],
    ids=["seed", "cut", "text", "files", "names"],
)
def test_the_digest_tells_what_would_change_a_range(other: ChunkedText) -> None:
    assert other.plan.corpus_digest != text().plan.corpus_digest


def test_a_pass_holds_the_text_and_the_next_one_holds_it_in_another_order() -> None:
    source = text()
    first, second = chunks_of_pass(source, 0), chunks_of_pass(source, 1)
    assert first != second
    joined = SEPARATOR.join(d.text for d in documents())
    bytes_of = [Counter(b"".join(chunks)) for chunks in (first, second)]
    for found in bytes_of:
        # All but the rest at the end that is no whole chunk.
        assert sum((Counter(joined) - found).values()) <= CHUNK
        assert not found - Counter(joined)


def test_chunks_that_follow_one_another_are_not_neighbours_in_the_text() -> None:
    chunks, known = chunks_of_pass(text(), 0), SEPARATOR.join(d.text for d in documents())
    neighbours = sum(a + b in known for a, b in pairwise(chunks))
    assert neighbours < len(chunks) / 10


def test_a_range_comes_with_the_byte_after_it() -> None:
    source = text()
    whole_chunk = source.tokens_of(whole(3))
    part = source.tokens_of(DataRange(1, 0, 3, 10, 30))
    assert len(part) == 21
    assert np.array_equal(part, whole_chunk[10:31])


@pytest.mark.parametrize(
    "bad",
    [(0, 10_000, 0, 10), (0, 0, 0, CHUNK + 1), (0, 0, 10, 10), (-1, 0, 0, 10), (0, -1, 0, 10), (0, 0, -1, 10)],
)
def test_a_range_that_the_plan_does_not_have_is_the_peers_error(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="but the plan has"):
        text().tokens_of(DataRange(1, *bad))


def test_too_little_text_names_the_remedy() -> None:
    enough = [Document("0/a", b"x" * (MIN_CHUNKS * CHUNK + 1))]
    assert text(docs=enough).plan.total_tokens == MIN_CHUNKS * CHUNK
    with pytest.raises(ConfigError, match="give more text, or lower chunk_tokens"):
        text(docs=[Document("0/a", b"x" * MIN_CHUNKS * CHUNK)])


def test_old_passes_can_still_be_read() -> None:
    source = text()
    first = source.tokens_of(whole(7, 0)).tobytes()
    for pass_index in (1, 2, 3):
        source.tokens_of(whole(0, pass_index))
    assert source.tokens_of(whole(7, 0)).tobytes() == first


def test_inputs_and_targets_are_the_text_shifted_by_one() -> None:
    source = text()
    batch = make_batch(source, [whole(2), whole(5)])
    for row, chunk in enumerate((2, 5)):
        tokens = source.tokens_of(whole(chunk))
        assert batch.inputs[row].tolist() == tokens[:-1].tolist()
        assert batch.targets[row].tolist() == tokens[1:].tolist()
    assert batch.tokens == 2 * CHUNK


def test_a_shorter_row_is_filled_up_and_a_batch_of_nothing_is_an_error() -> None:
    batch = make_batch(text(), [whole(2), DataRange(1, 0, 5, 0, 10)])
    assert batch.targets[1, 10:].tolist() == [IGNORED_TARGET] * (CHUNK - 10)
    assert int((batch.targets != IGNORED_TARGET).sum()) == batch.tokens == CHUNK + 10
    with pytest.raises(ValueError, match="at least one row"):
        LeasedBatches(text(), 4, 16).next()


def test_a_batch_mixes_chunks() -> None:
    batches = LeasedBatches(text(), batch_size=4, sequence_tokens=16)
    batches.add(whole(chunk) for chunk in range(8))
    for _ in range(8 * CHUNK // (4 * 16)):
        assert len({part.chunk for part in batches.next().ranges}) == 4
    assert batches.held_tokens == 0


RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, CHUNK - 1), st.integers(1, CHUNK)).map(
        lambda t: DataRange(t[0] + 1, 0, t[0], t[1], min(CHUNK, t[1] + t[2]))
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda part: part.chunk,
)
SOURCE = text()


@settings(max_examples=60)
@given(RANGES, st.integers(1, 5), st.integers(1, 40), st.integers(0, 6))
def test_every_leased_token_is_in_exactly_one_batch(
    leased: list[DataRange], batch_size: int, sequence_tokens: int, later: int
) -> None:
    batches = LeasedBatches(SOURCE, batch_size, sequence_tokens)
    batches.add(leased[later:])
    seen: Counter[tuple[int, int, int]] = Counter()
    late = leased[:later]
    while batches.held_tokens or late:
        if not batches.held_tokens or len(seen) > 30:
            batches.add(late)
            late = []
        batch = batches.next()
        assert len(batch.ranges) <= batch_size
        assert all(0 < part.tokens <= sequence_tokens for part in batch.ranges)
        assert int((batch.targets != IGNORED_TARGET).sum()) == batch.tokens
        seen.update((p.lease_id, p.chunk, t) for p in batch.ranges for t in range(p.begin_tokens, p.end_tokens))
    expected = {(p.lease_id, p.chunk, t) for p in leased for t in range(p.begin_tokens, p.end_tokens)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_training_alone_takes_every_chunk_of_every_pass_once() -> None:
    plan = text().plan
    n_chunks = plan.total_tokens // CHUNK
    source = all_ranges(plan)
    taken = [next(source) for _ in range(2 * n_chunks)]
    assert {(part.pass_index, part.chunk) for part in taken} == {(p, c) for p in (0, 1) for c in range(n_chunks)}
    assert sum(part.tokens for part in taken) == 2 * plan.total_tokens


def taken(batches: LeasedBatches, n: int) -> list[tuple[DataRange, ...]]:
    return [batches.next().ranges for _ in range(n)]


def test_batches_come_out_as_they_would_have() -> None:
    one, two = LeasedBatches(text(), 2, 16), LeasedBatches(text(), 2, 16)
    one.add(whole(chunk) for chunk in (5, 3, 9))
    taken(one, 3)
    two.load_state_dict(one.state_dict())
    held = sorted(one.held)
    two.resume(held)
    assert taken(two, 3) == taken(one, 3)


def test_only_what_is_still_lent_is_trained_on_and_what_was_unknown_comes_last() -> None:
    batches = LeasedBatches(text(), 1, CHUNK)
    batches.add([whole(5), whole(3), whole(9)])
    batches.resume([whole(3), whole(7), whole(9)])
    assert taken(batches, 3) == [(whole(3),), (whole(9),), (whole(7),)]
    batches.add([whole(1), whole(2)])
    batches.keep_only([whole(2)])
    assert batches.held == (whole(2),)
