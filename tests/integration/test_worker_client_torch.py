"""dips.DiLoCo around a torch loop, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.fake_services import FakeRun

import dips
from dips.core.errors import ConfigError
from dips.core.layout import Layout


class Model(torch.nn.Module):
    """Has the very layout of support.fake_services."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(5))
        for layer in self.layers:
            layer.w = torch.nn.Parameter(torch.randn(6000, generator=generator))

    def flat(self) -> np.ndarray:
        return torch.cat([w.detach() for w in self.parameters()]).numpy()


@pytest.fixture(autouse=True)
def _same_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake run cuts layers into smaller blocks than the default."""
    from support import fake_services

    from dips.worker import torch_parameters

    def cut(parameters: object, block_elems: int) -> Layout:
        return Layout(parameters, fake_services.LAYOUT.block_elems)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_parameters, "Layout", cut)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    run = FakeRun()
    monkeypatch.setenv("DIPS_MASTER", run.address)
    monkeypatch.setenv("DIPS_INSECURE", "1")
    monkeypatch.setenv("DIPS_CLUSTER", "a")
    yield run
    run.close()


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.stack([w.square().sum() for w in model.parameters()]).sum().backward()
    optimizer.step()


def test_a_user_loop_seeds_pushes_and_ends_with_the_last_version(run: FakeRun) -> None:
    model = Model(1)
    seed = model.flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with dips.DiLoCo(model, optimizer, tokens_per_step=32, sync_every=4, outer_lr=0.7, outer_momentum=0.8) as sync:
        assert sync.active
        assert np.array_equal(model.flat(), seed)
        for _ in range(4):
            step(model, optimizer)
        assert sync.last_verdict is not None
        assert sync.last_verdict.kind.name == "APPLIED"
        assert [push.tokens for push in run.pushes] == [0, 128]
        assert np.array_equal(run.theta_of(sync.last_verdict.push), model.flat())
        sync.count(5, loss=1.5)
        step(model, optimizer)
        assert sync.progress == 133
        last = np.full(30_000, 3.0, np.float32)
        run.publish(last)
        run.stop = True
        while not sync.done:
            step(model, optimizer)
            time.sleep(0.01)
        assert np.array_equal(model.flat(), last)
        assert sync.version == run.version
    assert len(run.leaves) == 1


def test_ctrl_c_leaves_with_its_reason(run: FakeRun) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = dips.DiLoCo(model, optimizer, tokens_per_step=32)
    with pytest.raises(KeyboardInterrupt), sync:
        raise KeyboardInterrupt
    assert [leave.reason for leave in run.leaves] == ["KeyboardInterrupt"]
    step(model, optimizer)
    assert sync.steps == 0


def test_an_outer_lr_that_is_not_the_runs_is_refused_when_entering(run: FakeRun) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"outer_lr = 0\.5, the run's is 0\.7"):
        dips.DiLoCo(model, optimizer, tokens_per_step=32, outer_lr=0.5).__enter__()
    assert len(run.leaves) == 1
    step(model, optimizer)  # no hook was left behind
