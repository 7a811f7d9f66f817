"""The interface of a run's arithmetic: what chunks hold, and what is computed from them. It has two implementations.

Symbols (dips.lab.sim.content) encode in one number how a chunk was made; Numbers (dips.lab.sim.numbers) are real
float32 that clusters train. Nothing else in the simulator depends on which of them a run has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.ids import Version
from dips.core.layout import Block, Chunk, Layout
from dips.core.messages import BlockGram, DataPlan, DataRange, Prepare
from dips.core.wire import Codec
from dips.worker.parameters import ParameterStore
from dips.worker.state.effects import Install

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

Key = tuple[int, int]
"""(block id, offset in bytes): which chunk."""

Value = Any
"""A chunk's content: one integer (Symbols), or its float32 elements (Numbers), or either written as a difference; None
in a message without payload.

Never changed once it is handed on."""

Part = Any
"""All chunks of one slave, theta or momentum: a tuple of integers, or one float32 array. Never changed once made."""


class Stepped(NamedTuple):
    """What an outer step makes."""

    theta: Part  # what readers of the version hold
    momentum: Part
    residual: Part = None  # what rounding lost; None where the run's pull_wire is float32
    difference: Part = None  # of theta to that of the version before; None there, and of a seed


class ModelVector(Protocol):
    """A whole model's parameters, to be sent."""

    def value(self, chunk: Chunk) -> Value: ...


class ClusterModel(Protocol):
    """One cluster's parameters in one incarnation: the live ones, theta_base, theta_at_push, what was pulled, and the
    residual: what the rounding of its pushes lost."""

    @property
    def residual_mark(self) -> int:
        """A number that changes with the residual; 0 while there is none."""
        ...

    def step(self, name: str, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        """One inner step of cluster `name`; the loss in nats per token."""
        ...

    def snapshot(self, name: str, kind: int) -> bool:
        """theta_at_push = theta_now. kind: what a fault makes of it (dips.lab.sim.content); whether that struck."""
        ...

    def copy_base(self) -> None:
        """theta_at_push = theta_base."""
        ...

    def sent(self, wire: Codec) -> ModelVector:
        """The vector that a push sends, in this form."""
        ...

    def installed(self) -> ModelVector:
        """theta_base, to which a pull may fetch differences."""
        ...

    def keep_residual(self, wire: Codec) -> None:
        """Keep the rounding error of a push that was applied: it is the residual of the next push."""
        ...

    def clear_residual(self) -> None: ...

    def fetched(self, values: Mapping[Key, Value]) -> None:
        """Take a version that has arrived, whole."""
        ...

    def install(self, name: str, how: Install) -> None:
        """Make what was fetched the live parameters, and theta_base."""
        ...


class Learner(ParameterStore, Protocol):
    """One cluster's model, inner optimizer and text, where its parameters are real."""

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        """Do one inner step on exactly these tokens; returns the mean loss in nats per byte. progress_tokens: the
        position of the run on the learning rate's schedule. A loss that is not finite changes nothing."""
        ...

    def data_plan(self) -> DataPlan:
        """The data that the master leases; equal on all clusters."""
        ...


class ShardArithmetic(Protocol):
    """One slave's staging rows and its computing on whole shards; each Configure makes a new one."""

    def clear(self, slot: int) -> None:
        """Clear the slot for another push."""
        ...

    def land(self, slot: int, index: int, value: Value) -> None:
        """Take chunk number `index` of the shard."""
        ...

    def landed(self, slot: int, index: int) -> Value:
        """What the slot has of chunk number `index`, which has landed."""
        ...

    def measure(self, theta: Part, slots: Sequence[int]) -> tuple[BlockGram, ...]: ...

    def all_zero(self, slots: Sequence[int]) -> tuple[bool, ...]:
        """As Measured.all_zero; empty: not measured."""
        ...

    def directions(
        self, version: Version, theta: Part, slots: Sequence[int], bases: Sequence[Version | None]
    ) -> tuple[float, ...]:
        """As Measured.directions, at theta of `version`; empty: not measured."""
        ...

    def prepare(self, before: Stepped | None, slots: Sequence[int], body: Prepare) -> Stepped:
        """The next version; before: the current one, None for the seed.

        Raises Refused(NONFINITE) when an element would be NaN or infinite.
        """
        ...

    def chunk(self, theta: Part, index: int) -> Value: ...

    def written(self, difference: Part, index: int) -> Value:
        """A chunk of a version's difference."""
        ...

    def assemble(self, values: Sequence[Value]) -> Part:
        """The part whose chunks these are, in (block, offset) order."""
        ...

    def digest(self, theta: Part) -> bytes:
        """As dips.core.layout.shard_digest."""
        ...

    def empty_array(self) -> F32:
        """Room for a part in the form that snapshot files have."""
        ...

    def to_array(self, part: Part) -> F32: ...

    def from_array(self, array: F32) -> Part: ...

    def empty_residual(self) -> U8:
        """Room for a residual, likewise."""
        ...

    def residual_bytes(self, residual: Part) -> U8: ...

    def residual_from(self, data: U8) -> Part: ...


class Arithmetic(Protocol):
    """The arithmetic of one run."""

    @property
    def remembers(self) -> bool:
        """Whether versions are small enough to keep the content of every one, to check merges and pulls."""
        ...

    def checksum(self, value: Value) -> int: ...

    def damaged(self, value: Value) -> Value:
        """The same content with a flipped bit."""
        ...

    def decoded(self, wire: Codec, base: Value, written: Value) -> Value:
        """The content that a slave or a cluster decodes from a difference to `base`."""
        ...

    def model(self, name: str, generation: int, layout: Layout, chunk_bytes: int) -> ClusterModel: ...

    def shard(
        self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, pull_wire: str = "float32"
    ) -> ShardArithmetic: ...
