"""One of four ranks of one torch.distributed world of which clusters are parts: `python -m support.group_process RANK
FOLDER MASTER KIND...`.

Does each kind in turn, and prints a line for each: what this rank saw, or the sentence that refused it. halves: two
clusters train, each a half of the world. half: one does, and the others do nothing. one: a cluster of rank 0 alone, and
one of ranks 1 and 2. The other kinds are wrong. An error of the last kind ends the process as it ends a user's program.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.parallel_models import RuleOptimizer, full_model, local, shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dips
from dips.core.errors import ConfigError

STEPS = 6
TOKENS = 8

Said = Mapping[str, object]


class World:
    def __init__(self, rank: int, folder: Path, master: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
        self.rank = rank
        self.master = master
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "rank"))
        self.halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.trio, self.pair = dist.new_group([0, 1, 2]), dist.new_group([1, 2])
        self.singles = [dist.new_group([each]) for each in range(4)]

    @property
    def name(self) -> str:
        return "ab"[self.rank // 2]

    def train(self, model: torch.nn.Module, group: Any, name: str, *, together: bool = False, **arguments: Any) -> Said:
        """A cluster's loop, whose steps add what a rule says. Returns the versions that this rank got, as digests.
        together: no rank of the world makes a step before all of them have entered.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        places = [local(p).long() for p in parameters]
        optimizer = RuleOptimizer(parameters, places, ord(name[0]))
        got: dict[str, str] = {}
        told: dict[str, object] = {}
        with dips.DiLoCo(
            model, optimizer, tokens_per_step=TOKENS, steps=STEPS, cluster_id=name, master=self.master or None,
            insecure=True, parallel=dips.Parallel(group=group, **arguments),
        ) as sync:  # fmt: skip
            if together:
                dist.barrier()
            while not sync.done:
                if sync.version is not None:
                    got.setdefault(str(sync.version), digest_of(model))
                optimizer.step()
            told |= {"steps": sync.steps, "progress": sync.progress, "talks": sync.shell is not None}
        return {**told, "got": got}


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole: Any = parameter.detach()
        digest.update((whole.full_tensor() if hasattr(whole, "full_tensor") else whole).numpy().tobytes())
    return digest.hexdigest()


def sharded(mesh: DeviceMesh) -> torch.nn.Module:
    model = full_model()
    shard(model, mesh)
    return model


def halves(world: World) -> Said:
    """FSDP2 in the first, whose group is a mesh; replicas in the second."""
    if world.name == "a":
        return world.train(sharded(world.mesh["rank"]), world.mesh["rank"], "a", together=True)
    replica = DistributedDataParallel(full_model(), process_group=world.halves[1])
    return world.train(replica, world.halves[1], "b", together=True)


def half(world: World) -> Said:
    if world.name == "b":
        return {}
    return world.train(sharded(world.mesh["rank"]), world.halves[0], "c")


def one(world: World) -> Said:
    if world.rank == 3:
        return {}
    alone = world.rank == 0
    return world.train(full_model(), world.singles[0] if alone else world.pair, "d" if alone else "e")


def strangers(world: World) -> Said:
    world.master, master = "", world.master
    try:
        return world.train(full_model(), world.halves[0], "a")
    finally:
        world.master = master


def differ(world: World) -> Said:
    return world.train(full_model(), world.halves[0] if world.rank == 0 else None, "a")


def kind_of_group(world: World) -> Said:
    """The second rank of each half gives something else."""
    return world.train(full_model(), [2, 3] if world.rank % 2 else world.halves[world.rank // 2], world.name)


def shards(world: World) -> Said:
    mesh = init_device_mesh("cpu", (4,))
    return world.train(sharded(mesh), world.mesh["rank"], world.name)


KINDS: Mapping[str, Callable[[World], Said]] = {
    each.__name__: each for each in (halves, half, one, strangers, differ, kind_of_group, shards)
}


def main(rank: int, folder: Path, master: str, *kinds: str) -> None:
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    world = World(rank, folder, master)
    for kind in kinds:
        try:
            print(json.dumps(KINDS[kind](world)), flush=True)
        except ConfigError as error:
            if kind == kinds[-1]:
                raise
            print(f"{type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]), *sys.argv[4:])  # [2]: how many ranks there are, always four
