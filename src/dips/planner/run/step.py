"""Runs one training step of a user's own model in the order of a plan.

Every rank of a process group holds the stages that the plan gives it and calls step() with the same batch size:

    cells = read_cells(Path("runs/plan/plan.csv"))
    pipeline = PlannedPipeline(cells, {s: make_stage(s) for s in cells.stages_of(rank)}, loss, device)
    losses = pipeline.step(inputs, targets)

Gradients are in the parameters afterwards; the optimizer is the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from dips.core.errors import ConfigError
from dips.planner.ir import Schedule

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
StageMaker = Callable[[nn.Module, int, int, torch.device, dist.ProcessGroup | None], PipelineStage]


class PlannedPipeline:
    """A rank's part of a planned pipeline."""

    def __init__(
        self,
        cells: Schedule,
        modules: Mapping[int, nn.Module],
        loss: LossFunction,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        make_stage: StageMaker | None = None,
    ) -> None:
        """modules[s]: stage s, on `device`, for the stages of this rank: one tensor in, one out. loss(output, target):
        the mean over a microbatch. group: of as many ranks as the plan has; default: all.

        Raises ConfigError where the group, the modules or the schedule do not fit.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != cells.n_devices:
            raise ConfigError(f"the plan has {cells.n_devices} ranks, the process group has {size}: make them equal")
        stages = cells.stages_of(rank)
        if sorted(modules) != list(stages):
            raise ConfigError(
                f"rank {rank} was given stages {sorted(modules)}, the plan has {list(stages)} there: give those"
            )
        self._cells, self._last = cells, cells.n_stages - 1 in stages
        self._first = 0 in stages
        make = make_stage or _plain_stage
        made = [make(modules[stage], stage, cells.n_stages, device, group) for stage in stages]
        self._schedule = _runtime(cells, made, loss)

    def step(self, inputs: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> list[torch.Tensor]:
        """One iteration: the gradients of the mean loss are added to the parameters of this rank's stages.

        inputs: on the rank with the first stage, (batch, ...); targets: on the rank with the last one, (batch, ...);
        others ignore theirs. The batch is cut into the plan's microbatches along its first dimension. Shapes stay those
        of the first step. Returns the losses of the microbatches on the rank with the last stage, else none.

        Raises ConfigError for a batch that does not divide.
        """
        n, losses = self._cells.n_microbatches, list[torch.Tensor]()
        for needed, name, batch in ((self._first, "inputs", inputs), (self._last, "targets", targets)):
            if needed and (batch is None or not len(batch) or len(batch) % n):
                size = "none" if batch is None else f"a batch of {len(batch)}"
                raise ConfigError(f"step() was given {size} as {name}: give a multiple of the plan's {n} microbatches")
        arguments = (inputs,) if self._first else ()
        self._schedule.step(*arguments, target=targets if self._last else None, losses=losses, return_outputs=False)
        return [loss.detach() * n for loss in losses]


def _plain_stage(
    module: nn.Module, stage: int, n_stages: int, device: torch.device, group: dist.ProcessGroup | None
) -> PipelineStage:
    return PipelineStage(module, stage, n_stages, device, group=group)


def _runtime(cells: Schedule, stages: list[PipelineStage], loss: LossFunction) -> PipelineScheduleMulti:
    """torch's runtime with the plan's order, to which torch adds sending and receiving."""
    try:
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    except ImportError as error:
        raise ConfigError(
            f"torch {torch.__version__} has no runtime for planned schedules: use the one of constraints.txt"
        ) from error
    # torch would divide gradients at the end of a step, also those that were there before it.
    n = cells.n_microbatches
    runtime = _PipelineScheduleRuntime(stages, n, lambda output, target: loss(output, target) / n, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.csv"
        file.write_text(cells.to_csv())
        try:
            runtime._load_csv(str(file), format="compute_only")
        except AssertionError as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"torch cannot run the schedule: {why}: make it again with dips plan FILE") from error
    return runtime
