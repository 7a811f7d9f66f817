"""The arithmetic with real parameters: float32 that clusters train, merged by the slave's own code.

All computations are the real ones: dips.slave.calculation on a slave's staging rows, dips.worker.vectors and
dips.core.net.payloads in a cluster. Arrays that were handed on are never written again, as versions and pushes under
way read them.

Shapes: n elements of a whole model or of one slave's shard; vectors and parts (n,) float32, staging (slots, n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from dips.core.ids import Version
from dips.core.layout import FLOAT32_BYTES, Block, Chunk, Layout, checksum, chunks_of, shard_digest
from dips.core.math import wire_numba
from dips.core.messages import BlockGram, DataRange, Prepare
from dips.core.net.payloads import Difference, Differences, Places
from dips.core.placement import shard_bytes_needed
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import F32, U8, Key, Learner, ModelVector, Stepped
from dips.lab.sim.content import CLEAN
from dips.slave import calculation
from dips.slave.memory import EncodedShard, ShardMemory
from dips.worker.state.effects import Install
from dips.worker.vectors import Vectors, chunk_spans

Corrupt = Callable[[str, F32, F32], bool]
"""(cluster, vector to send, theta_base): may spoil the vector in place; returns whether it did."""


class FlatVector:
    """A model's parameters as one flat array in layout order."""

    def __init__(self, flat: F32, layout: Layout) -> None:
        self._flat = flat
        self._starts = {block.block_id: block.start_elem for block in layout.blocks}

    def value(self, chunk: Chunk) -> F32:
        start = self._starts[chunk.block_id] + chunk.offset_bytes // FLOAT32_BYTES
        return self._flat[start : start + chunk.length_bytes // FLOAT32_BYTES]

    def fill(self, values: Mapping[Key, F32]) -> None:
        """Overwrite it with the chunks of a version."""
        for (block_id, offset_bytes), value in values.items():
            start = self._starts[block_id] + offset_bytes // FLOAT32_BYTES
            self._flat[start : start + len(value)] = value


class WrittenVector:
    """A model's parameters written as differences; each chunk's bytes (n,) uint8 are the caller's."""

    def __init__(self, codec: Codec, theta: F32, difference: Difference, places: Places, chunk_bytes: int) -> None:
        self._payloads = Differences(codec, theta, difference, places, chunk_bytes)

    def value(self, chunk: Chunk) -> U8:
        return np.array(self._payloads.of(chunk), np.uint8)


class NumberModel:
    """One cluster's learner and its flat copies."""

    def __init__(self, trainer: Learner, layout: Layout, chunk_bytes: int, corrupt: Corrupt | None) -> None:
        self._trainer = trainer
        self._layout = layout
        self._chunk_bytes = chunk_bytes
        self._corrupt = corrupt
        self._vectors = Vectors(layout.n_elems, n_trained=layout.n_trained)
        self._places = Places(layout)
        self._spoiled: F32 | None = None
        self._has_base = False

    def step(self, name: str, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        return self._trainer.step(ranges, progress_tokens)

    def snapshot(self, name: str, kind: int) -> bool:
        assert kind == CLEAN, "faults of symbols are not for numbers"
        self._vectors.snapshot(self._trainer)
        # Spoil the vector to send, if the fault says so
        self._spoiled = None
        if self._corrupt is not None and self._has_base:
            spoiled = self._vectors.push.copy()
            if self._corrupt(name, spoiled, self._vectors.base):
                self._spoiled = spoiled
        return False

    def copy_base(self) -> None:
        self._vectors.copy_base()
        self._spoiled = None

    @property
    def residual_mark(self) -> int:
        return 0 if self._vectors.residual is None else self._vectors.residual_changes

    def sent(self, wire: Codec) -> ModelVector:
        vectors = self._vectors
        theta = vectors.push if self._spoiled is None else self._spoiled
        if not wire.is_difference:
            return FlatVector(theta, self._layout)
        return WrittenVector(wire, theta, Difference(vectors.base, vectors.residual), self._places, self._chunk_bytes)

    def installed(self) -> FlatVector:
        return FlatVector(self._vectors.base, self._layout)

    def keep_residual(self, wire: Codec) -> None:
        self._vectors.keep_residual(wire, chunk_spans(self._layout, self._chunk_bytes))

    def clear_residual(self) -> None:
        self._vectors.clear_residual()

    def fetched(self, values: Mapping[Key, F32]) -> None:
        FlatVector(self._vectors.pull, self._layout).fill(values)

    def install(self, name: str, how: Install) -> None:
        self._vectors.install(self._trainer, how.mode, how.share)
        self._has_base = True
        if how.reset_inner:
            self._trainer.reset_inner_optimizer()


class NumberShard:
    """A slave's memory for staging and computing; the versions themselves are the caller's."""

    def __init__(self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, pull_wire: str) -> None:
        sizes = (block.n_elems for block in blocks)
        needed = shard_bytes_needed(sizes, chunk_bytes, n_slots, pins=0, pull_wire=pull_wire)
        self._memory = ShardMemory(blocks, chunk_bytes, n_slots, needed, pull_wire=pull_wire)
        sizes = (chunk.length_bytes // FLOAT32_BYTES for chunk in chunks_of(blocks, chunk_bytes))
        self._spans = list(pairwise(accumulate(sizes, initial=0)))  # of each chunk, in (block, offset) order

    def clear(self, slot: int) -> None:
        """Nothing to do: a row is read only after all its chunks have arrived."""

    def land(self, slot: int, index: int, value: F32) -> None:
        start, stop = self._spans[index]
        self._memory.staging[slot, start:stop] = value

    def landed(self, slot: int, index: int) -> F32:
        start, stop = self._spans[index]
        return self._memory.staging[slot, start:stop]

    def measure(self, theta: F32, slots: Sequence[int]) -> tuple[BlockGram, ...]:
        return calculation.measure(self._memory, theta, slots)

    def all_zero(self, slots: Sequence[int]) -> tuple[bool, ...]:
        return calculation.all_zero(self._memory, slots)

    def directions(
        self, version: Version, theta: F32, slots: Sequence[int], bases: Sequence[Version | None]
    ) -> tuple[float, ...]:
        return calculation.directions(self._memory, version, theta, slots, bases)

    def prepare(self, before: Stepped | None, slots: Sequence[int], body: Prepare) -> Stepped:
        memory = self._memory
        out = np.empty(memory.n_elems, np.float32)
        theta = None
        if body.from_version is not None:
            assert before is not None, "the state prepares only what follows the version that it holds"
            theta = before.theta
            np.copyto(memory.momentum, before.momentum)
            if before.residual is not None:
                np.copyto(memory.residual.data, before.residual)
        difference = memory.take().difference
        memory.drop_shadow()
        calculation.prepare(memory, theta, out, body, slots, difference=difference)
        momentum = memory.next_momentum.copy()
        if difference is None:
            return Stepped(out, momentum)
        written = replace(difference, data=difference.data.copy()) if theta is not None else None
        return Stepped(out, momentum, memory.next_residual.data.copy(), written)

    def written(self, difference: EncodedShard, index: int) -> U8:
        return difference.of(index)

    def chunk(self, theta: F32, index: int) -> F32:
        start, stop = self._spans[index]
        return theta[start:stop]

    def assemble(self, values: Sequence[F32]) -> F32:
        return np.concatenate(values)

    def digest(self, theta: F32) -> bytes:
        return shard_digest(calculation.chunk_checksums(theta, self._memory.blocks, self._memory.map.chunk_bytes))

    def empty_array(self) -> F32:
        return np.zeros(self._memory.n_elems, np.float32)

    def to_array(self, part: F32) -> F32:
        return part

    def from_array(self, array: F32) -> F32:
        return array

    def empty_residual(self) -> U8:
        return np.zeros_like(self._memory.residual.data)

    def residual_bytes(self, residual: U8 | None) -> U8:
        return self.empty_residual() if residual is None else residual

    def residual_from(self, data: U8) -> U8 | None:
        return data if data.size else None


class Numbers:
    """The arithmetic of runs that train. trainer_of: a cluster's learner, by the cluster's name."""

    remembers = False

    def __init__(self, trainer_of: Callable[[str], Learner], corrupt: Corrupt | None = None) -> None:
        self._trainer_of = trainer_of
        self._corrupt = corrupt

    def checksum(self, value: F32 | U8) -> int:
        return checksum(value)

    def damaged(self, value: F32 | U8) -> F32 | U8:
        bits: U8 = value.view(np.uint8).copy()
        bits[len(bits) // 2] ^= 1 << 4
        return bits.view(value.dtype)

    def decoded(self, wire: Codec, base: F32, written: U8) -> F32:
        out = np.empty_like(base)
        wire_numba.decode(wire, base, written, out)
        return out

    def model(self, name: str, generation: int, layout: Layout, chunk_bytes: int) -> NumberModel:
        return NumberModel(self._trainer_of(name), layout, chunk_bytes, self._corrupt)

    def shard(self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, pull_wire: str = "float32") -> NumberShard:
        return NumberShard(blocks, chunk_bytes, n_slots, pull_wire)
