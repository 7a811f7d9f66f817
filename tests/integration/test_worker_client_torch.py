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
from dips.core.errors import ConfigError
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


def test_ctrl_c_leaves_with_its_reason(run: RunForWorkers) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = dips.DiLoCo(model, optimizer, tokens_per_step=32)
    with pytest.raises(KeyboardInterrupt), sync:
        raise KeyboardInterrupt
    assert [leave.reason for leave in run.leaves] == ["KeyboardInterrupt"]
    step(model, optimizer)
    assert sync.steps == 0


def test_the_last_steps_are_pushed_when_the_block_ends(run: RunForWorkers) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with dips.DiLoCo(model, optimizer, tokens_per_step=32, steps=7) as sync:
        while not sync.done:
            step(model, optimizer)
    assert [push.steps for push in run.pushes] == [0, 4, 3]
    assert run.tokens == 7 * 32
    assert sync.done


@pytest.mark.parametrize("interrupted", [KeyboardInterrupt, SystemExit])
def test_the_last_steps_are_pushed_after_ctrl_c_between_two_steps(
    run: RunForWorkers, interrupted: type[BaseException]
) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loop() -> None:
        with dips.DiLoCo(model, optimizer, tokens_per_step=32):
            for _ in range(6):
                step(model, optimizer)
            raise interrupted

    with pytest.raises(interrupted):
        loop()
    assert [push.steps for push in run.pushes] == [0, 4, 2]


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


def test_ctrl_c_inside_of_a_step_pushes_nothing_that_is_half_way(
    run: RunForWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    def loop() -> None:
        with dips.DiLoCo(model, optimizer, tokens_per_step=32):
            step(model, optimizer)
            optimizer.register_step_pre_hook(interrupt)
            step(model, optimizer)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert [push.steps for push in run.pushes] == [0]
    assert "without 1 step with 32 tokens" in caplog.text


@pytest.mark.parametrize("asks", [True, False])
def test_sigterm_pushes_the_last_steps_and_ends_the_process_in_order(
    run: RunForWorkers, asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = dips.DiLoCo(model, optimizer, tokens_per_step=32)

    def loop() -> None:
        with sync:
            while not (asks and sync.done):
                step(model, optimizer)
                if sync.steps == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)  # as launchers do, to a group and to each process
                assert sync.steps < 8

    with pytest.raises(SystemExit) as ended:
        loop()
    assert ended.value.code == 143
    steps = 5 if asks else 6  # `done` says so before the next step; the hook, after it
    assert (sync.steps, run.tokens) == (steps, steps * 32)
    assert [leave.reason for leave in run.leaves] == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "this process ends with exit code 143" in caplog.text


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


def test_an_outer_lr_that_is_not_the_runs_is_refused_when_entering(run: RunForWorkers) -> None:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"outer_lr = 0\.5, the run's is 0\.7"):
        dips.DiLoCo(model, optimizer, tokens_per_step=32, outer_lr=0.5).__enter__()
    assert len(run.leaves) == 1
    step(model, optimizer)  # no hook was left behind
