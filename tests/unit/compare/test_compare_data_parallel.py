"""Data parallel training: what it trains on, what time it takes, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, DataRange
from dips.lab.compare.engine import run_data_parallel
from dips.lab.compare.record import RunRecord
from dips.lab.compare.setup import ComparisonSetup, load_setup
from dips.lab.sim.arithmetic import F32

CHUNK, BATCH, SEQUENCE = 32, 2, 8
STEP_TOKENS = 4 * BATCH * SEQUENCE
"""Of all four clusters."""

N_ELEMS = 1000


class Counter:
    """A model whose first element counts its steps; its loss is what `loss_of` says of the step."""

    def __init__(self, loss_of: Callable[[int], float] = lambda n: 1.0) -> None:
        self.flat = np.zeros(N_ELEMS, np.float32)
        self.rows: list[tuple[DataRange, ...]] = []
        self.progress: list[int] = []
        self._loss_of = loss_of

    def layout(self) -> Layout:
        return Layout((Parameter("w", (N_ELEMS,), "float32", "w"),))

    def data_plan(self) -> DataPlan:
        return DataPlan(DataMode.LEASED, b"text", 100 * CHUNK, CHUNK)

    def snapshot(self, into: F32) -> None:
        into[:] = self.flat

    def install(self, flat: F32) -> None:
        self.flat[:] = flat

    def reset_inner_optimizer(self) -> None:
        raise AssertionError("nothing is spoiled here")

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        self.rows.append(tuple(ranges))
        self.progress.append(progress_tokens)
        loss = self._loss_of(len(self.rows))
        if math.isfinite(loss):
            self.flat[0] += 1
        return loss


def small(steps: float = 24, **changes: object) -> ComparisonSetup:
    setup = load_setup("small")
    inner = setup.inner.model_copy(update={"batch_size": BATCH, "sequence_tokens": SEQUENCE})
    return setup.model_copy(update={"inner": inner}).with_overrides(tokens=int(steps * STEP_TOKENS), **changes)  # type: ignore[arg-type]


def ran(setup: ComparisonSetup, learner: Counter, seed: int = 1) -> RunRecord:
    """The loss of a model is 10 less its steps' tenth."""
    return run_data_parallel(setup, seed, learner, lambda flat: 10.0 - float(flat[0]) / 10)


def test_every_step_is_one_batch_of_all_clusters_and_no_token_comes_twice() -> None:
    learner = Counter()
    record = ran(small(), learner)
    assert [len(rows) for rows in learner.rows] == [4 * BATCH] * 24
    assert all(sum(row.tokens for row in rows) == STEP_TOKENS for rows in learner.rows)
    assert learner.progress == [n * STEP_TOKENS for n in range(24)]
    seen = [
        (row.pass_index, row.chunk, t)
        for rows in learner.rows
        for row in rows
        for t in range(row.begin_tokens, row.end_tokens)
    ]
    assert len(seen) == len(set(seen)) == record.tokens
    assert record.cluster_tokens == dict.fromkeys("abcd", record.tokens // 4)
    assert record.cluster_steps == dict.fromkeys("abcd", 24)
    assert (record.rounds, record.voids, record.ended, record.judged) == (24, 0, "finished", ())
    ran(small(), learner)
    assert all(len({row.chunk for row in rows}) == 4 * BATCH for rows in learner.rows)


def test_a_step_takes_its_slowest_cluster_and_the_exchange() -> None:
    setup = small(up=(8e3, 8e6, 8e6, 8e6), down=(8e6,))
    record = ran(setup, Counter())
    # 4000 bytes: a quarter in each of six steps, over a link of 1000 bytes a second.
    exchange = 6 * (1.0 + setup.links.latency)
    assert setup.all_reduce_s(N_ELEMS) == pytest.approx(exchange)
    assert record.virtual_s == pytest.approx(24 * (1.5 + exchange))
    assert record.waited_s["a"] == pytest.approx(24 * (0.5 + exchange))
    assert record.waited_s["d"] == pytest.approx(24 * exchange)


def test_jitter_and_points_of_the_curve() -> None:
    setup = small(gaps=(0.0, 0.0, 0.0, 0.0), jitter=0.2)
    one, again, other = (ran(setup, Counter(), seed).virtual_s for seed in (1, 1, 2))
    assert one == again != other
    assert 24 < one - 24 * setup.all_reduce_s(N_ELEMS) < 24 * 1.2
    record = ran(small(evaluations=6), Counter())
    assert [point.tokens for point in record.curve] == [4 * n * STEP_TOKENS for n in range(1, 7)]
    assert [point.loss for point in record.curve] == pytest.approx([9.6, 9.2, 8.8, 8.4, 8.0, 7.6])
    assert (record.loss, record.virtual_s) == (record.curve[-1].loss, record.curve[-1].virtual_s)


def test_loss_and_time_are_those_at_exactly_the_tokens() -> None:
    setup = small(10.25, evaluations=5)
    record = ran(setup, Counter())
    assert record.rounds == 11
    assert record.tokens == int(10.25 * STEP_TOKENS)
    assert [point.tokens for point in record.curve[-2:]] == [10 * STEP_TOKENS, 11 * STEP_TOKENS]
    assert record.loss == pytest.approx(10.0 - 1.025)
    assert record.virtual_s == pytest.approx(10.25 * (1.5 + setup.all_reduce_s(N_ELEMS)))


def test_a_loss_that_is_not_finite_ends_it_as_diverged() -> None:
    learner = Counter(lambda n: math.inf if n == 5 else 1.0)
    record = ran(small(), learner)
    assert (record.ended, record.loss, record.rounds) == ("diverged", None, 4)
    assert len(learner.rows) == 5
