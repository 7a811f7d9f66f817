"""Ownership of a cluster's ranks: every element has one owner, shares are even, and copies move each element once, in
bounded buckets. The exchange itself: test_rank_messages.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from support.pieces import Held, clusters, ddp, fsdp, layout_of, pipeline, tensor_parallel, transformer, twice, whole

from dips.core.layout import Layout, Share
from dips.worker.parallel.exchange import _Coming, _Moves
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


KINDS = {
    "one": ddp(transformer(), 1), "ddp4": ddp(transformer(), 4), "fsdp4": fsdp(transformer(), 4),
    "hsdp2x2": twice(fsdp(transformer(), 2)), "tp4": tensor_parallel(transformer(), 4),
    "dp2xtp2": twice(tensor_parallel(transformer(), 2)), "pp2xdp2": pipeline(transformer(), 2, ddp(transformer(), 2)),
    "pp2xtp2": pipeline(transformer(), 2, tensor_parallel(transformer(), 2)),
}  # fmt: skip


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
    assert copies.n_elems[copies.sources != copies.targets].sum() <= most * layout.n_elems


@pytest.mark.parametrize("kind", ["dp2xtp2", "pp2xtp2", "hsdp2x2"])
def test_holders_send_as_much_as_each_other(kind: str) -> None:
    layout, held = transformer(), KINDS[kind]
    copies = copies_to_owners(layout, held, shares_of_ranks(layout, held, 2048))
    away = copies.sources != copies.targets
    sent = np.bincount(copies.sources[away], copies.n_elems[away], minlength=len(held))
    assert sent.max() <= 1.5 * sent.mean() + 4096


TINY = layout_of((3, 8), (5,), (40,))


@pytest.mark.parametrize(
    ("layout", "held", "bucket_elems"),
    [(transformer(), KINDS["ddp4"], 5000), (transformer(), KINDS["pp2xtp2"], 5000), (TINY, fsdp(TINY, 3), 2)],
)
def test_what_ranks_pack_for_others_is_in_bounded_buckets(layout: Layout, held: Held, bucket_elems: int) -> None:
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    for copies in (copies_to_owners(layout, held, shares), copies_to_holders(layout, held, shares)):
        for rank, share in enumerate(shares):
            moves = _Moves(copies, layout, held[rank], share, rank, len(held), bucket_elems)
            assert max(moves.most_sent, moves.most_received) <= bucket_elems + 2 * len(held)
    assert moves.n_rounds > 1


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
