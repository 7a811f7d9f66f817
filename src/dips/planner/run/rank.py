"""Runs one rank of `dips plan run`; the command starts it as `python -m dips.planner.run.rank FOLDER RANK`.

The first iteration is not timed: torch learns shapes, connections are made, and the gradients are compared with those
of one process. The timed ones follow.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from dips.core.errors import ConfigError, DipsError
from dips.core.observe.logs import say_last
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.run.links import (
    BOARD_FILE,
    STORE_FILE,
    LinkBoard,
    PlanJob,
    RankPace,
    RankReport,
    SystemWaits,
    board_sizes,
    parse_cells,
    read_job,
    write_report,
)
from dips.planner.run.step import PlannedPipeline

# ---- model -----------------------------------------------------------------------------------------------------------
#
# The small model that `dips plan run` trains: one block for each stage, the same on every machine.
#
# In double precision, so that gradients which were summed in another order are equal to twelve digits, and a
# schedule that loses or doubles one is far off.


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


# ---- stage -----------------------------------------------------------------------------------------------------------
#
# A stage of torch's pipeline that keeps a plan's times and sends its messages over emulated links.
#
# torch's runtime has no hook for sending and receiving; but it asks the stage for what to send right after the
# operation that made it, and calls the stage's operations when their input has arrived. Both are the stage's own
# methods, so nothing of torch is patched (docs/decisions/0025-how-a-plan-runs.md).


class PacedStage(PipelineStage):
    """The stage (see the module). Its operations are those of PipelineStage."""

    def __init__(
        self,
        pace: RankPace,
        module: nn.Module,
        stage: int,
        n_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(module, stage, n_stages, device, group=group)
        self._pace = pace
        self._backward: dict[int, Op] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        op = Op(Kind.F, self.stage_index, fwd_chunk_id)
        return self._pace.run(op, lambda: super(PacedStage, self).forward_one_chunk(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        op = Op(Kind.B if full_backward else Kind.D, self.stage_index, bwd_chunk_id)
        self._backward[bwd_chunk_id] = op
        self._pace.run(
            op,
            lambda: super(PacedStage, self).backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward),
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        op = Op(Kind.W, self.stage_index, bwd_chunk_id)
        self._pace.run(op, lambda: super(PacedStage, self).backward_weight_one_chunk(bwd_chunk_id, last_backward))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._pace.send(Op(Kind.F, self.stage_index, fwd_chunk_id))
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._pace.send(self._backward[bwd_chunk_id])
        return super().get_bwd_send_ops(bwd_chunk_id)


# ---- rank ------------------------------------------------------------------------------------------------------------


def run(folder: Path, rank: int) -> None:
    """Join the others, run the job, write the report. Raises ConfigError when the job is not possible."""
    job = read_job(folder)
    cells = parse_cells(job.csv, "the plan")
    device = _device(job, rank)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / STORE_FILE), cells.n_devices)  # type: ignore[attr-defined]
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=cells.n_devices, timeout=timedelta(seconds=job.timeout_s)
    )
    try:
        with LinkBoard(folder / BOARD_FILE, *board_sizes(job, cells.n_stages, cells.n_microbatches)) as board:
            report = _train(job, cells, rank, device, board)
        write_report(folder, rank, report)
        dist.barrier()  # no rank leaves while another one still sends to it
    finally:
        dist.destroy_process_group()


def _device(job: PlanJob, rank: int) -> torch.device:
    if job.backend != "nccl":
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--backend nccl gives each rank a GPU, and there are {torch.cuda.device_count()}: use --backend gloo"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _train(job: PlanJob, cells: Schedule, rank: int, device: torch.device, board: LinkBoard) -> RankReport:
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    pace = RankPace(job, cells, rank, board, SystemWaits(), settle)
    modules = {stage: block(stage, device) for stage in cells.stages_of(rank)}
    pipeline = PlannedPipeline(cells, modules, loss, device, make_stage=partial(PacedStage, pace))
    inputs, targets = batch(cells.n_microbatches, device)
    pipeline.step(inputs, targets)
    error = gradient_error(cells.n_stages, cells.n_microbatches, modules, device)
    gc.collect()
    gc.freeze()  # no long collection in the middle of an iteration
    iterations = []
    for repeat in range(job.repeats):
        for module in modules.values():
            module.zero_grad()
        dist.barrier()
        pace.begin(repeat)
        pipeline.step(inputs, targets)
        iterations.append(pace.finish())
    message = inputs[:ROWS]
    parameters = sum(1 for module in modules.values() for _ in module.parameters())
    return RankReport(tuple(iterations), parameters, error, message.numel() * message.element_size())


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder with job.json, and the rank."""
    try:
        run(Path(arguments[0]), int(arguments[1]))
    except DipsError as error:
        say_last(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
