"""Ownership of a cluster's ranks: every element has one owner, shares are even, and copies move each element once; what
every rank packs for the others is what these unpack, in bounded buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.pieces import (
    Held,
    clusters,
    ddp,
    fsdp,
    layout_of,
    pipeline,
    tensor_parallel,
    transformer,
    twice,
    whole,
)

from dips.core.layout import Layout, Share
from dips.worker.parallel.exchange import _Coming, _copy, _Moves, _Rows
from dips.worker.parallel.ownership import Copies, Piece, copies_to_holders, copies_to_owners, shares_of_ranks

UNIT_BYTES = 4 * 5


def elements(layout: Layout, copies: Copies, row: int) -> list[int]:
    span = layout.spans[int(copies.parameters[row])]
    shape = span.parameter.shape or (1,)
    assert (copies.sizes[row, len(shape) :] == 1).all()
    assert (copies.starts[row, len(shape) :] == 0).all()
    box = zip(copies.starts[row, : len(shape)].tolist(), copies.sizes[row, : len(shape)].tolist(), strict=True)
    indices = product(*(range(start, start + size) for start, size in box))
    return [span.start_elem + int(np.ravel_multi_index(index, shape)) for index in indices]


def elements_of(layout: Layout, piece: Piece) -> list[int]:
    span = layout.spans[piece.parameter]
    shape = span.parameter.shape or (1,)
    box = zip(piece.starts or (0,), piece.sizes or (1,), strict=True)
    indices = product(*(range(start, start + size) for start, size in box))
    return [span.start_elem + int(np.ravel_multi_index(index, shape)) for index in indices]


def owner_of(layout: Layout, shares: Sequence[Share]) -> np.ndarray:
    """Each element's owner. Raises where one has none or two."""
    owner = np.full(layout.n_elems, -1)
    for rank, share in enumerate(shares):
        for start, stop in share.runs():
            assert (owner[start:stop] == -1).all()
            owner[start:stop] = rank
    assert (owner >= 0).all()
    return owner


def greatest(layout: Layout, n_ranks: int) -> float:
    """What a share may have at most: 1.1 of the mean, and a block; rounded up, which counts for tiny tensors only."""
    return 1.1 * layout.n_elems / n_ranks + max(block.n_elems for block in layout.blocks) + 1


@settings(max_examples=60)
@given(clusters())
def test_every_element_has_one_owner_and_no_share_is_large(cluster: tuple[Layout, Held]) -> None:
    layout, held = cluster
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    owner_of(layout, shares)
    for share in shares:
        assert share.n_elems <= greatest(layout, len(held))
        share.chunks(layout, UNIT_BYTES)  # raises where a chunk is in it only in part
        assert (share.starts[1:] > share.stops[:-1]).all()


@settings(max_examples=60)
@given(clusters())
def test_each_owned_element_comes_once_from_a_holder(cluster: tuple[Layout, Held]) -> None:
    layout, held = cluster
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    owner, copies = owner_of(layout, shares), copies_to_owners(layout, held, shares)
    holders: list[set[int]] = [set() for _ in range(layout.n_elems)]
    for rank, pieces in enumerate(held):
        for piece in pieces:
            for elem in elements_of(layout, piece):
                holders[elem].add(rank)
    came = np.zeros(layout.n_elems, int)
    for row in range(len(copies)):
        moved = elements(layout, copies, row)
        source, target = int(copies.sources[row]), int(copies.targets[row])
        assert len(moved) == copies.n_elems[row]
        assert set(moved) <= set(elements_of(layout, held[source][int(copies.pieces[row])]))
        assert (owner[moved] == target).all()
        assert any(start <= min(moved) and max(moved) < stop for start, stop in shares[target].runs())
        came[moved] += 1
        if layout.spans[int(copies.parameters[row])].parameter.averaged:
            assert all(source == min(holders[elem]) for elem in moved)
        elif source != target:
            assert all(target not in holders[elem] for elem in moved)
    assert (came == 1).all()


def moved_elems(copies: Copies) -> int:
    return int(copies.n_elems[copies.sources != copies.targets].sum())


KINDS = {
    "one": ddp(transformer(), 1),
    "ddp4": ddp(transformer(), 4),
    "fsdp4": fsdp(transformer(), 4),
    "hsdp2x2": twice(fsdp(transformer(), 2)),
    "tp4": tensor_parallel(transformer(), 4),
    "dp2xtp2": twice(tensor_parallel(transformer(), 2)),
    "pp2xdp2": pipeline(transformer(), 2, ddp(transformer(), 2)),
    "pp2xtp2": pipeline(transformer(), 2, tensor_parallel(transformer(), 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_within_a_tenth_and_few_runs(kind: str) -> None:
    layout, held = transformer(), KINDS[kind]
    shares = shares_of_ranks(layout, held, 2048)
    owner_of(layout, shares)
    assert max(share.n_elems for share in shares) <= 1.1 * layout.n_elems / len(held) + 512
    assert sum(share.starts.size for share in shares) <= len(held) * len(layout.spans) + 1


@pytest.mark.parametrize(
    ("kind", "most"), [("one", 0), ("ddp4", 0), ("fsdp4", 0.05), ("hsdp2x2", 0.05), ("pp2xdp2", 0.05)]
)
def test_what_a_rank_holds_it_owns(kind: str, most: float) -> None:
    layout, held = transformer(), KINDS[kind]
    copies = copies_to_owners(layout, held, shares_of_ranks(layout, held, 2048))
    assert moved_elems(copies) <= most * layout.n_elems


@pytest.mark.parametrize("kind", ["dp2xtp2", "pp2xtp2", "hsdp2x2"])
def test_holders_send_as_much_as_each_other(kind: str) -> None:
    layout, held = transformer(), KINDS[kind]
    copies = copies_to_owners(layout, held, shares_of_ranks(layout, held, 2048))
    away = copies.sources != copies.targets
    sent = np.bincount(copies.sources[away], copies.n_elems[away], minlength=len(held))
    assert sent.max() <= 1.5 * sent.mean() + 4096


def test_a_rank_may_hold_nothing_and_a_model_may_be_smaller_than_its_ranks() -> None:
    layout = layout_of((3, 8), (1,), (100,))
    held = fsdp(layout, 4)
    assert [math.prod(piece.sizes) for piece in held[3]] == [0, 0, 25]
    shares = shares_of_ranks(layout, [*held, []], UNIT_BYTES)
    owner_of(layout, shares)
    assert shares[4].n_elems > 0  # the others have no room above 1.1 of the mean
    layout = layout_of((2,), block_elems=1)
    shares = shares_of_ranks(layout, ddp(layout, 5), UNIT_BYTES)
    assert sorted(share.n_elems for share in shares) == [0, 0, 0, 1, 1]
    owner_of(layout, shares)


def test_a_tensor_that_nobody_holds_is_named() -> None:
    layout = layout_of((4, 4), (6,))
    held: Held = [[whole(layout, 0)], [Piece(1, (0,), (5,))]]
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    owner_of(layout, shares)
    with pytest.raises(ValueError, match=r"no rank holds all of tensor 'layers\.0\.w1'"):
        copies_to_owners(layout, held, shares)


F32 = NDArray[np.float32]
Copier = Callable[[int, _Rows, F32], None]


def box(layout: Layout, flat: F32, piece: Piece) -> F32:
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
    copies = copies_to_holders(layout, held, shares)
    assert copies.n_elems.sum() == sum(math.prod(piece.sizes) for pieces in held for piece in pieces), "each comes once"
    to_holders = moves_of(layout, held, shares, copies, bucket_elems)
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
