"""A cluster whose pipeline runs in the order of a plan; without DIPS_MASTER it is ordinary training.

Alone, with a plan for eight devices (README.md makes one):
    torchrun --standalone --nproc-per-node 8 examples/04-plan-a-schedule/planned_cluster.py runs/plan/plan.csv
As two clusters:  dips up examples/server.toml       (a master and a slave; leave it running)
and in two more terminals, each with the keys that `dips up` made for it; the second is the same model in one process:
    export DIPS_MASTER=127.0.0.1:29400
    DIPS_CLUSTER=a DIPS_KEYS=runs/own-loop/keys/a torchrun --standalone --nproc-per-node 8 \
        examples/04-plan-a-schedule/planned_cluster.py runs/plan/plan.csv
    DIPS_CLUSTER=b DIPS_KEYS=runs/own-loop/keys/b python examples/04-plan-a-schedule/planned_cluster.py

A rank may have several stages. Each pushes and pulls its own part, as in any pipeline (docs/integrations.md).
The stages here are small and on CPUs. Replace them with yours; on GPUs, use "nccl" and each rank's own device.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dips
from dips.planner.run.links import read_cells
from dips.planner.run.step import PlannedPipeline

WIDTH, LAYERS, LENGTH, STEPS = 32, 16, 32, 200
ROWS = 32  # of a batch: every number of microbatches of the plan must divide it
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # any text: here, a file of Python's own library


class Layer(nn.Module):
    """Each byte sees itself and a mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        before = y.cumsum(1) / torch.arange(1, y.shape[1] + 1).view(-1, 1)
        return x + self.down(nn.functional.gelu(self.up(torch.cat([y, before], -1))))


class Stage(nn.Module):
    """Stage `number` of `n_stages`; of one, the whole model. Modules have their names in the full model on every rank,
    by which a run knows what a rank holds."""

    def __init__(self, number: int, n_stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank makes the same model, and keeps its part
        embedding, layers, guess = nn.Embedding(256, WIDTH), [Layer() for _ in range(LAYERS)], nn.Linear(WIDTH, 256)
        first, last = number * LAYERS // n_stages, (number + 1) * LAYERS // n_stages
        self.embedding = embedding if number == 0 else None
        self.layers = nn.ModuleDict({str(layer): layers[layer] for layer in range(first, last)})
        self.guess = guess if number == n_stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.guess is None else self.guess(x)


def loss_of(guessed: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(guessed.flatten(0, 1), text.flatten())


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        cells = read_cells(Path(sys.argv[1]))
        dist.init_process_group("gloo")
        stages = {stage: Stage(stage, cells.n_stages) for stage in cells.stages_of(dist.get_rank())}
        step = PlannedPipeline(cells, stages, loss_of, torch.device("cpu")).step
    else:
        whole = Stage(0, 1)
        stages = {0: whole}

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
            loss = loss_of(whole(inputs), targets)
            loss.backward()
            return [loss.detach()]

    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    torch.manual_seed(
        zlib.crc32(os.environ.get("DIPS_CLUSTER", "").encode())
    )  # the same data on all ranks of a cluster
    # Tokens of the batch, which all ranks see: they are counted once.
    with dips.DiLoCo(list(stages.values()), optimizer, tokens_per_step=ROWS * LENGTH, steps=STEPS) as sync:
        while not sync.done:
            text = TEXT[torch.randint(len(TEXT) - LENGTH - 1, (ROWS, 1)) + torch.arange(LENGTH + 1)]
            optimizer.zero_grad()
            losses = step(text[:, :-1], text[:, 1:])
            if losses:  # this rank has the last stage
                sync.report(torch.stack(losses).mean())
            optimizer.step()
            if losses and sync.steps % 20 == 0:
                print(f"step {sync.steps}: loss {torch.stack(losses).mean():.3f}, version {sync.version}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
