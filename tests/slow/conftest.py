"""Processes that several files of slow tests start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.run_for_workers import RunForWorkers
from support.trainer_run import Processes


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Forks ranks and roles, with torch."""
    with ForkServer(torch=True) as server:
        yield server


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as children:
        yield children


@pytest.fixture
def new_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], RunForWorkers]]:
    """Another run at each call, which trainings from then on take part in."""
    runs: list[RunForWorkers] = []

    def made() -> RunForWorkers:
        runs.append(RunForWorkers())
        for name, value in (("MASTER", runs[-1].address), ("INSECURE", "1"), ("CLUSTER", "a")):
            monkeypatch.setenv(f"DIPS_{name}", value)
        return runs[-1]

    yield made
    for run in runs:
        run.close()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch computes on one thread, and models are cut as the layout of a RunForWorkers is."""
    import torch
    from support.trainer_models import same_cut

    from dips.worker import torch_model

    monkeypatch.setattr(torch_model, "Layout", same_cut)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
