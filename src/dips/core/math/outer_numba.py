"""The outer step and its sums, compiled: the signatures of core/math/outer_numpy.py and its bits, in one pass over
memory.

It exists because the update is bound by memory: each function reads every stream once and writes it once, past the
caches, so that no line is read before it is overwritten. It must never use fastmath or contract a multiply and an add
into one rounding unless the product is exact, never start threads of its own (a caller splits the range [start, stop),
for gram at edges of pieces; the interpreter lock is released, and no result depends on how the range is split), and
never touch memory that the checks of outer_numpy have not passed.

Compiled at the first use, or by warm_up(), and kept on disk (core/math/compiling.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dips.core.math.outer_numpy import (
    F32,
    F64,
    I64,
    LANES,
    PIECE_ELEMS,
    U64,
    check_chunks,
    check_gram,
    check_measure_pieces,
    check_multiply_pieces,
    check_pieces,
    check_seed,
    check_step,
    gram_of_pieces,
)
from dips.core.math.simd_numba import (
    VECTOR_BYTES,
    address_of,
    as_words,
    compiled,
    fence,
    load,
    load_words,
    multiply_add,
    scramble_words,
    splat,
    step_words,
    store,
    store_words,
    stream,
    widen,
)
from dips.core.math.xxh3_numba import BLOCK_BYTES, LAST_SECRET, LONGEST_SHORT, SECRET, finish, xxh3
from dips.core.math.xxh3_numba import start as start_sums

TILE_ELEMS = 512
"""Elements that sums work on at a time, a multiple of LANES: what is copied or multiplied again is still in the first
cache then (8 pseudo-gradients in float64: 32 KiB)."""

VECTOR_ELEMS = 16
"""VECTOR_BYTES of float32."""

FLOAT32_BYTES = 4
BLOCK_ELEMS = BLOCK_BYTES // FLOAT32_BYTES


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


def step_chunks(
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
    edges: I64,
) -> tuple[int, U64]:
    """As outer_numpy.step_chunks, to the bit, in one pass where the chunks begin lines of the cache."""
    check_chunks(theta, momentum, staging, slots, weights, out_theta, out_momentum, edges)
    scalars = np.array([scale, outer_lr, decay, lookahead, gradient_weight], np.float32)
    checksums = np.empty(len(edges) - 1, np.uint64)
    return _step_chunks(
        theta, momentum, staging, slots, weights, scalars, out_theta, out_momentum, edges, checksums
    ), checksums


def seed_step(staging: F32, slot: int, out_theta: F32, out_momentum: F32, start: int, stop: int) -> int:
    """As outer_numpy.seed_step, to the bit."""
    check_seed(staging, slot, out_theta, out_momentum, start, stop)
    return _seed_step(staging[slot], out_theta, out_momentum, start, stop)


def average_step(
    theta: F32,
    staging: F32,
    slots: I64,
    weights: F32,
    share: float,
    out_theta: F32,
    out_momentum: F32,
    start: int,
    stop: int,
) -> int:
    """As outer_numpy.average_step, to the bit."""
    check_step(theta, theta, staging, slots, weights, out_theta, out_momentum, start, stop)
    shares = np.array([share], np.float32)
    return _average_step(theta, staging, slots, weights, shares, out_theta, out_momentum, start, stop)


def gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> tuple[F64, I64]:
    """As outer_numpy.gram, to the bit."""
    check_gram(theta, staging, slots, start, stop)
    return gram_of_pieces(theta, staging, slots, start, stop, measure_pieces)


def measure_pieces(theta: F32, staging: F32, slots: I64, edges: I64, pieces: I64, sums: F64, nonfinite: I64) -> None:
    """As outer_numpy.measure_pieces, to the bit."""
    check_measure_pieces(theta, staging, slots, edges, pieces, sums, nonfinite)
    _measure_pieces(theta, staging, slots, edges, pieces, sums, nonfinite)


def multiply_pieces(theta: F32, x: F32, y: F32, edges: I64, pieces: I64, sums: F64) -> None:
    """As outer_numpy.multiply_pieces, to the bit."""
    check_multiply_pieces(theta, x, y, edges, pieces, sums)
    _multiply_pieces(theta, x, y, edges, pieces, sums)


def block_totals(sums: F64, first_pieces: I64) -> F64:
    """As outer_numpy.block_totals, to the bit."""
    if sums.ndim != 2 or first_pieces.min() < 0 or first_pieces.max() > sums.shape[1]:
        raise ValueError(f"pieces up to {first_pieces.max()} of sums {sums.shape}")
    return _block_totals(sums, first_pieces)


def products(theta: F32, x: F32, y: F32, out: F64) -> None:
    """As outer_numpy.products, to the bit."""
    check_pieces(theta, out, x=x, y=y)
    take_products(theta, x, y, out)


def warm_up() -> None:
    """Compile (or load from the cache) everything for the types in use, so that the first round is not
    slow."""
    theta, staging = np.zeros(LANES, np.float32), np.zeros((1, LANES), np.float32)
    slots, weights, squared = np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros(1)
    out_theta, out_momentum = np.zeros_like(theta), np.zeros_like(theta)
    outer_step(theta, theta, staging, slots, weights, 1.0, 1.0, 0.0, 0.0, 1.0, out_theta, out_momentum, 0, LANES)
    edges = np.array([0, LANES])
    step_chunks(theta, theta, staging, slots, weights, 1.0, 1.0, 0.0, 0.0, 1.0, out_theta, out_momentum, edges)
    average_step(theta, staging, slots, weights, 1.0, out_theta, out_momentum, 0, LANES)
    seed_step(staging, 0, out_theta, out_momentum, 0, LANES)
    gram(theta, staging, slots, 0, LANES)
    pieces = np.zeros(1, np.int64)
    multiply_pieces(theta, theta, theta, edges, pieces, squared)
    block_totals(squared.reshape(1, 1), np.array([0, 1]))
    products(theta, theta, theta, squared)


# ---- the outer step ----


@compiled
def _step_chunks(
    theta: F32,
    momentum: F32,
    staging: F32,
    slots: I64,
    weights: F32,
    scalars: F32,
    out_theta: F32,
    out_momentum: F32,
    edges: I64,
    checksums: U64,
) -> int:
    """The step is bound by memory: a checksum that reads the new theta again would take a fifth of its time more, one
    of what is in registers takes none.
    """
    rows: I64 = slots * len(theta)
    acc, bad = np.empty(8, np.uint64), 0
    for chunk in range(len(checksums)):
        start, stop = edges[chunk], edges[chunk + 1]
        at, n_bytes = address_of(out_theta) + FLOAT32_BYTES * start, FLOAT32_BYTES * (stop - start)
        aligned = at % VECTOR_BYTES == 0 and (address_of(out_momentum) + FLOAT32_BYTES * start) % VECTOR_BYTES == 0
        if not aligned or n_bytes <= LONGEST_SHORT:
            bad += _outer_step(theta, momentum, staging, slots, weights, scalars, out_theta, out_momentum, start, stop)
            checksums[chunk] = xxh3(at, n_bytes)
            continue
        n_blocks = (n_bytes - 1) // BLOCK_BYTES  # the last one is finish's
        middle = start + n_blocks * BLOCK_ELEMS
        start_sums(acc)
        if not _step_lines(
            theta, momentum, staging, rows, weights, scalars, out_theta, out_momentum, start, middle, True, acc, True
        ):
            bad += nonfinite(out_theta[start:middle]) + nonfinite(out_momentum[start:middle])
        bad += _outer_step(theta, momentum, staging, slots, weights, scalars, out_theta, out_momentum, middle, stop)
        checksums[chunk] = finish(acc, at + n_bytes, n_bytes - BLOCK_BYTES * n_blocks, n_bytes)
    return bad


@compiled
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
    rows: I64 = slots * len(theta)
    first = aligned_from(out_theta, start, stop)
    last = first + (stop - first) // (4 * VECTOR_ELEMS) * (4 * VECTOR_ELEMS)
    bad = 0
    for i in range(start, first):
        bad += _step_one(theta, momentum, staging, rows, weights, scalars, out_theta, out_momentum, i)
    aligned = address_of(out_theta) % VECTOR_BYTES == address_of(out_momentum) % VECTOR_BYTES
    unused = np.empty(8, np.uint64)
    if not _step_lines(
        theta, momentum, staging, rows, weights, scalars, out_theta, out_momentum, first, last, aligned, unused, False
    ):
        bad += nonfinite(out_theta[first:last]) + nonfinite(out_momentum[first:last])
    for i in range(last, stop):
        bad += _step_one(theta, momentum, staging, rows, weights, scalars, out_theta, out_momentum, i)
    return bad


@compiled
def _step_one(
    theta: F32,
    momentum: F32,
    staging: F32,
    rows: I64,
    weights: F32,
    scalars: F32,
    out_theta: F32,
    out_momentum: F32,
    i: int,
) -> int:
    """One element; returns how many of the two that are written are not finite."""
    scale, outer_lr, decay, lookahead, gradient_weight = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    flat, now = staging.reshape(-1), theta[i]
    d = weights[0] * (now - flat[rows[0] + i])
    for j in range(1, len(rows)):
        d = d + weights[j] * (now - flat[rows[j] + i])
    g = scale * d
    buf = decay * momentum[i] + g
    new = now - outer_lr * (gradient_weight * g + lookahead * buf)
    out_momentum[i], out_theta[i] = buf, new
    return int(buf - buf != np.float32(0)) + int(new - new != np.float32(0))


@compiled
def _step_lines(
    theta: F32,
    momentum: F32,
    staging: F32,
    rows: I64,
    weights: F32,
    scalars: F32,
    out_theta: F32,
    out_momentum: F32,
    first: int,
    last: int,
    aligned: bool,
    acc: U64,
    hashed: bool,
) -> bool:
    """_step_one for [first, last), four lines of each stream at a time; whether all that is written is finite.

    aligned: both outputs begin lines of the cache at `first`, so that they may be streamed. hashed: [first, last) are
    whole blocks of the new theta's checksum; acc is updated by them.

    The merge stays in registers. A vector times zero is zero, or NaN where it is not finite: that is added up.
    """
    scale, outer_lr, decay = splat(scalars[0]), splat(scalars[1]), splat(scalars[2])
    lookahead, gradient_weight = splat(scalars[3]), splat(scalars[4])
    zero = splat(np.float32(0))
    seen = zero
    where, secret = address_of(acc), address_of(SECRET)
    sums, last_secret = load_words(where), load_words(secret + LAST_SECRET)
    for i in range(first, last, 4 * VECTOR_ELEMS):
        t0, t1, t2, t3 = load(theta, i), load(theta, i + 16), load(theta, i + 32), load(theta, i + 48)
        w, x = splat(weights[0]), rows[0] + i
        d0, d1 = w * (t0 - load(staging, x)), w * (t1 - load(staging, x + 16))
        d2, d3 = w * (t2 - load(staging, x + 32)), w * (t3 - load(staging, x + 48))
        for j in range(1, len(rows)):
            w, x = splat(weights[j]), rows[j] + i
            d0 = d0 + w * (t0 - load(staging, x))
            d1 = d1 + w * (t1 - load(staging, x + 16))
            d2 = d2 + w * (t2 - load(staging, x + 32))
            d3 = d3 + w * (t3 - load(staging, x + 48))
        g0, g1, g2, g3 = scale * d0, scale * d1, scale * d2, scale * d3
        b0, b1 = decay * load(momentum, i) + g0, decay * load(momentum, i + 16) + g1
        b2, b3 = decay * load(momentum, i + 32) + g2, decay * load(momentum, i + 48) + g3
        _put(out_momentum, i, b0, aligned)
        _put(out_momentum, i + 16, b1, aligned)
        _put(out_momentum, i + 32, b2, aligned)
        _put(out_momentum, i + 48, b3, aligned)
        n0 = t0 - outer_lr * (gradient_weight * g0 + lookahead * b0)
        n1 = t1 - outer_lr * (gradient_weight * g1 + lookahead * b1)
        n2 = t2 - outer_lr * (gradient_weight * g2 + lookahead * b2)
        n3 = t3 - outer_lr * (gradient_weight * g3 + lookahead * b3)
        _put(out_theta, i, n0, aligned)
        _put(out_theta, i + 16, n1, aligned)
        _put(out_theta, i + 32, n2, aligned)
        _put(out_theta, i + 48, n3, aligned)
        if hashed:
            stripe = (i - first) % BLOCK_ELEMS // VECTOR_ELEMS
            sums = step_words(sums, as_words(n0), load_words(secret + 8 * stripe))
            sums = step_words(sums, as_words(n1), load_words(secret + 8 * stripe + 8))
            sums = step_words(sums, as_words(n2), load_words(secret + 8 * stripe + 16))
            sums = step_words(sums, as_words(n3), load_words(secret + 8 * stripe + 24))
            if stripe == 12:
                sums = scramble_words(sums, last_secret)
        seen = seen + ((zero * b0 + zero * b1) + (zero * b2 + zero * b3))
        seen = seen + ((zero * n0 + zero * n1) + (zero * n2 + zero * n3))
    fence()
    store_words(where, sums)
    found = np.empty(VECTOR_ELEMS, np.float32)
    store(found, 0, seen)
    return bool(found.sum() == np.float32(0))


@compiled
def _put(array: F32, index: int, value: Any, aligned: bool) -> None:
    if aligned:
        stream(array, index, value)
    else:
        store(array, index, value)


@compiled
def _average_step(
    theta: F32,
    staging: F32,
    slots: I64,
    weights: F32,
    shares: F32,
    out_theta: F32,
    out_momentum: F32,
    start: int,
    stop: int,
) -> int:
    """Element by element: buffers are few."""
    bad = 0
    for i in range(start, stop):
        now = theta[i]
        least, greatest, d = now, now, np.float32(0)
        for j in range(len(slots)):
            x = staging[slots[j], i]
            step = weights[j] * (now - x)
            d = step if j == 0 else d + step
            least = x if x < least else least
            greatest = x if x > greatest else greatest
        new = now - shares[0] * d
        new = least if new < least else new
        new = greatest if new > greatest else new
        out_theta[i], out_momentum[i] = new, np.float32(0)
        bad += int(new - new != np.float32(0))
    return bad


@compiled
def _seed_step(seed: F32, out_theta: F32, out_momentum: F32, start: int, stop: int) -> int:
    first = aligned_from(out_momentum, start, stop)
    last = first + (stop - first) // VECTOR_ELEMS * VECTOR_ELEMS
    zero = splat(np.float32(0))
    out_momentum[start:first] = np.float32(0)
    for i in range(first, last, VECTOR_ELEMS):
        stream(out_momentum, i, zero)
    out_momentum[last:stop] = np.float32(0)
    bad = _copy(out_theta, seed, start, stop)
    fence()
    return bad


# ---- a copy that counts ----


@compiled
def _copy(dst: F32, src: F32, start: int, stop: int) -> int:
    """dst = src on [start, stop), past the caches; returns src's non-finite elements there. A fence() must follow."""
    first = aligned_from(dst, start, stop)
    last = first + (stop - first) // VECTOR_ELEMS * VECTOR_ELEMS
    zero = splat(np.float32(0))
    seen = zero
    for i in range(start, first):
        dst[i] = src[i]
    for i in range(first, last, VECTOR_ELEMS):
        x = load(src, i)
        stream(dst, i, x)
        seen = seen + zero * x
    for i in range(last, stop):
        dst[i] = src[i]
    found = np.empty(VECTOR_ELEMS, np.float32)
    store(found, 0, seen)
    if found.sum() == np.float32(0):
        return nonfinite(src[start:first]) + nonfinite(src[last:stop])
    return nonfinite(src[start:stop])


@compiled
def aligned_from(array: F32, start: int, stop: int) -> int:
    """The first index of [start, stop] whose element begins a line of the cache, or stop. Float32 arrays are at
    multiples of four."""
    ahead: int = -(address_of(array) // 4 + start) % VECTOR_ELEMS
    return min(start + ahead, stop)


@compiled
def nonfinite(values: F32) -> int:
    """`x - x != 0` is true for NaN and both infinities only."""
    bad = 0
    for i in range(len(values)):
        bad += int(values[i] - values[i] != np.float32(0))
    return bad


# ---- sums over pieces ----


@compiled
def take_products(theta: F32, x: F32, y: F32, out: F64) -> None:
    """As products, for compiled callers, who have checked what it checks."""
    lanes = np.empty(LANES, np.float64)
    for piece in range(len(out)):
        start = piece * PIECE_ELEMS
        out[piece] = _product(lanes, theta, x, y, start, min(start + PIECE_ELEMS, len(theta)))


@compiled
def _multiply_pieces(theta: F32, x: F32, y: F32, edges: I64, pieces: I64, sums: F64) -> None:
    lanes = np.empty(LANES, np.float64)
    for piece in pieces:
        sums[piece] = _product(lanes, theta, x, y, edges[piece], edges[piece + 1])


@compiled
def _product(lanes: F64, theta: F32, x: F32, y: F32, start: int, stop: int) -> float:
    """<theta - x, theta - y> over the piece [start, stop); lanes: scratch."""
    whole = start + (stop - start) // LANES * LANES
    zero = splat(np.float64(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    for i in range(start, whole, LANES):
        now, after = load(theta, i), load(theta, i + 16)
        a0, a1 = widen(now - load(x, i))
        a2, a3 = widen(after - load(x, i + 16))
        b0, b1 = widen(now - load(y, i))
        b2, b3 = widen(after - load(y, i + 16))
        s0, s1 = multiply_add(a0, b0, s0), multiply_add(a1, b1, s1)
        s2, s3 = multiply_add(a2, b2, s2), multiply_add(a3, b3, s3)
    keep(lanes, s0, s1, s2, s3)
    for i in range(whole, stop):
        lanes[i - whole] += np.float64(theta[i] - x[i]) * np.float64(theta[i] - y[i])
    return fold(lanes)


@compiled
def _measure_pieces(theta: F32, staging: F32, slots: I64, edges: I64, pieces: I64, sums: F64, nonfinite: I64) -> None:
    k = len(slots)
    lanes = np.empty(k * (k + 1) // 2 * LANES, np.float64)
    tile = np.empty(k * TILE_ELEMS, np.float64)
    for piece in pieces:
        start, stop = edges[piece], edges[piece + 1]
        lanes[:] = 0.0
        for base in range(start, stop, TILE_ELEMS):
            end = min(base + TILE_ELEMS, stop)
            padded = 0
            for j in range(k):
                padded = _pseudo_gradient(theta, staging, slots[j], base, end, tile, j * TILE_ELEMS)
            pair = 0
            for j in range(k):
                for other in range(j, k):
                    _add_products(lanes, pair, tile, j * TILE_ELEMS, other * TILE_ELEMS, padded)
                    pair += 1
        pair = 0
        for j in range(k):
            for other in range(j, k):
                sums[pair, piece] = fold(lanes[pair * LANES : (pair + 1) * LANES])
                if other == j:
                    nonfinite[j, piece] = bad_in(sums[pair, piece], staging[slots[j]], start, stop)
                pair += 1


@compiled
def _block_totals(sums: F64, first_pieces: I64) -> F64:
    totals = np.zeros((len(sums), len(first_pieces) - 1), np.float64)
    for row in range(len(sums)):
        for block in range(len(first_pieces) - 1):
            for piece in range(first_pieces[block], first_pieces[block + 1]):
                totals[row, block] += sums[row, piece]
    return totals


@compiled
def _pseudo_gradient(theta: F32, staging: F32, row: int, start: int, stop: int, out: F64, at: int) -> int:
    """out from `at` on = theta - staging[row] on [start, stop), rounded to float32, and zeros up to a multiple of LANES
    elements, which is returned."""
    whole = start + (stop - start) // VECTOR_ELEMS * VECTOR_ELEMS
    shift = row * len(theta)
    for i in range(start, whole, VECTOR_ELEMS):
        low, high = widen(load(theta, i) - load(staging, shift + i))
        store(out, at + i - start, low)
        store(out, at + i - start + 8, high)
    padded = (stop - start + LANES - 1) // LANES * LANES
    for i in range(whole, stop):
        out[at + i - start] = np.float64(theta[i] - staging[row, i])
    for i in range(stop - start, padded):
        out[at + i] = 0.0
    return padded


@compiled
def _add_products(lanes: F64, pair: int, tile: F64, a: int, b: int, length: int) -> None:
    """The products of tile[a : a + length] and tile[b : b + length]; the pair's sums are lanes from pair * LANES on."""
    first = pair * LANES
    s0, s1, s2, s3 = load(lanes, first), load(lanes, first + 8), load(lanes, first + 16), load(lanes, first + 24)
    for i in range(0, length, LANES):
        s0 = multiply_add(load(tile, a + i), load(tile, b + i), s0)
        s1 = multiply_add(load(tile, a + i + 8), load(tile, b + i + 8), s1)
        s2 = multiply_add(load(tile, a + i + 16), load(tile, b + i + 16), s2)
        s3 = multiply_add(load(tile, a + i + 24), load(tile, b + i + 24), s3)
    store(lanes, first, s0)
    store(lanes, first + 8, s1)
    store(lanes, first + 16, s2)
    store(lanes, first + 24, s3)


@compiled
def add_squares(lanes: F64, theta: F32, x: F32, start: int, stop: int) -> None:
    """start is a multiple of LANES elements behind the piece's beginning."""
    whole = start + (stop - start) // LANES * LANES
    s0, s1, s2, s3 = load(lanes, 0), load(lanes, 8), load(lanes, 16), load(lanes, 24)
    for i in range(start, whole, LANES):
        d0, d1 = widen(load(theta, i) - load(x, i))
        d2, d3 = widen(load(theta, i + 16) - load(x, i + 16))
        s0, s1 = multiply_add(d0, d0, s0), multiply_add(d1, d1, s1)
        s2, s3 = multiply_add(d2, d2, s2), multiply_add(d3, d3, s3)
    keep(lanes, s0, s1, s2, s3)
    for i in range(whole, stop):
        lanes[i - whole] += np.float64(theta[i] - x[i]) * np.float64(theta[i] - x[i])


@compiled
def keep(lanes: F64, s0: Any, s1: Any, s2: Any, s3: Any) -> None:
    store(lanes, 0, s0)
    store(lanes, 8, s1)
    store(lanes, 16, s2)
    store(lanes, 24, s3)


@compiled
def fold(lanes: F64) -> float:
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] = lanes[lane] + lanes[lane + width]
        width //= 2
    return lanes[0]  # type: ignore[no-any-return]


@compiled
def bad_in(squared: float, x: F32, start: int, stop: int) -> int:
    """x's non-finite elements in a piece whose sum of squares this is: none where that is finite, and the finite sums
    of float32 squares cannot overflow."""
    if squared - squared == 0.0:
        return 0
    return nonfinite(x[start:stop])
