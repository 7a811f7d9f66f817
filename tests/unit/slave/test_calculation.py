"""A slave's arithmetic against the readable reference, and its independence of placement."""

from __future__ import annotations

import numpy as np
import pytest
from support.slave_bench import R2, V0, V1
from support.slave_peers import LAYOUT, placement_over, prepare_of, push_id, shard_of

from dips.core.chunks import digest_of_array, shard_digest
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.outer_numpy import gram, outer_step
from dips.slave import calculation
from dips.slave.memory import F32, ShardMemory

RNG = np.random.default_rng(3)
THETA, MOMENTUM, X, Y = (RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for _ in range(4))
PUSHES = [push_id("a"), push_id("b")]
BODY = prepare_of(R2, V1, PUSHES, V0, weights=(0.3, 0.7), scale=0.5)


def memory_of(slave: str, *slaves: str) -> ShardMemory:
    """A slave's memory at THETA and MOMENTUM with X in row 2 and Y in row 0."""
    placement = placement_over(*slaves)
    memory = ShardMemory(placement.blocks_of(SlaveId(slave), LAYOUT), 1024, 3, 1 << 20)
    memory.momentum[:] = shard_of(MOMENTUM, placement, slave)
    memory.staging[2] = shard_of(X, placement, slave)
    memory.staging[0] = shard_of(Y, placement, slave)
    return memory


def theta_of(slave: str, *slaves: str) -> F32:
    return shard_of(THETA, placement_over(*slaves), slave)


def test_prepare_is_the_outer_step_of_the_reference() -> None:
    memory = memory_of("s0", "s0")
    out = np.empty_like(THETA)
    checksums = calculation.prepare(memory, theta_of("s0", "s0"), out, BODY, [2, 0])
    expected, momentum = np.empty_like(THETA), np.empty_like(THETA)
    outer_step(
        THETA, MOMENTUM, np.stack([X, Y]), np.arange(2), np.array([0.3, 0.7], np.float32),
        0.5, 0.7, 0.8, 0.8, 1.0, expected, momentum, 0, LAYOUT.n_elems,
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(memory.next_momentum, momentum)
    assert shard_digest(checksums) == digest_of_array(expected, LAYOUT.blocks, 1024)


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


def test_measure_is_the_gram_of_the_reference_upper_triangle_by_rows() -> None:
    found = calculation.measure(memory_of("s0", "s0"), THETA, [2, 0])
    for block, grams in zip(LAYOUT.blocks, found, strict=True):
        expected, _ = gram(THETA, np.stack([X, Y]), np.arange(2), block.start_elem, block.stop_elem)
        assert grams.gram == (expected[0, 0], expected[0, 1], expected[1, 1])
        assert grams.nonfinite_elems == (0, 0)


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
