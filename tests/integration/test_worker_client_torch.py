"""dips.DiLoCo around a torch loop, over real sockets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.run_for_workers import LAYOUT, RunForWorkers
from support.waiting import until

import dips
from dips.core.layout import Layout


class Model(torch.nn.Module):
    """Has the very layout of support.run_for_workers."""

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

    from dips.worker import torch_model

    def cut(parameters: object, block_elems: int) -> Layout:
        return Layout(parameters, LAYOUT.block_elems)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_model, "Layout", cut)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunForWorkers]:
    run = RunForWorkers()
    monkeypatch.setenv("DIPS_MASTER", run.address)
    monkeypatch.setenv("DIPS_INSECURE", "1")
    monkeypatch.setenv("DIPS_CLUSTER", "a")
    yield run
    run.close()


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.stack([w.square().sum() for w in model.parameters()]).sum().backward()
    optimizer.step()


def test_a_user_loop_seeds_pushes_and_ends_with_the_last_version(run: RunForWorkers) -> None:
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

        def ends() -> bool:
            step(model, optimizer)
            return sync.done

        until(ends, "the loop's end")
        assert np.array_equal(model.flat(), last)
        assert sync.version == run.version
    assert len(run.leaves) == 1


def test_after_an_error_what_is_lost_is_said(run: RunForWorkers, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loop() -> None:
        with dips.DiLoCo(model, optimizer, tokens_per_step=32):
            for _ in range(6):
                step(model, optimizer)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert [push.steps for push in run.pushes] == [0, 4]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "leaving (ZeroDivisionError) without 2 steps with 64 tokens: they were made since the last "
        "push, and the parameters may be in the middle of a step"
    ]


def test_a_users_own_handler_of_sigterm_stays(run: RunForWorkers) -> None:
    model, heard = Model(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with dips.DiLoCo(model, optimizer, tokens_per_step=32, steps=2) as sync:
            while not sync.done:
                step(model, optimizer)
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (len(heard), sync.steps, run.tokens) == (2, 2, 64)
