"""One of two ranks of a cluster: `python tests/support/rank_process.py RANK STORE KIND...`, the run in the environment.

Trains each kind of cluster in turn, and prints one line for each: what this rank holds at the end, or why it was
refused. A refusal of the last kind ends the process as it would end a user's program.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dips
from dips.core.errors import ConfigError, DipsError

sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[1]))

from support.trainer_models import LENGTH, Model, same_cut

from dips.worker import torch_model
from dips.worker.parallel import agreement

STEPS = 10


def average(parameters: list[torch.nn.Parameter]) -> None:
    """What a user's own data parallelism does with gradients."""
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def train(kind: str, rank: int) -> dict[str, object]:
    """ddp: replicas, whose ranks were given other values after they were wrapped. own: replicas with other values that
    are averaged by hand. The others are shards, each a rank's own part of a tensor-parallel model: `shards` with other
    values, `shapes` with other shapes, `group` under DistributedDataParallel over this rank alone, `seed` with values
    that are equal as long as no step is made. sigterm: replicas, of which rank 1 gets a SIGTERM after
    six steps.
    """
    model = Model(seed=0 if kind == "seed" else rank)
    if kind == "shapes" and rank == 1:
        model.layers[3].w = torch.nn.Parameter(torch.ones(100))
    trained: torch.nn.Module = model
    if kind == "group":
        alone = [dist.new_group([each]) for each in range(2)][rank]
        trained = DistributedDataParallel(model, process_group=alone)
    if kind == "sigterm":
        trained = DistributedDataParallel(model)
    if kind == "ddp":
        trained = DistributedDataParallel(model)
        with torch.no_grad():
            model.layers[4].get_parameter("w").add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + rank)
    with dips.DiLoCo(
        trained,
        optimizer,
        tokens_per_step=(rank + 1) * LENGTH,
        cluster_id=kind,
        parallel=dips.Parallel(replicas=kind == "own"),
    ) as sync:
        while sync.steps < STEPS and not sync.done:
            if (kind, rank, sync.steps) == ("sigterm", 1, 6):
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.zero_grad()
            trained(torch.randint(10, (rank + 1, LENGTH), generator=data))["loss"].backward()
            if kind == "own":
                average(list(model.parameters()))
            optimizer.step()
        told = {"steps": sync.steps, "version": str(sync.version), "progress": sync.progress, "active": sync.active}
        told["talks"] = sync.shell is not None
    return {**told, "model": hashlib.sha256(model.flat().tobytes()).hexdigest()}


def main(rank: int, store: str, *kinds: str) -> None:
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    torch_model.Layout = agreement.Layout = same_cut  # type: ignore[attr-defined, assignment]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in kinds:
        try:
            print(json.dumps(train(kind, rank)), flush=True)
        except ConfigError as error:
            if kind == kinds[-1]:
                raise
            print(error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), *sys.argv[2:])
    except DipsError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
