"""The arithmetic of a run at scale: no parameters are held, only what identifies them.

All chunks of a push have one value: a number whose lowest bits are its norm, so that slaves can answer MEASURE. All
chunks of a version on one slave have one value too, a hash of how it was made. Digests, checksums and their checks are
then as real as with parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dips.core.layout import Block, Chunk, Layout, chunks_of, shard_digest
from dips.core.messages import BlockGram, DataRange, Prepare
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import Key, Stepped
from dips.lab.sim.content import LOSS, Symbols, SymbolShard, checksum_of, mixed
from dips.worker.state.effects import Install

BAD_NORM = 30.0
NORM = 2.0
NORM_SPREAD = 0.05
COSINE = 0.3
"""Plausible pseudo-gradients: norms of about 2 with 5 % spread, and some agreement between clusters. Assumed."""

NORM_BITS = 24
NORM_UNIT = 2.0**-12


@dataclass(frozen=True)
class SameEverywhere:
    """A model whose chunks all have this value."""

    number: int

    def value(self, chunk: Chunk) -> int:
        return self.number


class ScaleModel:
    """One cluster's parameters: only its pushes are something. draw_norm: the norm of its next push."""

    residual_mark = 0

    def __init__(self, name: str, generation: int, draw_norm: Callable[[], float]) -> None:
        self._made = mixed(name, generation)
        self._draw_norm = draw_norm
        self._push = 0

    def step(self, name: str, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        return LOSS

    def snapshot(self, name: str, kind: int) -> bool:
        self._made = mixed(self._made)
        self._push = self._made >> NORM_BITS << NORM_BITS | round(self._draw_norm() / NORM_UNIT)
        return False

    def copy_base(self) -> None:
        self._push = 0

    def sent(self, wire: Codec) -> SameEverywhere:
        return SameEverywhere(self._push)

    def installed(self) -> SameEverywhere:
        return SameEverywhere(0)

    def keep_residual(self, wire: Codec) -> None: ...

    def clear_residual(self) -> None: ...

    def fetched(self, values: Mapping[Key, int]) -> None: ...

    def install(self, name: str, how: Install) -> None: ...


class ScaleShard(SymbolShard):
    """A slave's staging rows and versions, as of one chunk that stands for all. n_elems: of the whole model."""

    def __init__(self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, n_elems: int) -> None:
        super().__init__((), chunk_bytes, 0, "float32")
        self._shares = [(block.block_id, block.n_elems / n_elems) for block in blocks]
        self._n_real_chunks, self._n_chunks = len(chunks_of(blocks, chunk_bytes)), 1
        self._pushed = [0] * n_slots

    def clear(self, slot: int) -> None:
        self._pushed[slot] = 0

    def land(self, slot: int, index: int, value: int) -> None:
        self._pushed[slot] = value

    def landed(self, slot: int, index: int) -> int:
        return self._pushed[slot]

    def measure(self, theta: tuple[int, ...], slots: Sequence[int]) -> tuple[BlockGram, ...]:
        norms = [(self._pushed[slot] & (1 << NORM_BITS) - 1) * NORM_UNIT for slot in slots]
        k = range(len(norms))
        whole = [norms[i] * norms[j] * (1.0 if i == j else COSINE) for i in k for j in k if j >= i]
        return tuple(
            BlockGram(block_id, tuple(value * share for value in whole), (0,) * len(norms))
            for block_id, share in self._shares
        )

    def all_zero(self, slots: Sequence[int]) -> tuple[bool, ...]:
        return ()

    def prepare(self, before: Stepped | None, slots: Sequence[int], body: Prepare) -> Stepped:
        known = None if before is None else (before.theta, before.momentum)
        made = (mixed(known, [self._pushed[slot] for slot in slots], body.weights, body.scale),)
        return Stepped(made, made, difference=made if body.from_version is not None else None)

    def written(self, difference: tuple[int, ...], index: int) -> int:
        return difference[0]

    def chunk(self, theta: tuple[int, ...], index: int) -> int:
        return theta[0]

    def assemble(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[:1])

    def digest(self, theta: tuple[int, ...]) -> bytes:
        return shard_digest([checksum_of(theta[0])] * self._n_real_chunks)


class ScaleArithmetic(Symbols):
    """The arithmetic of one run. bad_push: by cluster, the share of its pushes whose norm is BAD_NORM times too large.

    struck: called for each of those.
    """

    remembers = False

    def __init__(self, seed: int, bad_push: Mapping[str, float], n_elems: int, struck: Callable[[], None]) -> None:
        self._rngs = {name: random.Random(f"{seed} {name} pushes") for name in bad_push}
        self._bad_push, self._n_elems, self._struck = bad_push, n_elems, struck

    def decoded(self, wire: Codec, base: int, written: int) -> int:
        return written

    def model(  # type: ignore[override]  # another kind of symbols
        self, name: str, generation: int, layout: Layout, chunk_bytes: int
    ) -> ScaleModel:
        return ScaleModel(name, generation, lambda: self._draw_norm(name))

    def shard(self, blocks: Sequence[Block], chunk_bytes: int, n_slots: int, pull_wire: str = "float32") -> ScaleShard:
        return ScaleShard(blocks, chunk_bytes, n_slots, self._n_elems)

    def _draw_norm(self, name: str) -> float:
        rng = self._rngs[name]
        bad = rng.random() < self._bad_push[name]
        if bad:
            self._struck()
        return NORM * rng.lognormvariate(0.0, NORM_SPREAD) * (BAD_NORM if bad else 1.0)
