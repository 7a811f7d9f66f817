"""The difference codecs of core/wire.py in plain numpy: what core/math/wire_numba.py must equal to the bit.

Shapes: now, base, residual, out float32 (n,), one chunk; payload uint8 (encoded_bytes(codec, n),), at any address.
d = (now - base) + residual, each rounded to float32. INT8 and INT4 write each block's d as scale * q with

    scale = max|d| / top,  q = d * (top / max|d|) rounded to nearest even        top = 127 or 7

where max|d| below SMALLEST counts as zero: scale 0, q 0; the residual keeps it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dips.core.wire import RESIDUAL_CODEC, SCALE_BLOCK_ELEMS, Codec, encoded_bytes, n_scales

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]

SMALLEST = float(np.float32(2.0**-100))
"""Below it top / max|d| would come near the end of float32's range."""

TOP = {Codec.INT8: 127, Codec.INT4: 7}


def encode(codec: Codec, now: F32, base: F32, residual: F32 | None, payload: U8) -> None:
    """payload = Q(now - base + residual); residual None is zero. Raises ValueError for what does not fit."""
    check_wire(codec, payload, now=now, base=base, residual=residual)
    difference = _difference(now, base, residual)
    if codec is Codec.BF16:
        payload[:] = _bfloat16(difference).view(np.uint8)
        return
    scales, codes = _quantised(codec, difference)
    payload[: scales.nbytes] = scales.view(np.uint8)
    payload[scales.nbytes :] = codes.view(np.uint8) if codec is Codec.INT8 else _in_nibbles(codes)


def decode(codec: Codec, base: F32, payload: U8, out: F32) -> None:
    """out = base + what payload says; payload may be read-only. Raises ValueError for what does not fit."""
    check_wire(codec, payload, base=base, out=out)
    with np.errstate(all="ignore"):
        out[:] = base + _dequantised(codec, payload, len(base))


def keep_residual(codec: Codec, now: F32, base: F32, residual: F32) -> None:
    """residual = d minus what a receiver makes of encode's payload, in place. Raises ValueError as encode."""
    payload = np.empty(encoded_bytes(codec, len(now)), np.uint8)
    encode(codec, now, base, residual, payload)
    with np.errstate(all="ignore"):
        residual[:] = _difference(now, base, residual) - _dequantised(codec, payload, len(now))


def publish(codec: Codec, now: F32, base: F32, residual: U8, payload: U8, next_residual: U8) -> int:
    """Round a new version to what its readers will hold (docs/algorithm.md, published versions).

    now: the outer step's result at the version before, `base`, which readers hold; it becomes base + what payload says.
    payload: the difference; residual, next_residual: what rounding lost until now, and including this version, each
    (encoded_bytes(RESIDUAL_CODEC, n),). Returns how many elements of the version are not finite. Raises ValueError for
    what does not fit.
    """
    check_publish(codec, now, base, residual, payload, next_residual)
    before = _dequantised(RESIDUAL_CODEC, residual, len(now))
    difference = _difference(now, base, before)
    encode(codec, now, base, before, payload)
    with np.errstate(all="ignore"):
        said = _dequantised(codec, payload, len(now))
        now[:] = base + said
        lost = difference - said
    encode(RESIDUAL_CODEC, lost, np.zeros_like(lost), None, next_residual)
    return int(np.count_nonzero(~np.isfinite(now)))


def _difference(now: F32, base: F32, residual: F32 | None) -> F32:
    with np.errstate(all="ignore"):
        difference: F32 = now - base
        return difference if residual is None else difference + residual


def _bfloat16(values: F32) -> NDArray[np.uint16]:
    """Rounded to nearest even; any NaN becomes one quiet NaN."""
    bits = values.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _quantised(codec: Codec, values: F32) -> tuple[F32, I8]:
    """(scale of each block, q of each element)."""
    top = np.float32(TOP[codec])
    blocks = np.zeros((n_scales(codec, len(values)), SCALE_BLOCK_ELEMS), np.float32)
    blocks.reshape(-1)[: len(values)] = values
    largest = np.abs(blocks).max(axis=1, initial=0)
    largest[largest < SMALLEST] = 0
    with np.errstate(all="ignore"):
        scales = np.where(np.isfinite(largest), largest / top, np.float32(np.nan))
        codes = np.where(scales[:, None] > 0, np.rint(blocks * (top / largest)[:, None]), np.float32(0))
    return scales, codes.astype(np.int8).reshape(-1)[: len(values)]


def _in_nibbles(codes: I8) -> U8:
    padded = np.zeros(len(codes) + len(codes) % 2, np.uint8)
    padded[: len(codes)] = codes + 8
    packed: U8 = padded[::2] | np.left_shift(padded[1::2], 4, dtype=np.uint8)
    return packed


def _dequantised(codec: Codec, payload: U8, n_elems: int) -> F32:
    if codec is Codec.BF16:
        return (payload.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    count = n_scales(codec, n_elems)
    scales, codes = payload[: 4 * count].copy().view(np.float32), payload[4 * count :].copy()
    if codec is Codec.INT8:
        values = codes.view(np.int8).astype(np.float32)
    else:
        values = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:n_elems].astype(np.float32) - np.float32(8)
    with np.errstate(all="ignore"):
        return values * np.repeat(scales, SCALE_BLOCK_ELEMS)[:n_elems]


def check_wire(codec: Codec, payload: U8, **vectors: F32 | None) -> None:
    """What both twins check before they touch memory. Raises ValueError unless all arguments fit together."""
    if not codec.is_difference:
        raise ValueError(f"codec {codec.name} writes no differences")
    present = {name: vector for name, vector in vectors.items() if vector is not None}
    shape = (len(next(iter(present.values()))),)
    for name, vector in present.items():
        if vector.dtype != np.float32 or vector.shape != shape or not vector.flags.c_contiguous:
            raise ValueError(f"{name} is {vector.dtype} {vector.shape}; needed: float32 {shape}, C-contiguous")
    needed = (encoded_bytes(codec, shape[0]),)
    if payload.dtype != np.uint8 or payload.shape != needed or not payload.flags.c_contiguous:
        raise ValueError(f"payload is {payload.dtype} {payload.shape}; needed: uint8 {needed}, C-contiguous")
    written = {"out": present["out"]} if "out" in present else {"payload": payload}
    for name, array in written.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only and would be written")


def check_publish(codec: Codec, now: F32, base: F32, residual: U8, payload: U8, next_residual: U8) -> None:
    """As check_wire, for publish."""
    check_wire(codec, payload, base=base)
    check_wire(RESIDUAL_CODEC, residual, base=base, out=now)
    check_wire(RESIDUAL_CODEC, next_residual, base=base)
