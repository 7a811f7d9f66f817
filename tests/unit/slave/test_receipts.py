"""Sums taken on receipt: right for the theta that is current, unknown for every other, and within the memory_bytes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout, Parameter, checksum, chunks_of
from dips.core.math import outer_numpy
from dips.core.math.outer_numpy import PIECE_ELEMS
from dips.core.messages import SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.placement import KEPT_PRODUCTS, table_bytes_needed
from dips.core.wire import Codec
from dips.slave.calculation import chunk_checksums
from dips.slave.data_port import DataPort
from dips.slave.landing import MOST_COMPANIONS, NEVER, KnownReceipts, Receipts, note_products, note_sums
from dips.slave.memory import ThetaBuffer
from dips.slave.state.staging import Landing, ShardMap, Slot

CHUNK_BYTES = 2 * PIECE_ELEMS * 4
LAYOUT = Layout(
    tuple(
        Parameter(f"layers.{i}.weight", (n,), "float32", f"layers.{i}")
        for i, n in enumerate((5 * PIECE_ELEMS + 77, 3, PIECE_ELEMS))
    )
)
"""Blocks of 6, 1 and 1 pieces, in 3, 1 and 1 chunks."""

BLOCKS = LAYOUT.blocks
V0, V1 = Version(1, 0), Version(1, 1)
RNG = np.random.default_rng(3)
THETA = {version: RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for version in (V0, V1)}
VALUES = [RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for _ in range(5)]


def push_id(row: int) -> PushId:
    return PushId(ClusterId(f"c{row}"), Incarnation(1, 1), 1)


class Port:
    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.port = DataPort("run", lambda staged: None)
        self.staging = np.zeros((len(VALUES), LAYOUT.n_elems), np.float32)
        self.port.set_memory(ShardMap(BLOCKS, chunk_bytes), self.staging)
        self.serve(V0)
        self.slots = [Slot(push_id(row), 1, row, opening=1) for row in range(len(VALUES))]
        self.port.hold(self.slots)

    def serve(self, current: Version | None) -> None:
        def buffer(version: Version) -> ThetaBuffer:
            info = SnapshotInfo(version, RoundId(1, 1), b"", b"", b"", committed=True)
            return ThetaBuffer(THETA[version], info, chunk_checksums(THETA[version], BLOCKS, self.chunk_bytes))

        self.port.set_readable({version: buffer(version) for version in THETA}, current)

    def put(self, row: int, only: list[int] | None = None, values: list[np.ndarray] = VALUES) -> None:
        for index, chunk in enumerate(chunks_of(BLOCKS, self.chunk_bytes)):
            if only is not None and index not in only:
                continue
            start = BLOCKS[chunk.block_id].start_elem * 4 + chunk.offset_bytes
            payload = values[row].view(np.uint8)[start : start + chunk.length_bytes]
            header = DataHeader(
                "run", 1, DataOp.PUT_CHUNK, 1, push=push_id(row), attempt=1, block=chunk.block_id,
                offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=Codec.F32,
                checksum=checksum(payload),
            )  # fmt: skip
            answer = self.port.answer([memoryview(header.encode()), memoryview(payload.tobytes())])
            assert answer.header.op is DataOp.ACK, answer.header.refusal

    def known(self, version: Version = V0) -> KnownReceipts:
        known = self.port.known(version)
        assert known is not None
        return known


def sums(version: Version, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    parts = []
    for block in BLOCKS:
        part = slice(block.start_elem, block.stop_elem)
        out = np.zeros(outer_numpy.n_pieces(block.n_elems), np.float64)
        outer_numpy.products(THETA[version][part], x[part], y[part], out)
        parts.append(out)
    return np.concatenate(parts)


def test_squares_and_products_of_complete_pushes_are_those_of_the_reference_to_the_bit() -> None:
    port = Port()
    port.put(0)
    port.put(1)
    known = port.known()
    for row in (0, 1):
        squared, valid = known.squared(row)
        assert valid.all()
        np.testing.assert_array_equal(squared, sums(V0, VALUES[row], VALUES[row]))
        assert not known.bad(row).any()
    for pair in ((0, 1), (1, 0)):
        found = known.products(*pair)
        assert found is not None
        assert found[1].all()
        np.testing.assert_array_equal(found[0], sums(V0, VALUES[0], VALUES[1]))
    assert known.products(0, 2) is None


def test_sums_with_an_older_version_are_not_known() -> None:
    """The version flips between two chunks: what was measured with the one before does not count."""
    port = Port()
    port.put(0, only=[0])
    port.put(1, only=[0])
    port.serve(V1)
    assert port.port.known(V0) is None
    port.put(0)
    port.put(1)
    known = port.known(V1)
    squared, valid = known.squared(0)
    assert valid.tolist() == [False, False, True, True, True, True, True, True]
    np.testing.assert_array_equal(squared[valid], sums(V1, VALUES[0], VALUES[0])[valid])
    found = known.products(0, 1)
    assert found is not None
    assert found[1].tolist() == valid.tolist()
    np.testing.assert_array_equal(found[0][found[1]], sums(V1, VALUES[0], VALUES[1])[found[1]])


def test_products_of_another_pair_that_lands_while_they_are_read_are_not_taken_for_these() -> None:
    """MEASURE of pushes 0 and 1 begins after a flip, and the place of their products goes to 2 and 3 meanwhile."""
    port = Port()
    port.serve(V1)
    port.put(0)
    port.put(1)
    port.serve(V0)
    port.put(2)
    known, landed = port.known(), list[int]()

    class Landing(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            found = np.array(super().__getitem__(key))
            if isinstance(key, int) and not landed:
                landed.append(key)
                port.put(3)
            return found

    known.receipts.sums = known.receipts.sums._replace(pair_of=known.receipts.sums.pair_of.view(Landing))
    found = known.products(0, 1)
    assert landed
    assert found is None or not found[1].any()
    taken = known.products(2, 3)
    assert taken is not None
    assert taken[1].all()
    np.testing.assert_array_equal(taken[0], sums(V0, VALUES[2], VALUES[3]))


def test_another_push_in_a_row_begins_with_nothing_known() -> None:
    port = Port()
    port.put(0)
    port.put(1)
    port.port.hold([Slot(push_id(7), 1, 0, opening=2), *port.slots[1:]])
    known = port.known()
    assert not known.squared(0)[1].any()
    assert known.squared(1)[1].all()
    found = known.products(0, 1)
    assert found is not None
    assert not found[1].any()


@pytest.mark.parametrize("chunk_bytes", [1024, PIECE_ELEMS * 4 - 4])
def test_chunks_that_cut_pieces_are_landed_unmeasured(chunk_bytes: int) -> None:
    port = Port(chunk_bytes)
    port.put(0)
    np.testing.assert_array_equal(port.staging[0], VALUES[0])
    assert not port.known().squared(0)[1].any()


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
    before = sum(array.nbytes for array in receipts.sums)
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
    assert sum(array.nbytes for array in receipts.sums) == before
    assert before + receipts.chunk_of_piece.nbytes <= table_bytes_needed(shard.n_pieces, shard.n_chunks, n_rows, pins=0)


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
