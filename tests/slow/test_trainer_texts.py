"""A trainer with another text than the run's is refused with one sentence; real processes on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.master_process import START_S, MasterProcess
from support.trainer_run import TRAIN, Processes

from dips.core.errors import Refused
from dips.core.net.security import INSECURE
from dips.trainer.evaluate import RunWatch


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    children = Processes(tmp_path)
    yield children
    children.kill_all()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    knobs = ("slaves=2", "min_clusters=2", "sync_every=8", "tk_max=40000", "grace_s=0.2", "linger_s=600")
    master = MasterProcess(tmp_path / "run", *knobs)
    yield master.started().address
    master.popen.kill()
    master.popen.wait(START_S)


def wait_for_cluster(address: str) -> None:
    end_s = time.monotonic() + START_S
    with RunWatch(address, "demo", 5.0, INSECURE) as watch:
        while not watch.status().clusters:
            assert time.monotonic() < end_s, "no cluster joined"
            time.sleep(0.05)


def test_a_cluster_with_another_text_is_refused_with_a_sentence(processes: Processes, address: str) -> None:
    # The first cluster's text is the run's; a run of two cannot end before the second one comes.
    processes.start_slaves(address, ("s0", "s1"))
    processes.start_cluster(address, "a")
    wait_for_cluster(address)
    processes.start_cluster(address, "b", TRAIN.model_copy(update={"data_seed": 1}))
    assert processes.exit_code("b") == Refused.exit_code, processes.log("b")
    assert processes.log("b").strip().splitlines()[-1].startswith("dips: ")
    assert "Traceback" not in processes.log("b")
