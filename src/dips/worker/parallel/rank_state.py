"""The training state of a rank among several besides the flat vectors, by names of the full model.

The optimizer's state of each parameter, the model's buffers, parameters in fewer bits with their masters, random
number generators, and the parts that the loop adds. What belongs to a parameter is cut as this is, so that ranks of
another number, or of another parallelism, take their own boxes of it. Each element is written by one rank alone: of
several that hold it, by the one with least to write. Sends messages at the start only.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from dips.core.errors import ConfigError, option
from dips.worker.checkpoint_files import CheckpointError, RawTensor
from dips.worker.parallel.agreement import Agreed, Alone, Gathering, agree, cells_of
from dips.worker.parallel.held import Box, Row, cut_of, held_here, part_of
from dips.worker.parallel.shard_files import SavedShards, Shard, whole
from dips.worker.torch_model import (
    Optimizers,
    as_list,
    former_names,
    innermost,
    local,
    named_buffers,
    saved_buffers,
    with_contained,
)
from dips.worker.torch_state import (
    HasState,
    HostCopies,
    RandomState,
    StateTreeError,
    flatten,
    raw_of,
    refuse_unknown,
    same_optimizers,
    unflatten,
)

_logger = logging.getLogger("dips.worker.checkpoint")

_RANDOM = "random"

Held = Sequence[tuple[str, Box]]


class RankState:
    """The state of one rank: capture() copies it, restore() puts it back."""

    def __init__(
        self,
        ranks: Gathering,
        agreed: Agreed,
        optimizers: Sequence[torch.optim.Optimizer],
        parts: Mapping[str, HasState] | None = None,
        *,
        only_parts: bool = False,
    ) -> None:
        """Made on all ranks together. parts: the loop's own things. only_parts: a trainer keeps all else by itself.

        Raises ConfigError, on every rank, for a buffer that is two tensors.
        """
        self._rank, self._n_ranks = ranks.rank, ranks.n_ranks
        self._agreed = agreed
        self._optimizers = () if only_parts else tuple(innermost(optimizers))
        self._containers = () if only_parts else tuple(set(with_contained(optimizers)) - set(self._optimizers))
        self._parts: dict[str, HasState] = dict(parts or {})
        if not only_parts:
            self._parts[_RANDOM] = RandomState()
        self._only_parts = only_parts
        self._copies = HostCopies()
        self._rows = agreed.mine.row_of()
        names = [span.parameter.name for span in agreed.layout.spans]
        held = [[(names[piece.parameter], Box(piece.starts, piece.sizes)) for piece in each] for each in agreed.held]
        self._cells = _by_name(dealt(held)[agreed.rank])
        self._buffers = [] if only_parts else [each for each in agreed.mine.untrained if each.what.is_buffer]
        self._known_buffers = [{name for name, _ in named_buffers(model)} for model in agreed.mine.models]
        mine = [[e.name, str(e.what.tensor.dtype), e.shape, *e.box] for e in self._buffers if e.box.n_elems]
        texts = ranks.gather(json.dumps([sorted(self._stepped()), mine]).encode())
        stepped, said = zip(*map(json.loads, texts), strict=True)
        _refuse_two_buffers_of_one_name(said)
        # Of a tied parameter that one stage alone steps, that one has the optimizer's state.
        self._stepped_cells = _by_name(dealt(_of_those_who_step(held, stepped))[agreed.rank])
        buffers = [[(name, Box(tuple(starts), tuple(sizes))) for name, _, _, starts, sizes in each] for each in said]
        # Replicas' running statistics may differ: all of one rank's, as a mean and a variance belong together.
        self._buffer_cells = _by_name(dealt(buffers, evenly=False)[agreed.rank])

    def _stepped(self) -> set[str]:
        """The parameters that this rank's optimizers step."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        rows = (self._rows.get(id(parameter)) for group in groups for parameter in group["params"])
        return {row.parameter.name for row in rows if row is not None}

    # ---- capture ----

    def capture(self) -> tuple[dict[str, Any], list[Shard]]:
        """Copy the state: JSON, and this rank's part of the tensors, valid until the next capture().

        Raises StateTreeError for a value that a checkpoint cannot hold, or a tensor of which it is not known how it is
        cut.
        """
        shards: list[Shard] = []
        state: dict[str, Any] = {"parts": {name: self._part(name, part, shards) for name, part in self._parts.items()}}
        if not self._only_parts:
            state["optimizer"], state["groups"] = self._optimizer_state(shards)
            self._take_buffers(shards)
            for name, shape, box, copy in self._working_copies():
                for cell in self._cells.get(name, ()):
                    self._take(f"working.{name}", shape, cell, part_of(copy, box, cell), shards)
        self._copies.wait()
        for part in state["parts"].values():
            part["digest"] = _digest(part["skeleton"], [s.tensor for s in shards if s.name.startswith(part["prefix"])])
        return state, shards

    def capture_whole(self) -> tuple[dict[str, Any], dict[str, RawTensor]]:
        """capture() of the only rank: JSON as merged() returns it, and whole tensors by name."""
        state, shards = self.capture()
        return merged([state]), {shard.name: raw_of(shard.tensor) for shard in shards}

    def _part(self, name: str, part: HasState, shards: list[Shard]) -> dict[str, Any]:
        skeleton, tensors = flatten(part.state_dict())
        prefix = f"ranks.{self._rank}.{name}/"
        for key, tensor in tensors.items():
            source = torch.from_numpy(np.array(tensor)) if isinstance(tensor, np.ndarray) else local(tensor)
            refuse_unknown(f"{name}.{key}", source)
            copy = self._copies.take(prefix + key, source)
            if copy.numel():
                shards.append(whole(prefix + key, copy))
        empty = {key: [str(t.dtype), list(t.shape)] for key, t in tensors.items() if not math.prod(t.shape)}
        return {"skeleton": skeleton, "prefix": prefix, "tensors": sorted(set(tensors) - set(empty)), "empty": empty}

    def _optimizer_state(self, shards: list[Shard]) -> tuple[dict[str, Any], list[Any]]:
        state: dict[str, Any] = {}
        groups: list[Any] = []
        inside = {id(optimizer.state) for optimizer in self._optimizers}
        for outer in self._containers:
            if outer.state and id(outer.state) not in inside:
                raise StateTreeError(
                    f"{type(outer).__name__} keeps state of its own, outside of the optimizers that it contains, which "
                    "ranks cannot share out: leave out checkpoint_dir, or use another optimizer"
                )
        for optimizer in self._optimizers:
            strange = next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None)
            if strange is not None:
                raise StateTreeError(
                    f"{type(optimizer).__name__} keeps state {strange!r} that belongs to no parameter, which ranks "
                    "cannot share out: leave out checkpoint_dir, or use another optimizer"
                )
            for group in optimizer.param_groups:
                names = []
                for parameter in group["params"]:
                    row, of_parameter = self._rows.get(id(parameter)), optimizer.state.get(parameter)
                    if row is not None:
                        names.append(row.parameter.name)
                    if row is not None and of_parameter:
                        state[row.parameter.name] = self._state_of(optimizer, parameter, of_parameter, row, shards)
                    elif of_parameter:
                        raise StateTreeError(
                            f"{type(optimizer).__name__} steps a tensor of shape {list(parameter.shape)} that is no "
                            "parameter of this rank's modules nor one of master_parameters: leave out checkpoint_dir, "
                            "or give its name with dips.Parallel(master_parameters=...)"
                        )
                if names:
                    groups.append([_options_of(optimizer, group), names])
        return state, groups

    def _state_of(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[str, Any], row: Row,
        shards: list[Shard],
    ) -> dict[str, Any]:  # fmt: skip
        name = row.parameter.name
        said: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                said[key] = {"value": _plain(value, f"{name}.{key}")}
                continue
            tensor = f"optimizer.{name}.{key}"
            if _is_cut_alike(value, parameter):
                said[key] = {"tensor": "as the parameter", "local": _is_dtensor(parameter) and not _is_dtensor(value)}
                held = local(value)
                for cell in self._stepped_cells.get(name, ()):
                    self._take(tensor, row.parameter.shape, cell, part_of(held, row.box, cell), shards)
            elif value.dim() == 0:
                said[key] = {"tensor": "one number", "on_host": value.device.type == "cpu"}
                if any(not any(cell.starts) for cell in self._stepped_cells.get(name, ())):
                    self._take(tensor, (), Box((), ()), local(value), shards)
            else:
                raise StateTreeError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for parameter {name!r} of "
                    f"shape {list(parameter.shape)}, of which ranks cannot know how it is cut: leave out "
                    "checkpoint_dir, or use an optimizer whose state is shaped as its parameters"
                )
        return said

    def _take_buffers(self, shards: list[Shard]) -> None:
        for model, known in zip(self._agreed.mine.models, self._known_buffers, strict=True):
            if late := [name for name in saved_buffers(model) if name not in known]:
                raise StateTreeError(
                    f"buffer {late[0]!r} was registered after the loop was entered, so that the ranks have not agreed "
                    "on who writes it: register it before, or with persistent=False"
                )
        taken: set[tuple[str, Box]] = set()  # several stages of one rank may have a buffer of one name
        for each, tensor in zip(self._buffers, self._buffers_now(), strict=True):
            for cell in self._buffer_cells.get(each.name, ()):
                if (each.name, cell) not in taken and all(
                    start <= a and a + n <= start + size for a, n, start, size in zip(*cell, *each.box, strict=True)
                ):
                    taken.add((each.name, cell))
                    self._take(f"buffers.{each.name}", each.shape, cell, part_of(tensor, each.box, cell), shards)

    def _take(
        self, name: str, shape: tuple[int, ...], box: Box, tensor: torch.Tensor, shards: list[Shard]
    ) -> None:  # fmt: skip
        refuse_unknown(name, tensor)
        shards.append(Shard(name, shape, box, self._copies.take(f"{name}@{box.starts}", tensor)))

    # ---- restore ----

    def restore(self, state: Mapping[str, Any], saved: SavedShards) -> None:
        """Give everything its state back. state: merged() of what all ranks captured.

        Raises ConfigError for what does not fit this loop, CheckpointError for what is not there.
        """
        try:
            if not self._only_parts and "optimizer" in state:
                plain = {was: name for name, was in self._agreed.former.items()}
                saved = saved.with_names(plain)
                self._restore_groups(
                    [[options, [plain.get(n, n) for n in names]] for options, names in state["groups"]]
                )
                self._restore_optimizer_state({plain.get(n, n): each for n, each in state["optimizer"].items()}, saved)
                for each, tensor in zip(self._buffers, self._buffers_now(), strict=True):
                    if each.box.n_elems:
                        saved.read([Shard(f"buffers.{each.name}", each.shape, each.box, tensor)])
                for name, shape, box, copy in self._working_copies():
                    if f"working.{name}" in saved:  # a checkpoint without masters has the exact values
                        saved.read([Shard(f"working.{name}", shape, box, copy)])
            self._restore_parts(state["parts"], saved)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint's state does not fit this loop ({type(error).__name__}: {error}): resume with the "
                f"same model, optimizer and loop, or without {option('resume')}"
            ) from error

    def _restore_parts(self, parts: Mapping[str, Sequence[Mapping[str, Any]]], saved: SavedShards) -> None:
        wanted = {name for name in self._parts if name != _RANDOM}
        there = {name for name in parts if name != _RANDOM}
        if wanted != there:
            raise ConfigError(
                f"the checkpoint holds the state of {sorted(there)}, this loop has {sorted(wanted)}: resume with the "
                f"same loop, or without {option('resume')}"
            )
        for name, part in self._parts.items():
            of_ranks = parts.get(name, ())
            own = of_ranks[self._rank] if len(of_ranks) == self._n_ranks else None
            if own is None and name == _RANDOM:
                continue  # random numbers belong to a rank
            if own is None:
                own = of_ranks[0]
                if any(each["digest"] != own["digest"] for each in of_ranks):
                    _logger.warning(
                        "the %d ranks of the checkpoint had different states of %r, and there are %d now: all go on "
                        "from rank 0's", len(of_ranks), name, self._n_ranks,
                    )  # fmt: skip
            tensors = {key: raw_of(saved.read_whole(own["prefix"] + key)) for key in own["tensors"]}
            for key, said in own["empty"].items():
                dtype, shape = (said, [0]) if isinstance(said, str) else said  # an earlier release said the type alone
                tensors[key] = raw_of(torch.empty(shape, dtype=_dtype_of(dtype)))
            try:
                part.load_state_dict(unflatten(own["skeleton"], tensors))
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ConfigError(
                    f"the checkpoint's state of {name!r} does not fit this loop's ({error}): resume with the same "
                    f"loop, or without {option('resume')}"
                ) from error

    def _restore_groups(self, groups: Sequence[Any]) -> None:
        options_of = {name: options for options, names in groups for name in names}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rows = [self._rows.get(id(parameter)) for parameter in group["params"]]
                names = [row.parameter.name for row in rows if row is not None and row.parameter.name in options_of]
                if not names:
                    continue
                kind = type(optimizer).__name__
                if strange := next((k for name in names if (k := options_of[name]["kind"]) != kind), None):
                    raise ConfigError(
                        f"the checkpoint holds the state of {strange}, this loop has {kind}: {same_optimizers()}"
                    )
                options = options_of[names[0]]
                other = next((name for name in names if options_of[name] != options), None)
                if other is not None:
                    raise ConfigError(
                        f"{names[0]!r} and {other!r} are in one group of this loop's optimizer, and had different "
                        "options in the checkpoint's: resume with the same groups of parameters, or without "
                        f"{option('resume')}"
                    )
                for key, value in unflatten(options["options"], {}).items():
                    now = group.get(key)
                    if isinstance(now, torch.Tensor):
                        now.fill_(value)
                    else:
                        group[key] = value

    def _restore_optimizer_state(self, state: Mapping[str, Any], saved: SavedShards) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    row = self._rows.get(id(parameter))
                    said = None if row is None else state.get(row.parameter.name)
                    if row is not None and said is not None:
                        on_device = bool(group.get("capturable") or group.get("fused"))
                        optimizer.state[parameter] = {
                            key: self._value_of(parameter, row, key, how, saved, on_device) for key, how in said.items()
                        }

    def _value_of(
        self, parameter: torch.Tensor, row: Row, key: str, how: Mapping[str, Any], saved: SavedShards, on_device: bool
    ) -> Any:  # fmt: skip
        """on_device: the optimizer wants its counters there, as torch's own do that are fused or captured."""
        if "value" in how:
            return unflatten(how["value"], {})
        name = f"optimizer.{row.parameter.name}.{key}"
        if how["tensor"] == "one number":
            return saved.read_whole(name).to("cpu" if how["on_host"] and not on_device else parameter.device)
        like = local(parameter) if how["local"] else parameter
        value = torch.zeros_like(like, dtype=saved.dtype_of(name), requires_grad=False)
        saved.read([Shard(name, row.parameter.shape, row.box, local(value))])
        return value

    # ---- what is here ----

    def _buffers_now(self) -> list[torch.Tensor]:
        """The memory of the buffers; a module may have replaced one since the start. Raises ConfigError where one is
        gone.
        """
        named = [dict(named_buffers(model)) for model in self._agreed.mine.models]
        found = []
        for each in self._buffers:
            tensor = named[each.number].get(each.local_name)
            if tensor is None or tuple(local(tensor).shape) != each.box.sizes:
                raise ConfigError(
                    f"buffer {each.local_name!r} has another shape than when the loop was entered, or is gone: enter "
                    "the loop once the model is complete"
                )
            found.append(local(tensor))
        return found

    def _working_copies(self) -> Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
        agreed = self._agreed
        for piece, copy in zip(agreed.held[agreed.rank], agreed.working_copies(), strict=True):
            if copy is not None:
                parameter = agreed.layout.spans[piece.parameter].parameter
                yield parameter.name, parameter.shape, Box(piece.starts, piece.sizes), copy


# ---- who writes what -------------------------------------------------------------------------------------------------


def _refuse_two_buffers_of_one_name(said: Sequence[Sequence[Sequence[Any]]]) -> None:
    """said: by each rank, name, type and shape of its buffers."""
    first: dict[str, tuple[int, str, list[int]]] = {}
    for rank, buffers in enumerate(said):
        for name, dtype, shape, *_ in buffers:
            known, *theirs = first.setdefault(name, (rank, dtype, shape))
            if theirs != [dtype, shape]:
                raise ConfigError(
                    f"buffer {name!r} is {dtype} of shape {shape} on rank {rank}, and {theirs[0]} of shape {theirs[1]} "
                    f"on rank {known}, and a checkpoint keeps one tensor of a name: give them different names with "
                    "dips.Parallel(shards=...) (docs/integrations.md), or leave out checkpoint_dir"
                )


def dealt(held: Sequence[Held], *, evenly: bool = True) -> list[list[tuple[str, Box]]]:
    """The boxes that each rank writes, so that every element is written once, from the boxes that each rank holds: of
    several holders, the one with fewest elements to write so far; not evenly: the lowest.
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, each in enumerate(held):
        for name, box in each:
            holders.setdefault(name, {}).setdefault(box, []).append(rank)
    written: list[list[tuple[str, Box]]] = [[] for _ in held]
    loads = Counter[int]()
    for name, boxes in holders.items():
        for cell, ranks in cells_of(boxes).items():
            rank = min(ranks, key=loads.__getitem__) if evenly else ranks[0]
            written[rank].append((name, cell))
            loads[rank] += cell.n_elems
    return written


def _of_those_who_step(held: Sequence[Held], stepped: Sequence[Sequence[str]]) -> list[Held]:
    """Of what each rank holds, what its optimizers step; a parameter that none of them steps stays with its holders."""
    by_rank = [set(names) for names in stepped]
    by_any = set().union(*by_rank)
    return [
        [(name, box) for name, box in each if name in own or name not in by_any]
        for each, own in zip(held, by_rank, strict=True)
    ]


def _by_name(boxes: Iterable[tuple[str, Box]]) -> dict[str, list[Box]]:
    named: dict[str, list[Box]] = {}
    for name, box in boxes:
        named.setdefault(name, []).append(box)
    return named


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks captured, as one: parts of each rank, and the optimizer's state once for each parameter."""
    state: dict[str, Any] = {"parts": {name: [each["parts"][name] for each in states] for name in states[0]["parts"]}}
    if "optimizer" in states[0]:
        state["optimizer"] = {name: said for each in states for name, said in each["optimizer"].items()}
        groups: dict[str, tuple[Any, dict[str, None]]] = {}
        for each in states:
            for options, names in each["groups"]:
                known = groups.setdefault(json.dumps(options, sort_keys=True), (options, {}))
                known[1].update(dict.fromkeys(names))
        state["groups"] = [[options, list(names)] for options, names in groups.values()]
    return state


# ---- the optimizer's values ------------------------------------------------------------------------------------------


def _is_cut_alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the local part of one has the elements of the local part of the other."""
    if not _is_dtensor(value):
        return value.shape == local(parameter).shape
    return value.shape == parameter.shape and cut_of(value) == cut_of(parameter)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _options_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, with numbers in place of tensors of one."""
    options = {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params" and key != "param_names"
    }
    return {"kind": type(optimizer).__name__, "options": _plain(options, "param_groups")}


def _plain(value: object, place: str) -> Any:
    """As JSON. Raises StateTreeError for what holds a tensor, or cannot be kept."""
    skeleton, tensors = flatten(value)
    if tensors:
        raise StateTreeError(
            f"the optimizer's state at {place!r} has tensors in containers, of which ranks cannot know how they are "
            "cut: leave out checkpoint_dir, or use another optimizer"
        )
    return skeleton


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"it names elements of type {name!r}")
    return dtype


def _digest(skeleton: Any, tensors: Sequence[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128(json.dumps(skeleton, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(raw_of(tensor).data.data)
    return digest.hexdigest()


# ---- one process -----------------------------------------------------------------------------------------------------


class TorchState:
    """The state of one process, part by part; restore() gives every part the state that capture() took from it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        parts: Mapping[str, HasState] | None = None,
        *,
        buffers: str = "own",
    ) -> None:
        """parts: the loop's own things. buffers: as in DiLoCo."""
        self._optimizers = [kept for each in as_list(optimizer) for kept in _kept_by(each)]
        self._whole = model, dict(parts or {}), buffers
        self._named: RankState | None = None
        self._named_shapes: dict[str, torch.Size] = {}
        self._has_names = all(type(each).state_dict is torch.optim.Optimizer.state_dict for each in as_list(optimizer))
        self._parts: dict[str, HasState] = {
            "optimizer": self._optimizers[0] if len(self._optimizers) == 1 else _SeveralOptimizers(self._optimizers),
            "buffers": _Buffers(model),
            **{f"loop.{name}": part for name, part in (parts or {}).items()},
            "random": RandomState(),
        }
        self._copies = HostCopies()

    def capture(self) -> tuple[Any, dict[str, RawTensor]]:
        """Copy the state of all parts, by names of the full model where that can be. The result is valid until the next
        capture().

        Raises StateTreeError when a part's state has a value that a checkpoint cannot hold.
        """
        if self._has_names:
            try:
                named = self._by_names()
                if _shapes_of(self._whole[0]) != self._named_shapes:
                    raise StateTreeError("the model has other buffers than at the first checkpoint")
                return named.capture_whole()
            except ConfigError as why:
                _logger.info("only one process can go on from these checkpoints: %s", why)
                self._has_names = False
        state = {name: part.state_dict() for name, part in self._parts.items()}
        skeleton, tensors = flatten(state)
        raw: dict[str, RawTensor] = {}
        for name, tensor in tensors.items():
            source = torch.from_numpy(np.array(tensor)) if isinstance(tensor, np.ndarray) else tensor.detach()
            refuse_unknown(name, source)
            raw[name] = raw_of(self._copies.take(name, source))
        self._copies.wait()
        return skeleton, raw

    def restore(self, state: Any, saved: SavedShards) -> None:
        """Give every part its state back, whether it is kept by names of the full model or by places. Raises
        ConfigError when a part is missing or does not accept it, CheckpointError for a tensor that is not there.
        """
        if isinstance(state, dict) and "parts" in state:
            self._by_names().restore(state, saved)
            return
        state = unflatten(state, saved.read_state())
        if not isinstance(state, dict) or state.keys() != self._parts.keys():
            there = sorted(state) if isinstance(state, dict) else "nothing"
            raise ConfigError(
                f"the checkpoint holds the state of {there}, this loop has {sorted(self._parts)}: resume with the "
                f"same loop, or without {option('resume')}"
            )
        _refuse_other_optimizers(state["optimizer"], self._optimizers)
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ConfigError(
                    f"the checkpoint's state of {name!r} does not fit this loop's ({error}): resume with the same "
                    f"model, optimizer and loop, or without {option('resume')}"
                ) from error

    def _by_names(self) -> RankState:
        """This process as the only rank of its cluster."""
        if self._named is not None:
            return self._named
        model, parts, buffers = self._whole
        agreed = agree(Alone(), held_here([model], self._optimizers, buffers=buffers), {})
        assert agreed is not None, "one that holds its model has a place"
        self._named_shapes = _shapes_of(model)
        self._named = RankState(Alone(), agreed, self._optimizers, parts)
        return self._named


def _shapes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in named_buffers(model)}


# ---- several optimizers ----------------------------------------------------------------------------------------------

_KINDS = "kinds"
"""The state of one optimizer has no such key, and is written as it is."""


class _SeveralOptimizers:
    """The state of optimizers that step different parameters of one model, with their kinds."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        return {_KINDS: _kinds_of(self._optimizers), "states": [each.state_dict() for each in self._optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self._optimizers, state["states"], strict=True):
            optimizer.load_state_dict(saved)


def _kept_by(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Those whose state_dict() has an optimizer's moments: itself, unless it leaves them to those that it contains."""
    whole = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    return [optimizer] if whole else innermost([optimizer])


def _kinds_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    return [type(each).__name__ for each in optimizers]


def _refuse_other_optimizers(state: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ConfigError where several optimizers were saved and others are here, or one of the two is alone, or one
    with other options was saved than the one here.
    """
    saved = state.get(_KINDS) if isinstance(state, Mapping) else None
    here = _kinds_of(optimizers)
    if saved is None and len(here) == 1:
        _refuse_other_options(state, optimizers[0])
    elif saved != here:
        there = "one optimizer" if saved is None else " and ".join(map(str, saved))
        raise ConfigError(
            f"the checkpoint holds the state of {there}, and this loop has {' and '.join(here)}: {same_optimizers()}"
        )


def _refuse_other_options(state: object, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer's state does not name its kind, and torch takes another kind's without a word. A release of torch
    may add options to a kind; another kind also lacks some.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups or not isinstance(groups[0], Mapping):
        return  # load_state_dict() says what it is
    common = {"params", "initial_lr"}  # the second is a scheduler's
    there, here = set(groups[0]) - common, set(optimizer.param_groups[0]) - common
    if there - here and here - there:
        raise ConfigError(
            f"the checkpoint holds the state of an optimizer with {', '.join(sorted(there - here))}, which this loop's "
            f"{type(optimizer).__name__} does not have: {same_optimizers()}"
        )


class _Buffers:
    """The model's buffers (running statistics): each cluster has its own, so no version contains them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(named_buffers(self._model))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        buffers = self.state_dict()
        plain = {former: name for name, former in former_names(self._model).items()}
        state = {plain.get(name, name): buffer for name, buffer in state.items()}
        if buffers.keys() != state.keys():
            raise KeyError(f"buffers {sorted(state)} were saved, the model has {sorted(buffers)}")
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(state[name])
