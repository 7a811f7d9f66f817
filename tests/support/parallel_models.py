"""One small model, cut in every way that torch has: what each rank of a parallelism holds, and how it steps.

Every parameter begins with the place of each of its elements in the full model, before anything is cut. So whatever
torch makes of it, a rank knows which elements its shards hold without working that out itself, and values follow from
the place alone (`rule`): they are the same in one process and in eight, to the bit, as sums of gradients are not.

Sizes are such that shards of FSDP are uneven and the last rank of four has none of many tensors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import gelu, linear
from torch.nn.parallel import DistributedDataParallel

import dips

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Where models are: cpu or cuda."""


def begin_ranks(rank: int, n_ranks: int, folder: str) -> None:
    """Make torch.distributed's world. CUDA devices are one for each rank, under NCCL, where there are enough; else the
    ranks share the first one, and gloo takes what it can of tensors on it.
    """
    backend = "gloo"
    if DEVICE == "cuda" and torch.cuda.device_count() >= n_ranks:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)


@contextmanager
def group_of_ranks(rank: int, n_ranks: int, folder: str) -> Iterator[dist.ProcessGroup]:
    """All of them, under gloo; torch computes with one thread."""
    torch.set_num_threads(1)
    begin_ranks(rank, n_ranks, folder)
    yield dist.new_group(backend="gloo")
    if dist.is_initialized():
        dist.destroy_process_group()


VOCABULARY, WIDTH, HIDDEN, EXPERTS, EXPERT_HIDDEN, BLOCKS = 252, 6, 96, 4, 3, 4
ODD = 5
"""Elements of a vector that no number of ranks divides."""

BATCH, LENGTH = 2, 4
WITH_EXPERTS = (1, 3)
"""Blocks that have experts beside the other layers."""


class Experts(torch.nn.Module):
    """All experts see all tokens and their outputs are added up; under expert parallelism each rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH, EXPERT_HIDDEN))
        self.down = torch.nn.Parameter(torch.empty(EXPERTS, EXPERT_HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        hidden = gelu(torch.einsum("bld,edh->eblh", x, up))
        out = torch.einsum("eblh,ehd->bld", hidden, down)
        if isinstance(self.up, DTensor):
            summed: torch.Tensor = DTensor.from_local(out, self.up.device_mesh, [Partial()]).full_tensor()
            return summed
        return out


class Block(torch.nn.Module):
    """A norm, a column-parallel and a row-parallel layer, and in some blocks experts."""

    def __init__(self, with_experts: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.gain = torch.nn.Parameter(torch.empty(ODD))
        self.experts = Experts() if with_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(gelu(self.up(self.norm(x)))) * self.gain.mean()
        return x if self.experts is None else x + self.experts(x)


class Model(torch.nn.Module):
    embed: torch.nn.Embedding | None
    norm: torch.nn.LayerNorm | None
    head: torch.nn.Linear | None

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleDict({str(i): Block(i in WITH_EXPERTS) for i in range(BLOCKS)})
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = None if tied else torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.frozen = torch.nn.Parameter(torch.arange(ODD, dtype=torch.float32), requires_grad=False)
        self.register_buffer("constant", torch.arange(3, dtype=torch.float32))
        self.is_first = self.is_last = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            assert self.embed is not None
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if not self.is_last:
            return x
        assert self.norm is not None
        x = self.norm(x)
        if self.tied:
            assert self.embed is not None
            return linear(x, self.embed.weight)
        assert self.head is not None
        logits: torch.Tensor = self.head(x)
        return logits


def full_model(*, tied: bool = False) -> Model:
    model, start = Model(tied=tied), 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                places = torch.arange(start, start + parameter.numel(), dtype=torch.float32)
                parameter.copy_(places.view(parameter.shape))
                start += parameter.numel()
    return model.to(DEVICE)


LAST = sum(parameter.numel() for parameter in Model().parameters() if parameter.requires_grad) - 1
"""The place of the last trained element; it is in the head."""


def blocks_of(model: Model) -> list[Block]:
    return [block for block in model.blocks.values() if isinstance(block, Block)]


def stage_of(model: Model, blocks: Sequence[int]) -> Model:
    """A copy of the model with these of its blocks, and what belongs to the first and the last of all."""
    stage = copy.deepcopy(model)
    stage.is_first, stage.is_last = 0 in blocks, BLOCKS - 1 in blocks
    for name in list(stage.blocks):
        if int(name) not in blocks:
            del stage.blocks[name]
    if not stage.is_first:
        del stage.frozen
        if not (stage.is_last and stage.tied):
            stage.embed = None
    if not stage.is_last:
        stage.norm = stage.head = None
    return stage


def rule(places: torch.Tensor, step: int, cluster: int) -> torch.Tensor:
    """What a step adds to the elements with these places: float32 numbers in [-1, 1) that use all of their bits."""
    mixed = (places * 7919 + step * 104_729 + cluster * 1_299_709 + places * places * 31) % 16_777_213
    return (mixed.double() / 8_388_608 - 1).float()


def local(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


class RuleOptimizer(torch.optim.Optimizer):
    """Its step adds what the rule says in place of an update. `places`: of the elements of each parameter, as held."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], places: Sequence[torch.Tensor], cluster: int) -> None:
        super().__init__(list(parameters), {})
        self._places = places
        self._cluster = cluster
        self.steps = 0
        self.resets = 0
        """How often its state was taken from it since its first step."""
        self.spoiled_step = 0
        """The step that makes the model's last element NaN; 0: none does."""
        self.also: Callable[[], None] = lambda: None
        self.after_update: Callable[[], None] = lambda: None
        """Called inside of a step, before its hooks."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.resets += bool(self.steps and not self.state)
        self.steps += 1
        for parameter, places in zip(self.param_groups[0]["params"], self._places, strict=True):
            mine = local(parameter)
            self.state[parameter] = {"step": self.steps}
            mine.add_(rule(places, self.steps, self._cluster).to(mine.dtype))
            if self.steps == self.spoiled_step:
                mine[places == LAST] = torch.nan
        self.also()
        self.after_update()


@dataclass
class Part:
    """What one rank of a cluster holds. forward_and_backward: of a batch, by torch's own means."""

    models: list[Model]
    wrapped: list[torch.nn.Module]
    forward_and_backward: Callable[[], None]
    arguments: dict[str, Any] = field(default_factory=dict)
    """What dips.DiLoCo must be told beside the model and the optimizer."""
    evaluate: Callable[[], None] = lambda: None
    """A forward that leaves parameters gathered, where the kind is about that."""
    after_step: Callable[[], None] = lambda: None
    """What the optimizer does beside: masters are copied to the parameters."""
    working: list[torch.nn.Parameter] = field(default_factory=list)
    """Parameters in 16 bits whose masters are `parameters`."""
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Shape and starts in the full tensor of each local tensor that is a shard without torch's knowledge."""
    parameters: list[tuple[str, torch.nn.Parameter]] = field(init=False)
    places: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Taken as soon as the models are cut, as an optimizer takes them: FSDP2 exchanges them while it computes."""
        self.parameters = [
            (name, p) for model in self.models for name, p in model.named_parameters() if p.requires_grad
        ]
        self.places = [local(p).long() for _, p in self.parameters]

    def optimizers(self, cluster: int) -> list[RuleOptimizer]:
        made, at = [], 0
        for model in self.models:
            n = sum(p.requires_grad for p in model.parameters())
            taken = slice(at, at + n)
            made.append(RuleOptimizer([p for _, p in self.parameters[taken]], self.places[taken], cluster))
            made[-1].also = self.after_step
            at += n
        return made

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """What torch says that the full tensors are which this rank has a part of, in float32. All ranks call it.

        A mapped shard is a full-sized tensor of nan but for its own elements.
        """
        full: dict[str, torch.Tensor] = {}
        for low, (_, master) in zip(self.working, self.parameters, strict=False):
            assert torch.equal(local(low), local(master).to(low.dtype)), "a parameter is its master, rounded"
        for name, parameter in self.parameters:
            whole = parameter.detach()
            whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()
            if name in self.boxes:
                shape, starts = self.boxes[name]
                room = torch.full(shape, torch.nan)
                room[tuple(slice(a, a + n) for a, n in zip(starts, whole.shape, strict=True))] = whole.float()
                whole = room
            full[name] = whole.float().clone()
        return full


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(rank)).to(DEVICE)
    return chosen[:, :-1], chosen[:, 1:]


def _loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def _plain_step(model: torch.nn.Module, rank: int) -> Callable[[], None]:
    def step() -> None:
        tokens, wanted = _batch(rank)
        logits = model(tokens)
        _loss(logits.full_tensor() if isinstance(logits, DTensor) else logits, wanted).backward()

    return step


def _one(tied: bool = False) -> Part:
    model = full_model(tied=tied)
    return Part([model], [model], _plain_step(model, 0))


def _ddp(tied: bool = False) -> Part:
    model = full_model(tied=tied)
    wrapped = DistributedDataParallel(model)
    return Part([model], [wrapped], _plain_step(wrapped, dist.get_rank()))


def shard(model: Model, mesh: DeviceMesh, **more: Any) -> None:
    """fully_shard as a user does it: each block, then the rest."""
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)


def _fsdp(tied: bool = False, **more: Any) -> Part:
    model = full_model(tied=tied)
    shard(model, init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",)), **more)
    return Part([model], [model], _plain_step(model, dist.get_rank()))


def _fsdp_unsharded() -> Part:
    """Parameters stay gathered after an evaluation."""
    part = _fsdp(reshard_after_forward=False)

    def evaluate() -> None:
        with torch.no_grad():
            part.wrapped[0](_batch(0)[0])

    part.evaluate = evaluate
    return part


def _hsdp() -> Part:
    model = full_model()
    shard(model, init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard")))
    return Part([model], [model], _plain_step(model, dist.get_rank()))


def _tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )


def _tp() -> Part:
    model, mesh = full_model(), init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    _tensor_parallel(model, mesh)
    return Part([model], [model], _plain_step(model, 0))


def _fsdp_tp() -> Part:
    model, mesh = full_model(), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])
    shard(model, mesh["dp"])
    return Part([model], [model], _plain_step(model, mesh["dp"].get_local_rank()), {"data_mesh": mesh["dp"]})


def _scheduled_step(schedule: Any, at: int, data_rank: int) -> Callable[[], None]:
    """at: the rank's place in the pipeline."""

    def step() -> None:
        tokens, wanted = _batch(data_rank)
        if at == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=wanted)

    return step


def _pipeline(tied: bool = False, n_data: int = 1) -> Part:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh(DEVICE, (2, n_data), mesh_dim_names=("pp", "dp"))
    at, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = stage_of(full_model(tied=tied), (0, 1) if at == 0 else (2, 3))
    wrapped: torch.nn.Module = model
    if n_data > 1:
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    stage = PipelineStage(wrapped, at, 2, torch.device(DEVICE), group=mesh["pp"].get_group())
    step = _scheduled_step(ScheduleGPipe(stage, n_microbatches=2, loss_fn=_loss), at, data_rank)
    return Part([model], [wrapped], step, {"data_mesh": mesh["dp"]})


def _interleaved() -> Part:
    """Four stages of one block, two on each rank: 0 and 2, 1 and 3."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    mesh, rank, full = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("pp", "dp")), dist.get_rank(), full_model()
    models = [stage_of(full, (i,)) for i in (rank, rank + 2)]
    group = mesh["pp"].get_group()
    stages = [PipelineStage(m, rank + 2 * i, 4, torch.device(DEVICE), group=group) for i, m in enumerate(models)]
    step = _scheduled_step(ScheduleInterleaved1F1B(list(stages), n_microbatches=2, loss_fn=_loss), rank, 0)
    return Part(models, list(models), step, {"data_mesh": mesh["dp"]})


def _expert_parallel(model: Model, mesh: DeviceMesh) -> None:
    for block in blocks_of(model):
        if block.experts is not None:
            for name, parameter in list(block.experts.named_parameters()):
                cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                block.experts.register_parameter(name, torch.nn.Parameter(cut))


def _ep() -> Part:
    model, mesh = full_model(), init_device_mesh(DEVICE, (2,), mesh_dim_names=("ep",))
    _expert_parallel(model, mesh)
    return Part([model], [model], _plain_step(model, 0))


def _fsdp_ep() -> Part:
    """Experts on a mesh of experts x data, all else sharded over all four ranks: two meshes in one model."""
    model = full_model()
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("edp", "ep"))
    everyone = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    _expert_parallel(model, mesh["ep"])
    for block in blocks_of(model):
        if block.experts is not None:
            fully_shard(block.experts, mesh=mesh["edp"])
    shard(model, everyone)
    return Part([model], [model], _plain_step(model, 0), {"data_mesh": everyone})


_SPLIT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0}
"""The dimension along which Megatron would cut these."""


def _mapped() -> Part:
    """Local tensors that are shards, of which torch knows nothing."""
    full, rank, n_ranks = full_model(), dist.get_rank(), dist.get_world_size()
    model, boxes = full, {}
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            path = f"{prefix}.{name}"
            found = [dim for end, dim in _SPLIT.items() if path == end or path.endswith("." + end)]
            if found and "experts" not in path:
                size = parameter.shape[found[0]] // n_ranks
                cut = parameter.detach().narrow(found[0], rank * size, size).clone()
                starts = tuple(rank * size if dim == found[0] else 0 for dim in range(parameter.dim()))
                boxes[path] = (tuple(parameter.shape), starts)
                module.register_parameter(name, torch.nn.Parameter(cut))

    def step() -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)

    shards = {name: dips.ShardOf(name, shape=shape, starts=starts) for name, (shape, starts) in boxes.items()}
    return Part([model], [model], step, {"shards": shards, "data_mesh": _nobody_else()}, boxes=boxes)


def _nobody_else() -> dist.ProcessGroup:
    """All ranks see the same data: a group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group: dist.ProcessGroup = groups[dist.get_rank()]
    return group


def _masters() -> Part:
    """A model in bfloat16, whose optimizer keeps float32 masters that are sharded alike."""
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("dp",))
    exact, model = full_model(), full_model().bfloat16()
    shard(exact, mesh)
    shard(model, mesh)
    part = Part([model], [model], _plain_step(model, dist.get_rank()))
    working = part.parameters
    part.parameters = [(name, p) for name, p in exact.named_parameters() if p.requires_grad]
    part.places = [local(p).long() for _, p in part.parameters]
    part.arguments["master_parameters"] = dict(part.parameters)

    def copy_masters() -> None:
        for (_, low), (_, master) in zip(working, part.parameters, strict=True):
            local(low).copy_(local(master))

    part.after_step = copy_masters
    part.working = [p for _, p in working]
    return part


KINDS: Mapping[str, tuple[int, Callable[[], Part]]] = {
    "one": (1, _one),
    "one-tied": (1, lambda: _one(tied=True)),
    "fsdp1": (1, _fsdp),
    "ddp2": (2, _ddp),
    "ddp2-tied": (2, lambda: _ddp(tied=True)),
    "fsdp2": (2, _fsdp),
    "fsdp2-tied": (2, lambda: _fsdp(tied=True)),
    "fsdp2-unsharded": (2, _fsdp_unsharded),
    "fsdp4": (4, _fsdp),
    "hsdp4": (4, _hsdp),
    "tp2": (2, _tp),
    "fsdp-tp4": (4, _fsdp_tp),
    "pp2": (2, _pipeline),
    "pp2-tied": (2, lambda: _pipeline(tied=True)),
    "pp-dp4": (4, lambda: _pipeline(n_data=2)),
    "interleaved2": (2, _interleaved),
    "ep2": (2, _ep),
    "fsdp-ep4": (4, _fsdp_ep),
    "mapped2": (2, _mapped),
    "masters2": (2, _masters),
}
"""Number of ranks, and what makes one rank's part; torch.distributed is up, but for one and one-tied."""


COORDINATES: Mapping[str, int] = {
    "ddp2": 2, "ddp2-tied": 2, "fsdp2": 2, "fsdp2-tied": 2, "fsdp2-unsharded": 2, "masters2": 2,
    "fsdp4": 4, "hsdp4": 4, "fsdp-ep4": 4, "fsdp-tp4": 2, "pp-dp4": 2,
}  # fmt: skip
"""How many groups of ranks have data of their own; the kinds that are not named have one."""


def ranks_of(kind: str) -> int:
    return KINDS[kind][0]


def part_of(kind: str) -> Part:
    return KINDS[kind][1]()


def merged(of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The full tensors from what each rank says of them. Raises AssertionError where two ranks differ in an element
    that both know, or none knows one.
    """
    full: dict[str, torch.Tensor] = {}
    for name, tensor in (row for said in of_ranks for row in said.items()):
        if name not in full:
            full[name] = tensor.clone()
            continue
        known = ~tensor.isnan()
        both = known & ~full[name].isnan()
        assert torch.equal(full[name][both], tensor[both]), f"two ranks have other values of {name}"
        full[name][known] = tensor[known]
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full
