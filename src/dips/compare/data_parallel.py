"""Runs data parallel training, the baseline that communicates in every step (the Di-PS paper, section 5.1, baseline i).

K clusters with equal batches average their gradients; that equals one optimizer on one batch of all their sequences,
and is computed in this way. There is no server and no version: a "round" of the record is a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from dips.compare.learner import F32, Evaluate, Learner
from dips.compare.record import CurvePoint, RunRecord, at_tokens
from dips.compare.setup import ComparisonSetup
from dips.core.layout import FLOAT32_BYTES
from dips.core.messages import DataRange
from dips.sim.network import all_reduce_s
from dips.trainer.corpus import all_ranges, take_rows

METHOD = "dp"

StepProgress = Callable[[int, float], None]
"""Called with the tokens trained on and the virtual second."""

_CHUNKS_PER_ROW = 2
"""Chunks that are held for each row of a batch, so that a batch mixes chunks as in training without a master."""


def run_data_parallel(
    setup: ComparisonSetup, seed: int, learner: Learner, evaluate: Evaluate, progress: StepProgress | None = None
) -> RunRecord:
    """Train `learner` on setup.run.tokens tokens; loss and time at exactly that many by linear interpolation.

    A step's time: its slowest cluster, then a ring all-reduce of the gradient over the clusters' links. A
    training loss that is not finite ends the run; that, or a held-out loss that is not finite, is "diverged".
    """
    run = _Run(setup, learner, evaluate, Random(seed))
    finite = True
    while finite and run.tokens < setup.run.tokens:
        finite = run.step()
        if progress is not None:
            progress(run.tokens, run.now_s)
    return run.record(seed, finite)


@dataclass
class _Run:
    setup: ComparisonSetup
    learner: Learner
    evaluate: Evaluate
    rng: Random
    steps: int = 0
    tokens: int = 0
    now_s: float = 0.0
    curve: list[CurvePoint] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = _batches(self.setup, self.learner)
        self._vector: F32 = np.empty(self.learner.layout().n_elems, np.float32)
        self._exchange_s = exchange_s(self.setup, self.learner.layout().n_elems)
        self.busy_s = dict.fromkeys(self.setup.cluster_names, 0.0)

    def step(self) -> bool:
        """Do one step; returns False when its loss is not finite. Evaluated before and after a step that crosses the
        end."""
        rows = next(self._rows)
        step_tokens = sum(row.tokens for row in rows)
        total, ends_at = self.setup.run.tokens, self.tokens + step_tokens
        if ends_at > total and (not self.curve or self.curve[-1].tokens != self.tokens):
            self._evaluate()
        loss = self.learner.step(rows, self.tokens)
        if not math.isfinite(loss):
            return False
        mark = total / self.setup.run.evaluations
        is_due = ends_at // mark > self.tokens // mark
        self.steps, self.tokens = self.steps + 1, ends_at
        self.now_s += self._slowest_s() + self._exchange_s
        if is_due or ends_at >= total:
            self._evaluate()
        return True

    def _slowest_s(self) -> float:
        jitter = self.setup.clusters.jitter
        took = [self.rng.uniform(1 - jitter, 1 + jitter) * step_s for step_s in self.setup.step_s]
        for name, step_s in zip(self.setup.cluster_names, took, strict=True):
            self.busy_s[name] += step_s
        return max(took)

    def _evaluate(self) -> None:
        self.learner.snapshot(self._vector)
        loss = self.evaluate(self._vector)
        self.curve.append(CurvePoint(str(self.steps), self.tokens, self.now_s, loss if math.isfinite(loss) else None))

    def record(self, seed: int, finite: bool) -> RunRecord:
        total, names = self.setup.run.tokens, self.setup.cluster_names
        loss, virtual_s = at_tokens(self.curve, total) if finite else (None, self.now_s)
        return RunRecord(
            METHOD, seed, "", total, "diverged" if loss is None else "finished", loss, virtual_s, self.steps, 0,
            curve=tuple(self.curve),
            cluster_tokens=dict.fromkeys(names, self.tokens // len(names)),
            cluster_steps=dict.fromkeys(names, self.steps),
            waited_s={name: self.now_s - busy_s for name, busy_s in self.busy_s.items()},
        )  # fmt: skip


def exchange_s(setup: ComparisonSetup, n_elems: int) -> float:
    """Seconds of one all-reduce of the gradient, of the model or of the set-up's wire_parameters, in float32."""
    n_bytes = FLOAT32_BYTES * (setup.model.wire_parameters or n_elems)
    return all_reduce_s(n_bytes, setup.up_bits_per_s, setup.down_bits_per_s, setup.links.latency)


def _batches(setup: ComparisonSetup, learner: Learner) -> Iterator[tuple[DataRange, ...]]:
    """Batches of K x batch_size rows, each token of a pass once; never ends."""
    source, held = all_ranges(learner.data_plan()), list[DataRange]()
    n_rows = setup.n_clusters * setup.inner.batch_size
    while True:
        if sum(part.tokens for part in held) < n_rows * setup.inner.sequence_tokens:
            held.extend(next(source) for _ in range(_CHUNKS_PER_ROW * n_rows))
        yield take_rows(held, n_rows, setup.inner.sequence_tokens)
