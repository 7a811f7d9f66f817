"""The difference codecs, compiled: the signatures of core/math/wire_numpy.py and its bits, in one pass over a chunk.

A chunk is worked on in blocks of 64 elements, which is what one scale covers; a last shorter one is padded with zeros,
which change no scale. It must never use fastmath, never start threads (the interpreter lock is released), and never
touch memory that the checks of wire_numpy have not passed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dips.core.math.simd_numba import address, array_at, compiled
from dips.core.math.wire_numpy import F32, U8, check_publish, check_wire
from dips.core.wire import SCALE_BLOCK_ELEMS as BLOCK
from dips.core.wire import Codec, encoded_bytes

SMALLEST_BITS = (127 - 100) << 23
"""wire_numpy.SMALLEST as the bits of a float32, which order as the numbers do."""

INFINITY_BITS = 0x7F800000
TO_INTEGER = np.float32(1.5 * 2**23)
"""Added and taken away again, it rounds a small float32 to the nearest integer, ties to even."""

BF16, INT8, INT4 = int(Codec.BF16), int(Codec.INT8), int(Codec.INT4)

I32 = NDArray[np.int32]
NONE = np.empty(0, np.float32)


def encode(codec: Codec, now: F32, base: F32, residual: F32 | None, payload: U8) -> None:
    """As wire_numpy.encode, to the bit."""
    check_wire(codec, payload, now=now, base=base, residual=residual)
    encode_at(int(codec), now, base, NONE if residual is None else residual, address(payload))


def decode(codec: Codec, base: F32, payload: U8, out: F32) -> None:
    """As wire_numpy.decode, to the bit; payload may be at any address (a frame of a socket)."""
    check_wire(codec, payload, base=base, out=out)
    decode_at(int(codec), base, address(payload), out)


def keep_residual(codec: Codec, now: F32, base: F32, residual: F32) -> None:
    """As wire_numpy.keep_residual, to the bit."""
    check_wire(codec, np.empty(encoded_bytes(codec, len(now)), np.uint8), now=now, base=base, residual=residual)
    _keep_residual(int(codec), now, base, residual)


def publish(codec: Codec, now: F32, base: F32, residual: U8, payload: U8, next_residual: U8) -> int:
    """As wire_numpy.publish, to the bit."""
    check_publish(codec, now, base, residual, payload, next_residual)
    return int(_publish(int(codec), now, base, address(residual), address(payload), address(next_residual)))


def warm_up() -> None:
    """Compile (or load from the cache) everything, so that the first push is not slow."""
    now = np.zeros(BLOCK, np.float32)
    payload = np.zeros(encoded_bytes(Codec.INT4, BLOCK), np.uint8)
    encode(Codec.INT4, now, now, None, payload)
    decode(Codec.INT4, now, payload, now.copy())
    keep_residual(Codec.INT4, now, now, now.copy())
    residual = np.zeros(encoded_bytes(Codec.INT8, BLOCK), np.uint8)
    publish(Codec.INT4, now.copy(), now, residual, payload, residual.copy())


# Loops count from 0 to BLOCK over slices: that is what the compiler turns into vector code.


@compiled
def encode_at(codec: int, now: F32, base: F32, residual: F32, payload_address: int) -> None:
    """As encode, for compiled callers, who have checked what check_wire does; codec: the number of a difference codec;
    residual: NONE for none."""
    n = len(now)
    blocks = (n + BLOCK - 1) // BLOCK
    d, q = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits, largest = d.view(np.int32), np.empty(1, np.int32)
    scales = array_at(payload_address, blocks, np.float32)
    halves = array_at(payload_address, n, np.uint16)
    codes = array_at(payload_address + 4 * blocks, n if codec == INT8 else (n + 1) // 2, np.uint8)
    for block in range(blocks):
        at = block * BLOCK
        end = min(at + BLOCK, n)
        _difference(d, now[at:end], base[at:end], residual[at:end])
        if codec == BF16:
            _write_bfloat16(bits, halves[at:end])
        elif codec == INT8:
            scales[block] = _quantise(d, bits, q, largest, np.float32(127))
            _write_bytes(q, codes[at:end])
        else:
            scales[block] = _quantise(d, bits, q, largest, np.float32(7))
            _write_nibbles(q, codes[at // 2 : (end + 1) // 2], end - at)


@compiled
def _keep_residual(codec: int, now: F32, base: F32, residual: F32) -> None:
    n = len(now)
    d, q = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits, largest = d.view(np.int32), np.empty(1, np.int32)
    halves, rounded = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.int32)
    for at in range(0, n, BLOCK):
        end = min(at + BLOCK, n)
        _difference(d, now[at:end], base[at:end], residual[at:end])
        lost = residual[at:end]
        if codec == BF16:
            _write_bfloat16(bits, halves)
            for i in range(BLOCK):
                rounded[i] = np.int32(np.uint32(halves[i]) << np.uint32(16))
            values = rounded.view(np.float32)
            for i in range(len(lost)):
                lost[i] = d[i] - values[i]
        else:
            scale = _quantise(d, bits, q, largest, np.float32(127 if codec == INT8 else 7))
            for i in range(len(lost)):
                lost[i] = d[i] - q[i] * scale


@compiled
def _publish(
    codec: int, now: F32, base: F32, residual_address: int, payload_address: int, next_residual_address: int
) -> int:
    """residual and next_residual are INT8."""
    n = len(now)
    blocks = (n + BLOCK - 1) // BLOCK
    before, d, q, said = (
        np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32),
        np.empty(BLOCK, np.float32),
    )  # fmt: skip
    bits, largest, found = d.view(np.int32), np.empty(1, np.int32), said.view(np.int32)
    scales, halves = array_at(payload_address, blocks, np.float32), array_at(payload_address, n, np.uint16)
    codes = array_at(payload_address + 4 * blocks, n if codec == INT8 else (n + 1) // 2, np.uint8)
    old_scales = array_at(residual_address, blocks, np.float32)
    old_codes = array_at(residual_address + 4 * blocks, n, np.uint8)
    new_scales = array_at(next_residual_address, blocks, np.float32)
    new_codes = array_at(next_residual_address + 4 * blocks, n, np.uint8)
    bad = 0
    for block in range(blocks):
        at = block * BLOCK
        end = min(at + BLOCK, n)
        into, old = now[at:end], before[: end - at]
        _widen(old_codes[at:end], old_scales[block], old)
        _difference(d, into, base[at:end], old)
        if codec == BF16:
            _write_bfloat16(bits, halves[at:end])
            for i in range(end - at):
                found[i] = np.int32(np.uint32(halves[at + i]) << np.uint32(16))
        else:
            scale = _quantise(d, bits, q, largest, np.float32(127 if codec == INT8 else 7))
            scales[block] = scale
            if codec == INT8:
                _write_bytes(q, codes[at:end])
            else:
                _write_nibbles(q, codes[at // 2 : (end + 1) // 2], end - at)
            for i in range(BLOCK):
                said[i] = q[i] * scale
        bad += _apply(into, base[at:end], d, said)
        new_scales[block] = _quantise(d, bits, q, largest, np.float32(127))
        _write_bytes(q, new_codes[at:end])
    return bad


@compiled
def _widen(codes: U8, scale: np.float32, out: F32) -> None:
    for i in range(len(codes)):
        out[i] = np.float32(np.int8(codes[i])) * scale


@compiled
def _apply(into: F32, base: F32, d: F32, said: F32) -> int:
    """into = base + said, and d = d - said; how many elements of `into` are not finite."""
    bits, largest, bad = into.view(np.int32), np.int32(0), 0
    for i in range(len(into)):
        into[i] = base[i] + said[i]
    for i in range(len(into)):
        d[i] -= said[i]
    for i in range(len(into)):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    if largest >= np.int32(INFINITY_BITS):
        for i in range(len(into)):
            bad += (bits[i] & np.int32(0x7FFFFFFF)) >= np.int32(INFINITY_BITS)
    return bad


@compiled
def decode_at(codec: int, base: F32, payload_address: int, out: F32) -> None:
    """As decode, for compiled callers, as encode_at."""
    n = len(base)
    blocks = (n + BLOCK - 1) // BLOCK
    scales = array_at(payload_address, blocks, np.float32)
    codes = array_at(payload_address + 4 * blocks, n if codec == INT8 else (n + 1) // 2, np.uint8)
    if codec == BF16:
        _add_bfloat16(array_at(payload_address, n, np.uint16), base, out)
        return
    for block in range(blocks):
        at = block * BLOCK
        end = min(at + BLOCK, n)
        if codec == INT8:
            _add_bytes(codes[at:end], scales[block], base[at:end], out[at:end])
        else:
            _add_nibbles(codes[at // 2 : (end + 1) // 2], scales[block], base[at:end], out[at:end])


@compiled
def _difference(d: F32, now: F32, base: F32, residual: F32) -> None:
    """d = now - base + residual, and zeros behind the end; without a residual its slice is empty."""
    if len(now) == BLOCK and len(residual) == BLOCK:
        for i in range(BLOCK):
            d[i] = (now[i] - base[i]) + residual[i]
        return
    if len(now) == BLOCK and len(residual) == 0:
        for i in range(BLOCK):
            d[i] = now[i] - base[i]
        return
    d[:] = np.float32(0)
    for i in range(len(now)):
        d[i] = now[i] - base[i]
        if len(residual) > 0:
            d[i] += residual[i]


@compiled
def _quantise(d: F32, bits: I32, q: F32, largest: I32, top: np.float32) -> np.float32:
    """q = the codes of d as whole float32; returns the scale. bits: d's; largest: one element of scratch."""
    found: Any = np.int32(0)
    for i in range(BLOCK):
        found = max(found, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    if found < SMALLEST_BITS or found >= INFINITY_BITS:
        q[:] = np.float32(0)
        return np.float32(0) if found < SMALLEST_BITS else np.float32(np.nan)
    largest[0] = found
    value = largest.view(np.float32)[0]
    inverse = top / value
    for i in range(BLOCK):
        q[i] = (d[i] * inverse + TO_INTEGER) - TO_INTEGER
    return value / top  # type: ignore[no-any-return]


@compiled
def _write_bfloat16(bits: I32, out: NDArray[np.uint16]) -> None:
    for i in range(len(out)):
        b = np.uint32(bits[i])
        rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(INFINITY_BITS)
        out[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@compiled
def _write_bytes(q: F32, out: U8) -> None:
    for i in range(len(out)):
        out[i] = np.uint8(np.int32(q[i]))


@compiled
def _write_nibbles(q: F32, out: U8, n_elems: int) -> None:
    for i in range(n_elems // 2):
        out[i] = np.uint8((np.int32(q[2 * i]) + 8) | ((np.int32(q[2 * i + 1]) + 8) << 4))
    if n_elems % 2:
        out[n_elems // 2] = np.uint8(np.int32(q[n_elems - 1]) + 8)


@compiled
def _add_bfloat16(halves: NDArray[np.uint16], base: F32, out: F32) -> None:
    widened = np.empty(BLOCK, np.int32)
    values = widened.view(np.float32)
    for at in range(0, len(base), BLOCK):
        end = min(at + BLOCK, len(base))
        part, before, after = halves[at:end], base[at:end], out[at:end]
        for i in range(len(part)):
            widened[i] = np.int32(np.uint32(part[i]) << np.uint32(16))
        for i in range(len(part)):
            after[i] = before[i] + values[i]


@compiled
def _add_bytes(codes: U8, scale: np.float32, base: F32, out: F32) -> None:
    for i in range(len(base)):
        out[i] = base[i] + np.float32(np.int8(codes[i])) * scale


@compiled
def _add_nibbles(codes: U8, scale: np.float32, base: F32, out: F32) -> None:
    for i in range(len(base) // 2):
        code = np.int32(codes[i])
        out[2 * i] = base[2 * i] + np.float32((code & 15) - 8) * scale
        out[2 * i + 1] = base[2 * i + 1] + np.float32((code >> 4) - 8) * scale
    if len(base) % 2:
        last = len(base) - 1
        out[last] = base[last] + np.float32(np.int32(codes[last // 2] & 15) - 8) * scale
