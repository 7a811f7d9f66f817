"""The reference does what docs/algorithm.md says: torch's plain operators, DiLoCo, exact Gram entries,
refusals."""

from __future__ import annotations

import math
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.numerics import F32, Shard, assert_same_bits, random_slots

from dips.core.math import outer_numba, outer_numpy
from dips.core.math.outer_numpy import LANES, PIECE_ELEMS, n_pieces


def torch_step(
    shard: Shard, slots: list[int], weights: list[float],
    scale: float, lr: float, decay: float, lookahead: float, gradient_weight: float,
) -> tuple[F32, F32]:  # fmt: skip
    """PREPARE in plain torch operators with Python scalars."""
    theta, momentum = torch.from_numpy(shard.theta), torch.from_numpy(shard.momentum)
    d = weights[0] * (theta - torch.from_numpy(shard.staging[slots[0]]))
    for slot, weight in zip(slots[1:], weights[1:], strict=True):
        d = d + weight * (theta - torch.from_numpy(shard.staging[slot]))
    g = scale * d
    buf = decay * momentum + g
    return (theta - lr * (gradient_weight * g + lookahead * buf)).numpy(), buf.numpy()


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("n_elems", [1, 31, 4097])
@pytest.mark.parametrize("gradient_weight", [1.0, 0.3, 0.0])
def test_step_equals_plain_torch_operators_to_the_bit(k: int, n_elems: int, gradient_weight: float) -> None:
    shard = Shard.random(k, n_elems, slots=9)
    slots, weights = random_slots(k, k, 9)
    theta, momentum = shard.outputs()
    bad = outer_numpy.outer_step(
        shard.theta, shard.momentum, shard.staging, slots, weights, 0.37, 0.7, 0.83, 0.61, gradient_weight,
        theta, momentum, 0, n_elems,
    )  # fmt: skip
    expected = torch_step(shard, slots.tolist(), weights.tolist(), 0.37, 0.7, 0.83, 0.61, gradient_weight)
    assert_same_bits(theta, expected[0])
    assert_same_bits(momentum, expected[1])
    assert bad == 0


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_full_participation_with_equal_tokens_is_diloco(k: int) -> None:
    """Several rounds in place: within two ulp of torch.optim.SGD, which fuses roundings."""
    shard = Shard.random(100 + k, 5000, slots=k)
    shard.momentum[:] = 0.0
    parameter = torch.nn.Parameter(torch.from_numpy(shard.theta.copy()))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.8, nesterov=True)
    for round_number in range(6):
        rng = np.random.default_rng([k, round_number])
        shard.staging[:] = shard.theta - np.float32(0.1) * rng.standard_normal(shard.staging.shape, np.float32)
        weights = np.full(k, 1 / k, np.float32)
        _, mean = torch_step(shard, list(range(k)), [1 / k] * k, 1.0, 0.7, 0.0, 0.0, 1.0)
        parameter.grad = torch.from_numpy(mean)
        sgd.step()
        before = shard.theta.copy()
        outer_numpy.outer_step(
            shard.theta, shard.momentum, shard.staging, np.arange(k), weights,
            1.0, 0.7, 0.8, 0.8, 1.0, shard.theta, shard.momentum, 0, 5000,
        )  # fmt: skip
        # Of the terms that are added, which may cancel: theta, g and buf.
        ulp = np.spacing(np.abs(before) + np.abs(mean) + np.abs(shard.momentum))
        assert np.all(np.abs(shard.theta - parameter.detach().numpy()) <= 2 * ulp)
        with torch.no_grad():  # each round compares one step from the same state
            parameter.copy_(torch.from_numpy(shard.theta))
            sgd.state[parameter]["momentum_buffer"].copy_(torch.from_numpy(shard.momentum))


@pytest.mark.parametrize("n_elems", [1, LANES - 1, LANES, 3 * LANES + 5])
def test_gram_is_the_exact_inner_product_within_double_rounding(n_elems: int) -> None:
    shard = Shard.random(3, n_elems, slots=3)
    gram, counts = outer_numpy.gram(shard.theta, shard.staging, np.arange(3), 0, n_elems)
    for j in range(3):
        for k in range(3):
            d_j, d_k = shard.theta - shard.staging[j], shard.theta - shard.staging[k]
            exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(d_j, d_k, strict=True))
            assert math.isclose(gram[j, k], exact, rel_tol=1e-12, abs_tol=1e-12)
    assert np.array_equal(gram, gram.T)
    assert counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("n_elems", [1, PIECE_ELEMS, PIECE_ELEMS + 1])
def test_sums_on_receipt_are_those_of_gram(n_elems: int) -> None:
    shard = Shard.random(5, n_elems, slots=2)
    squared, mixed = np.zeros((2, n_pieces(n_elems)))
    assert outer_numpy.measure_landed(shard.staging[0], shard.theta, squared) == 0
    outer_numpy.products(shard.theta, shard.staging[0], shard.staging[1], mixed)
    gram, _ = outer_numpy.gram(shard.theta, shard.staging, np.arange(2), 0, n_elems)
    assert (gram[0, 0], gram[1, 0]) == (outer_numpy.total(squared), outer_numpy.total(mixed))


def test_non_finite_elements_are_counted_on_receipt_and_spoil_their_own_piece_only() -> None:
    x = np.ones(PIECE_ELEMS + 1, np.float32)
    x[[3, 4]] = np.nan, np.inf
    sums = np.zeros(2)
    assert outer_numpy.measure_landed(x, np.zeros_like(x), sums) == 2
    assert np.isnan(sums[0])
    assert sums[1] == 1.0


def _step_arguments() -> dict[str, object]:
    shard = Shard.random(1, 8, slots=2)
    theta, momentum = shard.outputs()
    return {
        "theta": shard.theta, "momentum": shard.momentum, "staging": shard.staging,
        "slots": np.arange(2), "weights": np.ones(2, np.float32),
        "scale": 1.0, "outer_lr": 0.7, "decay": 0.8, "lookahead": 0.8, "gradient_weight": 1.0,
        "out_theta": theta, "out_momentum": momentum, "start": 0, "stop": 8,
    }  # fmt: skip


def _read_only() -> F32:
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(("changed", "complaint"), [
    ({"theta": np.zeros((2, 4), np.float32)}, "momentum is"), ({"momentum": np.zeros(8)}, "momentum is float64"),
    ({"momentum": np.zeros(16, np.float32)[::2]}, "strided"), ({"staging": np.zeros((2, 9), np.float32)}, "staging is"),
    ({"slots": np.arange(2, dtype=np.int32)}, "slots is int32"), ({"slots": np.array([0, 2])}, "not rows of a staging"),
    ({"slots": np.array([-1, 0])}, "not rows of a staging"),
    ({"slots": np.zeros(0, np.int64), "weights": np.zeros(0, np.float32)}, "not rows of a staging"),
    ({"weights": np.ones(3, np.float32)}, "weights is"), ({"out_theta": np.zeros(7, np.float32)}, "out_theta is"),
    ({"out_momentum": _read_only()}, "read-only"), ({"start": -1}, "range"), ({"stop": 9}, "range"),
    ({"start": 5, "stop": 4}, "range"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, object], complaint: str) -> None:
    arguments = {**_step_arguments(), **changed}
    with pytest.raises(ValueError, match=complaint):
        outer_numpy.outer_step(**arguments)  # type: ignore[arg-type]


def averaged(theta: F32, rows: F32, weights: list[float], share: float) -> F32:
    out, momentum = np.full_like(theta, 7.0), np.full_like(theta, 7.0)
    slots, w = np.arange(len(rows)), np.array(weights, np.float32)
    bad = outer_numpy.average_step(theta, rows, slots, w, share, out, momentum, 0, len(theta))
    assert bad == np.count_nonzero(~np.isfinite(out))
    assert not momentum.any()
    return out


def test_an_averaged_buffer_moves_by_the_share_to_the_weighted_mean() -> None:
    theta, rows = np.array([1.0, 4.0], np.float32), np.array([[3.0, 4.0], [5.0, 0.0]], np.float32)
    np.testing.assert_allclose(averaged(theta, rows, [0.25, 0.75], 1.0), [4.5, 1.0])
    np.testing.assert_allclose(averaged(theta, rows, [0.25, 0.75], 0.5), [2.75, 2.5])


@given(
    st.lists(st.floats(0, 2.0**127, width=32, allow_subnormal=False), min_size=3, max_size=3),
    st.floats(0.0625, 0.9375, width=32),
    st.floats(0.0625, 1, width=32),
)
def test_a_mean_lies_between_its_values_so_that_a_variance_stays_positive(
    values: list[float], weight: float, share: float
) -> None:
    theta, *rows = (np.array([value], np.float32) for value in values)
    (new,) = averaged(theta, np.stack(rows), [weight, 1 - weight], share)
    assert min(values) <= new <= max(values)


@pytest.mark.parametrize("twin", [outer_numpy, outer_numba])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["not above the greatest", "not below the least"])
def test_weights_that_add_up_to_more_than_one_pass_neither_bound(twin: ModuleType, sign: float) -> None:
    """0.4 and 0.6 do in float32: unbounded, the mean of 0.7 and 0.7 is 0.70000005."""
    rows, weights = np.full((2, 1), sign * 0.7, np.float32), np.array([0.4, 0.6], np.float32)
    out, momentum = np.full((2, 1), 7.0, np.float32)
    twin.average_step(np.zeros(1, np.float32), rows, np.arange(2), weights, 1.0, out, momentum, 0, 1)
    assert_same_bits(out, rows[0])


def test_what_all_have_alike_stays_as_it_is_to_the_bit() -> None:
    theta = np.random.default_rng(5).standard_normal(400).astype(np.float32)
    rows, new = np.stack([theta] * 3), theta
    for _ in range(50):
        new = averaged(new, rows, [0.3, 0.3, 0.4], 0.7)
    assert new.tobytes() == theta.tobytes()
