"""xxh3-64 with seed 0 and the default secret, compiled: the bits of the xxhash package, for the loops that hash what
they move anyway (core/math/landing_numba.py) and for compiled senders.

The algorithm is the one of https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. All functions take
addresses, at any alignment, and check nothing: the caller owns the memory.

Inputs of more than LONGEST_SHORT bytes may be hashed in parts: `start(acc)`, then `update` or a loop of its own over
whole blocks of BLOCK_BYTES, then `finish` for the last 1 to BLOCK_BYTES. Shapes: acc uint64 (8,).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dips.core.math.simd_numba import (
    VECTOR_BYTES,
    address_of,
    compiled,
    load_words,
    mulhi_fold,
    peek8,
    peek32,
    peek64,
    scramble_words,
    step_words,
    store_words,
)

U64 = NDArray[np.uint64]
Word = Any
"""A uint64; for the type checker a number of numpy's is no int."""

BLOCK_BYTES = 1024
"""16 stripes of VECTOR_BYTES, each with the secret from 8 bytes further on; behind them the sums are scrambled."""

LONGEST_SHORT = 240
"""Bytes that are hashed without the eight sums."""

SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
).copy()

LAST_SECRET = len(SECRET) - VECTOR_BYTES
"""Where the secret of scrambling begins."""

PRIME32_1, PRIME32_2, PRIME32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
PRIME64_1, PRIME64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
PRIME64_3, PRIME64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
PRIME_MX1, PRIME_MX2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)

INITIAL = np.array([PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1], np.uint64)


@compiled
def xxh3(address: int, n_bytes: int) -> Word:
    """Of n_bytes at the address, n_bytes from 0 on."""
    if n_bytes > LONGEST_SHORT:
        acc = np.empty(8, np.uint64)
        start(acc)
        n_blocks = (n_bytes - 1) // BLOCK_BYTES
        update(acc, address, n_blocks)
        return finish(acc, address + n_bytes, n_bytes - BLOCK_BYTES * n_blocks, n_bytes)
    if n_bytes > 128:
        return _to_240(address, n_bytes)
    if n_bytes > 16:
        return _to_128(address, n_bytes)
    return _to_16(address, n_bytes)


@compiled
def start(acc: U64) -> None:
    for i in range(8):
        acc[i] = INITIAL[i]


@compiled
def update(acc: U64, address: int, n_blocks: int) -> None:
    """n_blocks whole blocks from the address on; never the last one of an input."""
    where, secret = address_of(acc), address_of(SECRET)
    sums, last = load_words(where), load_words(secret + LAST_SECRET)
    for block in range(n_blocks):
        at = address + BLOCK_BYTES * block
        for stripe in range(16):
            sums = step_words(sums, load_words(at + VECTOR_BYTES * stripe), load_words(secret + 8 * stripe))
        sums = scramble_words(sums, last)
    store_words(where, sums)


@compiled
def finish(acc: U64, end_address: int, rest_bytes: int, n_bytes: int) -> Word:
    """The checksum. end_address: behind the input's last byte; rest_bytes: that update() did not see, 1 to BLOCK_BYTES;
    n_bytes: the whole input's, more than LONGEST_SHORT."""
    where, secret = address_of(acc), address_of(SECRET)
    sums = load_words(where)
    at = end_address - rest_bytes
    for stripe in range((rest_bytes - 1) // VECTOR_BYTES):
        sums = step_words(sums, load_words(at + VECTOR_BYTES * stripe), load_words(secret + 8 * stripe))
    sums = step_words(sums, load_words(end_address - VECTOR_BYTES), load_words(secret + LAST_SECRET - 7))
    store_words(where, sums)
    found = np.uint64(n_bytes) * PRIME64_1
    for i in range(4):
        low = acc[2 * i] ^ peek64(secret + 11 + 16 * i)
        found += mulhi_fold(low, acc[2 * i + 1] ^ peek64(secret + 19 + 16 * i))
    return _avalanche(found)


@compiled
def _to_240(address: int, n_bytes: int) -> Word:
    secret = address_of(SECRET)
    found = np.uint64(n_bytes) * PRIME64_1
    for i in range(8):
        found += _mix(address + 16 * i, secret + 16 * i)
    found = _avalanche(found)
    found += _mix(address + n_bytes - 16, secret + 136 - 17)
    for i in range(8, n_bytes // 16):
        found += _mix(address + 16 * i, secret + 16 * (i - 8) + 3)
    return _avalanche(found)


@compiled
def _to_128(address: int, n_bytes: int) -> Word:
    secret = address_of(SECRET)
    found = np.uint64(n_bytes) * PRIME64_1
    for i in range((n_bytes - 1) // 32 + 1):
        found += _mix(address + 16 * i, secret + 32 * i)
        found += _mix(address + n_bytes - 16 * (i + 1), secret + 32 * i + 16)
    return _avalanche(found)


@compiled
def _to_16(address: int, n_bytes: int) -> Word:
    secret, length = address_of(SECRET), np.uint64(n_bytes)
    if n_bytes > 8:
        low = peek64(address) ^ peek64(secret + 24) ^ peek64(secret + 32)
        high = peek64(address + n_bytes - 8) ^ peek64(secret + 40) ^ peek64(secret + 48)
        return _avalanche(length + _bytes_swapped(low) + high + mulhi_fold(low, high))
    if n_bytes > 3:
        both = peek32(address + n_bytes - 4) + (peek32(address) << np.uint64(32))
        key = both ^ peek64(secret + 8) ^ peek64(secret + 16)
        key ^= _rotated(key, 49) ^ _rotated(key, 24)
        key *= PRIME_MX2
        key ^= (key >> np.uint64(35)) + length
        key *= PRIME_MX2
        return key ^ (key >> np.uint64(28))
    if n_bytes > 0:
        first, middle, last = peek8(address), peek8(address + n_bytes // 2), peek8(address + n_bytes - 1)
        three = (first << np.uint64(16)) | (middle << np.uint64(24)) | last | (length << np.uint64(8))
        return _avalanche_of_xxh64(three ^ peek32(secret) ^ peek32(secret + 4))
    return _avalanche_of_xxh64(peek64(secret + 56) ^ peek64(secret + 64))


@compiled
def _mix(address: int, secret: int) -> Word:
    return mulhi_fold(peek64(address) ^ peek64(secret), peek64(address + 8) ^ peek64(secret + 8))


@compiled
def _avalanche(h: Word) -> Word:
    h ^= h >> np.uint64(37)
    h *= PRIME_MX1
    return h ^ (h >> np.uint64(32))


@compiled
def _avalanche_of_xxh64(h: Word) -> Word:
    h ^= h >> np.uint64(33)
    h *= PRIME64_2
    h ^= h >> np.uint64(29)
    h *= PRIME64_3
    return h ^ (h >> np.uint64(32))


@compiled
def _rotated(word: Word, n_bits: int) -> Word:
    return (word << np.uint64(n_bits)) | (word >> np.uint64(64 - n_bits))


@compiled
def _bytes_swapped(word: Word) -> Word:
    odd, pairs = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    word = ((word & odd) << np.uint64(8)) | ((word >> np.uint64(8)) & odd)
    word = ((word & pairs) << np.uint64(16)) | ((word >> np.uint64(16)) & pairs)
    return _rotated(word, 32)
