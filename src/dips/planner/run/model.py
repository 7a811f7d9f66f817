"""The small model that `dips plan run` trains: one block for each stage, the same on every machine.

In double precision, so that gradients which were summed in another order are equal to twelve digits, and a
schedule that loses or doubles one is far off.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

WIDTH = 16
ROWS = 2
"""Of a microbatch."""


class ResidualBlock(nn.Module):
    """x + W2 gelu(W1 norm(x)); (rows, WIDTH) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + inner


def block(stage: int, device: torch.device) -> nn.Module:
    """Stage `stage`, whose weights follow from its number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1 + stage)
        return ResidualBlock().to(device, torch.float64)


def batch(n_microbatches: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (ROWS * n_microbatches, WIDTH) each."""
    made = torch.Generator().manual_seed(0)
    shape = (2, ROWS * n_microbatches, WIDTH)
    inputs, targets = torch.randn(shape, generator=made, dtype=torch.float64).to(device)
    return inputs, targets


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean square."""
    return nn.functional.mse_loss(output, target)


def gradient_error(n_stages: int, n_microbatches: int, modules: Mapping[int, nn.Module], device: torch.device) -> float:
    """The largest difference of the modules' gradients from those of the whole model in this process alone, which takes
    the batch at once; over its largest gradient. A parameter without a gradient: infinite."""
    whole = [block(stage, device) for stage in range(n_stages)]
    inputs, targets = batch(n_microbatches, device)
    loss(nn.Sequential(*whole)(inputs), targets).backward()
    largest = max(float(_gradient(p).abs().max()) for one in whole for p in one.parameters())
    pairs = [
        (ours, true)
        for stage, module in modules.items()
        for ours, true in zip(module.parameters(), whole[stage].parameters(), strict=True)
    ]
    if any(ours.grad is None for ours, _ in pairs):
        return float("inf")
    return max(float((_gradient(ours) - _gradient(true)).abs().max()) for ours, true in pairs) / largest


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
