"""The outer step in plain numpy: the readable reference that core/kernels_numba.py must equal to the bit.

It exists so that the arithmetic of docs/algorithm.md (paper section 4.1 and Algorithm 1, lines 12 and 17-18)
can be read in one place. It must never become clever: one operator a line, float32 where the kernel works in
float32, and an order of additions that depends on nothing but the arguments.

Shape legend: n elements in a slave's memory; s staging slots; k participants of the round.
    theta, momentum, out_theta, out_momentum   float32 (n,)     C-contiguous
    staging                                    float32 (s, n)   one cluster's parameters in each row
    slots                                      int64   (k,)     rows of staging, in cluster-id order
    weights                                    float32 (k,)     w_j, in the order of slots
All functions work on the elements [start, stop) and leave the others as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

LANES = 32
"""Partial sums of one entry of the Gram matrix: element start + i is added to lane i % LANES. Part of the
result's definition (it fixes the rounding), chosen so that the compiled twin fills its vector registers."""


def outer_step(
    theta: F32,
    momentum: F32,
    staging: F32,
    slots: I64,
    weights: F32,
    scale: float,
    outer_lr: float,
    decay: float,
    lookahead: float,
    gradient_weight: float,
    out_theta: F32,
    out_momentum: F32,
    start: int,
    stop: int,
) -> int:
    """PREPARE (docs/algorithm.md; paper 4.1 step 3): one step of the outer optimizer on [start, stop), in float32, in
    exactly this order.

        d    = w_0 (theta - x_0);  d = d + w_j (theta - x_j) for j = 1 .. k-1     (consumed-token average)
        g    = scale d                                           (scale = rho kappa, times the optimizer's share)
        buf  = decay momentum + g
        out  = theta - outer_lr (gradient_weight g + lookahead buf)

    decay = lookahead = mu_o with gradient_weight 1 is torch.optim.SGD(nesterov=True); 1 g is g to the bit. Which
    optimizer takes which coefficients in which round, the master decides (master/state/outer_optimizer.py).
    The scalars are rounded to float32 first. A momentum of zeros makes the first step the textbook's buf = g.
    out_theta and out_momentum may be theta and momentum themselves. Returns the number of non-finite elements
    written to both outputs. Raises ValueError for arguments that do not fit.
    """
    check_step(theta, momentum, staging, slots, weights, out_theta, out_momentum, start, stop)
    part = slice(start, stop)
    now = theta[part]
    with np.errstate(all="ignore"):
        d = weights[0] * (now - staging[slots[0], part])
        for slot, weight in zip(slots[1:], weights[1:], strict=True):
            d = d + weight * (now - staging[slot, part])
        g = np.float32(scale) * d
        buf = np.float32(decay) * momentum[part] + g
        new = now - np.float32(outer_lr) * (np.float32(gradient_weight) * g + np.float32(lookahead) * buf)
    out_theta[part] = new
    out_momentum[part] = buf
    return _count_nonfinite(new) + _count_nonfinite(buf)


def seed_step(staging: F32, slot: int, out_theta: F32, out_momentum: F32, start: int, stop: int) -> int:
    """Version 0: theta is the seed's parameters, momentum is zero. Returns theta's non-finite
    elements."""
    check_seed(staging, slot, out_theta, out_momentum, start, stop)
    out_theta[start:stop] = staging[slot, start:stop]
    out_momentum[start:stop] = 0.0
    return _count_nonfinite(out_theta[start:stop])


def gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> tuple[F64, I64]:
    """MEASURE (docs/algorithm.md; paper 4.1 step 1) for one block, which is the range [start, stop).

    Returns (float64 (k, k) symmetric, int64 (k,)): Gram_jk = <theta - x_j, theta - x_k> and the number of
    non-finite elements of each x_j. theta - x is rounded to float32, as in outer_step; products (exact) and
    sums are float64. The order of the additions is fixed: LANES partial sums, then a fixed tree over them. A
    non-finite element makes its participant's row and column NaN or infinite.
    """
    check_gram(theta, staging, slots, start, stop)
    k = len(slots)
    with np.errstate(all="ignore"):
        pseudo_gradients = [theta[start:stop] - staging[slot, start:stop] for slot in slots]
        lanes = [_in_lanes(gradient) for gradient in pseudo_gradients]
        result = np.zeros((k, k), np.float64)
        for j in range(k):
            for other in range(j, k):
                result[j, other] = result[other, j] = _sum_lanes(lanes[j] * lanes[other])
    counts = [_count_nonfinite(staging[slot, start:stop]) for slot in slots]
    return result, np.array(counts, np.int64)


def land(dst: F32, src: F32) -> int:
    """Copy src into dst, both float32 (m,); returns src's non-finite elements, counted in the same pass."""
    check_land(dst, src)
    dst[:] = src
    return _count_nonfinite(dst)


def _in_lanes(gradient: F32) -> F64:
    """float64 (rows, LANES), padded with zeros, which change no partial sum."""
    rows = -(-len(gradient) // LANES)
    padded = np.zeros(rows * LANES, np.float64)
    padded[: len(gradient)] = gradient
    return padded.reshape(rows, LANES)


def _sum_lanes(products: F64) -> float:
    """Rows are added one after the other, starting from zero; then lanes are folded in halves: 16, 8, 4, 2,
    1."""
    from_zero = np.concatenate([np.zeros((1, LANES)), products])
    lanes = np.add.accumulate(from_zero, axis=0)[-1]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


def _count_nonfinite(values: F32) -> int:
    return int(np.count_nonzero(~np.isfinite(values)))


# ---- what both twins check before they touch memory (the compiled one has no bounds checks) ----


def check_step(
    theta: F32,
    momentum: F32,
    staging: F32,
    slots: I64,
    weights: F32,
    out_theta: F32,
    out_momentum: F32,
    start: int,
    stop: int,
) -> None:
    """Raises ValueError unless the arguments of outer_step fit together."""
    for name, vector in (("momentum", momentum), ("out_theta", out_theta), ("out_momentum", out_momentum)):
        _require(name, vector, np.float32, theta.shape)
    _require("weights", weights, np.float32, slots.shape)
    check_gram(theta, staging, slots, start, stop)
    _require_writable(out_theta=out_theta, out_momentum=out_momentum)


def check_seed(staging: F32, slot: int, out_theta: F32, out_momentum: F32, start: int, stop: int) -> None:
    """Raises ValueError unless the arguments of seed_step fit together."""
    _require("out_momentum", out_momentum, np.float32, out_theta.shape)
    check_gram(out_theta, staging, np.array([slot], np.int64), start, stop)
    _require_writable(out_theta=out_theta, out_momentum=out_momentum)


def check_gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> None:
    """Raises ValueError unless the arguments of gram fit together."""
    n = theta.shape[0] if theta.ndim == 1 else -1
    _require("theta", theta, np.float32, (n,))
    _require("staging", staging, np.float32, (staging.shape[0], n))
    _require("slots", slots, np.int64, (len(slots),))
    if not 0 <= start <= stop <= n:
        raise ValueError(f"the range [{start}, {stop}) is not within the {n} elements of theta")
    if len(slots) == 0 or slots.min() < 0 or slots.max() >= staging.shape[0]:
        raise ValueError(f"slots {slots.tolist()} are not rows of a staging with {staging.shape[0]} of them")


def check_land(dst: F32, src: F32) -> None:
    """Raises ValueError unless src can be copied into dst element by element."""
    if dst.ndim != 1:
        raise ValueError(f"dst has shape {dst.shape}, not one dimension")
    _require("dst", dst, np.float32, dst.shape)
    _require("src", src, np.float32, dst.shape)
    _require_writable(dst=dst)


def _require(name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "strided"
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}, {layout}; needed: {np.dtype(dtype)} {shape}, C-contiguous"
        )


def _require_writable(**arrays: NDArray[Any]) -> None:
    for name, array in arrays.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only and would be written")
