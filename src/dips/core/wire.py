"""The codecs of parameters on the wire: float32, or differences to a version that both sides have, in fewer bits.

Parameters themselves are never quantised: bfloat16 rounding of theta is as large as a pseudo-gradient. A difference
codec writes d = theta - theta_base + residual, in blocks of SCALE_BLOCK_ELEMS elements from the chunk's beginning; what
rounding loses is the next push's residual (error feedback), which the cluster keeps. A published version is written
likewise where the run's pull_wire says so: as a difference to the version before, whose residual the slave keeps.

Payload of a chunk of n elements, little-endian:
    F32    n float32: the parameters
    BF16   n bfloat16, rounded to nearest even: d
    INT8   ceil(n / 64) float32 scales, then n int8 in [-127, 127]:      d ~ scale * q,  scale = max|d| / 127
    INT4   ceil(n / 64) float32 scales, then ceil(n / 2) bytes, two elements each, the even one in the low four bits,
           as q + 8 with q in [-7, 7]:                                   d ~ scale * q,  scale = max|d| / 7
A block with an element that is not finite has scale NaN, so that nothing non-finite is ever lost on the way.
"""

from __future__ import annotations

from dips.core.layout import FLOAT32_BYTES
from dips.protos.enums import Codec as Codec

SCALE_BLOCK_ELEMS = 64

WIRE_DTYPES = {"float32": Codec.F32, "bfloat16": Codec.BF16, "int8": Codec.INT8, "int4": Codec.INT4}
"""The names that people use."""

RESIDUAL_CODEC = Codec.INT8
"""How a slave keeps the residual of a published version: what that loses again is at most 1 / 254 of a block's largest
residual, which is at most 1 / 14 of its largest difference."""

MOST_DIFFERENCES = 2
"""Versions that a pull may be behind, to get differences: a slave keeps those that led to v and to v-1 (and to pinned
versions, which no one can rely on)."""


_F32, _BF16, _INT8, _INT4 = int(Codec.F32), int(Codec.BF16), int(Codec.INT8), int(Codec.INT4)


# Plain functions of numbers: compiled loops run them too.


def n_scales(codec: int, n_elems: int) -> int:
    """Float32 scales before the codes."""
    return (n_elems + SCALE_BLOCK_ELEMS - 1) // SCALE_BLOCK_ELEMS if codec == _INT8 or codec == _INT4 else 0


def encoded_bytes(codec: int, n_elems: int) -> int:
    """Length of the payload of n_elems elements; Codec.NONE has none."""
    scales = FLOAT32_BYTES * n_scales(codec, n_elems)
    if codec == _F32:
        return FLOAT32_BYTES * n_elems
    if codec == _BF16:
        return 2 * n_elems
    if codec == _INT8:
        return scales + n_elems
    return scales + (n_elems + 1) // 2 if codec == _INT4 else 0


def pays(codec: Codec, n_differences: int) -> bool:
    """Whether so many differences, one at least, have fewer bytes than parameters."""
    n = SCALE_BLOCK_ELEMS
    return codec.is_difference and 0 < n_differences * encoded_bytes(codec, n) < encoded_bytes(Codec.F32, n)


def encoded_block_bytes(codec: Codec, n_elems: int, chunk_bytes: int) -> int:
    """Length of the payloads of all chunks of a block of n_elems elements."""
    of_chunk = chunk_bytes // FLOAT32_BYTES
    return n_elems // of_chunk * encoded_bytes(codec, of_chunk) + encoded_bytes(codec, n_elems % of_chunk)
