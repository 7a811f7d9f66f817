"""The ranks of a cluster in torch.distributed's world, as the only process in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dips.core.errors import ConfigError
from dips.worker.parallel.held import DataPlace, Held, ShardOf, held_here, refuse_ranks_outside, reshard
from dips.worker.parallel.ranks import call_the_roll


@pytest.fixture
def store() -> Iterator[Any]:
    made = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=made, rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def mesh(name: str = "data") -> Any:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("other", name))


GROUPS: list[Callable[[], Any]] = [lambda: None, lambda: dist.group.WORLD, mesh, lambda: mesh()["data"]]


@pytest.mark.usefixtures("store")
def test_each_loop_of_a_cluster_has_a_store_of_its_own() -> None:
    stores = []
    for group in GROUPS:
        of_world, own = call_the_roll(group())
        assert of_world == (0,)
        assert not own.check(["key"])
        own.set("key", "its own")
        stores.append(own)
    assert all(own.get("key") == b"its own" for own in stores)


def test_a_rank_that_cannot_enter_says_so_to_the_others(store: Any) -> None:
    for group, sentence in ((7, "group is a int"), (dist.GroupMember.NON_GROUP_MEMBER, "rank 0 .* is not in its")):
        before = store.num_keys()
        with pytest.raises(ConfigError, match=sentence):
            call_the_roll(group)
        assert store.num_keys() > before, "the others wait"


class Stage(nn.Module):
    def __init__(self, placement: Any = None) -> None:
        super().__init__()
        weight = torch.arange(6.0).reshape(2, 3)
        if placement is not None:
            weight = DTensor.from_local(weight, mesh(), [Replicate(), placement], run_check=False)
        self.weight = nn.Parameter(weight)


def held(model: nn.Module, **given: Any) -> Held:
    return held_here([model], [torch.optim.SGD(model.parameters(), lr=0.1)], **given)


@pytest.mark.usefixtures("store")
def test_a_cut_tensor_is_the_box_that_is_here() -> None:
    for placement in (None, Shard(0), Replicate()):
        (row,) = held(Stage(placement)).rows
        assert (row.box.starts, row.box.sizes, row.parameter.shape) == ((0, 0), (2, 3), (2, 3))
        assert row.mesh == (() if placement is None else (0,))
    with pytest.raises(ConfigError, match="is a sum over ranks"):
        held(Stage(Partial()))
    with pytest.raises(ConfigError, match="is a DTensor, which knows its own"):
        held(Stage(Shard(0)), shards={"weight": ShardOf("weight", (4, 3), (2, 0))})


@pytest.mark.usefixtures("store")
def test_ranks_outside_of_the_cluster_are_refused() -> None:
    refuse_ranks_outside([Stage(), Stage(Shard(0))], None)
    refuse_ranks_outside([Stage(), Stage(Shard(0))], (0, 1))
    with pytest.raises(ConfigError, match="'weight' is cut over ranks"):
        refuse_ranks_outside([Stage(Shard(0))], (1, 2))
    with pytest.raises(ConfigError, match="averages gradients over ranks"):
        refuse_ranks_outside([nn.parallel.DistributedDataParallel(Stage())], (1, 2))


@pytest.mark.usefixtures("store")
def test_the_place_among_ranks_with_other_data() -> None:
    for given in (mesh(), mesh()["data"], dist.group.WORLD):
        assert held(Stage(), data_mesh=given).data == DataPlace(0, 1)
    with pytest.raises(ConfigError, match="give a DeviceMesh or a process group"):
        held(Stage(), data_mesh=3)
    with pytest.raises(ConfigError, match="data_mesh has ranks"):
        held(Stage(), data_mesh=mesh(), of_world=(1, 2))
    second = SimpleNamespace(get_coordinate=lambda: [1, 2], size=lambda: 8, shape=(2, 4), mesh=torch.arange(8))
    assert held(Stage(), data_mesh=second).data == DataPlace(6, 8)
    elsewhere = SimpleNamespace(get_coordinate=lambda: None, size=lambda: 2, shape=(2,))
    with pytest.raises(ConfigError, match="no place for this rank"):
        held(Stage(), data_mesh=elsewhere)


@pytest.mark.usefixtures("store")
def test_fsdp_has_its_shards_as_parameters_again() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert held(model).fsdp == DataPlace(0, 1)
    cast(Any, model).unshard()
    assert not isinstance(model[0].weight, DTensor)
    reshard([model])
    assert isinstance(model[0].weight, DTensor)
