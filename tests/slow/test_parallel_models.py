"""Torch alone: every kind of parallelism of support.parallel_models is built, stepped and put together again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.fork_server import ForkServer
from support.parallel_models import KINDS, full_model, ranks_of
from support.parallel_run import RankedCluster


@pytest.mark.parametrize("kind", KINDS)
def test_torch_cuts_the_model_and_steps_it(server: ForkServer, tmp_path: Path, kind: str) -> None:
    cluster = RankedCluster.start(server, kind, tmp_path / kind, only_torch=True)
    n_elems = sum(p.numel() for p in full_model(tied="tied" in kind).parameters() if p.requires_grad)
    (flat,) = cluster.flats("synced")
    assert np.array_equal(flat, np.arange(n_elems, dtype=np.float32)), "each element has its place as its value"
    news = [record["news"] for record in cluster.records()]
    if kind != "masters2":  # its 16 bits are too few for one step of SGD
        assert all(said["moved"] for said in news), "a step of training reaches every parameter"
    assert len(news) == ranks_of(kind)
    if kind in ("fsdp4", "fsdp-ep4"):
        assert news[3]["empty"] > 10, "the last rank has nothing of many tensors"
        assert len({said["elements"] for said in news}) > 1, "shards are uneven"
