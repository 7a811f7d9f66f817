"""The trainer, killed with SIGKILL in mid-round and started again: it goes on where its checkpoint was, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.trainer_run import TRAIN, Processes

EVERY_STEP = TRAIN.model_copy(update={"log_every_steps": 1})
LAST = 8
NO_MORE = f"worker.checkpoint.before_manifest={LAST}*off->error(enough of them)"
"""So many checkpoints are written, and all later ones fail: it is known from which one the next life goes on."""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as children:
        yield children


@pytest.fixture
def address(processes: Processes) -> str:
    # So many steps in a round that nothing is merged while this test runs.
    return processes.start_master("slaves=1", "min_clusters=1", "sync_every=500")


def start(processes: Processes, address: str, tmp_path: Path, **environment: str) -> None:
    client = ["--checkpoint-dir", str(tmp_path / "a"), "--checkpoint-every-s", "0", "--resume"]
    processes.start_cluster(address, "a", EVERY_STEP, client, **environment)


def lives(processes: Processes) -> list[dict[int, dict[str, Any]]]:
    """For each life of the cluster, its steps by number."""
    records = [*processes.records("a", "step"), *processes.records("a", "joined")]
    made: list[dict[int, dict[str, Any]]] = []
    for record in sorted(records, key=lambda record: record["wall_s"]):
        if record["kind"] == "joined":
            made.append({})
        else:
            made[-1][record["steps"]] = record
    return made


def test_a_killed_trainer_makes_the_same_steps_again(processes: Processes, address: str, tmp_path: Path) -> None:
    processes.start_slaves(address, ["s0"])
    start(processes, address, tmp_path, DIPS_FAILPOINTS=NO_MORE, DIPS_FAILPOINTS_ENABLED="1")
    processes.until("a", lambda: len(processes.records("a", "checkpoint")) == LAST)
    made = len(processes.records("a", "step"))
    processes.until("a", lambda: len(processes.records("a", "step")) >= made + 20)
    processes.kill("a")
    first = lives(processes)[0]

    start(processes, address, tmp_path, DIPS_FAILPOINTS=NO_MORE, DIPS_FAILPOINTS_ENABLED="1")
    processes.until("a", lambda: len(lives(processes)) == 2 and max(lives(processes)[1], default=0) > max(first))
    processes.kill("a")
    second = lives(processes)[1]
    again = sorted(set(first) & set(second))
    assert len(again) >= 10
    assert min(second) > 1, "it went on, and did not begin again"
    for step in again:
        assert (first[step]["loss"], first[step]["lr"]) == (second[step]["loss"], second[step]["lr"]), step
    assert max(first) + 1 in second, "and goes on beyond"
    (resumed,) = processes.records("a", "resumed")
    assert (resumed["number"], resumed["base"], resumed["seq"]) == (LAST, "1:0", 1)
    assert "Traceback" not in processes.log("a")
    assert "enough of them" in processes.log("a"), "a checkpoint that fails is said"
