"""A trainer with another text than the run's is refused with one sentence; real processes on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trainer_run import TRAIN, Processes
from support.waiting import until

from dips.core.errors import Refused
from dips.core.net.security import INSECURE
from dips.trainer.evaluate import RunWatch


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as children:
        yield children


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master("slaves=2", "min_clusters=2", "sync_every=8")


def test_a_cluster_with_another_text_is_refused_with_a_sentence(processes: Processes, address: str) -> None:
    # The first cluster's text is the run's; a run of two cannot end before the second one comes.
    processes.start_slaves(address, ("s0", "s1"))
    processes.start_cluster(address, "a")
    with RunWatch(address, "demo", 5.0, INSECURE) as watch:
        until(lambda: watch.status().clusters, "a cluster", lambda: processes.log("a"))
    processes.start_cluster(address, "b", TRAIN.model_copy(update={"data_seed": 1}))
    assert processes.exit_code("b") == Refused.exit_code, processes.log("b")
    assert processes.log("b").strip().splitlines()[-1].startswith("dips: ")
    assert "Traceback" not in processes.log("b")
