"""Checkpoints of the worker's driver over real sockets: a process that is gone, and one that goes on from its files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.run_for_workers import F32, FlatModel, RunForWorkers
from support.trainer_models import Model, same_cut

import dips
from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import BeginPushRequest, DataMode, DataPlan, VerdictKind
from dips.core.observe import failpoints
from dips.core.observe.tape import read_tape
from dips.worker import torch_model
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
    """Take one, of now, and wait until it is on disk."""
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
    """A step boundary without a step, so that what has arrived is handled."""
    client._settle()
    return False


def test_a_bfloat16_model_pushes_its_steps_alone_also_after_a_rebase_and_a_restart(
    run: RunForWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What installing a version rounds is as large as what many steps change."""
    monkeypatch.setattr(torch_model, "Layout", same_cut)
    run.settings = replace(run.settings, verdict_wait_s=0.0)
    known = threading.Event()
    known.set()
    run.decide = lambda push: VerdictKind.APPLIED if known.is_set() else None

    def enter() -> tuple[ClusterShell, torch_model.TorchParameters]:
        model = Model(3).bfloat16()
        store = torch_model.TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
        client = driver(run, store, tmp_path)
        client.start()
        return client, store

    def flat(store: torch_model.TorchParameters) -> F32:
        vector = np.empty(store.layout().n_elems, np.float32)
        store.snapshot(vector)
        return vector

    def steps(number: int, change: float = 0.0) -> F32:
        before = flat(store)
        for _ in range(number):
            for parameter in store.tensors:
                parameter.data += change
            client.step(TOKENS)
        return flat(store) - before

    client, store = enter()
    base = FlatModel(7).theta
    assert not np.array_equal(flat(store), base)
    steps(4)
    wait_for(run, lambda: client.version == Version(1, 1) or _settled(client))
    assert np.array_equal(run.theta_of(next(iter(run.verdicts))), base), "no step changed anything"
    known.clear()
    pushed = steps(4, change=0.01)
    wait_for(run, lambda: client.phase == "AWAITING" or _settled(client))
    later = steps(2, change=0.01)
    known.set()
    wait_for(run, lambda: client.version == Version(1, 2) or _settled(client))
    assert np.abs(run.theta_of(list(run.verdicts)[1]) - (base + pushed)).max() < 1e-6
    checkpoint(run, client, tmp_path)
    die(client)

    client, store = enter()
    assert client.resumed
    later += steps(2, change=0.01)
    wait_for(run, lambda: len(run.verdicts) == 3 or _settled(client))
    assert np.abs(run.theta_of(list(run.verdicts)[2]) - (base + pushed + later)).max() < 1e-6
    client.close()


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


# ---- a user's own loop ----


class Walk(torch.nn.Module):
    """Has the very layout of support.run_for_workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(5))
        for layer in self.layers:
            layer.w = torch.nn.Parameter(torch.zeros(6000))


class Matrices(Walk):
    """The same as matrices."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.w = torch.nn.Parameter(torch.zeros(60, 100))


def step(model: Walk, optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The random input tells whether the generators came back."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    target = torch.randn(6000)
    loss = torch.stack([(w.reshape(6000) - target).square().mean() for w in model.parameters()]).sum()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def adamw(model: Walk) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def muon_and_adamw(model: Walk) -> list[torch.optim.Optimizer]:
    """Muon for two of the matrices."""
    first, second, *others = model.parameters()
    return [torch.optim.Muon([first, second], lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


MakeOptimizers = Callable[[Walk], list[torch.optim.Optimizer]]


def loop(
    run: RunForWorkers, folder: Path, losses: list[float], steps: int, model: Walk, make: MakeOptimizers
) -> dips.DiLoCo:
    """A loop with a scheduler and a place in its data; takes a checkpoint before each step, and ends as if killed."""
    optimizers = make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    with dips.DiLoCo(
        model, optimizers, tokens_per_step=10, steps=steps, checkpoint_dir=folder, checkpoint_every_s=0.0,
        resume=True, state={"scheduler": scheduler},
    ) as sync:  # fmt: skip
        while not sync.done:
            losses.append(step(model, optimizers))
            scheduler.step()
            wait_for(run, lambda: sync.shell is not None and written(sync.shell))
        assert sync.shell is not None
        sync.shell._finished = Finished("killed")
    return sync


@pytest.mark.parametrize(("make_model", "make"), [(Walk, adamw), (Matrices, muon_and_adamw)])
def test_a_users_loop_goes_on_with_its_scheduler_and_random_numbers(
    run: RunForWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: type[Walk], make: MakeOptimizers
) -> None:
    monkeypatch.setenv("DIPS_MASTER", run.address)
    monkeypatch.setenv("DIPS_INSECURE", "1")
    monkeypatch.setenv("DIPS_CLUSTER", "a")
    monkeypatch.setattr(torch_model, "Layout", lambda parameters, block_elems: Layout(parameters, 4000))
    run.settings = replace(run.settings, sync_every_steps=100)
    torch.manual_seed(5)
    whole: list[float] = []
    loop(run, tmp_path / "whole", whole, 9, make_model(), make)
    torch.manual_seed(5)
    parts: list[float] = []
    first = loop(run, tmp_path / "parts", parts, 4, make_model(), make)
    torch.manual_seed(99)
    second = loop(run, tmp_path / "parts", parts, 9, make_model(), make)
    assert (first.steps, second.steps) == (4, 9)
    assert second.shell is not None
    assert second.shell.resumed
    assert parts == whole


def test_an_optimizer_that_the_loop_does_not_know_is_a_warning(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_model, "Layout", lambda parameters, block_elems: Layout(parameters, 4000))
    model = Matrices()
    muon, other = muon_and_adamw(model)
    for given, n_warnings in ((muon, 1), ([muon, other], 0)):
        caplog.clear()
        with dips.DiLoCo(
            model, given, tokens_per_step=10, steps=0, master=run.address, cluster_id="a", insecure=True
        ) as sync:
            assert sync.done
        warnings = [
            each.message for each in caplog.records if "the optimizers of this loop do not step" in each.message
        ]
        assert len(warnings) == n_warnings
        assert all("3 of the parameters that require gradients ('layers.2.w')" in each for each in warnings)


def test_a_state_without_the_two_methods_is_refused(run: RunForWorkers, tmp_path: Path) -> None:
    model = Walk()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sync = dips.DiLoCo(
        model, optimizer, tokens_per_step=1, master=run.address, cluster_id="a", checkpoint_dir=tmp_path,
        state={"loader": object()},  # type: ignore[dict-item]
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"'loader' is a object: give an object with state_dict\(\)"):
        sync.__enter__()


def test_resuming_needs_a_directory(run: RunForWorkers) -> None:
    config = ClientConfig(master=run.address, cluster_id="a", resume=True, insecure=True)
    with pytest.raises(ConfigError, match="give --checkpoint-dir"):
        ClusterShell(config, FlatModel(1), FlatModel(1).layout(), OWN)
