"""Checkpoints of the worker's driver over real sockets: a process that is gone, and one that goes on from its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.run_for_workers import FlatModel, RunForWorkers

from dips.core.ids import Version
from dips.core.messages import BeginPushRequest, DataMode, DataPlan
from dips.core.observe import failpoints
from dips.core.observe.tape import read_tape
from dips.worker.checkpoint import Checkpointing
from dips.worker.checkpoint_files import read_record
from dips.worker.config import ClientConfig
from dips.worker.parameters import ParameterStore
from dips.worker.shell import ClusterShell
from dips.worker.state.effects import Finished

OWN = DataPlan(DataMode.OWN)
LEASED = DataPlan(DataMode.LEASED, b"d", 100_000, 1000)
TOKENS = 100


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    yield run
    run.close()


def driver(
    run: RunForWorkers, model: ParameterStore, folder: Path, plan: DataPlan = OWN, **knobs: object
) -> ClusterShell:
    given: dict[str, object] = {
        "master": run.address, "cluster_id": "a", "checkpoint_dir": folder / "checkpoints", "checkpoint_every_s": 0.0,
        "resume": True, "tape": folder / "tape", "retry_max_s": 0.3, "connect_wait_s": 60.0,
        "insecure": True,
    }  # fmt: skip
    return ClusterShell(ClientConfig.model_validate(given | knobs), model, model.layout(), plan)


def wait_for(run: RunForWorkers, what: Callable[[], bool]) -> None:
    run.wait_for(what)


def train(client: ClusterShell, model: FlatModel, steps: int) -> None:
    for _ in range(steps):
        model.theta += 1
        client.step(TOKENS, loss=2.0)


def checkpoint(run: RunForWorkers, client: ClusterShell, folder: Path) -> None:
    before = len(records(folder, "checkpoint"))
    wait_for(run, lambda: written(client))
    client.checkpoint_if_due()
    wait_for(run, lambda: len(records(folder, "checkpoint")) > before)


def written(client: ClusterShell) -> bool:
    assert isinstance(client._checkpoints, Checkpointing)
    writing = client._checkpoints._writing
    return writing is None or writing.done()


def die(client: ClusterShell) -> None:
    """As after SIGKILL: no message says that it ends, threads and locks are gone."""
    client._finished = Finished("killed")
    client.close()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_tape(folder / "tape") if event["kind"] == kind]


def _settled(client: ClusterShell) -> bool:
    client._settle()
    return False


def test_a_push_begins_only_when_its_record_is_on_disk(run: RunForWorkers, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def hook(method: str, request: object) -> None:
        if isinstance(request, BeginPushRequest):
            push = read_record(tmp_path / "checkpoints" / "push.json")["push"]
            seen.append((request.seq, push["id"][2]))

    run.hook = hook
    model = FlatModel(1)
    with driver(run, model, tmp_path) as client:
        train(client, model, 8)
    assert seen == [(1, 1), (2, 2)]


def test_a_disk_that_fails_delays_the_push_and_not_the_training(run: RunForWorkers, tmp_path: Path) -> None:
    model = FlatModel(1)
    with failpoints.armed("worker.push_record.before_write=2*error(no space)"), driver(run, model, tmp_path) as client:
        train(client, model, 4)
        wait_for(run, lambda: bool(run.pushes) or _settled(client))
        assert failpoints.fired() == {"worker.push_record.before_write": {"error": 2}}
        assert run.pushes[0].tokens == 400


def test_a_checkpoint_that_cannot_be_written_is_said_and_training_goes_on(
    run: RunForWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = FlatModel(1)
    with (
        failpoints.armed("worker.checkpoint.before_manifest=error(no space left)"),
        caplog.at_level(logging.WARNING),
        driver(run, model, tmp_path) as client,
    ):
        client.checkpoint_if_due()
        wait_for(run, lambda: written(client))
        train(client, model, 4)
        assert client.version == Version(1, 1)
    assert "no space left; training goes on" in caplog.text
