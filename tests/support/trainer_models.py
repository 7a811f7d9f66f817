"""A module with the very layout of support.run_for_workers, that trainers can train on batches of `input_ids`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.run_for_workers import LAYOUT, RunForWorkers
from torch.utils.data import Dataset

from dips.core.layout import Layout

LENGTH = 8


class Model(torch.nn.Module):
    """Its loss depends on every parameter and every token."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(5))
        for layer in self.layers:
            layer.w = torch.nn.Parameter(torch.randn(6000, generator=generator))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        wanted = input_ids.float().mean()
        loss = torch.stack([(self.dropout(layer.w) - wanted).square().mean() for layer in self.layers]).mean()
        return {"loss": loss}

    def flat(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return torch.cat([layer.get_parameter("w").detach() for layer in self.layers]).numpy().copy()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers from 0 to 9."""

    def __init__(self, n_rows: int = 400) -> None:
        self.rows = torch.randint(10, (n_rows, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def same_cut(parameters: Any, block_elems: int) -> Layout:
    """The fake run cuts layers into smaller blocks than the default."""
    return Layout(parameters, LAYOUT.block_elems)


def applied_tokens(run: RunForWorkers) -> list[int]:
    """Of each push that the run has seen, the seed first."""
    return [push.tokens for push in run.pushes]
