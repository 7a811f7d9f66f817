"""Symbolic parameters: a chunk's content is one integer, computed from everything that it depends on.

Two chunks are equal exactly when they were made in the same way, so a torn pull, a wrong merge or a missing push
shows as an unequal number. The lowest two bits say what kind of numbers the chunk would hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from dips.core.ids import Version
from dips.core.layout import Block, Chunk, Layout, chunks_of, shard_digest
from dips.core.messages import BlockGram, DataRange, Prepare
from dips.core.wire import WIRE_DTYPES, Codec
from dips.lab.sim.arithmetic import F32, U8, Key, ModelVector, Stepped
from dips.worker.state.effects import Install, InstallMode

CLEAN, NAN, HUGE, SAME, ALL_ZERO = 0, 1, 2, 3, 4
"""Kinds: ordinary numbers; some not finite; an update thirty times too large; equal to the current version; only
zeros, whose symbol is 0."""

KIND_BITS = 3
KIND_NAMES: Mapping[int, str] = {NAN: "nan_push", HUGE: "x30_push", SAME: "zero_push", ALL_ZERO: "all_zero_push"}

LOSS = 2.0
"""The loss of every step: nothing is trained."""


def mixed(*parts: object) -> int:
    """A 62-bit hash of all parts, with the kind bits clear."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) & ~KIND_BITS & 0x7FFF_FFFF_FFFF_FFFF


def checksum_of(value: int) -> int:
    """The stand-in for the checksum of a chunk's bytes: different content, different checksum."""
    return (value * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF


def key_of(chunk: Chunk) -> Key:
    return chunk.block_id, chunk.offset_bytes


@dataclass(frozen=True)
class Trained:
    """Parameters after training; `token` identifies how they were made."""

    token: int
    kind: int = CLEAN

    def value(self, chunk: Chunk) -> int:
        return 0 if self.kind == ALL_ZERO else mixed(self.token, key_of(chunk)) | self.kind


@dataclass(frozen=True)
class PulledModel:
    """Parameters exactly as they were pulled."""

    values: Mapping[Key, int]

    def value(self, chunk: Chunk) -> int:
        return self.values[key_of(chunk)]


@dataclass(frozen=True)
class Rounded:
    """Parameters as slaves hold them after a push of differences, whose rounding changes the content."""

    wire: Codec
    push: ModelVector
    base: ModelVector
    residual: int

    def value(self, chunk: Chunk) -> int:
        push: int = self.push.value(chunk)
        return mixed("rounded", self.wire.name, push, self.base.value(chunk), self.residual) | push & KIND_BITS


@dataclass(frozen=True)
class Written:
    """The same as sent: only a process with the base can decode it."""

    rounded: Rounded

    def value(self, chunk: Chunk) -> int:
        base: int = self.rounded.base.value(chunk)
        return self.rounded.value(chunk) ^ difference_mask(self.rounded.wire, base)


def difference_mask(wire: Codec, base: int) -> int:
    """The mask between a chunk and its difference to `base`."""
    return mixed("difference", wire.name, base)


@dataclass
class SimulatedModel:
    """The parameters of one cluster, and what its transfers read and write."""

    live: ModelVector
    base: ModelVector | None = None
    push: ModelVector | None = None
    pulled: ModelVector | None = None
    changes: int = 0
    residual: int = 0
    written: Rounded | None = None  # the differences that the open push was last sent as, if any

    @property
    def residual_mark(self) -> int:
        return self.residual

    def train(self, name: str, kind: int = CLEAN) -> None:
        """Take steps: the parameters become new ones."""
        self.changes += 1
        self.live = Trained(mixed("trained", name, self.changes, _token(self.live)), kind)

    def step(self, name: str, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        self.train(name)
        return LOSS

    def snapshot(self, name: str, kind: int) -> bool:
        struck = kind != CLEAN and self.base is not None
        if struck:
            self.train(name, kind)
        self.push, self.written = self.live, None
        return struck

    def copy_base(self) -> None:
        self.push, self.written = self.base, None

    def sent(self, wire: Codec) -> ModelVector:
        assert self.push is not None, "a snapshot was taken before"
        if not wire.is_difference:
            self.written = None
            return self.push
        self.written = self._rounded(wire)
        return Written(self.written)

    def installed(self) -> ModelVector:
        assert self.base is not None, "a version was pulled"
        return self.base

    def _rounded(self, wire: Codec) -> Rounded:
        assert self.push is not None, "a snapshot was taken before"
        assert self.base is not None, "differences are based on a version that was pulled"
        return Rounded(wire, self.push, self.base, self.residual)

    def keep_residual(self, wire: Codec) -> None:
        assert self._rounded(wire) == self.written, "push, base or residual is no longer what was sent"
        self.residual = mixed("lost", wire.name, _token(self.push), _token(self.base), self.residual)

    def clear_residual(self) -> None:
        self.residual = 0

    def fetched(self, values: Mapping[Key, int]) -> None:
        self.pulled = PulledModel(values)

    def install(self, name: str, how: Install) -> None:
        assert self.pulled is not None, "installed only what was pulled"
        self.base = self.live = self.pulled
        if how.mode is not InstallMode.REPLACE:
            self.train(name)


def _token(vector: ModelVector | None) -> object:
    match vector:
        case Trained(token, _):
            return token
        case PulledModel(values):
            return sorted(values.items())
        case _:
            return None


def merged(
    theta: int, momentum: int, pushed: Sequence[int], weights: Sequence[float], scale: float, rates: tuple[float, ...]
) -> tuple[int, int]:
    """One chunk's (theta, momentum) after an outer step; rates: as rates_of makes them."""
    step = mixed("momentum", momentum, theta, tuple(pushed), tuple(weights), scale, rates[1])
    return mixed("theta", theta, step, rates), step


def averaged(theta: int, pushed: Sequence[int], weights: Sequence[float], share: float) -> tuple[int, int]:
    """One chunk of an averaged block after an outer step: it has no momentum."""
    return mixed("averaged", theta, tuple(pushed), tuple(weights), share), 0


def published(codec: Codec, stepped: int, theta: int, residual: int) -> tuple[int, int]:
    """One chunk's (theta, residual) where pull_wire rounds versions; stepped: theta after the outer step; theta and
    residual: of the version before."""
    if not codec.is_difference:
        return stepped, 0
    made = (codec.name, stepped, theta, residual)
    return mixed("published", *made), mixed("lost", *made)


def rates_of(outer_lr: float, decay: float, lookahead: float, gradient_weight: float) -> tuple[float, ...]:
    """The rates of a step; the usual gradient weight of 1 is left out, so that the seeds in tests keep their
    symbols."""
    return (outer_lr, decay, lookahead) if gradient_weight == 1.0 else (outer_lr, decay, lookahead, gradient_weight)


def outer_step(
    theta: int, momentum: int, pushed: Sequence[int], body: Prepare, is_averaged: bool = False
) -> tuple[int, int]:
    """A slave's computation on one chunk; the seed becomes version 0 unchanged, with momentum zero."""
    if body.from_version is None:
        return pushed[0], 0
    if is_averaged:
        return averaged(theta, pushed, body.weights, body.averaged_share)
    rates = rates_of(body.outer_lr, body.momentum_decay, body.momentum_lookahead, body.gradient_weight)
    return merged(theta, momentum, pushed, body.weights, body.scale, rates)


def gram_of(block: Block, first_values: Sequence[int]) -> BlockGram:
    """The Gram matrix that a slave would measure of one block; first_values: one chunk of the block of each push."""
    norms, nonfinite = [], []
    for value in first_values:
        kind = value & KIND_BITS
        nonfinite.append(3 if kind == NAN else 0)
        length = 0.1 * (0.8 + (value >> 8) % 1024 / 2560)
        norms.append({CLEAN: length, NAN: float("nan"), HUGE: 30 * length, SAME: 0.0}[kind])
    k = len(norms)
    if block.averaged:
        return BlockGram(block.block_id, (0.0,) * (k * (k + 1) // 2), tuple(nonfinite))
    gram = tuple(norms[i] * norms[j] * (1.0 if i == j else 0.9) for i in range(k) for j in range(i, k))
    return BlockGram(block.block_id, gram, tuple(nonfinite))


def to_array(values: Sequence[int]) -> F32:
    """Symbols as the snapshot's files hold them: each number's 64 bits in the place of two float32."""
    return np.array(values, dtype="<u8").view(np.float32)


class SymbolShard:
    """A slave's arithmetic on symbols. rows: for each staging slot, the content of each chunk that landed."""

    def __init__(self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, pull_wire: str) -> None:
        self._blocks = blocks
        self._codec = WIRE_DTYPES[pull_wire]
        keys = [key_of(chunk) for chunk in chunks_of(blocks, chunk_bytes)]
        of_id = {block.block_id: block for block in blocks}
        self._averaged = [of_id[block_id].averaged for block_id, _ in keys]
        self._n_chunks = len(keys)
        self._first = [keys.index((block.block_id, 0)) for block in blocks]
        self._rows: list[dict[int, int]] = [{} for _ in range(n_slots)]

    def clear(self, slot: int) -> None:
        self._rows[slot] = {}

    def land(self, slot: int, index: int, value: int) -> None:
        self._rows[slot][index] = value

    def landed(self, slot: int, index: int) -> int:
        return self._rows[slot][index]

    def measure(self, theta: tuple[int, ...], slots: Sequence[int]) -> tuple[BlockGram, ...]:
        return tuple(
            gram_of(block, [self._rows[slot][index] for slot in slots])
            for block, index in zip(self._blocks, self._first, strict=True)
        )

    def all_zero(self, slots: Sequence[int]) -> tuple[bool, ...]:
        return tuple(not any(self._rows[slot].values()) for slot in slots)

    def directions(
        self, version: Version, theta: tuple[int, ...], slots: Sequence[int], bases: Sequence[Version | None]
    ) -> tuple[float, ...]:
        """Symbols have norms, but no direction."""
        return ()

    def prepare(self, before: Stepped | None, slots: Sequence[int], body: Prepare) -> Stepped:
        steps, rounds = [], self._codec.is_difference
        for index in range(self._n_chunks):
            pushed = [self._rows[slot][index] for slot in slots]
            theta, momentum = (before.theta[index], before.momentum[index]) if before else (0, 0)
            stepped, moved = outer_step(theta, momentum, pushed, body, self._averaged[index])
            now, residual = stepped, 0
            if rounds and before is not None and body.from_version is not None:
                now, residual = published(self._codec, stepped, theta, before.residual[index])
            steps.append((now, moved, residual, now ^ difference_mask(self._codec, theta)))
        thetas, momenta, residuals, differences = zip(*steps, strict=True) if steps else ((), (), (), ())
        if not rounds:
            return Stepped(thetas, momenta)
        return Stepped(thetas, momenta, residuals, differences if body.from_version is not None else None)

    def written(self, difference: tuple[int, ...], index: int) -> int:
        return difference[index]

    def chunk(self, theta: tuple[int, ...], index: int) -> int:
        return theta[index]

    def assemble(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def digest(self, theta: tuple[int, ...]) -> bytes:
        return shard_digest([checksum_of(value) for value in theta])

    def empty_array(self) -> F32:
        return self.to_array((0,) * self._n_chunks)

    def to_array(self, part: Sequence[int]) -> F32:
        return to_array(part)

    def from_array(self, array: F32) -> tuple[int, ...]:
        return tuple(int(value) for value in array.view("<u8"))

    def empty_residual(self) -> U8:
        return np.zeros(8 * self._n_chunks if self._codec.is_difference else 0, np.uint8)

    def residual_bytes(self, residual: tuple[int, ...] | None) -> U8:
        return np.array(residual or (), "<u8").view(np.uint8)

    def residual_from(self, data: U8) -> tuple[int, ...] | None:
        return tuple(int(value) for value in data.view("<u8")) if self._codec.is_difference else None


class Symbols:
    """The arithmetic of runs that train nothing."""

    remembers = True

    def checksum(self, value: int) -> int:
        return checksum_of(value)

    def damaged(self, value: int) -> int:
        return value ^ 1 << 40

    def decoded(self, wire: Codec, base: int, written: int) -> int:
        return written ^ difference_mask(wire, base)

    def model(self, name: str, generation: int, layout: Layout, chunk_bytes: int) -> SimulatedModel:
        return SimulatedModel(Trained(mixed("initial", name, generation)))

    def shard(self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, pull_wire: str = "float32") -> SymbolShard:
        return SymbolShard(blocks, chunk_bytes, n_slots, pull_wire)


SYMBOLS = Symbols()
