"""Runs one rank of `dips plan run`; the command starts it as `python -m dips.planner.run.rank FOLDER RANK`.

The first iteration is not timed: torch learns shapes, connections are made, and the gradients are compared with those
of one process. The timed ones follow.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dips.core.errors import ConfigError, DipsError
from dips.core.observe.telemetry import say_last
from dips.planner.run import model
from dips.planner.run.cells import Cells, parse_cells
from dips.planner.run.job import (
    BOARD_FILE,
    STORE_FILE,
    Iteration,
    PlanJob,
    RankReport,
    board_sizes,
    read_job,
    write_report,
)
from dips.planner.run.links import LinkBoard
from dips.planner.run.pace import RankPace, SystemWaits
from dips.planner.run.stage import PacedStage
from dips.planner.run.step import PlannedPipeline


def run(folder: Path, rank: int) -> None:
    """Join the others, run the job, write the report. Raises ConfigError when the job is not possible."""
    job = read_job(folder)
    cells = parse_cells(job.csv, "the plan")
    device = _device(job, rank)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / STORE_FILE), cells.n_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=cells.n_ranks, timeout=timedelta(seconds=job.timeout_s)
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


def _train(job: PlanJob, cells: Cells, rank: int, device: torch.device, board: LinkBoard) -> RankReport:
    settle = torch.cuda.synchronize if device.type == "cuda" else _nothing
    pace = RankPace(job, cells, rank, board, SystemWaits(), settle)
    modules = {stage: model.block(stage, device) for stage in cells.stages_of(rank)}
    pipeline = PlannedPipeline(cells, modules, model.loss, device, make_stage=partial(PacedStage, pace))
    inputs, targets = model.batch(cells.n_microbatches, device)
    pipeline.step(inputs, targets)
    error = model.gradient_error(cells.n_stages, cells.n_microbatches, modules, device)
    gc.collect()
    gc.freeze()  # no long collection in the middle of an iteration
    iterations = [_timed(pace, pipeline, modules, inputs, targets, repeat) for repeat in range(job.repeats)]
    message = inputs[: model.ROWS]
    parameters = sum(1 for module in modules.values() for _ in module.parameters())
    return RankReport(tuple(iterations), parameters, error, message.numel() * message.element_size())


def _timed(
    pace: RankPace,
    pipeline: PlannedPipeline,
    modules: dict[int, nn.Module],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    repeat: int,
) -> Iteration:
    for module in modules.values():
        module.zero_grad()
    dist.barrier()
    pace.begin(repeat)
    pipeline.step(inputs, targets)
    return pace.finish()


def _nothing() -> None:
    pass


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
