"""What one process holds of the cluster's model: boxes of global tensors, and the memory in which they are.

A DTensor (FSDP2, tensor parallelism, both) says itself which box of the global tensor is here; a plain tensor is the
whole of its parameter; of any other local tensor the user says it (ShardOf). Nothing here sends a message: what all
ranks hold together is agreed in parallel/agreement.py.

Shapes: a box is (starts, sizes), one number for each dimension of the global tensor; an empty shard has a size of 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dips.core.errors import ConfigError
from dips.core.layout import Parameter, layer_of
from dips.worker.torch_model import (
    UntrainedTensor,
    as_averaged,
    averaged_buffers,
    described,
    former_names,
    local,
    plain_model,
    plain_name,
    plain_names,
    refuse_another_dtype,
    refuse_shards,
    refuse_shared_memory,
    replica_ranks,
    stepped_by,
    untrained_tensors,
)


class Box(NamedTuple):
    """A part of a global tensor: elements [starts[i], starts[i] + sizes[i]) in each dimension i."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def n_elems(self) -> int:
        return math.prod(self.sizes)


def part_of(tensor: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    """The elements of `box` in a tensor that is `held` of the same global tensor. A view."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start - held.starts[dim], size)
    return tensor


def pieces_of(box: Box, max_elems: int) -> Iterator[Box]:
    """The box, cut so that no piece has more elements, in logical order."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.n_elems <= max_elems:
        yield box
        return
    rows = max(1, max_elems // (box.n_elems // box.sizes[dim]))
    for start in range(0, box.sizes[dim], rows):
        starts, sizes = list(box.starts), list(box.sizes)
        starts[dim], sizes[dim] = starts[dim] + start, min(rows, sizes[dim] - start)
        piece = Box(tuple(starts), tuple(sizes))
        yield from pieces_of(piece, max_elems) if rows == 1 else [piece]


@dataclass(frozen=True)
class ShardOf:
    """Says what a local tensor is in the full model, where torch does not know it.

    Args:
        name: The parameter in the full model.
        shape: The full tensor's shape, for a part of a plain tensor (as Megatron has them); without it the tensor keeps
            its shape, and has another name only.
        starts: Where the local tensor begins in the full one, in each dimension.
    """

    name: str
    shape: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None


Shards = Mapping[str, ShardOf]
"""Local name, as model.named_parameters() or named_buffers() has it (with or without the parts that wrappers put into
names), -> what it is in the full model."""


@dataclass(frozen=True)
class Parallel:
    """What a user says of a cluster of several ranks, where torch does not know it.

    Args:
        group: The process group or DeviceMesh of the cluster's ranks, where they are only a part of torch.distributed's
            world.
        replicas: The processes hold the whole model each, and get rank 0's values where theirs are others at the start.
        data_mesh: The DeviceMesh or process group of the ranks that train on different data, whose tokens are added up;
            else it follows from how the model is cut. Where it cannot: ConfigError.
        shards: What local tensors are in the full model: ShardOf by local name; of several modules a list. A name that
            no tensor has: ConfigError.
        order: The names of the full model in its order, where it does not follow from the ranks'.
        master_parameters: float32 copies, by name in the full model, that are pushed and pulled in place of parameters
            in fewer bits. A name or shape that does not fit: ConfigError.
    """

    group: Any = None
    replicas: bool = False
    data_mesh: Any = None
    shards: Shards | Sequence[Shards] | None = None
    order: Sequence[str] | None = None
    master_parameters: Mapping[str, torch.Tensor] | None = None

    @property
    def cuts(self) -> bool:
        """Whether it speaks of a model that several ranks hold in parts."""
        parts = (self.data_mesh, self.shards, self.order, self.master_parameters)
        return any(part is not None for part in parts)


@dataclass(frozen=True)
class Row:
    """One tensor of which this rank holds a part.

    mesh: the ranks of the cluster over which a DTensor is cut or copied; empty: it is none. is_marked: a plain tensor
    that Megatron has marked as a part of a larger one.
    """

    parameter: Parameter  # with its global name and shape
    box: Box
    mesh: tuple[int, ...] = ()
    is_marked: bool = False


@dataclass(frozen=True)
class DataPlace:
    """This rank's place among the ranks that train on different data: its coordinate in a mesh of so many of them."""

    coordinate: int
    n_coordinates: int


class _Tensor(NamedTuple):
    """A tensor of the layout: the module's own, and its attribute. master: is pushed and pulled in its place."""

    row: Row
    module: torch.nn.Module
    key: str
    held: torch.Tensor
    master: torch.Tensor | None


class UntrainedPart(NamedTuple):
    """A frozen parameter or buffer, or a part of it. number, local_name: of its module, and its name there."""

    number: int
    local_name: str
    name: str
    shape: tuple[int, ...]
    box: Box
    what: UntrainedTensor


class Held:
    """The trained tensors and averaged buffers of one rank. rows: in the order of its modules, trained ones first."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        tensors: Sequence[_Tensor],
        untrained: Sequence[UntrainedPart],
        *,
        buffers: str,
        is_replica: bool,
        data: DataPlace | None,
        fsdp: DataPlace | None,
        former: Mapping[str, str],
    ) -> None:
        """is_replica: every rank of the cluster holds all that this one does. data, fsdp: this rank's place in the mesh
        that the user gave, and in FSDP's own. former: as former_names(), of the full model.
        """
        self.models = models
        self.untrained = untrained
        self.buffers = buffers
        self.is_replica = is_replica
        self.data = data
        self.fsdp = fsdp
        self.former = former
        self._tensors = list(tensors)
        self._known = frozenset(id(each.held) for each in tensors)

    @property
    def rows(self) -> list[Row]:
        return [each.row for each in self._tensors]

    @property
    def ids(self) -> frozenset[int]:
        """id() of each tensor of the modules that is in the layout: the model's others are not part of the run."""
        return frozenset(id(each.held) for each in self._tensors)

    def row_of(self) -> dict[int, Row]:
        """By id() of each trained parameter, and of each master copy, its row."""
        rows = {id(each.held): each.row for each in self._tensors if not each.row.parameter.averaged}
        return rows | {id(each.master): each.row for each in self._tensors if each.master is not None}

    def tensors(self) -> list[torch.Tensor]:
        """The memory of each row now: of the row's box, on the device where it is. Called before every read and write
        of parameters, as FSDP2 may have left them gathered, and a module may replace a buffer's tensor.

        Raises ConfigError where a model trains a tensor that the layout lacks, or a buffer no longer fits.
        """
        reshard(self.models)
        # Raises ConfigError when a model trains a parameter that the layout lacks.
        for model in self.models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise ConfigError(
                        f"parameter {plain_name(model, name)!r} was not trained, or was another tensor, when the loop "
                        "was entered, so that no push holds it and no version reaches it: enter the loop once the "
                        "model is complete, on its device and cut into its shards"
                    )
        for at, each in enumerate(self._tensors):
            if each.row.parameter.averaged:
                self._tensors[at] = _found_again(each)
            else:
                refuse_another_dtype(each.row.parameter, each.held if each.master is None else each.master)
        return [local(each.held if each.master is None else each.master) for each in self._tensors]

    def working_copies(self) -> list[torch.Tensor | None]:
        """For each row the parameter that follows its master copy, and is written with it; None: there is none."""
        return [None if each.master is None else local(each.held) for each in self._tensors]


def held_here(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    buffers: str = "own",
    shards: Shards | Sequence[Shards] | None = None,
    master_parameters: Mapping[str, torch.Tensor] | None = None,
    data_mesh: Any = None,
    of_world: Sequence[int] | None = None,
) -> Held:
    """What this process holds of its modules: one, or several of an interleaved pipeline.

    shards: what local tensors are in the full model; one mapping for each module, or one for all of them.
    master_parameters: name in the full model -> the float32 tensor that is pushed and pulled in place of a parameter
    in fewer bits, which gets its values rounded. data_mesh: a DeviceMesh or process group of the ranks that train on
    different data. of_world: the number in torch.distributed's world of each of the cluster's ranks; None: they are
    all of it.

    Raises ConfigError, with the tensor's name, for one that cannot be described as a box of a global tensor or copied,
    and for a mesh or DistributedDataParallel that has ranks of other clusters.
    """
    refuse_ranks_outside(models, of_world)
    for model in models:
        for optimizer in optimizers:
            refuse_shards(plain_model(model), optimizer)
    plain = [plain_model(model) for model in models]
    reshard(plain)
    names = _Names(plain, shards)
    masters = {names.plain.get(name, name): master for name, master in (master_parameters or {}).items()}
    found: list[_Tensor] = []
    for number, name, module, key, parameter in _parameters(plain):
        shard = names.of(number, name)
        if parameter.requires_grad:
            master = masters.pop(shard.name, None)
            pushed = _master_of(name, parameter, master)
            row = _row(shard, described(name, pushed), pushed, of_world)
            found.append(_Tensor(row, module, key, parameter, master))
    if masters:
        raise ConfigError(
            f"master_parameters has {next(iter(masters))!r}, which this rank does not train: give the names of its "
            "parameters in the full model"
        )
    if buffers == "average":
        for number, model in enumerate(plain):
            for name, (module, key) in averaged_buffers(model).items():
                buffer = module.get_buffer(key)
                row = _row(names.of(number, name), as_averaged(name, buffer), buffer, of_world)
                found.append(_Tensor(row, module, key, buffer, None))
    untrained = list(_untrained(plain, {id(each.held) for each in found}, names))
    names.check_all_were_used()
    _refuse_two_of_one_name(found)
    refuse_shared_memory({each.row.parameter.name: local(each.held) for each in found if each.row.box.n_elems})
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [each for each in found if not each.row.parameter.averaged]
    ours = {id(tensor) for each in trained for tensor in (each.held, each.master)}
    if trained and stepped.isdisjoint(ours):
        raise ConfigError(
            "the optimizer holds none of the model's parameters: make it of model.parameters(), after the model was "
            "moved to its device and cut into its shards"
        )
    # torch's Muon orthogonalises a DTensor as the whole matrix that it is, and a plain tensor as if it were whole.
    by_muon = stepped_by(optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Muon))
    for each in found:
        tensor = each.held if each.master is None else each.master
        if (
            id(tensor) in by_muon
            and not hasattr(tensor, "device_mesh")
            and each.row.box.sizes != each.row.parameter.shape
        ):
            raise ConfigError(
                f"torch.optim.Muon steps {each.row.parameter.name!r}, of which this rank holds a part in a plain "
                "tensor, and would orthogonalise the part and not the matrix: cut it as a DTensor, or let AdamW step it"
            )
    # The place in the largest mesh over which FSDP2 cuts or copies parameters; None: it cuts none. Ranks along all
    # dimensions of such a mesh train on different data. Experts may be cut over fewer ranks.
    meshes = []
    for module in _fsdp_modules(plain):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        meshes += [group.mesh_info.mesh for group in groups if group is not None]
    data = None
    if data_mesh is not None:
        data, is_group = _place_in(data_mesh), isinstance(data_mesh, dist.ProcessGroup)
        ranks = dist.get_process_group_ranks(data_mesh) if is_group else data_mesh.mesh.flatten().tolist()
        _check_inside("data_mesh has", ranks, of_world)
    return Held(
        plain,
        found,
        untrained,
        buffers=buffers,
        is_replica=all(_is_replica(model, of_world) for model in models),
        data=data,
        fsdp=_place_in(max(meshes, key=lambda mesh: mesh.size())) if meshes else None,
        former=names.former,
    )


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def reshard(models: Sequence[torch.nn.Module]) -> None:
    """Have FSDP2's modules keep their shards as parameters again: after an evaluation, or with reshard_after_forward
    off, they hold gathered copies, which are no part of the model. Sends nothing.
    """
    for module in _fsdp_modules(models):
        module.reshard()


def _fsdp_modules(models: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Told by the name of their class, so that no one loads FSDP2 who does not use it."""
    for model in models:
        for module in model.modules():
            if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
                yield module


def _place_in(mesh: Any) -> DataPlace:
    """Raises ConfigError for neither a DeviceMesh nor a process group, or one that this rank is not part of."""
    if isinstance(mesh, dist.ProcessGroup):
        coordinate, n_coordinates = dist.get_rank(mesh), mesh.size()
    elif hasattr(mesh, "get_coordinate"):
        at, n_coordinates, coordinate = mesh.get_coordinate(), mesh.size(), 0 if mesh.get_coordinate() else -1
        for place, size in zip(at or (), mesh.shape, strict=False):
            coordinate = coordinate * size + place
    else:
        raise ConfigError(f"data_mesh is a {type(mesh).__name__}: give a DeviceMesh or a process group")
    if coordinate < 0:
        raise ConfigError("data_mesh has no place for this rank: give each rank the mesh or group that it is part of")
    return DataPlace(coordinate, n_coordinates)


# ---- ranks outside of the cluster -----------------------------------------------------------------------------------


def refuse_ranks_outside(models: Sequence[torch.nn.Module], of_world: Sequence[int] | None) -> None:
    """Raises ConfigError where a model is kept equal on, or cut over, ranks that are not in the cluster. of_world: as
    in held_here().
    """
    if of_world is None:
        return
    for model in models:
        for module in model.modules():
            _check_inside("DistributedDataParallel averages gradients over", replica_ranks(module), of_world)
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if hasattr(tensor, "device_mesh"):
                _check_inside(
                    f"{plain_name(model, name)!r} is cut over", tensor.device_mesh.mesh.flatten().tolist(), of_world
                )


def _check_inside(what: str, ranks: Sequence[int], of_world: Sequence[int] | None) -> None:
    if of_world is not None and not set(ranks) <= set(of_world):
        raise ConfigError(
            f"{what} ranks {list(ranks)} of torch.distributed's world, and this cluster has ranks {list(of_world)} "
            "(dips.Parallel(group=...)): give it a group or mesh of the cluster's own ranks"
        )


def _is_replica(model: torch.nn.Module, of_world: Sequence[int] | None) -> bool:
    """Whether all ranks of the cluster hold the whole model. DistributedDataParallel over a part of them, together with
    shards of tensor or pipeline parallelism, does not make it so.
    """
    ranks = replica_ranks(model)
    return bool(ranks) and len(ranks) == (dist.get_world_size() if of_world is None else len(of_world))


# ---- boxes -----------------------------------------------------------------------------------------------------------


def _row(shard: ShardOf, described: Parameter, tensor: torch.Tensor, of_world: Sequence[int] | None) -> Row:
    """The row of a local tensor. Raises ConfigError for one whose box is unknown, or is not what is here."""
    box, shape = _box_and_shape(described.name, tensor, shard)
    layer = described.layer if described.averaged else layer_of(shard.name)
    mesh = tuple(tensor.device_mesh.mesh.flatten().tolist()) if hasattr(tensor, "device_mesh") else ()
    if of_world is not None:
        mesh = tuple(map(of_world.index, mesh))
    is_marked = bool(getattr(tensor, "tensor_model_parallel", False)) and shard.shape is None
    return Row(replace(described, name=shard.name, shape=shape, layer=layer), box, mesh, is_marked)


def _box_and_shape(name: str, tensor: torch.Tensor, shard: ShardOf) -> tuple[Box, tuple[int, ...]]:
    """What is here, and the shape of the full tensor; as the user says, else as torch knows."""
    if shard.shape is None and shard.starts is None:
        return _box_of(name, tensor), tuple(tensor.shape)
    # The box and full shape that the user gave. Raises ConfigError where they do not fit the local tensor.
    if hasattr(tensor, "device_mesh"):
        raise ConfigError(
            f"shards gives {name!r} a shape or starts, but it is a DTensor, which knows its own: leave them out"
        )
    if shard.shape is None or shard.starts is None:
        raise ConfigError(f"shards gives {name!r} only one of shape and starts: give both, or none for a whole tensor")
    shape, box = tuple(shard.shape), Box(tuple(shard.starts), tuple(tensor.shape))
    if not len(shape) == len(box.starts) == tensor.dim():
        raise ConfigError(
            f"shards says that {name!r} of {tensor.dim()} dimensions begins at {list(box.starts)} of shape "
            f"{list(shape)}: give one number for each dimension; a flattened tensor is no box"
        )
    if any(start < 0 or start + size > whole for start, size, whole in zip(*box, shape, strict=True)):
        raise ConfigError(
            f"shards says that {name!r} of shape {list(box.sizes)} begins at {list(box.starts)} of shape "
            f"{list(shape)}, where it does not fit"
        )
    return box, shape


def _box_of(name: str, tensor: torch.Tensor) -> Box:
    """The box of the global tensor that is here, as torch.distributed.checkpoint would save it."""
    if not hasattr(tensor, "device_mesh"):
        return Box.whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise ConfigError(
            f"parameter {name!r} is a sum over ranks (Partial) of which each holds one term: redistribute it to shards "
            "or replicas before the loop is entered"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())  # cut over other ranks
    try:
        chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError, AssertionError) as error:
        raise _no_box(name, f"torch {torch.__version__} cannot say what part of it is here: {error}") from error
    if len(chunks) != 1:
        raise _no_box(name, f"it is {len(chunks)} pieces on this rank")
    box = Box(tuple(map(int, chunks[0].offsets)), tuple(map(int, chunks[0].sizes)))
    here = tuple(local(tensor).shape)
    if not box.n_elems and not math.prod(here):
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    if box.sizes != here or any(start + size > whole for start, size, whole in zip(*box, tensor.shape, strict=True)):
        raise _no_box(name, f"torch {torch.__version__} says {list(box.sizes)} of it are here, and {list(here)} are")
    return box


def _no_box(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} has shards of which this rank's is no box of it: {why}; choose sizes that divide by the "
        "number of ranks, or another dimension to cut"
    )


# ---- names -----------------------------------------------------------------------------------------------------------


class _Names:
    """The names in the full model of what this rank's modules hold."""

    def __init__(self, models: Sequence[torch.nn.Module], shards: Shards | Sequence[Shards] | None) -> None:
        n_models = len(models)
        several = [shards] * n_models if isinstance(shards, Mapping) else list(shards or [{}] * n_models)
        if len(several) != n_models:
            raise ConfigError(
                f"shards has {len(several)} mappings for {n_models} modules: give one for each, or one for all"
            )
        self._shards: list[Shards] = several
        self._unused = {name for each in several for name in each}
        self._former = [former_names(model) for model in models]
        self.plain = {raw: name for each in self._former for name, raw in each.items()}
        self.former: dict[str, str] = {}
        """Of those that were asked for: name in the full model -> with wrappers' parts."""

    def of(self, number: int, name: str) -> ShardOf:
        """number: of the module in the list. name: as this module has it, without wrappers' parts."""
        shards, raw = self._shards[number], self._former[number].get(name, name)
        self._unused -= {name, raw}
        given = shards.get(name, shards.get(raw))
        if given is None and raw != name:
            self.former[name] = raw
        return given or ShardOf(name)

    def check_all_were_used(self) -> None:
        if self._unused:
            raise ConfigError(
                f"shards has {min(self._unused)!r}, which no module of this rank has: give the names of "
                "named_parameters() and named_buffers()"
            )


def _parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[int, str, torch.nn.Module, str, torch.Tensor]]:
    """Number of the module, name in it, owner, attribute and tensor of each parameter; tied ones once, by their first
    name.
    """
    seen: set[int] = set()
    for number, model in enumerate(models):
        places = {
            f"{prefix}.{key}" if prefix else key: (module, key)
            for prefix, module in model.named_modules()
            for key in module._parameters
        }
        plain = plain_names(model, [name for name, _ in model.named_parameters()])
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield number, plain[name], *places[name], parameter


def _untrained(models: Sequence[torch.nn.Module], trained: Set[int], names: _Names) -> Iterator[UntrainedPart]:
    seen: set[int] = set()
    for number, model in enumerate(models):
        for each in untrained_tensors(model, trained):
            if id(each.tensor) in seen:
                continue
            seen.add(id(each.tensor))
            shard = names.of(number, each.name)
            box, shape = _box_and_shape(each.name, each.tensor, shard)
            yield UntrainedPart(number, each.name, shard.name, shape, box, each)


def _refuse_two_of_one_name(found: Sequence[_Tensor]) -> None:
    """Two tensors of one rank with one name are no tie: a tie is one tensor under two names."""
    names: set[str] = set()
    for each in found:
        name = each.row.parameter.name
        if name in names:
            raise ConfigError(
                f"two tensors of this rank are called {name!r}: give the modules of a pipeline their names in the full "
                "model, with dips.Parallel(shards=[...]), one mapping for each module"
            )
        names.add(name)


def _master_of(name: str, parameter: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """The tensor that is pushed. Raises ConfigError for a master copy that is no float32 tensor of the same shape and
    cut.
    """
    if master is None:
        return parameter
    same = tuple(master.shape) == tuple(parameter.shape) and local(master).shape == local(parameter).shape
    if master.dtype is not torch.float32 or not same or cut_of(master) != cut_of(parameter):
        raise ConfigError(
            f"the master copy of {name!r} is {str(master.dtype).removeprefix('torch.')} of shape {list(master.shape)}: "
            f"give float32 of the parameter's own shape {list(parameter.shape)}, cut over the same ranks"
        )
    return master


def cut_of(tensor: torch.Tensor) -> object:
    """Over which ranks a DTensor is cut, and how; (None, None) for a plain tensor."""
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def _found_again(each: _Tensor) -> _Tensor:
    """The buffer as its module has it now (`self.mean = 0.9 * self.mean + ...`). Raises ConfigError for one that does
    not fit.
    """
    now = each.module._buffers.get(each.key)
    if now is each.held:
        return each
    if now is None or (now.shape, now.dtype, now.device) != (each.held.shape, each.held.dtype, each.held.device):
        raise ConfigError(
            f"buffer {each.row.parameter.name!r} has another shape, type or device than when the loop was entered: "
            "enter the loop once the model is complete and on its device"
        )
    return each._replace(held=now)
