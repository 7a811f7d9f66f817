"""One rank of a planned pipeline with a user's own loop: `RANK N_RANKS FOLDER KIND...`; prints a line for each kind.

swap: two plans of six layers, AdamW, layers that change their rank in the middle. share-STAGE-ORDER: three stages, of
which a fourth rank computes a third of one. The line has the largest difference from one process, over the largest
value.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dips.planner.run.links import parse_cells
from dips.planner.run.rank import WIDTH, block, loss
from dips.planner.run.share import StageHelper, StageShare
from dips.planner.run.step import PlannedPipeline, layer_places, move_layers, stage_modules
from dips.planner.schedules.fixed import one_f_one_b, zb_h1, zb_v

CPU = torch.device("cpu")
STEPS = 3


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn((2, rows, WIDTH), generator=made, dtype=torch.float64)
    return inputs, targets


def trained_alone(n_layers: int, rows: int, steps: int) -> nn.Sequential:
    whole = nn.Sequential(*(block(layer, CPU) for layer in range(n_layers)))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    inputs, targets = batch(rows)
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss(whole(inputs), targets).backward()
        if step < steps:
            optimizer.step()
    return whole


def difference(layers: dict[int, nn.Module], whole: nn.Sequential) -> float:
    found = 0.0
    for number, layer in layers.items():
        for ours, true in zip(layer.parameters(), whole[number].parameters(), strict=True):
            assert ours.grad is not None
            assert true.grad is not None
            for a, b in ((ours.detach(), true.detach()), (ours.grad, true.grad)):
                found = max(found, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3))
    return found


def swap(rank: int) -> float:
    """ZB-V with stages of unequal length, then ZB-H1: five of six layers change their rank."""
    old, division = parse_cells(zb_v(2, 4).to_csv(), "old"), (1, 2, 1, 2)
    new, other = parse_cells(zb_h1(2, 4).to_csv(), "new"), (2, 4)
    inputs, targets = batch(8)
    layers = {n: block(n, CPU) for n, place in enumerate(layer_places(old, division)) if place == rank}
    optimizer = torch.optim.AdamW((p for one in layers.values() for p in one.parameters()), lr=1e-3)
    pipeline = PlannedPipeline(old, stage_modules(layers, old, division, rank), loss, CPU)
    for step in range(2 * STEPS + 1):
        if step == STEPS:
            places = layer_places(old, division), layer_places(new, other)
            layers = move_layers(layers, *places, lambda n: block(100 + n, CPU), optimizer)
            pipeline.swap(new, stage_modules(layers, new, other, rank))
            ours = [p for one in layers.values() for p in one.parameters()]
            assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, ours))
            assert set(optimizer.state) == set(ours)
        optimizer.zero_grad()
        pipeline.step(inputs, targets)
        if step < 2 * STEPS:
            optimizer.step()
    return difference(layers, trained_alone(6, 8, 2 * STEPS))


def share(rank: int, stage: int, order: str) -> float:
    """Ranks 0 to 2 are the pipeline; rank 3 has a row of three of `stage`. Two steps, whose gradients add up."""
    make = {"1f1b": one_f_one_b, "zb_h1": zb_h1}[order]
    cells = parse_cells(make(3, 4).to_csv(), order)
    pipeline_group, members = dist.new_group([0, 1, 2]), dist.new_group([stage, 3])
    mine = rank if rank < 3 else stage
    module = block(mine, CPU)
    inputs, targets = batch(12)
    if rank == 3:
        helper = StageHelper(module, stage, StageShare(members, (2, 1)), CPU)
        for _ in range(2):
            helper.step()
    else:
        shares = {stage: StageShare(members, (2, 1))} if rank == stage else {}
        pipeline = PlannedPipeline(cells, {mine: module}, loss, CPU, pipeline_group, shares=shares)
        for _ in range(2):
            pipeline.step(inputs, targets)
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    return difference({mine: module}, trained_alone(3, 12, 0))


def main() -> None:
    rank, n_ranks, folder, *kinds = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]
    store = dist.FileStore(str(folder / "store"), n_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    for kind in kinds:
        word, *rest = kind.split("-")
        found = swap(rank) if word == "swap" else share(rank, int(rest[0]), rest[1])
        print(f"{kind} {found:.3e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
