"""A model of 10,000 tiny tensors goes through whole rounds, and every bit is the one that it must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.diloco import diloco, trained
from support.waiting import NO_LIMIT_S
from support.whole_run import WholeRun

from dips.core.layout import Layout, Parameter

N_TENSORS = 10_000
LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (1 + i % 50,), "float32", f"layers.{i}") for i in range(N_TENSORS)))
ROUNDS = 2
EVERY = 4
TOKENS = 10 * EVERY  # of one push: sync_every steps of 10 tokens


def test_rounds_of_ten_thousand_tensors_equal_diloco_to_the_last_bit(tmp_path: Path) -> None:
    with WholeRun(tmp_path, 2, clip_norm=1e6, verdict_wait_s=NO_LIMIT_S) as run:
        cluster = run.cluster("a", 1, layout=LAYOUT, steps=ROUNDS * EVERY)
        cluster.join()
        assert run.status().tokens == ROUNDS * TOKENS
    installed = cluster.model.installed
    theta, momentum = installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    for n, pushed in enumerate(trained(cluster)[:ROUNDS], start=1):
        theta, momentum = diloco(theta, momentum, [pushed])
        assert np.array_equal(theta, installed[n]), f"round {n}"
    assert len(installed) == ROUNDS + 1
