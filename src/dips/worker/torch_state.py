"""Captures a torch training process's state besides the flat parameters, for its checkpoint.

Inner optimizer, the model's buffers, random number generators, and the parts that the loop adds (a scheduler, its place
in the data). The training thread waits only for capture(), which copies into reused host memory; another thread writes
the bytes later. Never pickles, never touches the parameters themselves.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from dips.core.errors import ConfigError
from dips.worker.checkpoint_files import RawTensor
from dips.worker.torch_model import Optimizers, as_list, former_names, innermost, named_buffers, wait_for

if TYPE_CHECKING:  # these modules import this one
    from dips.worker.parallel.rank_state import RankState
    from dips.worker.parallel.shard_files import SavedShards

_logger = logging.getLogger("dips.worker.checkpoint")

_TORCH_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in _TORCH_NAMES.items()}

# ---- nested state ----------------------------------------------------------------------------------------------------
#
# Converts nested state (an optimizer's state_dict, say) to JSON and a flat table of tensors, and back. No pickle.
#
# Marks distinguish what JSON cannot: a tuple from a list, keys that are numbers, NaN, bytes, a tensor of torch from one
# of numpy. Only containers, numbers, texts, bytes and tensors are accepted: what cannot be read back exactly must not
# be written. (torch's pytree takes other mappings as leaves, and its text form cannot hold keys that are numbers.)


MAX_DEPTH = 100


class StateTreeError(ConfigError):
    """A state has a value that a checkpoint cannot hold; the sentence says where."""


def flatten(state: object) -> tuple[Any, dict[str, Any]]:
    """A JSON skeleton and the tensors by name. Raises StateTreeError with the place of a value that cannot be kept."""
    tensors: dict[str, Any] = {}

    def skeleton(value: object, path: tuple[str, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise StateTreeError(f"the state at {_place(path)} is nested deeper than {MAX_DEPTH}: it may hold itself")
        if isinstance(value, torch.Tensor | np.ndarray):
            plain = name = ".".join(path) or "state"
            n = 1
            while name in tensors:  # paths may coincide: "a.b" as one key, or as two
                n += 1
                name = f"{plain}#{n}"
            tensors[name] = value
            return {"x": ["torch" if isinstance(value, torch.Tensor) else "numpy", name]}
        if isinstance(value, Mapping):
            return {"d": [[_leaf(key, path), skeleton(item, (*path, str(key)))] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [skeleton(item, (*path, str(i))) for i, item in enumerate(value)]
            return {"l" if isinstance(value, list) else "t": items}
        return _leaf(value, path)

    return skeleton(state, ()), tensors


def _leaf(value: object, path: tuple[str, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (an IntEnum, say) would come back as something else.
    if type(value) in (int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"f": str(float(value))}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    raise StateTreeError(
        f"the state at {_place(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: let state_dict() return tensors, numbers, texts and containers of these"
    )


def _place(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "its top"


def unflatten(skeleton: Any, tensors: Mapping[str, RawTensor]) -> Any:
    """The inverse of flatten. Raises StateTreeError for an invalid skeleton, and for a tensor that is not there."""
    try:
        return _value(skeleton, tensors)
    except (ValueError, TypeError, RecursionError) as error:
        raise StateTreeError(f"a state's skeleton cannot be read ({error}): it is not one of this release") from error


def _value(skeleton: Any, tensors: Mapping[str, RawTensor]) -> Any:
    if not isinstance(skeleton, dict | list):
        return skeleton
    if isinstance(skeleton, list) or len(skeleton) != 1:
        raise StateTreeError("a state's skeleton has a bare list, or a mark too many: it is not one of this release")
    ((mark, inner),) = skeleton.items()
    match mark:
        case "x":
            kind, name = inner
            tensor = _tensor(name, tensors)
            return tensor.numpy() if kind == "numpy" else tensor
        case "d":
            return {_value(key, tensors): _value(item, tensors) for key, item in inner}
        case "l":
            return [_value(item, tensors) for item in inner]
        case "t":
            return tuple([_value(item, tensors) for item in inner])
        case "f":
            return float(inner)
        case "b":
            return bytes.fromhex(inner)
    raise StateTreeError(f"a state's skeleton has {mark}: {inner!r}, which is not a mark of this release")


def _tensor(name: str, tensors: Mapping[str, RawTensor]) -> torch.Tensor:
    raw = tensors.get(name)
    if raw is None or raw.dtype not in TORCH_DTYPES:
        raise StateTreeError(f"the checkpoint names a tensor {name!r} that it does not hold")
    dtype = TORCH_DTYPES[raw.dtype]
    flat = torch.from_numpy(raw.data).view(dtype) if raw.data.size else torch.empty(0, dtype=dtype)
    return flat.reshape(raw.shape)


# ---- the state of a process ------------------------------------------------------------------------------------------


class HasState(Protocol):
    """An object with the two methods that torch's optimizers, schedulers and loaders have."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


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

    def restore(self, skeleton: Any, tensors: Mapping[str, RawTensor]) -> None:
        """Give every part its state back. Raises ConfigError when a part is missing or does not accept it."""
        state = unflatten(skeleton, tensors)
        if not isinstance(state, dict) or state.keys() != self._parts.keys():
            there = sorted(state) if isinstance(state, dict) else "nothing"
            raise ConfigError(
                f"the checkpoint holds the state of {there}, this loop has {sorted(self._parts)}: resume with the "
                "same loop, or without --resume"
            )
        _refuse_other_optimizers(state["optimizer"], self._optimizers)
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ConfigError(
                    f"the checkpoint's state of {name!r} does not fit this loop's ({error}): resume with the same "
                    "model, optimizer and loop, or without --resume"
                ) from error

    def restore_by_names(self, state: Mapping[str, Any], saved: SavedShards) -> None:
        """Give every part the state that is kept by names of the full model. Raises ConfigError where it does not fit,
        CheckpointError for what is not there.
        """
        self._by_names().restore(state, saved)

    def _by_names(self) -> RankState:
        """This process as the only rank of its cluster."""
        if self._named is not None:
            return self._named
        from dips.worker.parallel.agreement import Alone, agree
        from dips.worker.parallel.held import held_here
        from dips.worker.parallel.rank_state import RankState

        model, parts, buffers = self._whole
        agreed = agree(Alone(), held_here([model], self._optimizers, buffers=buffers), {})
        assert agreed is not None, "one that holds its model has a place"
        self._named_shapes = _shapes_of(model)
        self._named = RankState(Alone(), agreed, self._optimizers, parts)
        return self._named


def _shapes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in named_buffers(model)}


# ---- several optimizers ----------------------------------------------------------------------------------------------

SAME_OPTIMIZERS = (
    "resume with the same optimizers in the same order (of `dips train`: the same --inner-optimizer), or without "
    "--resume"
)

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
            f"the checkpoint holds the state of {there}, and this loop has {' and '.join(here)}: {SAME_OPTIMIZERS}"
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
            f"{type(optimizer).__name__} does not have: {SAME_OPTIMIZERS}"
        )


class HostCopies:
    """Copies of tensors in host memory that is reused; pinned for those that come from a GPU, so that they are copied
    at the link's speed.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; the copy is complete after wait(), and valid until the next take() of this name."""
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype, copy.is_pinned()) != (source.shape, source.dtype, source.is_cuda):
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._copies[name] = copy
        with torch.no_grad():
            copy.copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            self._devices.add(source.device)
        return copy

    def wait(self) -> None:
        """Return once all copies are complete."""
        wait_for(self._devices)
        self._devices = set()


def refuse_unknown(name: str, tensor: torch.Tensor) -> None:
    """Raises StateTreeError for a type of elements, or a layout, that a checkpoint cannot hold."""
    if tensor.dtype not in _TORCH_NAMES or tensor.layout is not torch.strided:
        raise StateTreeError(f"the state at {name!r} is a tensor of {tensor.dtype}, which a checkpoint cannot hold")


def raw_of(tensor: torch.Tensor) -> RawTensor:
    """The memory of a contiguous tensor on the host."""
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return RawTensor(_TORCH_NAMES[tensor.dtype], tuple(tensor.shape), data)


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


class RandomState:
    """The random generators of Python, numpy and torch, on the processor and, once used, on CUDA devices."""

    def state_dict(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
