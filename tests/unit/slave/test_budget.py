"""What a slave notes beside the parameters stands within its memory_bytes, however many pushes there are."""

from __future__ import annotations

import itertools
import random

import pytest

from dips.core.layout import Layout, Parameter, chunks_of
from dips.core.math.outer_numpy import PIECE_ELEMS
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.placement import KEPT_PRODUCTS, table_bytes_needed
from dips.slave.landing import MOST_COMPANIONS, NEVER, KnownReceipts, Receipts, note_products, note_sums
from dips.slave.state.staging import Landing, ShardMap

CHUNK_BYTES = 2 * PIECE_ELEMS * 4
LAYOUT = Layout(
    tuple(
        Parameter(f"layers.{i}.weight", (n,), "float32", f"layers.{i}")
        for i, n in enumerate((5 * PIECE_ELEMS + 77, 3, PIECE_ELEMS))
    )
)


def landings(shard: ShardMap) -> list[Landing]:
    headers = [
        DataHeader(
            "run", 1, DataOp.GET_CHUNK, 1, block=chunk.block_id, offset_bytes=chunk.offset_bytes,
            length_bytes=chunk.length_bytes,
        )
        for chunk in chunks_of(LAYOUT.blocks, CHUNK_BYTES)
    ]  # fmt: skip
    return [shard.find(header) for header in headers]


@pytest.mark.parametrize("n_rows", [1, 2, 3, 8, 100])
def test_sums_of_any_number_of_pushes_take_what_the_formula_says(n_rows: int) -> None:
    """Products were kept for each pair of rows once: 4950 pairs of a hundred rows, outside of every budget."""
    shard = ShardMap(LAYOUT.blocks, CHUNK_BYTES)
    receipts = Receipts(shard, n_rows)
    receipts.new_theta()
    before = receipts.n_bytes
    for landing, row in itertools.product(landings(shard), range(n_rows)):
        for other, products in receipts.companions(row, landing):
            products[:] = 1.0
            note_products(receipts.sums, row, other, landing.index, receipts.theta_number)
        note_sums(receipts.sums, row, landing.index, 0, receipts.theta_number)
    for first, second in itertools.combinations(range(n_rows), 2):
        receipts.clear(first)
        landing = landings(shard)[0]
        note_sums(receipts.sums, first, landing.index, 0, receipts.theta_number)
        receipts.companions(second, landing)
    assert receipts.n_bytes == before <= table_bytes_needed(shard.n_pieces, shard.n_chunks, n_rows, pins=0)


def test_products_are_never_those_of_another_pair_or_another_version() -> None:
    """Pushes come, go, fail in the middle and land at the same moment; whatever is known of a pair is of that pair."""
    shard, rng, n_rows = ShardMap(LAYOUT.blocks, CHUNK_BYTES), random.Random(11), 6
    receipts, places = Receipts(shard, n_rows), landings(shard)
    receipts.new_theta()
    owner = [0] * n_rows  # which push holds the row
    n_known, pushes = 0, itertools.count(1)
    landed: set[tuple[int, int]] = set()

    def stamp(row: int, other: int) -> float:
        low, high = sorted((owner[row], owner[other]))
        return receipts.theta_number * 1e6 + low * 1e3 + high

    for _ in range(3000):
        landing, row, what = rng.choice(places), rng.randrange(n_rows), rng.random()
        if what < 0.02:
            receipts.new_theta()
        elif what < 0.15:
            owner[row] = next(pushes) % 997
            receipts.clear(row)
            landed -= {(row, place.index) for place in places}
        elif (row, landing.index) not in landed:
            other_row = rng.randrange(n_rows)
            together = [row] if other_row == row or (other_row, landing.index) in landed else [row, other_row]
            asked = {who: receipts.companions(who, landing) for who in together}
            for who in together:
                if rng.random() < 0.2:
                    note_sums(receipts.sums, who, landing.index, 0, NEVER)
                    continue
                note_sums(receipts.sums, who, landing.index, 0, receipts.theta_number)
                landed.add((who, landing.index))
                for other, products in asked[who]:
                    products[:] = stamp(who, other)
                    note_products(receipts.sums, who, other, landing.index, receipts.theta_number)
        for one, two in itertools.combinations(range(n_rows), 2):
            found = KnownReceipts(receipts, receipts.theta_number).products(one, two)
            if found is not None and found[1].any():
                n_known += 1
                assert set(found[0][found[1]]) == {stamp(one, two)}
    assert n_known > 1000, "little was known, so little was tried"


def test_a_landing_that_failed_gives_its_places_back() -> None:
    shard = ShardMap(LAYOUT.blocks, CHUNK_BYTES)
    receipts, landing = Receipts(shard, MOST_COMPANIONS + 1), landings(shard)[0]
    receipts.new_theta()
    for row in range(MOST_COMPANIONS):
        note_sums(receipts.sums, row, landing.index, 0, receipts.theta_number)
    for _ in range(2 * KEPT_PRODUCTS):
        assert len(receipts.companions(MOST_COMPANIONS, landing)) == MOST_COMPANIONS
        note_sums(receipts.sums, MOST_COMPANIONS, landing.index, 0, NEVER)
