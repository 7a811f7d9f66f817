"""The outer step in plain numpy: the readable reference that core/math/outer_numba.py must equal to the bit.

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

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import checksum

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
MeasurePieces = Callable[[F32, F32, I64, I64, I64, F64, I64], None]

LANES = 32
"""Partial sums of one piece: its element i is added to lane i % LANES. Part of the result's definition (it fixes the
rounding), chosen so that the compiled twin fills its vector registers."""

PIECE_ELEMS = 16384
"""Elements of a piece, counted from the beginning of the block: what a sum is taken of at a time, so that chunks may be
measured as they arrive, in any order and by any thread. A multiple of LANES; 64 KiB stay in a core's own caches."""


_FLOAT32, _FLOAT64, _INT64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)
"""To compare an array's type with one of these is several times faster than with the class."""


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
    optimizer takes which coefficients in which round, the master decides (master/state/records.py).
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
    """outer_step on each chunk [edges[i], edges[i + 1]); the non-finite elements of all, and the checksums of the new
    theta's chunks (core/layout.py). Raises ValueError for arguments that do not fit.
    """
    check_chunks(theta, momentum, staging, slots, weights, out_theta, out_momentum, edges)
    scalars = (scale, outer_lr, decay, lookahead, gradient_weight)
    bad, checksums = 0, np.empty(len(edges) - 1, np.uint64)
    for i, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        bad += outer_step(theta, momentum, staging, slots, weights, *scalars, out_theta, out_momentum, start, stop)
        checksums[i] = checksum(out_theta[start:stop])
    return bad, checksums


def seed_step(staging: F32, slot: int, out_theta: F32, out_momentum: F32, start: int, stop: int) -> int:
    """Version 0: theta is the seed's parameters, momentum is zero. Returns theta's non-finite
    elements."""
    check_seed(staging, slot, out_theta, out_momentum, start, stop)
    out_theta[start:stop] = staging[slot, start:stop]
    out_momentum[start:stop] = 0.0
    return _count_nonfinite(out_theta[start:stop])


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
    """PREPARE of averaged blocks (docs/algorithm.md, Averaged buffers) on [start, stop), in float32, in this order.

        d    = w_0 (theta - x_0);  d = d + w_j (theta - x_j) for j = 1 .. k-1
        out  = theta - share d, but not below the least, nor above the greatest, of theta and all x_j
        buf  = 0

    A mean lies between the values that it is of, whatever was rounded on the way: a variance stays positive, and what
    all have alike stays as it is, to the bit. Returns out's non-finite elements. Raises ValueError as outer_step.
    """
    check_step(theta, theta, staging, slots, weights, out_theta, out_momentum, start, stop)
    part = slice(start, stop)
    now = theta[part]
    least, greatest, d = now, now, np.zeros_like(now)
    with np.errstate(all="ignore"):
        for j, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
            x = staging[slot, part]
            step = weight * (now - x)
            d = step if j == 0 else d + step
            least = np.where(x < least, x, least)
            greatest = np.where(x > greatest, x, greatest)
        new = now - np.float32(share) * d
        new = np.where(new < least, least, new)
        new = np.where(new > greatest, greatest, new)
    out_theta[part] = new
    out_momentum[part] = 0.0
    return _count_nonfinite(out_theta[part])


def n_pieces(n_elems: int) -> int:
    """Pieces of n_elems elements; only the last may be shorter than PIECE_ELEMS."""
    return -(-n_elems // PIECE_ELEMS)


def gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> tuple[F64, I64]:
    """MEASURE (docs/algorithm.md; paper 4.1 step 1) for one block, which is the range [start, stop).

    Returns (float64 (k, k) symmetric, int64 (k,)): Gram_jk = <theta - x_j, theta - x_k> and the number of
    non-finite elements of each x_j. Each entry is the total() of the block's pieces. A non-finite element makes
    its participant's row and column NaN or infinite.
    """
    check_gram(theta, staging, slots, start, stop)
    return gram_of_pieces(theta, staging, slots, start, stop, measure_pieces)


def gram_of_pieces(
    theta: F32, staging: F32, slots: I64, start: int, stop: int, measure: MeasurePieces
) -> tuple[F64, I64]:
    """gram by either twin's measure_pieces."""
    k = len(slots)
    edges = np.append(np.arange(start, stop, PIECE_ELEMS), stop).astype(np.int64)
    sums = np.zeros((k * (k + 1) // 2, len(edges) - 1), np.float64)
    nonfinite = np.zeros((k, len(edges) - 1), np.int64)
    measure(theta, staging, slots, edges, np.arange(len(edges) - 1), sums, nonfinite)
    result = np.zeros((k, k), np.float64)
    upper = np.triu_indices(k)
    result[upper] = [total(of_pair) for of_pair in sums]
    result.T[upper] = result[upper]
    return result, nonfinite.sum(axis=1)


def measure_pieces(theta: F32, staging: F32, slots: I64, edges: I64, pieces: I64, sums: F64, nonfinite: I64) -> None:
    """The pieces' parts of Gram, for all pairs of slots at once.

    edges: (p + 1,), piece i is the range [edges[i], edges[i + 1]). pieces: the numbers of those to measure. sums:
    (k (k + 1) / 2, p), the upper triangle by rows of each; nonfinite: (k, p). Other pieces' columns stay as they are.
    Raises ValueError for arguments that do not fit.
    """
    check_measure_pieces(theta, staging, slots, edges, pieces, sums, nonfinite)
    for piece in pieces.tolist():
        part = slice(int(edges[piece]), int(edges[piece + 1]))
        pair = 0
        for j, row in enumerate(slots):
            for other in slots[j:]:
                products(theta[part], staging[row, part], staging[other, part], sums[pair, piece : piece + 1])
                pair += 1
            nonfinite[j, piece] = _count_nonfinite(staging[row, part])


def multiply_pieces(theta: F32, x: F32, y: F32, edges: I64, pieces: I64, sums: F64) -> None:
    """measure_pieces for one pair of whole vectors x, y (n,); sums: (p,)."""
    check_multiply_pieces(theta, x, y, edges, pieces, sums)
    for piece in pieces.tolist():
        part = slice(int(edges[piece]), int(edges[piece + 1]))
        products(theta[part], x[part], y[part], sums[piece : piece + 1])


def products(theta: F32, x: F32, y: F32, out: F64) -> None:
    """out[p] = <theta - x, theta - y> over piece p of a slice that begins at a piece's edge; out: (n_pieces,).

    theta - x is rounded to float32, as in outer_step; products (exact) and sums are float64. The order of the
    additions is fixed: LANES partial sums that begin with zero, then a fixed tree over them. Raises ValueError
    for arguments that do not fit.
    """
    check_pieces(theta, out, x=x, y=y)
    with np.errstate(all="ignore"):
        left, right = (theta - x).astype(np.float64), (theta - y).astype(np.float64)
        for piece in range(len(out)):
            part = slice(piece * PIECE_ELEMS, (piece + 1) * PIECE_ELEMS)
            out[piece] = _sum_lanes(left[part] * right[part])


def total(pieces: F64) -> float:
    """The sum over a block's pieces: plain float64 additions in the order of their offsets."""
    return float(np.add.accumulate(pieces)[-1]) if len(pieces) else 0.0


def block_totals(sums: F64, first_pieces: I64) -> F64:
    """(rows, b): total() of the pieces [first_pieces[i], first_pieces[i + 1]) in each row of sums (rows, p)."""
    ranges = list(itertools.pairwise(first_pieces.tolist()))
    return np.array([[total(row[start:stop]) for start, stop in ranges] for row in sums], np.float64)


def measure_landed(x: F32, theta: F32, squared: F64) -> int:
    """squared = products(theta, x, x); returns x's non-finite elements."""
    products(theta, x, x, squared)
    return _count_nonfinite(x)


def _sum_lanes(products: F64) -> float:
    """Rows of LANES products, the last padded with zeros, which change no sum, are added one after the other;
    then lanes are folded in halves: 16, 8, 4, 2, 1."""
    rows = np.zeros((1 + -(-len(products) // LANES), LANES))
    rows.reshape(-1)[LANES : LANES + len(products)] = products
    lanes = np.add.accumulate(rows, axis=0)[-1]
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
        _require(name, vector, _FLOAT32, theta.shape)
    _require("weights", weights, _FLOAT32, slots.shape)
    check_gram(theta, staging, slots, start, stop)
    _require_writable(out_theta=out_theta, out_momentum=out_momentum)


def check_chunks(
    theta: F32, momentum: F32, staging: F32, slots: I64, weights: F32, out_theta: F32, out_momentum: F32, edges: I64
) -> None:
    """Raises ValueError unless the arguments of step_chunks fit together."""
    if edges.ndim != 1 or edges.dtype != _INT64 or edges.size < 1 or np.any(np.diff(edges) < 0):
        raise ValueError(f"edges are {edges!r:.80}, not ascending numbers of elements")
    check_step(theta, momentum, staging, slots, weights, out_theta, out_momentum, int(edges[0]), int(edges[-1]))


def check_seed(staging: F32, slot: int, out_theta: F32, out_momentum: F32, start: int, stop: int) -> None:
    """Raises ValueError unless the arguments of seed_step fit together."""
    _require("out_momentum", out_momentum, _FLOAT32, out_theta.shape)
    check_gram(out_theta, staging, np.array([slot], np.int64), start, stop)
    _require_writable(out_theta=out_theta, out_momentum=out_momentum)


def check_gram(theta: F32, staging: F32, slots: I64, start: int, stop: int) -> None:
    """Raises ValueError unless the arguments of gram fit together."""
    n = theta.shape[0] if theta.ndim == 1 else -1
    _require("theta", theta, _FLOAT32, (n,))
    _require("staging", staging, _FLOAT32, (staging.shape[0], n))
    _require("slots", slots, _INT64, (len(slots),))
    if not 0 <= start <= stop <= n:
        raise ValueError(f"the range [{start}, {stop}) is not within the {n} elements of theta")
    if len(slots) == 0 or slots.min() < 0 or slots.max() >= staging.shape[0]:
        raise ValueError(f"slots {slots.tolist()} are not rows of a staging with {staging.shape[0]} of them")


def check_pieces(theta: F32, sums: F64, **vectors: F32) -> None:
    """Raises ValueError unless the vectors are as long as theta, and sums has an element for each of its pieces."""
    if theta.ndim != 1:
        raise ValueError(f"theta has shape {theta.shape}, not one dimension")
    for name, vector in (("theta", theta), *vectors.items()):
        _require(name, vector, _FLOAT32, theta.shape)
    _require("sums", sums, _FLOAT64, (n_pieces(len(theta)),))
    _require_writable(sums=sums)


def check_measure_pieces(
    theta: F32, staging: F32, slots: I64, edges: I64, pieces: I64, sums: F64, nonfinite: I64
) -> None:
    """Raises ValueError unless the arguments of measure_pieces fit together."""
    check_gram(theta, staging, slots, 0, len(theta))
    _check_edges(len(theta), edges, pieces)
    k, n = len(slots), len(edges) - 1
    _require("sums", sums, _FLOAT64, (k * (k + 1) // 2, n))
    _require("nonfinite", nonfinite, _INT64, (k, n))
    _require_writable(sums=sums, nonfinite=nonfinite)


def check_multiply_pieces(theta: F32, x: F32, y: F32, edges: I64, pieces: I64, sums: F64) -> None:
    """Raises ValueError unless the arguments of multiply_pieces fit together."""
    for name, vector in (("theta", theta), ("x", x), ("y", y)):
        _require(name, vector, _FLOAT32, (len(theta),))
    _check_edges(len(theta), edges, pieces)
    _require("sums", sums, _FLOAT64, (len(edges) - 1,))
    _require_writable(sums=sums)


def _check_edges(n_elems: int, edges: I64, pieces: I64) -> None:
    _require("edges", edges, _INT64, (len(edges),))
    _require("pieces", pieces, _INT64, (len(pieces),))
    lengths = np.diff(edges)
    if len(edges) == 0 or edges[0] < 0 or edges[-1] > n_elems or np.any(lengths < 1) or np.any(lengths > PIECE_ELEMS):
        raise ValueError(f"edges must rise within {n_elems} elements, by 1 to {PIECE_ELEMS} each")
    if len(pieces) and (pieces.min() < 0 or pieces.max() >= len(lengths)):
        raise ValueError(f"pieces must be below {len(lengths)}, the number of pieces between edges")


def check_land(dst: F32, src: F32) -> None:
    """Raises ValueError unless src can be copied into dst element by element."""
    if dst.ndim != 1:
        raise ValueError(f"dst has shape {dst.shape}, not one dimension")
    _require("dst", dst, _FLOAT32, dst.shape)
    _require("src", src, _FLOAT32, dst.shape)
    _require_writable(dst=dst)


def _require(name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "strided"
        raise ValueError(f"{name} is {array.dtype} {array.shape}, {layout}; needed: {dtype} {shape}, C-contiguous")


def _require_writable(**arrays: NDArray[Any]) -> None:
    for name, array in arrays.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only and would be written")
