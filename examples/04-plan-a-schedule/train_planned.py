"""A model of your own, trained in the order of a plan: one process for each device of the plan.

    torchrun --nproc-per-node 4 examples/04-plan-a-schedule/train_planned.py runs/plan/plan.csv

The stages here are small blocks on CPUs. Replace them with yours; on GPUs, use "nccl" and each rank's own device.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dips.planner.run.links import read_cells
from dips.planner.run.step import PlannedPipeline

WIDTH, STEPS = 32, 10


def make_stage(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    cells = read_cells(Path(sys.argv[1]))
    dist.init_process_group("gloo")
    stages = {stage: make_stage(stage) for stage in cells.stages_of(dist.get_rank())}
    pipeline = PlannedPipeline(cells, stages, nn.functional.mse_loss, torch.device("cpu"))
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 4 * cells.n_microbatches, WIDTH)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = pipeline.step(inputs, targets)
        optimizer.step()
        if losses:  # this rank has the last stage
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
