"""The compiled kernels equal the reference to the bit, whatever the sizes, values, ranges, threads and
placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checked_memory import Interpreted
from support.numerics import F32, Shard, assert_same_bits, random_slots

from dips.core.allocator import zeros
from dips.core.layout import checksum
from dips.core.math import outer_numba, outer_numpy
from dips.core.math.outer_numba import TILE_ELEMS, VECTOR_ELEMS
from dips.core.math.outer_numpy import LANES, PIECE_ELEMS

SIZES = [
    *(1, 2, LANES - 1, LANES + 1, 4 * VECTOR_ELEMS, TILE_ELEMS - 1, TILE_ELEMS, 3 * TILE_ELEMS + 77),
    *(PIECE_ELEMS, PIECE_ELEMS + 1, 100_003),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    outer_numba.warm_up()


def both(shard: Shard, k: int, twin: Any, call: Callable[..., Any], outputs: Callable[[], Any] | None = None) -> None:
    """call: of a module, the slots, their weights and the outputs."""
    drawn, results = random_slots(k, k, len(shard.staging)), []
    for module in (outer_numpy, twin):
        written = (outputs or shard.outputs)()
        results.append((*written, call(module, *drawn, *written)))
    (theta, momentum, bad), (found_theta, found_momentum, found_bad) = results
    assert_same_bits(found_theta, theta)
    assert_same_bits(found_momentum, momentum)
    assert found_bad == bad


def both_steps(
    shard: Shard, k: int, start: int, stop: int, scale: float = 0.4, weight: float = 1.0, twin: Any = outer_numba
) -> None:
    def step(module: Any, slots: Any, weights: F32, *written: F32) -> Any:
        inputs = (shard.theta, shard.momentum, shard.staging, slots, weights)
        return module.outer_step(*inputs, scale, 0.7, 0.8, 0.75, weight, *written, start, stop)

    both(shard, k, twin, step)


def both_steps_of_chunks(shard: Shard, k: int, edges: Sequence[int], offset: int = 0, twin: Any = outer_numba) -> None:
    """offset: elements by which the outputs begin beside a line of the cache."""

    def step(module: Any, slots: Any, weights: F32, theta: F32, momentum: F32) -> Any:
        inputs = (shard.theta, shard.momentum, shard.staging, slots, weights, 0.4, 0.7, 0.8, 0.75, 0.5)
        bad, checksums = module.step_chunks(*inputs, theta, momentum, np.array(edges, np.int64))
        assert checksums.tolist() == [checksum(theta[a:b]) for a, b in pairwise(edges)]
        return bad

    both(shard, k, twin, step, lambda: [zeros(len(shard.theta) + offset)[offset:] for _ in range(2)])


def both_averages(shard: Shard, k: int, start: int, stop: int, share: float = 0.3, twin: Any = outer_numba) -> None:
    def step(module: Any, slots: Any, weights: F32, *written: F32) -> Any:
        return module.average_step(shard.theta, shard.staging, slots, weights, share, *written, start, stop)

    both(shard, k, twin, step)


def both_grams(shard: Shard, k: int, start: int, stop: int, twin: Any = outer_numba) -> None:
    slots, _ = random_slots(k, k, len(shard.staging))
    expected, expected_counts = outer_numpy.gram(shard.theta, shard.staging, slots, start, stop)
    actual, counts = twin.gram(shard.theta, shard.staging, slots, start, stop)
    assert_same_bits(actual, expected)
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("n_elems", SIZES)
@pytest.mark.parametrize("k", range(1, 9))
def test_kernels_equal_the_reference(k: int, n_elems: int, special: bool) -> None:
    shard = Shard.random(1000 * k + n_elems, n_elems, slots=8, special=special)
    both_steps(shard, k, 0, n_elems)
    both_averages(shard, k, 0, n_elems)
    both_averages(shard, k, n_elems // 3, n_elems, share=1.0)
    both_grams(shard, k, 0, n_elems)


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9])
def test_their_source_in_the_interpreter_equals_the_reference_and_reads_and_writes_nothing_else(
    k: int, special: bool
) -> None:
    twin: Any = Interpreted(outer_numba)
    shard = Shard.random(k, TILE_ELEMS + 333, slots=9, special=special)
    both_steps(shard, k, 5, TILE_ELEMS + 300, twin=twin)
    both_averages(shard, k, 5, TILE_ELEMS + 300, twin=twin)
    both_grams(shard, k, 0, TILE_ELEMS + 333, twin)
    both_steps_of_chunks(shard, k, [0, 256, 512 + 16, 512 + 16 + 61, TILE_ELEMS + 300], twin=twin)
    both_steps_of_chunks(shard, k, [7, 300], offset=3, twin=twin)
    pieces_are_measured(Shard.random(13, 900, slots=4, special=special), twin, [5, 6, 700, 710, 743, 888])
    a_seed_is_the_reference(special, 100, twin)


@settings(max_examples=150)
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


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(1, 5),
    chunks=st.lists(
        st.sampled_from([0, 1, 59, 60, 61, 255, 256, 257, 1000, 2048, 3 * 256 + 16]), min_size=1, max_size=6
    ),
    skipped=st.integers(0, 40),
    offset=st.sampled_from([0, 1, 16, 24]),
    special=st.booleans(),
)
def test_chunks_are_stepped_as_in_the_reference_and_have_the_checksums_of_what_is_written(
    seed: int, k: int, chunks: list[int], skipped: int, offset: int, special: bool
) -> None:
    edges = list(accumulate(chunks, initial=skipped))
    shard = Shard.random(seed, edges[-1] + 7, slots=6, special=special)
    both_steps_of_chunks(shard, k, edges, offset)


@pytest.mark.parametrize("edges", [[0, 101], [-1, 5], [5, 3], []])
@pytest.mark.parametrize("module", [outer_numpy, outer_numba])
def test_edges_of_chunks_that_do_not_fit_are_refused(module: Any, edges: list[int]) -> None:
    shard = Shard.random(1, 100, slots=1)
    one, weights, outputs = np.zeros(1, np.int64), np.ones(1, np.float32), shard.outputs()
    step = (shard.theta, shard.momentum, shard.staging, one, weights, 1.0, 1.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match=r"edges are|the range"):
        module.step_chunks(*step, *outputs, np.array(edges, np.int64))


@pytest.mark.parametrize("special", [False, True])
def test_a_seed_equals_the_reference(special: bool) -> None:
    a_seed_is_the_reference(special, 2 * TILE_ELEMS + 9)


def a_seed_is_the_reference(special: bool, n_elems: int, twin: Any = outer_numba) -> None:
    shard = Shard.random(5, n_elems, slots=2, special=special)
    theta, momentum = shard.outputs()
    expected_theta, expected_momentum = shard.outputs()
    bad = twin.seed_step(shard.staging, 1, theta, momentum, 7, len(theta) - 3)
    assert bad == outer_numpy.seed_step(shard.staging, 1, expected_theta, expected_momentum, 7, len(theta) - 3)
    assert_same_bits(theta, expected_theta)
    assert_same_bits(momentum, expected_momentum)


def test_the_step_may_overwrite_its_inputs() -> None:
    shard = Shard.random(6, 2 * TILE_ELEMS + 5, slots=6)
    slots, weights = random_slots(6, 6, 6)
    theta, momentum = shard.outputs()
    arguments = (shard.theta, shard.momentum, shard.staging, slots, weights, 0.4, 0.7, 0.8, 0.8, 1.0)
    outer_numpy.outer_step(*arguments, theta, momentum, 0, len(theta))
    outer_numba.outer_step(*arguments, shard.theta, shard.momentum, 0, len(theta))
    assert_same_bits(shard.theta, theta)
    assert_same_bits(shard.momentum, momentum)


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
def test_listed_pieces_are_measured_and_no_other(special: bool) -> None:
    shard = Shard.random(13, 3 * PIECE_ELEMS, slots=4, special=special)
    pieces_are_measured(shard, outer_numba, [5, 6, 6 + PIECE_ELEMS, 20_000, 20_033, 30_007])


def pieces_are_measured(shard: Shard, twin: Any, at: Sequence[int]) -> None:
    edges = np.array(at)
    pieces, slots = np.array([4, 1, 3]), np.array([3, 0, 1])
    results = []
    for module in (outer_numpy, twin):
        sums, nonfinite, pair = np.full((6, 5), 77.0), np.full((3, 5), 77), np.full(5, 77.0)
        module.measure_pieces(shard.theta, shard.staging, slots, edges, pieces, sums, nonfinite)
        module.multiply_pieces(shard.theta, shard.staging[3], shard.staging[1], edges, pieces, pair)
        assert_same_bits(pair, sums[2])
        assert np.all(sums[:, [0, 2]] == 77.0)
        assert np.all(nonfinite[:, [0, 2]] == 77)
        totals = module.block_totals(sums, np.array([0, 3, 3, 5]))
        assert totals.shape == (6, 3)
        results.append((sums, nonfinite, totals))
    for found, expected in zip(*results, strict=True):
        assert_same_bits(found, expected)


ROW, ONE, SUMS, NONE = np.array([0]), np.ones(1, np.float32), np.zeros((1, 1)), np.zeros((1, 1), np.int64)
WRONG_PIECES = [
    (np.array(edges), np.array([at])) for edges, at in (([0, 9], 0), ([4, 3], 0), ([0, 8], 1), ([0, 8], -1))
]


@pytest.mark.parametrize("call", [
    lambda k, s, theta, momentum: k.outer_step(*s, ROW, ONE, 1, 1, 0, 0, 1, theta, momentum, 0, 9),
    lambda k, s, theta, momentum: k.outer_step(*s, ROW + 2, ONE, 1, 1, 0, 0, 1, theta, momentum, 0, 8),
    lambda k, s, theta, _: k.gram(s[0], s[2], ROW, 0, 9),
    lambda k, s, theta, momentum: k.seed_step(s[2], 2, theta, momentum, 0, 8),
    lambda k, s, theta, _: k.products(s[0], np.zeros(9, np.float32), theta, SUMS[0]),
    lambda k, s, theta, _: k.products(s[0], theta, theta, np.zeros(2)),
    *(lambda k, s, *_, wrong=wrong: k.measure_pieces(s[0], s[2], ROW, *wrong, SUMS, NONE) for wrong in WRONG_PIECES),
    *(lambda k, s, *_, wrong=wrong: k.multiply_pieces(s[0], *s[2], *wrong, SUMS[0]) for wrong in WRONG_PIECES),
    lambda k, s, *_: k.measure_pieces(s[0], s[2], ROW, np.array([0, 8]), ROW, SUMS, np.zeros((2, 1), np.int64)),
    lambda k, *_: k.block_totals(SUMS, np.array([0, 2])),
])  # fmt: skip
def test_the_compiled_twin_refuses_what_the_reference_refuses(call: Callable[..., object]) -> None:
    """It has no bounds checks of its own, so this is what stands between a bug and other memory."""
    shard = Shard.random(1, 8, slots=2)
    with pytest.raises(ValueError, match=r"range|not rows|x is|sums is|must rise|pieces|nonfinite is"):
        call(outer_numba, (shard.theta, shard.momentum, shard.staging), *shard.outputs())
