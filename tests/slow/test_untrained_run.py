"""What a model holds and does not train, against a real master and real slaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.whole_run import WholeRun

import dips
from dips.core.errors import ConfigError, RefusalCode, Refused


class Adapted(torch.nn.Module):
    """A frozen base under a trained adapter."""

    def __init__(self, base_seed: int) -> None:
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = torch.nn.Linear(8, 8).requires_grad_(False)
        self.adapter = torch.nn.Linear(8, 8)


def entered(run: WholeRun, name: str, model: torch.nn.Module) -> tuple[dips.DiLoCo, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return dips.DiLoCo(
        model, optimizer, tokens_per_step=8, master=run.address, cluster_id=name, insecure=True
    ), optimizer


def step(model: Adapted, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.adapter(model.base(torch.randn(4, 8))).square().mean().backward()
    optimizer.step()


def unfreeze_on_the_way(sync: dips.DiLoCo, optimizer: torch.optim.Optimizer, model: Adapted) -> None:
    with sync:
        model.base.requires_grad_(True)
        for _ in range(4):
            step(model, optimizer)


def test_another_base_is_refused_by_name_and_an_unfrozen_one_at_the_next_push(tmp_path: Path) -> None:
    with WholeRun(tmp_path, n_slaves=1, grace_s=0.0) as run:
        model = Adapted(base_seed=1)
        sync, optimizer = entered(run, "a", model)
        with sync:
            with pytest.raises(Refused, match=r"'base.weight', 'base.bias' differ; load the same weights") as refused:
                entered(run, "b", Adapted(base_seed=2))[0].__enter__()
            assert refused.value.code is RefusalCode.FROZEN
            with entered(run, "b", Adapted(base_seed=1))[0]:
                pass
            for _ in range(4):
                step(model, optimizer)
            assert run.version() == 1
        with pytest.raises(ConfigError, match=r"'base.weight' requires gradients and did not"):
            unfreeze_on_the_way(*entered(run, "a", model), model)
        assert not any(cluster.alive for cluster in run.status().clusters)
