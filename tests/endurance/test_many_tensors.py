"""A model of 10,000 tiny tensors goes through whole rounds, and every bit is the one that it must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.diloco import diloco, trained
from support.whole_run import WholeRun

from dips.core.layout import Layout, Parameter

N_TENSORS = 10_000
LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (1 + i % 50,), "float32", f"layers.{i}") for i in range(N_TENSORS)))
ROUNDS = 2
TOKENS = 10 * 4  # of one push: sync_every steps of 10 tokens


@pytest.mark.timeout(600)
def test_rounds_of_ten_thousand_tensors_equal_diloco_to_the_last_bit(tmp_path: Path) -> None:
    with WholeRun(tmp_path, 2, tk_max=ROUNDS * TOKENS, clip_norm=1e6) as run:
        cluster = run.cluster("a", 1, layout=LAYOUT)
        cluster.join(wait_s=300)
        assert run.status().tokens == ROUNDS * TOKENS
    installed = cluster.model.installed
    theta, momentum = installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    for n, pushed in enumerate(trained(cluster)[:ROUNDS], start=1):
        theta, momentum = diloco(theta, momentum, [pushed])
        assert np.array_equal(theta, installed[n]), f"round {n}"
    # The cluster learns of the run's end from a beat. If it has the last version by then and trains on, it drops what
    # it made since, and installs the same version again.
    assert len(installed) in (ROUNDS + 1, ROUNDS + 2)
    assert all(np.array_equal(installed[ROUNDS], again) for again in installed[ROUNDS + 1 :])
