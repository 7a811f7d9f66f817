"""An exchange without messages: what every rank packs for the others is what these unpack, in bounded buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.pieces import Held, clusters, layout_of, whole

from dips.core.layout import Layout
from dips.core.share import Share
from dips.worker.parallel.exchange import _Coming, _copy, _Moves, _Rows
from dips.worker.parallel.ownership import Copies, Piece, copies_to_holders, copies_to_owners, shares_of_ranks

F32 = NDArray[np.float32]
Copier = Callable[[int, _Rows, F32], None]
UNIT_BYTES = 4 * 5


def box(layout: Layout, flat: F32, piece: Piece) -> F32:
    """The piece's values, of one dimension at least."""
    span = layout.spans[piece.parameter]
    full = flat[span.start_elem : span.stop_elem].reshape(span.parameter.shape or (1,))
    bounds = zip(piece.starts or (0,), piece.sizes or (1,), strict=True)
    return full[tuple(slice(start, start + size) for start, size in bounds)].copy()


def owned(share: Share, flat: F32) -> F32:
    return np.concatenate([np.empty(0, np.float32), *(flat[start:stop] for start, stop in share.runs())])


def exchanged(moves: Sequence[_Moves], pack: Copier, unpack: Copier) -> None:
    """All rounds of all ranks, each bucket moved as all_to_all moves it."""
    n_ranks = len(moves)
    assert len({each.n_rounds for each in moves}) == 1
    for number in range(moves[0].n_rounds):
        sent: list[list[F32]] = []
        for rank, each in enumerate(moves):
            bucket = np.full(sum(each.elems_sent[number]), np.nan, np.float32)
            pack(rank, each.sent[number], bucket)
            sent.append(np.split(bucket, np.cumsum(each.elems_sent[number])[:-1]))
        for rank, each in enumerate(moves):
            received = [sent[other][rank] for other in range(n_ranks)]
            assert [part.size for part in received] == each.elems_received[number]
            unpack(rank, each.received[number], np.concatenate(received))


def moves_of(layout: Layout, held: Held, shares: Sequence[Share], copies: Copies, bucket_elems: int) -> list[_Moves]:
    """Of every rank. Raises AssertionError for a bucket that is too large."""
    moves = [
        _Moves(copies, layout, held[rank], shares[rank], rank, len(held), bucket_elems) for rank in range(len(held))
    ]
    for each in moves:
        assert each.most_sent <= bucket_elems + 2 * len(held)
        assert each.most_received <= bucket_elems + 2 * len(held)
    return moves


@settings(max_examples=60)
@given(clusters(), st.integers(2, 60))
def test_shares_are_collected_and_spread_to_the_bit(cluster: tuple[Layout, Held], bucket_elems: int) -> None:
    layout, held = cluster
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    now = np.arange(layout.n_elems, dtype=np.float32)
    memory = [[box(layout, now, piece) for piece in pieces] for pieces in held]
    vectors = [np.full(share.n_elems, np.nan, np.float32) for share in shares]

    to_owners = moves_of(layout, held, shares, copies_to_owners(layout, held, shares), bucket_elems)
    exchanged(
        to_owners,
        lambda rank, rows, bucket: _copy(rows.in_bucket(bucket), rows.in_tensors(memory[rank])),
        lambda rank, rows, bucket: _copy(rows.in_share(vectors[rank]), rows.in_bucket(bucket)),
    )
    for rank, each in enumerate(to_owners):
        for rows in each.kept:
            _copy(rows.in_share(vectors[rank]), rows.in_tensors(memory[rank]))
        assert vectors[rank].tobytes() == owned(shares[rank], now).tobytes()

    then = now + 1000
    vectors = [owned(share, then) for share in shares]
    to_holders = moves_of(layout, held, shares, copies_to_holders(layout, held, shares), bucket_elems)
    exchanged(
        to_holders,
        lambda rank, rows, bucket: _copy(rows.in_bucket(bucket), rows.in_share(vectors[rank])),
        lambda rank, rows, bucket: _copy(rows.in_tensors(memory[rank]), rows.in_bucket(bucket)),
    )
    for rank, each in enumerate(to_holders):
        for rows in each.kept:
            _copy(rows.in_tensors(memory[rank]), rows.in_share(vectors[rank]))
        for piece, got in zip(held[rank], memory[rank], strict=True):
            assert got.tobytes() == box(layout, then, piece).tobytes()


def test_a_rank_alone_sends_nothing() -> None:
    layout = layout_of((3, 4), (5,))
    held: Held = [[whole(layout, 0), whole(layout, 1)]]
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    (moves,) = moves_of(layout, held, shares, copies_to_owners(layout, held, shares), 8)
    assert (moves.n_rounds, moves.bytes_sent, len(moves.kept)) == (0, 0, 1)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 5, [0]), (0, 10, [0]), (0, 11, [2]), (25, 30, [2]), (12, 100, [3]), (90, 100, [3])],
)
def test_copies_from_a_device_are_waited_for_as_far_as_they_reach(start: int, stop: int, expected: list[int]) -> None:
    """Groups that begin at 0, 20, 10 and 30: one that begins at 10 may come after the one at 20."""
    waited: list[int] = []
    coming = _Coming([0, 20, 10, 30], [[lambda i=i: waited.append(i)] for i in range(4)])  # type: ignore[misc]
    coming.wait(start, stop)
    assert waited == expected
