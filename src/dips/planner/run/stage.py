"""A stage of torch's pipeline that keeps a plan's times and sends its messages over emulated links.

torch's runtime has no hook for sending and receiving; but it asks the stage for what to send right after the operation
that made it, and calls the stage's operations when their input has arrived. Both are the stage's own methods, so
nothing of torch is patched (docs/decisions/0025-how-a-plan-runs.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from dips.planner.run.cells import Cell
from dips.planner.run.pace import RankPace


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
        self._backward: dict[int, Cell] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        cell = Cell(self.stage_index, "F", fwd_chunk_id)
        return self._pace.run(cell, lambda: super(PacedStage, self).forward_one_chunk(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        cell = Cell(self.stage_index, "B" if full_backward else "I", bwd_chunk_id)
        self._backward[bwd_chunk_id] = cell
        self._pace.run(
            cell,
            lambda: super(PacedStage, self).backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward),
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        cell = Cell(self.stage_index, "W", bwd_chunk_id)
        self._pace.run(cell, lambda: super(PacedStage, self).backward_weight_one_chunk(bwd_chunk_id, last_backward))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._pace.send(Cell(self.stage_index, "F", fwd_chunk_id))
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._pace.send(self._backward[bwd_chunk_id])
        return super().get_bwd_send_ops(bwd_chunk_id)
