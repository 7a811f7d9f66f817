"""Runs one rank of `dips plan run`; the command starts it as `python -m dips.planner.run.rank FOLDER RANK`.

The first iteration is not timed: torch learns shapes, connections are made, and the gradients are compared with those
of one process. The timed ones follow; gradients are compared again in the last one. If jobs follow (links that change,
another schedule), the ranks train on until the next one is there, and take it between two iterations.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
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
    SPARE_ITERATIONS,
    STORE_FILE,
    Iteration,
    LinkBoard,
    PlanJob,
    RankPace,
    RankReport,
    SystemWaits,
    board_file,
    board_sizes,
    job_file,
    parse_cells,
    read_job,
    write_report,
)
from dips.planner.run.step import PlannedPipeline, layer_places, move_layers, stage_modules

PAUSE_S = 0.05
"""Between two looks for the next job, where iterations have run out."""

# ---- model -----------------------------------------------------------------------------------------------------------
#
# The small model that `dips plan run` trains: a block for each layer, the same on every machine.
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


def block(layer: int, device: torch.device) -> nn.Module:
    """Layer `layer`, whose weights follow from its number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1 + layer)
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


class OneProcess:
    """The whole model in this process alone, which takes the batch at once and trains as the ranks do."""

    def __init__(self, n_layers: int, n_microbatches: int, device: torch.device) -> None:
        self._layers = [block(layer, device) for layer in range(n_layers)]
        self._batch = batch(n_microbatches, device)
        self._optimizer = optimizer_of(self._layers)
        self._steps = 0

    def gradient_error(self, steps: int, layers: Mapping[int, nn.Module]) -> float:
        """The largest difference of the layers' gradients from those of this process after so many steps; over its
        largest gradient. A parameter without a gradient: infinite."""
        inputs, targets = self._batch
        while True:
            self._optimizer.zero_grad()
            loss(nn.Sequential(*self._layers)(inputs), targets).backward()
            if self._steps == steps:
                break
            self._optimizer.step()
            self._steps += 1
        largest = max(float(_gradient(p).abs().max()) for one in self._layers for p in one.parameters())
        pairs = [
            (ours, true)
            for layer, module in layers.items()
            for ours, true in zip(module.parameters(), self._layers[layer].parameters(), strict=True)
        ]
        if any(ours.grad is None for ours, _ in pairs):
            return float("inf")
        return max(float((_gradient(ours) - _gradient(true)).abs().max()) for ours, true in pairs) / largest


def optimizer_of(layers: Iterable[nn.Module]) -> torch.optim.Optimizer:
    """Momentum, whose state must move with its layer. It is linear: rounding is not made larger."""
    return torch.optim.SGD((p for layer in layers for p in layer.parameters()), lr=0.02, momentum=0.9)


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
    """Join the others, run the jobs, write the reports. Raises ConfigError when a job is not possible."""
    job = read_job(folder)
    device = _device(job, rank)
    torch.set_num_threads(1)
    n_ranks = parse_cells(job.csv, "the plan").n_devices
    store = dist.FileStore(str(folder / STORE_FILE), n_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=n_ranks, timeout=timedelta(seconds=job.timeout_s)
    )
    try:
        _Trainee(folder, rank, device).run()
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


class _Trainee:
    """A rank's part of the model, which trains through all jobs."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._folder, self._rank, self._device = folder, rank, device
        self._steps = self._skipped = 0

    def run(self) -> None:
        for number in count():
            job = read_job(self._folder, number)
            cells = parse_cells(job.csv, "the plan")
            sizes = board_sizes(job, cells.n_stages, cells.n_microbatches)
            with LinkBoard(board_file(self._folder, number), *sizes) as board:
                taken_ns = time.monotonic_ns()
                if number:
                    self._follow(job, cells, board)
                else:
                    self._begin(job, cells, board)
                write_report(self._folder, self._rank, self._timed(job, number, taken_ns), number)
                if job.last:
                    return
                self._train_on(job.repeats, number + 1)

    def _begin(self, job: PlanJob, cells: Schedule, board: LinkBoard) -> None:
        device = self._device
        settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._pace = RankPace(job, cells, self._rank, board, SystemWaits(), settle)
        self._job, self._division = job, _division(job, cells)
        self._places = layer_places(cells, self._division)
        self._layers = {layer: block(layer, device) for layer, at in enumerate(self._places) if at == self._rank}
        self._optimizer = optimizer_of(self._layers.values())
        self._whole = OneProcess(sum(self._division), cells.n_microbatches, device)
        self._batch = batch(cells.n_microbatches, device)
        stages = stage_modules(self._layers, cells, self._division, self._rank)
        self._pipeline = PlannedPipeline(cells, stages, loss, device, make_stage=partial(PacedStage, self._pace))

    def _follow(self, job: PlanJob, cells: Schedule, board: LinkBoard) -> None:
        """Take the next job: other links, or another order too, for which layers move to other ranks."""
        self._pace.follow(job, cells, board)
        division = _division(job, cells)
        if (job.csv, division) != (self._job.csv, self._division):
            places = layer_places(cells, division)
            make = partial(block, device=self._device)
            self._layers = move_layers(self._layers, self._places, places, make, self._optimizer)
            self._pipeline.swap(cells, stage_modules(self._layers, cells, division, self._rank))
            self._places = places
        self._job, self._division = job, division

    def _timed(self, job: PlanJob, number: int, taken_ns: int) -> RankReport:
        """The timed iterations of a job, after one that is not if it is the first. Gradients are compared in the first
        iteration and in the last one."""
        errors = []
        if not number:
            self._optimizer.zero_grad()
            self._pipeline.step(*self._batch)
            errors.append(self._whole.gradient_error(self._steps, self._layers))
            self._update()
            gc.collect()
            gc.freeze()  # no long collection in the middle of an iteration
        iterations = []
        for repeat in range(job.repeats):
            iterations.append(self._iterate(repeat))
            if repeat + 1 == job.repeats or (number and not repeat):
                errors.append(self._whole.gradient_error(self._steps, self._layers))
            self._update()
        message = self._batch[0][:ROWS]
        return RankReport(
            iterations=tuple(iterations),
            parameters=sum(1 for layer in self._layers.values() for _ in layer.parameters()),
            gradient_error=max(errors, default=0.0),
            message_bytes=message.numel() * message.element_size(),
            skipped=self._skipped,
            taken_ns=taken_ns,
        )

    def _train_on(self, row: int, number: int) -> None:
        """Train until job `number` is there. row: the first iteration of the board that is not used."""
        self._skipped = 0
        there = torch.zeros(1, dtype=torch.int64, device=self._device)
        while True:
            there.fill_(job_file(self._folder, number).exists())
            dist.broadcast(there, src=0)  # all see it before the same iteration
            if there.item():
                return
            if self._skipped == SPARE_ITERATIONS:
                time.sleep(PAUSE_S)
                continue
            self._iterate(row + self._skipped)
            self._update()
            self._skipped += 1

    def _iterate(self, row: int) -> Iteration:
        self._optimizer.zero_grad()
        dist.barrier()
        self._pace.begin(row)
        self._pipeline.step(*self._batch)
        return self._pace.finish()

    def _update(self) -> None:
        self._optimizer.step()
        self._steps += 1


def _division(job: PlanJob, cells: Schedule) -> tuple[int, ...]:
    return job.layers or (1,) * cells.n_stages


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder with the jobs, and the rank."""
    try:
        run(Path(arguments[0]), int(arguments[1]))
    except DipsError as error:
        say_last(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
