"""Runs data parallel training, the baseline that communicates in every step (the Di-PS paper, section 5.1, baseline i).

K clusters with equal batches average their gradients; that equals one optimizer on one batch of all their sequences,
and is computed in this way. There is no server and no version: a "round" of the record is a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import numpy as np

from dips.core.messages import DataRange
from dips.lab.compare.record import CurvePoint, Evaluate, Learner, Progress, RunRecord, at_tokens
from dips.lab.compare.setup import ComparisonSetup
from dips.lab.sim.arithmetic import F32
from dips.trainer.corpus import all_ranges, take_rows

METHOD = "dp"

_CHUNKS_PER_ROW = 2
"""Chunks that are held for each row of a batch, so that a batch mixes chunks as in training without a master."""


def run_data_parallel(
    setup: ComparisonSetup, seed: int, learner: Learner, evaluate: Evaluate, progress: Progress | None = None
) -> RunRecord:
    """Train `learner` on setup.run.tokens tokens; loss and time at exactly that many by linear interpolation.

    A step's time: its slowest cluster, then a ring all-reduce of the gradient over the clusters' links, as both are at
    its beginning. A training loss that is not finite ends the run; that, or a held-out loss that is not finite, is
    "diverged".
    """
    total, names, rng = setup.run.tokens, setup.cluster_names, Random(seed)
    n_elems = learner.layout().n_elems
    vector = np.empty(n_elems, np.float32)
    batches, mark = _batches(setup, learner), total / setup.run.evaluations
    steps, tokens, now_s, finite = 0, 0, 0.0, True
    curve: list[CurvePoint] = []
    busy_s = dict.fromkeys(names, 0.0)
    while finite and tokens < total:
        rows = next(batches)
        ends_at = tokens + sum(row.tokens for row in rows)
        if ends_at > total and (not curve or curve[-1].tokens != tokens):
            # The loss at the end is interpolated between this point and the one behind the step that crosses the end.
            curve.append(_point(steps, tokens, now_s, learner, evaluate, vector))
        finite = math.isfinite(learner.step(rows, tokens))
        if finite:
            clusters, exchange_s = setup.conditions(now_s), setup.all_reduce_s(n_elems, now_s)
            took = [rng.uniform(1 - one.jitter, 1 + one.jitter) * one.step_s for one in clusters]
            for name, step_s in zip(names, took, strict=True):
                busy_s[name] += step_s
            due = ends_at // mark > tokens // mark
            steps, tokens, now_s = steps + 1, ends_at, now_s + (max(took) + exchange_s)
            if due or tokens >= total:
                curve.append(_point(steps, tokens, now_s, learner, evaluate, vector))
        if progress is not None:
            progress(tokens, now_s)
    loss, virtual_s = at_tokens(curve, total) if finite else (None, now_s)
    return RunRecord(
        METHOD, seed, "", total, "diverged" if loss is None else "finished", loss, virtual_s, steps, 0,
        curve=tuple(curve),
        cluster_tokens=dict.fromkeys(names, tokens // len(names)),
        cluster_steps=dict.fromkeys(names, steps),
        waited_s={name: now_s - trained_s for name, trained_s in busy_s.items()},
    )  # fmt: skip


def _point(steps: int, tokens: int, now_s: float, learner: Learner, evaluate: Evaluate, vector: F32) -> CurvePoint:
    """Evaluate the model as it is; vector: where it is copied to."""
    learner.snapshot(vector)
    loss = evaluate(vector)
    return CurvePoint(str(steps), tokens, now_s, loss if math.isfinite(loss) else None)


def _batches(setup: ComparisonSetup, learner: Learner) -> Iterator[tuple[DataRange, ...]]:
    """Batches of K x batch_size rows, each token of a pass once; never ends."""
    source, held = all_ranges(learner.data_plan()), list[DataRange]()
    n_rows = setup.n_clusters * setup.inner.batch_size
    while True:
        if sum(part.tokens for part in held) < n_rows * setup.inner.sequence_tokens:
            held.extend(next(source) for _ in range(_CHUNKS_PER_ROW * n_rows))
        yield take_rows(held, n_rows, setup.inner.sequence_tokens)
