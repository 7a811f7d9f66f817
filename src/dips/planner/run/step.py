"""Runs one training step of a user's own model in the order of a plan.

Every rank of a process group holds the stages that the plan gives it and calls step() with the same batch size:

    cells = read_cells(Path("runs/plan/plan.csv"))
    pipeline = PlannedPipeline(cells, {s: make_stage(s) for s in cells.stages_of(rank)}, loss, device)
    losses = pipeline.step(inputs, targets)

Gradients are in the parameters afterwards; the optimizer is the caller's.

Another plan takes over between two steps (CrossPipe, arXiv:2507.00217, section 6: hot-swapping), in the same processes:

    layers = move_layers(layers, layer_places(cells, division), layer_places(new, new_division), make_layer, optimizer)
    pipeline.swap(new, stage_modules(layers, new, new_division, rank))
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from dips.core.errors import ConfigError
from dips.planner.ir import Schedule
from dips.planner.run.share import SharedStage, StageShare, shared_of

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
StageMaker = Callable[[nn.Module, int, int, torch.device, dist.ProcessGroup | None], PipelineStage]


class PlannedPipeline:
    """A rank's part of a planned pipeline."""

    def __init__(
        self,
        cells: Schedule,
        modules: Mapping[int, nn.Module],
        loss: LossFunction,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        make_stage: StageMaker | None = None,
        shares: Mapping[int, StageShare] | None = None,
    ) -> None:
        """modules[s]: stage s, on `device`, for the stages of this rank: one tensor in, one out. loss(output, target):
        the mean over a microbatch. group: of as many ranks as the plan has; default: all. shares[s]: for a stage of
        this rank that others help with (dips.planner.run.share).

        Raises ConfigError where the group, the modules or the schedule do not fit.
        """
        self._loss, self._device, self._group, self._make = loss, device, group, make_stage or _plain_stage
        self.swap(cells, modules, shares)

    def swap(
        self, cells: Schedule, modules: Mapping[int, nn.Module], shares: Mapping[int, StageShare] | None = None
    ) -> None:
        """Go on in the order of another plan from the next step() on. Every rank of the group calls it, between the
        same two steps.

        modules, shares: as for the constructor, of the new plan; modules may be the old ones (move_layers() moves those
        that change their rank). Gradients and the optimizer are not touched; shapes are learnt again in the next step.
        Raises ConfigError where the group, the modules or the schedule do not fit; the old plan is kept then.
        """
        group = self._group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != cells.n_devices:
            raise ConfigError(f"the plan has {cells.n_devices} ranks, the process group has {size}: make them equal")
        stages = cells.stages_of(rank)
        if sorted(modules) != list(stages):
            raise ConfigError(
                f"rank {rank} was given stages {sorted(modules)}, the plan has {list(stages)} there: give those"
            )
        # torch's stages keep shapes and buffers of their order: a new order has new ones, over the same modules.
        shares, form = shares or {}, (cells.n_stages, self._device, group)
        made = [
            SharedStage(shares[stage], modules[stage], stage, *form)
            if stage in shares
            else self._make(modules[stage], stage, *form)
            for stage in stages
        ]
        self._shared = shared_of(made)
        self._schedule = _runtime(cells, made, self._loss)
        self._cells, self._first, self._last = cells, 0 in stages, cells.n_stages - 1 in stages

    def step(self, inputs: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> list[torch.Tensor]:
        """One iteration: the gradients of the mean loss are added to the parameters of this rank's stages.

        inputs: on the rank with the first stage, (batch, ...); targets: on the rank with the last one, (batch, ...);
        others ignore theirs. The batch is cut into the plan's microbatches along its first dimension. Shapes stay those
        of the first step. Returns the losses of the microbatches on the rank with the last stage, else none.

        Raises ConfigError for a batch that does not divide.
        """
        n, losses = self._cells.n_microbatches, list[torch.Tensor]()
        for needed, name, batch in ((self._first, "inputs", inputs), (self._last, "targets", targets)):
            if needed and (batch is None or not len(batch) or len(batch) % n):
                size = "none" if batch is None else f"a batch of {len(batch)}"
                raise ConfigError(f"step() was given {size} as {name}: give a multiple of the plan's {n} microbatches")
        arguments = (inputs,) if self._first else ()
        for stage in self._shared:
            stage.begin_step()
        self._schedule.step(*arguments, target=targets if self._last else None, losses=losses, return_outputs=False)
        for stage in self._shared:
            stage.end_step()
        return [loss.detach() * n for loss in losses]


def _plain_stage(
    module: nn.Module, stage: int, n_stages: int, device: torch.device, group: dist.ProcessGroup | None
) -> PipelineStage:
    return PipelineStage(module, stage, n_stages, device, group=group)


def _runtime(cells: Schedule, stages: list[PipelineStage], loss: LossFunction) -> PipelineScheduleMulti:
    """torch's runtime with the plan's order, to which torch adds sending and receiving."""
    try:
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    except ImportError as error:
        raise ConfigError(
            f"torch {torch.__version__} has no runtime for planned schedules: use the one of constraints.txt"
        ) from error
    # torch would divide gradients at the end of a step, also those that were there before it.
    n = cells.n_microbatches
    runtime = _PipelineScheduleRuntime(stages, n, lambda output, target: loss(output, target) / n, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.csv"
        file.write_text(cells.to_csv())
        try:
            runtime._load_csv(str(file), format="compute_only")
        except AssertionError as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"torch cannot run the schedule: {why}: make it again with dips plan FILE") from error
    return runtime


# ---- layers ----------------------------------------------------------------------------------------------------------
#
# A stage is a row of layers. Plans have other stages than each other, but the model's layers stay: so layers are what
# moves from rank to rank.


def layer_places(cells: Schedule, division: Sequence[int]) -> tuple[int, ...]:
    """The rank of each layer. division[s]: layers of stage s ("layers" of plan.json, where blocks are not cut)."""
    if len(division) != cells.n_stages:
        raise ConfigError(f"layers of {len(division)} stages, the plan has {cells.n_stages}: give a number for each")
    return tuple(place for place, n in zip(cells.device_of_stage, division, strict=True) for _ in range(n))


def stage_modules(
    layers: Mapping[int, nn.Module], cells: Schedule, division: Sequence[int], rank: int
) -> dict[int, nn.Module]:
    """The stages of a rank, made of its layers."""
    starts = [0, *accumulate(division)]
    return {s: nn.Sequential(*(layers[n] for n in range(starts[s], starts[s + 1]))) for s in cells.stages_of(rank)}


def move_layers(
    layers: Mapping[int, nn.Module],
    old: Sequence[int],
    new: Sequence[int],
    make: Callable[[int], nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[int, nn.Module]:
    """Move layers to the ranks where a new plan has them, over the process group; every rank calls it, between two
    steps. Returns the layers that this rank has then, in their order.

    layers: of this rank now. old, new: of layer_places(). make(n): layer n on this rank's device, with any values,
    for those that arrive. Parameters and buffers move, and what the optimizer keeps of each parameter, which comes
    into the parameter group with the same number. Gradients do not move: swap after the optimizer's step. A parameter
    that two layers share becomes two.

    Raises ConfigError for another number of layers, and for a made layer that is not like the one that arrives.
    """
    if len(old) != len(new):
        raise ConfigError(f"the old plan has {len(old)} layers, the new one {len(new)}: plans must be of one model")
    rank, moves = dist.get_rank(group), defaultdict[tuple[int, int], list[int]](list)
    for number, pair in enumerate(zip(old, new, strict=True)):
        moves[pair].append(number)
    found = {number: layers[number] for number in moves[rank, rank]}
    ops: list[dist.P2POp] = []
    for source, target in sorted(pair for pair in moves if pair[0] != pair[1]):  # the same order on all ranks
        numbers = moves[source, target]
        if source == rank:
            ops += _sent([layers[number] for number in numbers], optimizer, target, group)
        elif target == rank:
            arriving = {number: make(number) for number in numbers}
            ops += _received(arriving, optimizer, source, group)
            found |= arriving
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return dict(sorted(found.items()))


# A rank says what it sends as JSON, and nothing that could be code: for each layer its parameters and buffers, each
# with name, form, the number of the parameter's group in the optimizer, and by key what the optimizer keeps of it: a
# value; a form, where a message follows; or a form with its elements, where a tensor is not on the layer's device.

MOST_SAID_BYTES = 64 << 20
"""Of the description of all layers that move between two ranks."""

MOST_SAID_ELEMS = 1024
"""Of a tensor that is not on its layer's device, such as AdamW's count of steps of a parameter on a GPU."""

Form = list[Any]
"""[sizes, name of the dtype], as in JSON."""


def _sent(
    layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, target: int, group: dist.ProcessGroup | None
) -> list[dist.P2POp]:
    """Describe layers to the rank that gets them; returns the messages to send."""
    said: list[list[Any]] = []
    tensors: list[torch.Tensor] = []
    for layer in layers:
        said.append([])
        for name, tensor in _named(layer):
            tensors.append(tensor.detach())
            number, state = None, dict[str, Any]()
            if optimizer is not None and isinstance(tensor, nn.Parameter):
                number, state = _forget(optimizer, tensor)
            tensors += [value for value in state.values() if _follows(value, tensor)]
            kept = {key: _state_json(key, value, tensor) for key, value in state.items()}
            said[-1].append([name, _form(tensor), number, kept])
    _say(json.dumps(said).encode(), target, group)
    return [dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=target) for tensor in tensors]


def _received(
    layers: Mapping[int, nn.Module],
    optimizer: torch.optim.Optimizer | None,
    source: int,
    group: dist.ProcessGroup | None,
) -> list[dist.P2POp]:
    """Give layers that were made the optimizer's state of those that arrive; returns the messages to receive."""
    said: list[list[Any]] = json.loads(_heard(source, group))
    tensors: list[torch.Tensor] = []
    for (number, layer), described in zip(layers.items(), said, strict=True):
        ours = _named(layer)
        if [[name, _form(tensor)] for name, tensor in ours] != [one[:2] for one in described]:
            raise ConfigError(
                f"layer {number} was made with {[name for name, _ in ours]}, what arrives is "
                f"{[one[0] for one in described]}, or shapes or types differ: make it like the one that moves"
            )
        for (name, tensor), (_, _, group_number, kept) in zip(ours, described, strict=True):
            if not tensor.is_contiguous():
                raise ConfigError(f"layer {number}: {name} is not contiguous, so nothing can be received into it")
            tensors.append(tensor.detach())
            state = {key: _state_of(one, tensor) for key, one in kept.items()}
            tensors += [state[key] for key, one in kept.items() if "form" in one and "elements" not in one]
            if optimizer is not None and group_number is not None:
                if not 0 <= group_number < len(optimizer.param_groups):
                    raise ConfigError(
                        f"layer {number}: {name} is in group {group_number} of its optimizer, and the one here has "
                        f"{len(optimizer.param_groups)} groups: make all ranks' optimizers with the same groups"
                    )
                optimizer.param_groups[group_number]["params"].append(tensor)
                if state:
                    optimizer.state[tensor] = state
    return [dist.P2POp(dist.irecv, tensor, group=group, group_peer=source) for tensor in tensors]


def _named(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _form(tensor: torch.Tensor) -> Form:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _follows(value: object, tensor: torch.Tensor) -> bool:
    """Whether a part of the optimizer's state goes as a message of its own."""
    return isinstance(value, torch.Tensor) and value.device == tensor.device


def _state_json(key: str, value: object, tensor: torch.Tensor) -> dict[str, Any]:
    if isinstance(value, torch.Tensor) and (_follows(value, tensor) or value.numel() <= MOST_SAID_ELEMS):
        form: dict[str, Any] = {"form": _form(value)}
        return form if _follows(value, tensor) else form | {"elements": value.flatten().tolist()}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        f"the optimizer keeps {key!r} of a parameter as {type(value).__name__}, which cannot move to another rank: "
        "swap to a plan in which layers stay where they are"
    )


def _state_of(said: Mapping[str, Any], tensor: torch.Tensor) -> Any:
    """A part of the optimizer's state as it was said; a tensor that follows has no values yet."""
    if "form" not in said:
        return said["value"]
    (sizes, name), elements = said["form"], said.get("elements")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is no dtype of this torch ({torch.__version__}): run the same one on all ranks")
    if elements is None:
        return torch.empty(sizes, dtype=dtype, device=tensor.device)
    return torch.tensor(elements, dtype=dtype).reshape(sizes)


def _say(text: bytes, target: int, group: dist.ProcessGroup | None) -> None:
    device = _device_of(group)
    dist.send(torch.tensor([len(text)], dtype=torch.int64, device=device), group=group, group_dst=target)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), group=group, group_dst=target)


def _heard(source: int, group: dist.ProcessGroup | None) -> bytes:
    device = _device_of(group)
    size = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=source)
    n_bytes = int(size)
    if not 0 < n_bytes <= MOST_SAID_BYTES:
        raise ConfigError(f"rank {source} describes its layers in {n_bytes} bytes: at most {MOST_SAID_BYTES} are read")
    text = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    dist.recv(text, group=group, group_src=source)
    return text.cpu().numpy().tobytes()


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's messages lie."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _forget(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[int | None, dict[str, Any]]:
    """Take a parameter out of the optimizer; returns the number of its group, and its state."""
    for number, one in enumerate(optimizer.param_groups):
        kept = [other for other in one["params"] if other is not parameter]
        if len(kept) < len(one["params"]):
            one["params"] = kept
            return number, dict(optimizer.state.pop(parameter, {}))
    return None, {}
