"""The outer step, compiled: the signatures of core/outer_numpy.py and its bits, in one pass over memory.

It exists because the update is bound by memory: each function reads every stream once and writes it once, in
tiles that stay in a core's own caches. It must never use fastmath or contract a multiply and an add into one
rounding, never start threads of its own (a caller splits the range [start, stop); the interpreter lock is
released, and no result depends on how elements are split between calls of outer_step), and never touch memory
that the checks of outer_numpy have not passed.

Compiled at the first use, or by warm_up(). Numba keeps the result in NUMBA_CACHE_DIR if that is set, else
beside this file, else in the user's cache folder; where none can be written, it is compiled again at each
start (seconds).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np

from dips.core.outer_numpy import F32, F64, I64, check_gram, check_land, check_seed, check_step

LANES = 32
"""outer_numpy.LANES, written again because numba's cache notices changes of this file only."""

TILE_ELEMS = 16384
"""Elements that outer_step works on at a time. The merge of a tile and its theta take 128 KiB and stay in a
second-level cache, and each stream of memory is 64 KiB long, which the prefetcher needs: with 4 KiB the step
is a quarter slower for eight clusters."""

GRAM_TILE_ELEMS = 4096
"""The same for gram, a multiple of ROWS * LANES: it keeps k pseudo-gradients of a tile (128 KiB for eight
clusters)."""

ROWS = 8
"""Rows of LANES elements whose products are added in registers before the sums go back to memory."""

P = ParamSpec("P")
R = TypeVar("R")


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """numba.njit, with the type of the function kept for the type checker."""
    options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    compiled: Callable[P, R]
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for a cache can be written: the same code, compiled again at every start
        compiled = numba.njit(**options)(function)
    return compiled


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
    """As outer_numpy.outer_step, to the bit."""
    check_step(theta, momentum, staging, slots, weights, out_theta, out_momentum, start, stop)
    scalars = np.array([scale, outer_lr, decay, lookahead, gradient_weight], np.float32)
    return _outer_step(theta, momentum, staging, slots, weights, scalars, out_theta, out_momentum, start, stop)


def seed_step(staging: F32, slot: int, out_theta: F32, out_momentum: F32, start: int, stop: int) -> int:
    """As outer_numpy.seed_step, to the bit."""
    check_seed(staging, slot, out_theta, out_momentum, start, stop)
    return _seed_step(staging[slot], out_theta, out_momentum, start, stop)


def gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> tuple[F64, I64]:
    """As outer_numpy.gram, to the bit."""
    check_gram(theta, staging, slots, start, stop)
    return _gram(theta, staging, slots, start, stop)


def land(dst: F32, src: F32) -> int:
    """As outer_numpy.land; src may be read-only, and may stand at any address (a frame of a socket)."""
    check_land(dst, src)
    if src.flags.aligned:
        return _land(dst, src)
    dst[:] = src  # numpy copies from any address; a chunk is then still in the cache
    return _nonfinite(dst)


def warm_up() -> None:
    """Compile (or load from the cache) everything for the types in use, so that the first round is not
    slow."""
    theta, staging = np.zeros(LANES, np.float32), np.zeros((1, LANES), np.float32)
    slots, weights = np.zeros(1, np.int64), np.ones(1, np.float32)
    out_theta, out_momentum = np.zeros_like(theta), np.zeros_like(theta)
    outer_step(theta, theta, staging, slots, weights, 1.0, 1.0, 0.0, 0.0, 1.0, out_theta, out_momentum, 0, LANES)
    seed_step(staging, 0, out_theta, out_momentum, 0, LANES)
    gram(theta, staging, slots, 0, LANES)
    land(out_theta, theta)
    land(out_theta, np.frombuffer(bytes(4 * LANES), np.float32))
    _nonfinite(theta)


# Every loop below counts from 0 over slices of one length: that is what the compiler turns into vector code.
# `x - x != 0` is true for NaN and both infinities only. Counts are 32 bits wide within a tile, as the data are.


@_compiled
def _outer_step(
    theta: F32,
    momentum: F32,
    staging: F32,
    slots: I64,
    weights: F32,
    scalars: F32,
    out_theta: F32,
    out_momentum: F32,
    start: int,
    stop: int,
) -> int:
    d = np.empty(TILE_ELEMS, np.float32)
    bad = 0
    for base in range(start, stop, TILE_ELEMS):
        end = min(base + TILE_ELEMS, stop)
        now = theta[base:end]
        _first_difference(d, weights[0], now, staging[slots[0], base:end])
        j = 1
        while j + 4 <= len(slots):
            _add_four(
                d,
                weights[j : j + 4],
                now,
                staging[slots[j], base:end],
                staging[slots[j + 1], base:end],
                staging[slots[j + 2], base:end],
                staging[slots[j + 3], base:end],
            )
            j += 4
        while j < len(slots):
            _add_difference(d, weights[j], now, staging[slots[j], base:end])
            j += 1
        bad += _momentum_step(now, momentum[base:end], d, scalars, out_theta[base:end], out_momentum[base:end])
    return bad


@_compiled
def _first_difference(d: F32, weight: np.float32, now: F32, x: F32) -> None:
    for i in range(len(now)):
        d[i] = weight * (now[i] - x[i])


@_compiled
def _add_difference(d: F32, weight: np.float32, now: F32, x: F32) -> None:
    for i in range(len(now)):
        d[i] = d[i] + weight * (now[i] - x[i])


@_compiled
def _add_four(d: F32, weights: F32, now: F32, x0: F32, x1: F32, x2: F32, x3: F32) -> None:
    """_add_difference four times, with four streams of memory under way at once."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(len(now)):
        t = now[i]
        d[i] = (((d[i] + w0 * (t - x0[i])) + w1 * (t - x1[i])) + w2 * (t - x2[i])) + w3 * (t - x3[i])


@_compiled
def _momentum_step(now: F32, momentum: F32, d: F32, scalars: F32, out_theta: F32, out_momentum: F32) -> int:
    scale, outer_lr, decay, lookahead, gradient_weight = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    bad: Any = np.int32(0)
    for i in range(len(now)):
        g = scale * d[i]
        buf = decay * momentum[i] + g
        new = now[i] - outer_lr * (gradient_weight * g + lookahead * buf)
        out_momentum[i] = buf
        out_theta[i] = new
        bad += np.int32(buf - buf != np.float32(0)) + np.int32(new - new != np.float32(0))
    return bad  # type: ignore[no-any-return]


@_compiled
def _seed_step(seed: F32, out_theta: F32, out_momentum: F32, start: int, stop: int) -> int:
    out_momentum[start:stop] = np.float32(0)
    return _land(out_theta[start:stop], seed[start:stop])


@_compiled
def _gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> tuple[F64, I64]:
    k = len(slots)
    lanes = np.zeros((k, k, LANES), np.float64)
    counts = np.zeros(k, np.int64)
    tile = np.zeros((k, GRAM_TILE_ELEMS), np.float32)
    for base in range(start, stop, GRAM_TILE_ELEMS):
        end = min(base + GRAM_TILE_ELEMS, stop)
        padded = -(-(end - base) // (ROWS * LANES)) * ROWS * LANES
        for j in range(k):
            counts[j] += _pseudo_gradient(theta[base:end], staging[slots[j], base:end], tile[j])
            tile[j, end - base : padded] = np.float32(0)
        for j in range(k):
            for other in range(j, k):
                _add_products(lanes[j, other], tile[j, :padded], tile[other, :padded])
    result = np.zeros((k, k), np.float64)
    for j in range(k):
        for other in range(j, k):
            result[j, other] = result[other, j] = _fold(lanes[j, other])
    return result, counts


@_compiled
def _pseudo_gradient(now: F32, x: F32, out: F32) -> int:
    """out = now - x, and the count of x's non-finite elements."""
    bad: Any = np.int32(0)
    for i in range(len(now)):
        out[i] = now[i] - x[i]
        bad += np.int32(x[i] - x[i] != np.float32(0))
    return bad  # type: ignore[no-any-return]


@_compiled
def _add_products(lanes: F64, a: F32, b: F32) -> None:
    """Adds the products of whole rows of LANES elements, ROWS rows at a time so that the sums stay in
    registers."""
    for block in range(len(a) // (ROWS * LANES)):
        left = a[block * ROWS * LANES : (block + 1) * ROWS * LANES]
        right = b[block * ROWS * LANES : (block + 1) * ROWS * LANES]
        for lane in range(LANES):
            total = lanes[lane]
            for row in range(ROWS):
                total += np.float64(left[row * LANES + lane]) * np.float64(right[row * LANES + lane])
            lanes[lane] = total


@_compiled
def _fold(lanes: F64) -> float:
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] = lanes[lane] + lanes[lane + width]
        width //= 2
    return lanes[0]  # type: ignore[no-any-return]


@_compiled
def _land(dst: F32, src: F32) -> int:
    bad = 0
    for base in range(0, len(dst), TILE_ELEMS):
        bad += _land_tile(dst[base : base + TILE_ELEMS], src[base : base + TILE_ELEMS])
    return bad


@_compiled
def _land_tile(dst: F32, src: F32) -> int:
    bad: Any = np.int32(0)
    for i in range(len(dst)):
        x = src[i]
        dst[i] = x
        bad += np.int32(x - x != np.float32(0))
    return bad  # type: ignore[no-any-return]


@_compiled
def _nonfinite(values: F32) -> int:
    bad = 0
    for i in range(len(values)):
        bad += int(values[i] - values[i] != np.float32(0))
    return bad
