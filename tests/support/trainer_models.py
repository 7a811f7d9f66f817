"""A module with the very layout of support.run_for_workers, that trainers can train on batches of `input_ids`."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from support.run_for_workers import LAYOUT, RunForWorkers
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import Dataset

from dips.core.ids import Version
from dips.core.layout import Layout, PublishedModel
from dips.worker.state.effects import Finished
from dips.worker.torch_model import TorchParameters

LENGTH = 8
BATCH, ACCUMULATED = 2, 2
STEP_TOKENS = BATCH * ACCUMULATED * LENGTH


class Layer(torch.nn.Module):
    """Its loss, also where a rank has a part of its parameter."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)

    def forward(self, wanted: torch.Tensor, dropout: torch.nn.Module) -> torch.Tensor:
        w: torch.Tensor = self.w
        if not isinstance(w, DTensor):
            loss: torch.Tensor = (dropout(w) - wanted).square().mean()
            return loss
        part = (dropout(w.to_local()) - wanted).square().sum() / w.numel()
        whole: torch.Tensor = DTensor.from_local(part, w.device_mesh, [Partial()]).full_tensor()
        return whole


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList(Layer(torch.randn(6000, generator=generator)) for _ in range(5))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        wanted = input_ids.float().mean()
        return {"loss": torch.stack([layer(wanted, self.dropout) for layer in self.layers]).mean()}

    def flat(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return flat_of(self)


def flat_of(model: torch.nn.Module) -> np.ndarray[Any, np.dtype[np.float32]]:
    held = (parameter.detach() for parameter in model.parameters())
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in held]
    return torch.cat([each.flatten() for each in whole]).numpy().copy()


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, n_rows: int = 400) -> None:
        self.rows = torch.randint(10, (n_rows, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def same_cut(parameters: Any, block_elems: int = 0) -> Layout:
    """The fake run cuts layers into smaller blocks than the default."""
    return Layout(parameters, LAYOUT.block_elems)


def applied_tokens(run: RunForWorkers) -> list[int]:
    return [push.tokens for push in run.pushes]


VERSION = Version(1, 7)


def published(
    layout: Layout, flat: NDArray[np.float32], run_id: str = "mine", version: Version = VERSION, tokens: int = 12345
) -> PublishedModel:
    return PublishedModel(run_id, version, tokens, layout, flat)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model.eval()(torch.arange(20).view(2, 10)).logits
    return out


def snapshot_of(parameters: TorchParameters, *of_run: Any) -> PublishedModel:
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.snapshot(flat)
    return published(parameters.layout(), flat, *of_run)


def fetched_of(model: torch.nn.Module, *of_run: Any) -> PublishedModel:
    return snapshot_of(TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1)), *of_run)


class Killed(BaseException):
    """Stands for SIGKILL: nothing that would be said at an end is said."""


def kill(ours: Any) -> NoReturn:
    """End the training of a trainer's callback as if its process had been killed."""
    assert ours.sync is not None
    assert ours.sync.shell is not None
    ours.sync.shell._finished = Finished("killed")
    ours.close()
    raise Killed


def check_resumed(killed_at: int, models: list[np.ndarray[Any, Any]], tokens: list[int]) -> None:
    """Of a training of 18 steps, and of one that was killed at this step and went on from a checkpoint of step 5."""
    if killed_at == 6:  # nothing was pushed between the checkpoint and the end: the very same training
        assert np.array_equal(models[0], models[1])
        assert tokens[0] == tokens[1]
    else:  # steps 1 to 8 were applied and stay; 6 to 18 were made from there on
        assert tokens == [18 * STEP_TOKENS, (8 + 13) * STEP_TOKENS]
