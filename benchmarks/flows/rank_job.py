"""A rank of bench_ranks.py: a job of torch.distributed whose steps cost nothing, with Di-PS if DIPS_MASTER is set.

    python rank_job.py RANK N_RANKS STORE WIDTH LAYERS STEPS    (STORE: tcp://HOST:PORT of rank 0)

It prints, in JSON, the most memory that the process had: resident bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dips


def make(width: int, n_layers: int, n_ranks: int) -> torch.nn.Module:
    """Square layers: width ** 2 * n_layers parameters. Of several ranks, each has its shard, and never made more."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(n_layers)))
    if n_ranks > 1:
        mesh = init_device_mesh("cpu", (n_ranks,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(local(parameter), 0.5)
    return model


def local(parameter: torch.Tensor) -> torch.Tensor:
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def peak_bytes() -> int:
    """Resident, since the process began."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def main(rank: int, n_ranks: int, store: str, width: int, n_layers: int, n_steps: int) -> None:
    torch.set_num_threads(1)
    if n_ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_ranks)
    model = make(width, n_layers, n_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dips.DiLoCo(model, optimizer, tokens_per_step=1, steps=n_steps) as sync:
        while not sync.done:
            for parameter in model.parameters():
                local(parameter).add_(1e-3)
            optimizer.step()
    print(json.dumps({"peak_bytes": peak_bytes()}), flush=True)
    if n_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
