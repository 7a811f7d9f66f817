"""One of two ranks of a cluster: `python tests/support/rank_process.py RANK STORE`; the run stands in the environment.

Trains under DistributedDataParallel on data of its own, and tells at the end what it holds.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dips
from dips.core.errors import DipsError

sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[1]))

from support.trainer_models import LENGTH, Model, same_cut

from dips.worker import torch_parameters

STEPS = 10


def main(rank: int, store: str) -> int:
    torch.set_num_threads(1)
    torch_parameters.Layout = same_cut  # type: ignore[attr-defined, assignment]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = Model(seed=rank)  # DistributedDataParallel makes them one, DiLoCo then the run's
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + rank)
    told: dict[str, object] = {}
    with dips.DiLoCo(wrapped, optimizer, tokens_per_step=(rank + 1) * LENGTH) as sync:
        for _ in range(STEPS):
            optimizer.zero_grad()
            wrapped(torch.randint(10, (rank + 1, LENGTH), generator=data))["loss"].backward()
            optimizer.step()
        told = {"steps": sync.steps, "version": str(sync.version), "progress": sync.progress, "active": sync.active}
        told["driver"] = sync.driver is not None
    print(json.dumps({**told, "model": hashlib.sha256(model.flat().tobytes()).hexdigest()}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1]), sys.argv[2]))
    except DipsError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
