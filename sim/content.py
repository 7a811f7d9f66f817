"""Parameters without numbers: a chunk's content is one integer made from everything that it depends on.

Two chunks are equal exactly when they came about in the same way, so a torn pull, a wrong merge or a forgotten push
shows as an unequal number. The lowest two bits say what kind of numbers the chunk would hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from dips.core.chunks import Chunk
from dips.core.messages import BlockGram, Prepare

CLEAN, NAN, HUGE, SAME = 0, 1, 2, 3
"""Ordinary numbers; some not finite; thirty times too long a way; no different from the current version."""

KIND_BITS = 3
KIND_NAMES: Mapping[int, str] = {NAN: "nan_push", HUGE: "x30_push", SAME: "zero_push"}

Key = tuple[int, int]
"""(block id, offset in bytes): which chunk."""


def mixed(*parts: object) -> int:
    """One 62-bit number with the kind bits clear, from all parts."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) & ~KIND_BITS & 0x7FFF_FFFF_FFFF_FFFF


def checksum_of(value: int) -> int:
    """What stands for the checksum of a chunk's bytes: other content, other checksum."""
    return (value * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF


class Vector(Protocol):
    """A whole model's parameters."""

    def value(self, key: Key) -> int: ...


@dataclass(frozen=True)
class Trained:
    """Parameters that came out of training; `token` says how."""

    token: int
    kind: int = CLEAN

    def value(self, key: Key) -> int:
        return mixed(self.token, key) | self.kind


@dataclass(frozen=True)
class Pulled:
    """Parameters exactly as they were pulled."""

    values: Mapping[Key, int]

    def value(self, key: Key) -> int:
        return self.values[key]


@dataclass
class Model:
    """The parameters of one cluster, and what its transfers read and write."""

    live: Vector
    base: Vector | None = None
    push: Vector | None = None
    pulled: Vector | None = None
    changes: int = 0

    def train(self, name: str, kind: int = CLEAN) -> None:
        """Steps were made: other parameters than ever before."""
        self.changes += 1
        self.live = Trained(mixed("trained", name, self.changes, _token(self.live)), kind)


def _token(vector: Vector | None) -> object:
    match vector:
        case Trained(token, _):
            return token
        case Pulled(values):
            return sorted(values.items())
        case _:
            return None


def key_of(chunk: Chunk) -> Key:
    return chunk.block_id, chunk.offset_bytes


def merged(
    theta: int, momentum: int, pushed: Sequence[int], weights: Sequence[float], scale: float, rates: tuple[float, ...]
) -> tuple[int, int]:
    """One chunk's (theta, momentum) after an outer step; rates: learning rate, decay, look-ahead."""
    step = mixed("momentum", momentum, theta, tuple(pushed), tuple(weights), scale, rates[1])
    return mixed("theta", theta, step, rates), step


def outer_step(theta: int, momentum: int, pushed: Sequence[int], body: Prepare) -> tuple[int, int]:
    """What a slave computes of one chunk; the seed becomes version 0 as it is, with momentum zero."""
    if body.from_version is None:
        return pushed[0], 0
    rates = (body.outer_lr, body.momentum_decay, body.momentum_lookahead)
    return merged(theta, momentum, pushed, body.weights, body.scale, rates)


def gram_of(block: int, first_values: Sequence[int]) -> BlockGram:
    """What a slave would measure of one block; first_values: one chunk of the block of each push."""
    norms, nonfinite = [], []
    for value in first_values:
        kind = value & KIND_BITS
        nonfinite.append(3 if kind == NAN else 0)
        length = 0.1 * (0.8 + (value >> 8) % 1024 / 2560)
        norms.append({CLEAN: length, NAN: float("nan"), HUGE: 30 * length, SAME: 0.0}[kind])
    k = len(norms)
    gram = tuple(norms[i] * norms[j] * (1.0 if i == j else 0.9) for i in range(k) for j in range(i, k))
    return BlockGram(block, gram, tuple(nonfinite))
