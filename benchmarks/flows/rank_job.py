"""A rank of bench_ranks.py: a job of torch.distributed whose steps cost nothing, with Di-PS if DIPS_MASTER is set.

    python rank_job.py RANK N_RANKS STORE WIDTH LAYERS STEPS    (STORE: tcp://HOST:PORT of rank 0)

It prints, in JSON, the most memory that the process had: resident bytes, and those of them that are its own alone and
not pages of a file (of a library, say), which the processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import threading
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


def status_bytes(name: str) -> int:
    """A row of /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


class PrivateMemory(threading.Thread):
    """Looks at the private memory every 20 ms: the system keeps no peak of it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ends = threading.Event()
        self._peak_bytes = 0

    def run(self) -> None:
        while not self._ends.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, status_bytes("RssAnon"))

    def end(self) -> int:
        """The most that it had."""
        self._ends.set()
        self.join()
        return self._peak_bytes


def main(rank: int, n_ranks: int, store: str, width: int, n_layers: int, n_steps: int) -> None:
    torch.set_num_threads(1)
    private = PrivateMemory()
    private.start()
    if n_ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_ranks)
    model = make(width, n_layers, n_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = next(model.parameters())
    first.grad = torch.zeros_like(first)  # a step without any gradient is none
    with dips.DiLoCo(model, optimizer, tokens_per_step=1, steps=n_steps) as sync:
        while not sync.done:
            for parameter in model.parameters():
                local(parameter).add_(1e-3)
            optimizer.step()
    print(json.dumps({"resident": status_bytes("VmHWM"), "private": private.end()}), flush=True)
    if n_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
