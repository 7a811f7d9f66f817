"""A slave's arithmetic against the readable reference, and its independence of placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.slave_values import R2, V0, V1
from support.slave_wire import LAYOUT, placement_over, prepare_of, push_id, shard_of

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import AVERAGED_LAYER, Layout, Parameter, chunks_of
from dips.core.math import outer_numba, outer_numpy
from dips.core.math.outer_numpy import PIECE_ELEMS, average_step, outer_step
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.threads import Threads
from dips.slave import calculation
from dips.slave.landing import KnownReceipts, Receipts, note_products, note_sums
from dips.slave.memory import F32, ShardMemory

RNG = np.random.default_rng(3)
THETA, MOMENTUM, X, Y = (RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for _ in range(4))
PUSHES = [push_id("a"), push_id("b")]
BODY = prepare_of(R2, V1, PUSHES, V0, weights=(0.3, 0.7), scale=0.5)


def memory_of(slave: str, *slaves: str) -> ShardMemory:
    placement = placement_over(*slaves)
    memory = ShardMemory(placement.blocks_of(SlaveId(slave), LAYOUT), 1024, 3, 1 << 20)
    memory.momentum[:] = shard_of(MOMENTUM, placement, slave)
    memory.staging[2] = shard_of(X, placement, slave)
    memory.staging[0] = shard_of(Y, placement, slave)
    return memory


def theta_of(slave: str, *slaves: str) -> F32:
    return shard_of(THETA, placement_over(*slaves), slave)


def test_one_slave_and_three_give_the_same_bits() -> None:
    whole = memory_of("s0", "s0")
    one = np.empty_like(THETA)
    calculation.prepare(whole, THETA, one, BODY, [2, 0])
    grams = {found.block: found for found in calculation.measure(whole, THETA, [2, 0])}
    slaves = ("s0", "s1", "s2")
    for slave in slaves:
        memory, theta = memory_of(slave, *slaves), theta_of(slave, *slaves)
        out = np.empty_like(theta)
        calculation.prepare(memory, theta, out, BODY, [2, 0])
        np.testing.assert_array_equal(out, shard_of(one, placement_over(*slaves), slave))
        for found in calculation.measure(memory, theta, [2, 0]):
            assert found == grams.pop(found.block)
    assert not grams


BIG = Layout(
    tuple(Parameter(f"{name}.weight", (n,), "float32", name) for name, n in (("a", 50_000), ("b", 7), ("c", 90_000))),
    block_elems=70_000,
)
CHUNK_BYTES = 2 * 4 * PIECE_ELEMS
"""Of two pieces, so that blocks end within a chunk and within a piece."""

SLOTS = 4


def big_memory(seed: int) -> tuple[ShardMemory, F32]:
    rng = np.random.default_rng(seed)
    memory = ShardMemory(BIG.blocks, CHUNK_BYTES, SLOTS, 100 << 20)
    memory.staging[:] = rng.standard_normal(memory.staging.shape)
    memory.momentum[:] = rng.standard_normal(memory.n_elems)
    memory.staging[1, 60_000] = np.nan
    return memory, rng.standard_normal(memory.n_elems).astype(np.float32)


def receive(memory: ShardMemory, theta: F32, share: float, pairs: float) -> KnownReceipts:
    """As if each chunk of each row had been measured on receipt with this chance, the others with an older theta."""
    receipts, rng = Receipts(memory.map, SLOTS), np.random.default_rng(7)
    receipts.new_theta()
    receipts.new_theta()
    for chunk in chunks_of(memory.blocks, CHUNK_BYTES):
        block, offset_bytes, length_bytes = chunk.block_id, chunk.offset_bytes, chunk.length_bytes
        header = DataHeader(
            "run", 1, DataOp.PUT_CHUNK, 1, block=block, offset_bytes=offset_bytes, length_bytes=length_bytes
        )
        landing = memory.map.find(header)
        part = slice(landing.start_byte // 4, (landing.start_byte + landing.length_bytes) // 4)
        for row in range(SLOTS):
            number = 2 if rng.random() < share else 1
            then, sums = theta[part] * np.float32(number / 2), receipts.sums.squared[row, landing.pieces]
            bad = outer_numpy.measure_landed(memory.staging[row, part], then, sums)
            note_sums(receipts.sums, row, landing.index, bad, number)
            for other, products in receipts.companions(row, landing):
                if number == 2 and rng.random() < pairs:
                    x, y = memory.staging[row, part], memory.staging[other, part]
                    outer_numba.products(theta[part], x, y, products)
                    note_products(receipts.sums, row, other, landing.index, 2)
    return KnownReceipts(receipts, receipts.theta_number)


@pytest.mark.parametrize("rows", [[2], [0, 1], [3, 0, 2], [0, 1, 2, 3]], ids=len)
@pytest.mark.parametrize(("share", "pairs"), [(0, 0), (1, 0), (1, 1), (0.5, 0.5)])
def test_what_receipt_tells_changes_no_bit(rows: list[int], share: float, pairs: float) -> None:
    memory, theta = big_memory(1)
    expected = calculation.measure(memory, theta, rows)
    known = receive(memory, theta, share, pairs)
    found = calculation.measure(memory, theta, rows, known)
    assert repr(found) == repr(expected)  # a NaN is not equal to itself, but is written the same
    assert sum(grams.nonfinite_elems[rows.index(1)] for grams in found) == 1 if 1 in rows else True


def test_what_is_known_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, theta = big_memory(2)
    known = receive(memory, theta, 1, 1)
    expected = calculation.measure(memory, theta, [0, 1])
    monkeypatch.setattr(outer_numba, "measure_pieces", None)
    monkeypatch.setattr(outer_numba, "multiply_pieces", None)
    assert repr(calculation.measure(memory, theta, [0, 1], known)) == repr(expected)


@pytest.mark.parametrize("n_threads", [2, 3])
def test_threads_change_no_bit(n_threads: int) -> None:
    memory, theta = big_memory(3)
    memory.staging[1, 60_000] = 0.5
    threads, rows, out = Threads(n_threads), [0, 1], [np.empty_like(theta) for _ in range(2)]
    assert calculation.measure(memory, theta, rows, None, threads) == calculation.measure(memory, theta, rows)
    one = calculation.prepare(memory, theta, out[0], BODY, rows)
    momentum = memory.next_momentum.copy()
    many = calculation.prepare(memory, theta, out[1], BODY, rows, threads)
    assert many == one == calculation.chunk_checksums(out[0], BIG.blocks, CHUNK_BYTES)
    np.testing.assert_array_equal(out[1], out[0])
    np.testing.assert_array_equal(memory.next_momentum, momentum)
    threads.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_elements_are_counted_in_their_block_and_their_push(bad: float) -> None:
    memory = memory_of("s0", "s0")
    memory.staging[0, 5] = bad
    found = calculation.measure(memory, THETA, [2, 0])
    assert [grams.nonfinite_elems for grams in found] == [(0, 1)] + [(0, 0)] * (len(found) - 1)


@pytest.mark.parametrize("theta", [THETA, None], ids=["round", "seed"])
def test_a_shadow_that_is_not_finite_is_refused(theta: F32 | None) -> None:
    memory = memory_of("s0", "s0")
    memory.staging[2, 700] = np.nan
    with pytest.raises(Refused, match=r"1 elements|2 elements") as caught:
        calculation.prepare(memory, theta, np.empty_like(THETA), BODY, [2, 0])
    assert caught.value.code is RefusalCode.NONFINITE


def test_the_seed_is_the_push_itself_with_momentum_zero() -> None:
    memory = memory_of("s0", "s0")
    memory.next_momentum.fill(7)
    out = np.empty_like(THETA)
    calculation.prepare(memory, None, out, prepare_of(R2, V0, PUSHES[:1], None), [2])
    np.testing.assert_array_equal(out, X)
    assert not memory.next_momentum.any()


def test_a_slave_without_blocks_measures_and_prepares_nothing() -> None:
    memory = ShardMemory([], 1024, 3, 0)
    nothing = np.empty(0, np.float32)
    assert calculation.measure(memory, nothing, [2, 0]) == ()
    assert calculation.directions(memory, V0, nothing, [2, 0], [V0, V0]) == (0.0,) * 10
    assert calculation.prepare(memory, nothing, nothing, BODY, [2, 0]) == []


BUFFERED = Layout(
    (
        *(Parameter(f"layers.{i}", (300 + i,), "float32", f"layers.{i}") for i in range(3)),
        Parameter("mean", (500,), "float32", AVERAGED_LAYER, averaged=True),
    ),
    block_elems=256,
)


@pytest.mark.parametrize("slaves", [("s0",), ("s0", "s1"), ("s0", "s1", "s2", "s3", "s4")])
def test_averaged_blocks_take_the_mean_and_are_no_part_of_any_norm(slaves: tuple[str, ...]) -> None:
    rng = np.random.default_rng(8)
    n, n_trained = BUFFERED.n_elems, BUFFERED.n_trained
    theta, momentum, x, y = (rng.standard_normal(n).astype(np.float32) for _ in range(4))
    y[-1] = np.nan
    body = replace(BODY, averaged_share=0.25)
    rows, weights, expected = np.stack([x, y]), np.array(body.weights, np.float32), np.empty((2, n), np.float32)
    outer_step(
        theta, momentum, rows, np.arange(2), weights, 0.5, 0.7, 0.8, 0.8, 1.0, expected[0], expected[1], 0, n_trained
    )
    average_step(theta, rows, np.arange(2), weights, 0.25, expected[0], expected[1], n_trained, n)
    placement = placement_over(*slaves, layout=BUFFERED)
    n_bad = 0
    for slave in slaves:
        memory = ShardMemory(placement.blocks_of(SlaveId(slave), BUFFERED), 1024, 2, 1 << 20)
        memory.momentum[:] = shard_of(momentum, placement, slave, BUFFERED)
        memory.staging[:] = [shard_of(row, placement, slave, BUFFERED) for row in rows]
        mine = shard_of(theta, placement, slave, BUFFERED)
        for found in calculation.measure(memory, mine, [0, 1]):
            n_bad += found.nonfinite_elems[1]
            assert any(found.gram) is not BUFFERED.blocks[found.block].averaged
        assert all(np.isfinite(calculation.directions(memory, V0, mine, [0, 1], [V0, V0])))
        memory.staging[1] = np.nan_to_num(memory.staging[1])
        out = np.empty_like(mine)
        calculation.prepare(memory, mine, out, body, [0, 1], Threads(3))
        want = np.where(np.isnan(expected), 0.0, expected)
        here, made = shard_of(want[0], placement, slave, BUFFERED), np.isfinite(out)
        known = shard_of(np.isfinite(expected[0]).astype(np.float32), placement, slave, BUFFERED) > 0
        assert made.all()
        np.testing.assert_array_equal(out[known], here[known])
        np.testing.assert_array_equal(memory.next_momentum, shard_of(want[1], placement, slave, BUFFERED))
    assert n_bad == 1


def test_a_non_finite_mean_is_refused() -> None:
    memory = ShardMemory(BUFFERED.blocks, 1024, 1, 1 << 20)
    memory.staging[0, -1] = np.inf
    theta = np.zeros(BUFFERED.n_elems, np.float32)
    body = prepare_of(R2, V1, PUSHES[:1], V0)
    with pytest.raises(Refused, match="1 elements that are NaN or infinite"):
        calculation.prepare(memory, theta, np.empty_like(theta), body, [0])


def test_a_push_of_zeros_is_told_from_one_with_a_single_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculation, "PIECE_ELEMS", 16)  # of many pieces one has it
    memory = memory_of("s0", "s0")
    memory.staging[1] = 0.0
    assert calculation.all_zero(memory, [2, 1]) == (False, True)
    memory.staging[1, -1] = np.nan
    assert calculation.all_zero(memory, [1]) == (False,)


def test_averaged_buffers_hide_no_push_of_zeros() -> None:
    averaged = Layout((*LAYOUT.parameters, Parameter("var", (8,), "float32", AVERAGED_LAYER, averaged=True)))
    memory = ShardMemory(averaged.blocks, 1024, 1, 1 << 20)
    memory.staging[0] = 0.0
    memory.staging[0, averaged.n_trained :] = 1.0
    assert calculation.all_zero(memory, [0]) == (True,)
