"""The compiled kernels equal the reference to the bit, whatever the sizes, values, ranges, threads and
placement."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numerics import F32, Shard, assert_same_bits, random_slots

from dips.core import kernels_numba, outer_numpy
from dips.core.kernels_numba import GRAM_TILE_ELEMS, ROWS, TILE_ELEMS
from dips.core.outer_numpy import LANES

SIZES = [
    *(1, 2, LANES - 1, LANES + 1, ROWS * LANES, GRAM_TILE_ELEMS - 1, GRAM_TILE_ELEMS, 3 * GRAM_TILE_ELEMS + 77),
    *(TILE_ELEMS, TILE_ELEMS + 1, 100_003),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    kernels_numba.warm_up()


def both_steps(shard: Shard, k: int, start: int, stop: int, scale: float = 0.4, weight: float = 1.0) -> None:
    slots, weights = random_slots(k, k, len(shard.staging))
    results = []
    for module in (outer_numpy, kernels_numba):
        theta, momentum = shard.outputs()
        bad = module.outer_step(
            *(shard.theta, shard.momentum, shard.staging, slots, weights),
            *(scale, 0.7, 0.8, 0.75, weight, theta, momentum, start, stop),
        )
        results.append((theta, momentum, bad))
    assert_same_bits(results[1][0], results[0][0])
    assert_same_bits(results[1][1], results[0][1])
    assert results[1][2] == results[0][2]


def both_grams(shard: Shard, k: int, start: int, stop: int) -> None:
    slots, _ = random_slots(k, k, len(shard.staging))
    expected, expected_counts = outer_numpy.gram(shard.theta, shard.staging, slots, start, stop)
    actual, counts = kernels_numba.gram(shard.theta, shard.staging, slots, start, stop)
    assert_same_bits(actual, expected)
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("n_elems", SIZES)
@pytest.mark.parametrize("k", range(1, 9))
def test_kernels_equal_the_reference(k: int, n_elems: int, special: bool) -> None:
    shard = Shard.random(1000 * k + n_elems, n_elems, slots=8, special=special)
    both_steps(shard, k, 0, n_elems)
    both_grams(shard, k, 0, n_elems)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(1, 11),
    n_elems=st.integers(1, 3000),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    scale=st.floats(0, 2, width=32),
    weight=st.sampled_from([0.0, 0.25, 1.0]),
    special=st.booleans(),
)
def test_kernels_equal_the_reference_anywhere(
    seed: int, k: int, n_elems: int, ends: tuple[float, float], scale: float, weight: float, special: bool
) -> None:
    start, stop = sorted(int(end * n_elems) for end in ends)
    shard = Shard.random(seed, n_elems, slots=11, special=special)
    both_steps(shard, k, start, stop, scale, weight)
    both_grams(shard, k, start, stop)


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=80), seed=st.integers(0, 2**20))
def test_any_float32_values(values: list[float], seed: int) -> None:
    """Bit patterns that hypothesis thinks of: each array is a shuffle of them."""
    rng = np.random.default_rng(seed)
    pool = np.array(values, np.float32)
    shard = Shard(rng.permutation(pool), rng.permutation(pool), np.stack([rng.permutation(pool) for _ in range(3)]))
    both_steps(shard, 3, 0, len(values))
    both_grams(shard, 3, 0, len(values))


@pytest.mark.parametrize("special", [False, True])
def test_seed_and_land_equal_the_reference(special: bool) -> None:
    shard = Shard.random(5, 2 * TILE_ELEMS + 9, slots=2, special=special)
    theta, momentum = shard.outputs()
    expected_theta, expected_momentum = shard.outputs()
    bad = kernels_numba.seed_step(shard.staging, 1, theta, momentum, 7, len(theta) - 3)
    assert bad == outer_numpy.seed_step(shard.staging, 1, expected_theta, expected_momentum, 7, len(theta) - 3)
    assert_same_bits(theta, expected_theta)
    assert_same_bits(momentum, expected_momentum)
    dst = np.zeros_like(theta)
    assert kernels_numba.land(dst, shard.staging[0]) == np.count_nonzero(~np.isfinite(shard.staging[0]))
    assert_same_bits(dst, shard.staging[0])


@pytest.mark.parametrize("offset_bytes", [0, 1, 2, 4])
def test_land_takes_a_read_only_frame_at_any_address(offset_bytes: int) -> None:
    values = np.array([1.5, np.nan, -0.0, np.inf, 3.0] * 300, np.float32)
    frame = bytes(offset_bytes) + values.tobytes()
    src = np.frombuffer(frame, np.float32, offset=offset_bytes)
    dst = np.zeros_like(values)
    assert kernels_numba.land(dst, src) == 600
    assert_same_bits(dst, values)


def test_the_step_may_overwrite_its_inputs() -> None:
    shard = Shard.random(6, 2 * TILE_ELEMS + 5, slots=6)
    slots, weights = random_slots(6, 6, 6)
    theta, momentum = shard.outputs()
    arguments = (shard.theta, shard.momentum, shard.staging, slots, weights, 0.4, 0.7, 0.8, 0.8, 1.0)
    outer_numpy.outer_step(*arguments, theta, momentum, 0, len(theta))
    kernels_numba.outer_step(*arguments, shard.theta, shard.momentum, 0, len(theta))
    assert_same_bits(shard.theta, theta)
    assert_same_bits(shard.momentum, momentum)


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_threads_that_share_a_range_change_no_bit(pieces: int) -> None:
    n_elems = 50_021
    shard = Shard.random(7, n_elems, slots=5)
    slots, weights = random_slots(7, 5, 5)
    arguments = (shard.theta, shard.momentum, shard.staging, slots, weights, 0.4, 0.7, 0.8, 0.8, 1.0)
    whole, split = shard.outputs(), shard.outputs()
    kernels_numba.outer_step(*arguments, *whole, 0, n_elems)
    edges = np.linspace(0, n_elems, pieces + 1).astype(int).tolist()
    with ThreadPoolExecutor(pieces) as pool:
        parts = itertools.pairwise(edges)
        list(pool.map(lambda part: kernels_numba.outer_step(*arguments, *split, *part), parts))
    assert_same_bits(split[0], whole[0])
    assert_same_bits(split[1], whole[1])


def _packed(array: F32, blocks: list[tuple[int, int]]) -> F32:
    return np.ascontiguousarray(np.concatenate([array[..., a:b] for a, b in blocks], axis=-1))


def test_one_slave_and_four_slaves_give_the_same_bits() -> None:
    """Blocks dealt to 4 slaves, each packing its own: theta, momentum and the sum of Grams do not change by a
    bit."""
    rng = np.random.default_rng(8)
    n_elems = 60_000
    edges = [0, *np.sort(rng.choice(np.arange(1, n_elems), 18, replace=False)).tolist(), n_elems]
    blocks = list(itertools.pairwise(edges))
    shard = Shard.random(8, n_elems, slots=4)
    slots, weights = random_slots(8, 4, 4)
    one = _on_slaves(shard, blocks, [0] * len(blocks), slots, weights)
    four = _on_slaves(shard, blocks, rng.integers(0, 4, len(blocks)).tolist(), slots, weights)
    for actual, expected in zip(four, one, strict=True):
        assert_same_bits(actual, expected)


def _on_slaves(
    shard: Shard, blocks: list[tuple[int, int]], slave_of_block: list[int], slots: np.ndarray, weights: F32
) -> tuple[F32, F32, np.ndarray]:
    theta, momentum = shard.outputs()
    gram_of_block: dict[int, np.ndarray] = {}
    for slave in sorted(set(slave_of_block)):
        mine = [block for block, owner in enumerate(slave_of_block) if owner == slave]
        ranges = [blocks[block] for block in mine]
        here = Shard(*(_packed(a, ranges) for a in (shard.theta, shard.momentum, shard.staging)))
        out_theta, out_momentum = here.outputs()
        kernels_numba.outer_step(
            *(here.theta, here.momentum, here.staging, slots, weights),
            *(0.4, 0.7, 0.8, 0.8, 1.0, out_theta, out_momentum, 0, len(here.theta)),
        )
        at = 0
        for block, (start, stop) in zip(mine, ranges, strict=True):
            here_range = slice(at, at + stop - start)
            theta[start:stop], momentum[start:stop] = out_theta[here_range], out_momentum[here_range]
            gram_of_block[block], _ = kernels_numba.gram(here.theta, here.staging, slots, at, at + stop - start)
            at += stop - start
    total = np.zeros((len(slots), len(slots)))
    for block in range(len(blocks)):
        total = total + gram_of_block[block]
    return theta, momentum, total


def test_warm_up_compiles_all_that_a_round_needs() -> None:
    """After it, a round with real arrays (a read-only frame too) adds no specialisation."""
    dispatchers = [
        kernels_numba._outer_step,
        kernels_numba._seed_step,
        kernels_numba._gram,
        kernels_numba._land,
        kernels_numba._nonfinite,
    ]
    before = [len(dispatcher.signatures) for dispatcher in dispatchers]  # type: ignore[attr-defined]
    assert min(before) >= 1
    both_steps(Shard.random(9, 100, slots=3), 3, 10, 90)
    both_grams(Shard.random(9, 100, slots=3), 3, 10, 90)
    test_land_takes_a_read_only_frame_at_any_address(4)
    test_land_takes_a_read_only_frame_at_any_address(1)
    test_seed_and_land_equal_the_reference(False)
    assert [len(dispatcher.signatures) for dispatcher in dispatchers] == before  # type: ignore[attr-defined]


def test_both_twins_mean_the_same_lanes() -> None:
    assert kernels_numba.LANES == LANES
    assert GRAM_TILE_ELEMS % (ROWS * LANES) == 0


def test_without_a_folder_for_the_cache_it_compiles_all_the_same() -> None:
    """A function without a file is what numba finds no cache folder for, as in a read-only image without a
    home."""
    namespace: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x", namespace)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(namespace["twice"])
    assert kernels_numba._compiled(namespace["twice"])(21) == 42


def test_the_compiled_twin_refuses_what_the_reference_refuses() -> None:
    """It has no bounds checks of its own, so this is what stands between a bug and other memory."""
    shard = Shard.random(1, 8, slots=2)
    theta, momentum = shard.outputs()
    weights = np.ones(1, np.float32)
    common = (shard.theta, shard.momentum, shard.staging)
    with pytest.raises(ValueError, match="range"):
        kernels_numba.outer_step(*common, np.array([0]), weights, 1, 1, 0, 0, 1, theta, momentum, 0, 9)
    with pytest.raises(ValueError, match="not rows"):
        kernels_numba.outer_step(*common, np.array([2]), weights, 1, 1, 0, 0, 1, theta, momentum, 0, 8)
    with pytest.raises(ValueError, match="range"):
        kernels_numba.gram(shard.theta, shard.staging, np.array([0]), 0, 9)
    with pytest.raises(ValueError, match="not rows"):
        kernels_numba.seed_step(shard.staging, 2, theta, momentum, 0, 8)
    with pytest.raises(ValueError, match="src is"):
        kernels_numba.land(theta, np.zeros(9, np.float32))
