"""One rank that agrees with the others on what they hold: `python -m support.held_process RANK N_RANKS FOLDER KIND...`.

For each KIND of SINGLE it writes a line: what this rank gets, or the sentence of the refusal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from support.parallel_models import local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dips.core.errors import DipsError
from dips.worker.parallel.agreement import agree
from dips.worker.parallel.held import held_here
from dips.worker.parallel.replicas import Replicas


class Group:
    def __init__(self) -> None:
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: bytes) -> list[bytes]:
        said: list[bytes] = [b""] * self.n_ranks
        dist.all_gather_object(said, mine)
        return said

    def copy(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        for other in ranks[1:]:
            if self.rank == ranks[0]:
                dist.send(tensor.contiguous(), other)
            elif self.rank == other:
                got = tensor.contiguous()
                dist.recv(got, ranks[0])
                tensor.copy_(got)


def parameter_of(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(tensor))
    return module


def _whole() -> torch.Tensor:
    return torch.arange(7 * 4, dtype=torch.float32).view(7, 4)


def hybrid4() -> torch.nn.Module:
    """FSDP2 on a 2-D mesh, whose second half was initialized from another seed."""
    module = parameter_of(_whole())
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with torch.no_grad():
        local(module.get_parameter("w")).add_(dist.get_rank() // 2)
    return module


def uneven4() -> torch.nn.Module:
    """FSDP2 over tensor parallelism along one dimension, which neither divides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parameter_of(distribute_tensor(_whole(), mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    return module


SINGLE: Mapping[str, Callable[[], torch.nn.Module]] = {
    "hybrid4": hybrid4,
    "hybrid4-replicas": hybrid4,
    "uneven4": uneven4,
}


def agreed_single(kind: str) -> dict[str, object]:
    """What this rank gets, and its elements at the end."""
    group, module = Group(), SINGLE[kind]()
    here = held_here([module], [torch.optim.SGD(module.parameters(), lr=0.1)])
    replicas = kind.endswith("replicas")
    agreed = agree(group, here, {}, replicas=replicas)
    assert agreed is not None
    compared = Replicas(group, agreed)
    if compared.agree(replicas=replicas):
        compared.give(group.copy)
    mine = zip(agreed.held[group.rank], agreed.tensors(), strict=True)
    return {"held": [[*piece[1:], tensor.tolist()] for piece, tensor in mine]}


def main(rank: int, n_ranks: int, folder: Path, kinds: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    for kind in kinds:
        try:
            line = agreed_single(kind)
        except DipsError as error:
            line = {"refused": str(error)}
        with (folder / f"rank-{rank}.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
