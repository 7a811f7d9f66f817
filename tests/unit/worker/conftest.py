"""A run in memory, a cluster that trains on leased data, and torch on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.cluster_bench import LeasedClusterBench
from support.run_for_workers import FlatModel
from support.run_in_memory import RunInMemory, in_memory
from support.trainer_models import same_cut


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunInMemory]:
    for user in ("torch_model", "parallel.agreement"):
        monkeypatch.setattr(f"dips.worker.{user}.Layout", same_cut)
    made = in_memory(monkeypatch, RunInMemory(theta=FlatModel(7).theta))
    yield made
    made.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def life() -> LeasedClusterBench:
    life = LeasedClusterBench()
    life.begin()
    return life
