"""Lands payloads: checksum, copy past the caches and sums in one pass, while the bytes are in registers.

A chunk is bound by memory, so every further pass over it costs as much as the copy. The checksums are those of the
xxhash package (core/math/xxh3_numba.py), the sums and counts those of core/math/outer_numpy.py, to the bit. In one pass
the bytes are written before their checksum is known: the caller counts nothing as landed until it has compared, and
no one may read what is not counted.

`land_chunk` and `copy_chunk` check their arguments and are for the interpreter. The other functions are for compiled
loops: they take the payload's address, at any alignment, and check nothing. Their scratch: acc uint64 (8,), lanes
float64 (LANES,), both without meaning before and after.

Shapes: n elements of a chunk; into, base and theta float32 (n,); squared float64 (n_pieces(n),).
"""

from __future__ import annotations

import numpy as np

from dips.core.layout import FLOAT32_BYTES, Buffer
from dips.core.math.outer_numba import (
    VECTOR_ELEMS,
    add_squares,
    aligned_from,
    bad_in,
    fold,
    keep,
    nonfinite,
)
from dips.core.math.outer_numpy import F32, F64, LANES, PIECE_ELEMS, check_land, check_pieces
from dips.core.math.simd_numba import (
    VECTOR_BYTES,
    address,
    address_of,
    array_at,
    as_words,
    compiled,
    fence,
    load,
    load_words,
    multiply_add,
    prefetch,
    scramble_words,
    splat,
    step_words,
    store_words,
    stream,
    stream_words,
    widen,
)
from dips.core.math.wire_numba import decode_at
from dips.core.math.wire_numpy import check_wire
from dips.core.math.xxh3_numba import (
    BLOCK_BYTES,
    LAST_SECRET,
    LONGEST_SHORT,
    SECRET,
    U64,
    Word,
    finish,
    start,
    update,
    xxh3,
)
from dips.core.wire import Codec

BLOCK_ELEMS = BLOCK_BYTES // FLOAT32_BYTES

AHEAD_ELEMS = 1024
"""How far ahead land_measured asks for theta: 4 KiB, which take longer to copy than a line takes to come."""

# ---- for the interpreter ----


def land_chunk(
    codec: Codec,
    into: F32,
    payload: Buffer,
    base: F32 | None = None,
    theta: F32 | None = None,
    squared: F64 | None = None,
) -> tuple[int, int]:
    """into = what the payload says; (the payload's xxh3-64, into's non-finite elements).

    base: what differences are relative to. With theta and squared: also the piece sums of (theta - into)^2. The payload
    may be read-only and at any address. Raises ValueError for arguments that do not fit; then nothing was written.
    """
    source = np.frombuffer(payload, np.uint8)
    at, acc = address(source), np.empty(8, np.uint64)
    if codec.is_difference:
        if base is None:
            raise ValueError(f"codec {codec.name} writes differences, and no base was given")
        check_wire(codec, source, base=base, out=into)
    else:
        check_land(into, source.view(np.float32))
    if theta is None or squared is None:
        if base is None or not codec.is_difference:
            return land(into, at, acc)
        return land_difference(int(codec), into, at, source.size, base, acc)
    check_pieces(theta, squared, into=into)
    lanes = np.empty(LANES, np.float64)
    if base is None or not codec.is_difference:
        return land_measured(into, at, theta, squared, acc, lanes)
    return land_difference_measured(int(codec), into, at, source.size, base, theta, squared, acc, lanes)


def copy_chunk(into: Buffer, payload: Buffer) -> int:
    """into = payload; returns the payload's xxh3-64. Raises ValueError unless both are equally long and into may be
    written."""
    source, target = np.frombuffer(payload, np.uint8), np.frombuffer(into, np.uint8)
    if source.size != target.size or not target.flags.writeable:
        written = "" if target.flags.writeable else ", read-only"
        raise ValueError(f"{source.size} bytes cannot be copied into {target.size}{written}")
    found: int = copy_hashed(address(target), address(source), source.size, np.empty(8, np.uint64))
    return found


def warm_up() -> None:
    """Compile (or load from the cache) everything, so that the first chunk is not slow."""
    into, squared = np.zeros(LANES, np.float32), np.zeros(1)
    for codec, payload in ((Codec.F32, bytes(4 * LANES)), (Codec.BF16, bytes(2 * LANES))):
        land_chunk(codec, into, payload, into.copy())
        land_chunk(codec, into, payload, into.copy(), into.copy(), squared)
    copy_chunk(into, bytes(4 * LANES))


# ---- for compiled loops ----


@compiled
def land(into: F32, src_address: int, acc: U64) -> tuple[int, int]:
    """into = the floats at the address; (xxh3-64 of their bytes, how many are not finite)."""
    found = copy_hashed(address_of(into), src_address, FLOAT32_BYTES * len(into), acc)
    return found, nonfinite(array_at(src_address, len(into), np.float32))


@compiled
def land_measured(into: F32, src_address: int, theta: F32, squared: F64, acc: U64, lanes: F64) -> tuple[int, int]:
    """As land; squared = the piece sums of (theta - into)^2.

    The source is in the cache, `into` goes past it, and theta comes from memory: unless it is asked for ahead, it waits
    for the stores to leave. Lines of `into` need not begin where blocks do: what is copied runs `ahead` of the rest.
    """
    n, n_bytes = len(into), FLOAT32_BYTES * len(into)
    src = array_at(src_address, n, np.float32)
    ahead = aligned_from(into, 0, n)
    n_blocks = max(0, (n_bytes - 1) // BLOCK_BYTES)  # the last one is finish's
    n_fused = min(n_blocks, (n - ahead) // BLOCK_ELEMS)
    start(acc)
    where, secret = address_of(acc), address_of(SECRET)
    sums, last = load_words(where), load_words(secret + LAST_SECRET)
    zero = splat(np.float64(0))
    bad, block = 0, 0
    into[:ahead] = src[:ahead]
    for piece in range(len(squared)):
        first = piece * PIECE_ELEMS
        stop = min(first + PIECE_ELEMS, n)
        s0, s1, s2, s3 = zero, zero, zero, zero
        while block < n_fused and (block + 1) * BLOCK_ELEMS <= stop:
            for k in range(8):
                i = block * BLOCK_ELEMS + LANES * k
                prefetch(theta, i + AHEAD_ELEMS)
                prefetch(theta, i + AHEAD_ELEMS + VECTOR_ELEMS)
                x0, x1 = load(src, i), load(src, i + VECTOR_ELEMS)
                d0, d1 = widen(load(theta, i) - x0)
                d2, d3 = widen(load(theta, i + VECTOR_ELEMS) - x1)
                s0, s1 = multiply_add(d0, d0, s0), multiply_add(d1, d1, s1)
                s2, s3 = multiply_add(d2, d2, s2), multiply_add(d3, d3, s3)
                sums = step_words(sums, as_words(x0), load_words(secret + 16 * k))
                sums = step_words(sums, as_words(x1), load_words(secret + 16 * k + 8))
                stream(into, i + ahead, load(src, i + ahead))
                stream(into, i + ahead + VECTOR_ELEMS, load(src, i + ahead + VECTOR_ELEMS))
            sums = scramble_words(sums, last)
            block += 1
        keep(lanes, s0, s1, s2, s3)
        add_squares(lanes, theta, src, min(max(first, block * BLOCK_ELEMS), stop), stop)
        squared[piece] = fold(lanes)
        bad += bad_in(squared[piece], src, first, stop)
    copied = min(ahead + BLOCK_ELEMS * n_fused, n)
    into[copied:] = src[copied:]
    fence()
    store_words(where, sums)
    return _finished(acc, src_address, n_bytes, n_blocks, n_fused), bad


@compiled
def land_difference(codec: int, into: F32, src_address: int, n_bytes: int, base: F32, acc: U64) -> tuple[int, int]:
    """into = base + the difference that is written in the n_bytes at the address; as land. codec: of a difference."""
    found = xxh3(src_address, n_bytes)
    decode_at(codec, base, src_address, into)
    return found, nonfinite(into)


@compiled
def land_difference_measured(
    codec: int, into: F32, src_address: int, n_bytes: int, base: F32, theta: F32, squared: F64, acc: U64, lanes: F64
) -> tuple[int, int]:
    """As land_difference; squared = the piece sums of (theta - into)^2."""
    found = xxh3(src_address, n_bytes)
    decode_at(codec, base, src_address, into)
    bad = 0
    for piece in range(len(squared)):
        first = piece * PIECE_ELEMS
        stop = min(first + PIECE_ELEMS, len(into))
        lanes[:] = 0.0
        add_squares(lanes, theta, into, first, stop)
        squared[piece] = fold(lanes)
        bad += bad_in(squared[piece], into, first, stop)
    return found, bad


@compiled
def copy_hashed(into_address: int, src_address: int, n_bytes: int, acc: U64) -> Word:
    """Copies n_bytes, from 0 on, between places that do not overlap, at any alignment; returns their xxh3-64."""
    ahead = min(-into_address % VECTOR_BYTES, n_bytes)
    n_blocks = max(0, (n_bytes - 1) // BLOCK_BYTES)
    n_fused = min(n_blocks, (n_bytes - ahead) // BLOCK_BYTES)
    start(acc)
    where, secret = address_of(acc), address_of(SECRET)
    sums, last = load_words(where), load_words(secret + LAST_SECRET)
    _copy_bytes(into_address, src_address, ahead)
    for block in range(n_fused):
        at = src_address + BLOCK_BYTES * block
        to = into_address + ahead + BLOCK_BYTES * block
        for stripe in range(16):
            stream_words(to + VECTOR_BYTES * stripe, load_words(at + ahead + VECTOR_BYTES * stripe))
            sums = step_words(sums, load_words(at + VECTOR_BYTES * stripe), load_words(secret + 8 * stripe))
        sums = scramble_words(sums, last)
    copied = ahead + BLOCK_BYTES * n_fused
    _copy_bytes(into_address + copied, src_address + copied, n_bytes - copied)
    fence()
    store_words(where, sums)
    return _finished(acc, src_address, n_bytes, n_blocks, n_fused)


@compiled
def _finished(acc: U64, src_address: int, n_bytes: int, n_blocks: int, n_seen: int) -> Word:
    """The checksum of n_bytes, of whose n_blocks blocks acc has seen the first n_seen."""
    if n_bytes <= LONGEST_SHORT:
        return xxh3(src_address, n_bytes)
    update(acc, src_address + BLOCK_BYTES * n_seen, n_blocks - n_seen)
    return finish(acc, src_address + n_bytes, n_bytes - BLOCK_BYTES * n_blocks, n_bytes)


@compiled
def _copy_bytes(into_address: int, src_address: int, n_bytes: int) -> None:
    into, src = array_at(into_address, n_bytes, np.uint8), array_at(src_address, n_bytes, np.uint8)
    for i in range(n_bytes):
        into[i] = src[i]
