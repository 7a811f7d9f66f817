"""Real numbers in simulated processes: what slaves compute is the reference's to the bit; nothing is shared."""

from __future__ import annotations

import numpy as np
import pytest
from support.number_learners import LAYOUT as BOWL
from support.number_learners import BowlLearner

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.layout import Layout, Parameter, chunks_of
from dips.core.math import outer_numpy as reference
from dips.core.messages import Prepare
from dips.core.wire import WIRE_DTYPES, Codec, encoded_bytes
from dips.lab.sim.arithmetic import F32, Stepped
from dips.lab.sim.content import CLEAN, key_of
from dips.lab.sim.numbers import FlatVector, NumberModel, Numbers, NumberShard
from dips.worker.state.effects import Install, InstallMode

CHUNK_BYTES = 1024
LAYOUT = Layout(
    tuple(Parameter(f"layers.{i}.w", (size,), "float32", f"layers.{i}") for i, size in enumerate((300, 256, 77)))
)
MINE = (LAYOUT.blocks[0], LAYOUT.blocks[2])
N = sum(block.n_elems for block in MINE)
NUMBERS = Numbers(lambda name: BowlLearner())
REPLACE = Install(InstallMode.REPLACE, reset_inner=False)


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32)


def filled(rows: F32, pull_wire: str = "float32") -> NumberShard:
    """A shard with these staging rows, landed chunk by chunk in disorder."""
    shard = NumberShard(MINE, CHUNK_BYTES, len(rows), pull_wire)
    spans, start = [], 0
    for chunk in chunks_of(MINE, CHUNK_BYTES):
        spans.append((start, start + chunk.length_bytes // 4))
        start = spans[-1][1]
    for slot, row in enumerate(rows):
        for index in sorted(range(len(spans)), key=lambda i: (i * 7) % 5):
            shard.land(slot, index, row[slice(*spans[index])])
    return shard


def prepare_of(from_version: Version | None, weights: tuple[float, ...]) -> Prepare:
    momentum = {"momentum_decay": 0.8, "momentum_lookahead": 0.8, "gradient_weight": 1.0}
    return Prepare(RoundId(1, 2), from_version, Version(1, 4), (), weights, scale=0.7, outer_lr=0.9, **momentum)


class TestShard:
    def test_the_outer_step_is_the_references_to_the_bit(self) -> None:
        theta, momentum, rows = random(N), random(N, seed=1), random(3, N)
        weights = (0.25, 0.75)
        stepped = filled(rows).prepare(Stepped(theta, momentum), [2, 0], prepare_of(Version(1, 3), weights))
        expected, expected_buf = np.empty(N, np.float32), np.empty(N, np.float32)
        reference.outer_step(
            theta, momentum, rows, np.array([2, 0]), np.array(weights, np.float32), 0.7, 0.9, 0.8, 0.8, 1.0,
            expected, expected_buf, 0, N,
        )  # fmt: skip
        assert stepped.theta.tobytes() == expected.tobytes()
        assert stepped.momentum.tobytes() == expected_buf.tobytes()
        assert (stepped.residual, stepped.difference) == (None, None)

    @pytest.mark.parametrize("pull_wire", ["bfloat16", "int8", "int4"])
    def test_what_is_published_is_what_clusters_hold(self, pull_wire: str) -> None:
        """Version after version: a cluster at the one before applies the difference."""
        codec, rows = WIRE_DTYPES[pull_wire], random(2, N)
        shard = filled(rows, pull_wire)
        version = shard.prepare(None, [0], prepare_of(None, (1.0,)))
        assert np.array_equal(version.theta, rows[0])
        assert version.difference is None
        held = version.theta
        for _ in range(3):
            version = shard.prepare(version, [1], prepare_of(Version(1, 3), (1.0,)))
            parts = [
                NUMBERS.decoded(codec, shard.chunk(held, index), shard.written(version.difference, index))
                for index in range(len(chunks_of(MINE, CHUNK_BYTES)))
            ]
            held = np.concatenate(parts)
            assert held.tobytes() == version.theta.tobytes()
            again = shard.residual_from(shard.residual_bytes(version.residual))
            assert again is not None
            assert again.any()

    def test_a_merge_that_overflows_is_refused(self) -> None:
        shard = filled(np.full((1, N), 3e38, np.float32))
        with pytest.raises(Refused) as refused:
            shard.prepare(
                Stepped(-np.full(N, 3e38, np.float32), np.zeros(N, np.float32)), [0], prepare_of(Version(1, 3), (1.0,))
            )
        assert refused.value.code is RefusalCode.NONFINITE

    def test_the_gram_matrix_is_the_references_block_by_block(self) -> None:
        theta, rows = random(N), random(2, N)
        rows[1, 5] = np.nan
        measured = filled(rows).measure(theta, [0, 1])
        start = 0
        for block, found in zip(MINE, measured, strict=True):
            gram, bad = reference.gram(theta, rows, np.array([0, 1]), start, start + block.n_elems)
            assert found.block == block.block_id
            assert np.array_equal(found.gram, [gram[0, 0], gram[0, 1], gram[1, 1]], equal_nan=True)
            assert found.nonfinite_elems == tuple(bad)
            start += block.n_elems


class TestModel:
    def model(self, learner: BowlLearner, spoil: bool = False) -> NumberModel:
        def corrupt(name: str, push: F32, base: F32) -> bool:
            push[:] = np.nan
            return spoil

        return NumberModel(learner, BOWL, CHUNK_BYTES, corrupt)

    def pulls(self, model: NumberModel, flat: F32, how: Install = REPLACE) -> None:
        vector = FlatVector(flat, BOWL)
        model.fetched({key_of(chunk): vector.value(chunk) for chunk in chunks_of(BOWL.blocks, CHUNK_BYTES)})
        model.install("a", how)

    def whole(self, model: NumberModel) -> F32:
        return np.concatenate([model.sent(Codec.F32).value(chunk) for chunk in chunks_of(BOWL.blocks, CHUNK_BYTES)])

    def test_what_a_bad_cluster_sends_is_not_what_it_remembers(self) -> None:
        learner, pulled = BowlLearner(), random(BOWL.n_elems)
        model = self.model(learner, spoil=True)
        model.snapshot("a", CLEAN)
        assert np.isfinite(self.whole(model)).all(), "the seed stands on no version, and is never spoilt"
        self.pulls(model, pulled)
        at_push = learner.theta = pulled + np.float32(1)
        model.snapshot("a", CLEAN)
        assert np.isnan(self.whole(model)).all()
        learner.theta = at_push + np.float32(0.5)
        self.pulls(model, pulled, Install(InstallMode.REBASE_FROM_PUSH, reset_inner=True))
        assert np.array_equal(learner.theta, pulled + (at_push + np.float32(0.5) - at_push))
        assert learner.resets == 1

    def test_a_good_push_and_a_donation_are_sent_as_they_are(self) -> None:
        learner, pulled = BowlLearner(), random(BOWL.n_elems)
        model = self.model(learner)
        self.pulls(model, pulled)
        learner.theta = pulled + np.float32(1)
        model.snapshot("a", CLEAN)
        assert np.array_equal(self.whole(model), learner.theta)
        model.copy_base()
        assert np.array_equal(self.whole(model), pulled)


@pytest.mark.parametrize("wire", [wire for wire in Codec if wire.is_difference], ids=lambda wire: wire.name)
class TestDifferences:
    """What a cluster writes and a slave reads, with the codecs that run in production."""

    def begun(self, spoil: bool = False) -> tuple[NumberModel, BowlLearner, F32]:
        """A model that stands on a pulled version and trained on from there."""
        learner, base = BowlLearner(), random(BOWL.n_elems)
        model = TestModel().model(learner, spoil)
        TestModel().pulls(model, base)
        learner.theta = base + np.float32(0.01) * random(BOWL.n_elems, seed=1)
        model.snapshot("a", CLEAN)
        return model, learner, base

    def landed(self, model: NumberModel, base: F32, wire: Codec) -> F32:
        """What slaves that hold `base` make of a push."""
        vector, parts = model.sent(wire), []
        for chunk in chunks_of(BOWL.blocks, CHUNK_BYTES):
            written = vector.value(chunk)
            assert len(written) == encoded_bytes(wire, chunk.length_bytes // 4)
            parts.append(NUMBERS.decoded(wire, FlatVector(base, BOWL).value(chunk), written))
        return np.concatenate(parts)

    def test_what_rounding_lost_travels_with_the_next_push(self, wire: Codec) -> None:
        model, learner, base = self.begun()
        trained = learner.theta.copy()
        first = self.landed(model, base, wire)
        assert model.residual_mark == 0
        model.keep_residual(wire)
        assert model.residual_mark != 0
        TestModel().pulls(model, first)
        model.snapshot("a", CLEAN)  # no step was made: the difference is the residual alone
        second = self.landed(model, first, wire)
        lost, left = np.abs(first - trained).max(), np.abs(second - trained).max()
        assert left < lost / 5
