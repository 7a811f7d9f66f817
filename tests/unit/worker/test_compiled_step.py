"""A compiled step is the loop's step: its hooks are not traced, where they would copy tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.run_for_workers import FlatModel
from support.run_in_memory import RunInMemory
from support.trainer_models import Model

import dips

# torch's own, of its first compilation.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.mark.parametrize("what", ["the optimizer's step", "the whole step"])
def test_a_compiled_step_pushes_what_was_trained(run: RunInMemory, what: str) -> None:
    model = Model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()

    compiled: dict[str, Callable[[], Any]] = {"the whole step": torch.compile(step, backend="eager")}
    optimizer_step = torch.compile(optimizer.step, backend="eager")

    def step_of_optimizer() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        optimizer_step()

    trains = compiled.get(what, step_of_optimizer)
    with dips.DiLoCo(model, optimizer, tokens_per_step=10, master=run.address, cluster_id="a", insecure=True) as sync:
        for _ in range(8):
            run.clock.advance(1.0)
            trains()
        assert (sync.steps, sync.progress) == (8, 80)
    assert [push.steps for push in run.pushes] == [4, 4]
    trained = FlatModel(7).theta
    for _ in range(8):
        trained = trained + np.float32(1.0)
    assert run.theta_of(max(run.verdicts)).tobytes() == trained.tobytes()
