"""Learners for comparisons that need no torch: a quadratic bowl whose every batch pulls to a point of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, DataRange
from dips.lab.sim.arithmetic import F32

LAYOUT = Layout(
    tuple(Parameter(f"layers.{i}.w", (size,), "float32", f"layers.{i}") for i, size in enumerate((700, 300)))
)
DATA = DataPlan(DataMode.LEASED, b"bowl", 256 * 1024, 256)
TARGET: F32 = np.linspace(-1.0, 1.0, LAYOUT.n_elems, dtype=np.float32)


class BowlLearner:
    """Plain gradient steps towards TARGET plus noise that the batch's ranges name. n_steps, resets: what was asked."""

    def __init__(self, lr: float = 0.05, noise: float = 0.5, fails_after: int | None = None) -> None:
        self.theta: F32 = np.zeros(LAYOUT.n_elems, np.float32)
        self.lr, self.noise, self.fails_after = lr, noise, fails_after
        self.n_steps = self.resets = 0
        self.batches: list[tuple[DataRange, ...]] = []
        self.progress: list[int] = []

    def layout(self) -> Layout:
        return LAYOUT

    def data_plan(self) -> DataPlan:
        return DATA

    def snapshot(self, into: F32) -> None:
        into[:] = self.theta

    def install(self, flat: F32) -> None:
        self.theta = flat.copy()

    def reset_inner_optimizer(self) -> None:
        self.resets += 1

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        self.n_steps += 1
        self.batches.append(tuple(ranges))
        self.progress.append(progress_tokens)
        if self.fails_after is not None and self.n_steps > self.fails_after:
            return math.inf
        rng = np.random.default_rng([(r.pass_index, r.chunk, r.begin_tokens) for r in ranges])
        target = TARGET + np.float32(self.noise) * rng.standard_normal(LAYOUT.n_elems, np.float32)
        self.theta = self.theta - np.float32(self.lr) * (self.theta - target)
        return bowl_loss(self.theta)


def bowl_loss(theta: F32) -> float:
    return float(np.mean(np.square(theta.astype(np.float64) - TARGET)))
