"""Several processes that are one cluster: replicas of one model under torch.distributed (DistributedDataParallel).

Rank 0 alone talks to the master and moves parameters; after each step it tells the others what happened, and when the
parameters were replaced, they get them from it. All ranks call the same methods in the same order. Never used when
there is one rank, and knows nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dips.core.errors import FatalError

FIRST = 0
PATIENCE = timedelta(days=30)
"""How long a rank waits for the first one, which may wait for other clusters to join. One that died is noticed at
once, by its connection."""


@dataclass(frozen=True)
class Told:
    """What rank 0 says after a step. installs, resets: how often parameters and optimizer were replaced so far.

    timeline, version: the base, both 0 when there is none. progress: tokens of the run.
    """

    installs: int = 0
    resets: int = 0
    done: bool = False
    timeline: int = 0
    version: int = 0
    progress: int = 0
    failed: bool = False


class Ranks:
    """This process's place among those of its cluster."""

    def __init__(self) -> None:
        """To be made on all ranks together. Messages go over gloo, so that no device is waited for."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.n_ranks = dist.get_world_size()

    @property
    def is_first(self) -> bool:
        return self.rank == FIRST

    def total(self, tokens: int) -> int:
        """The sum over all ranks."""
        summed = torch.tensor([tokens], dtype=torch.int64)
        dist.all_reduce(summed, group=self._group)
        return int(summed.item())

    def tell(self, told: Told | None) -> Told:
        """What rank 0 says; `told` counts on rank 0 alone. Raises FatalError on the others when rank 0 has failed."""
        said = told or Told()
        numbers = torch.tensor([int(value) for value in vars(said).values()], dtype=torch.int64)
        dist.broadcast(numbers, FIRST, group=self._group)
        installs, resets, done, timeline, version, progress, failed = (int(n) for n in numbers.tolist())
        if failed and not self.is_first:
            raise FatalError("rank 0 of this cluster has failed: its own error says why")
        return Told(installs, resets, bool(done), timeline, version, progress, bool(failed))

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give every rank the parameters of rank 0, which are on the host or on one device for each rank."""
        with torch.no_grad():
            for parameter in parameters:
                group = self._group if parameter.device.type == "cpu" else None
                dist.broadcast(parameter.detach(), FIRST, group=group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def ranks_here() -> Ranks | None:
    """This process's ranks; None when it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks()
