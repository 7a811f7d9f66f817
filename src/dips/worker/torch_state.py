"""Copies torch's tensors to reused host memory, and nested state to JSON and tensors, for a checkpoint.

parallel/rank_state.py captures and restores with this what a process holds besides the flat parameters. Never pickles.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from dips.core.errors import ConfigError, option
from dips.worker.checkpoint_files import RawTensor
from dips.worker.torch_model import wait_for

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
            raw = tensors.get(name)
            if raw is None or raw.dtype not in TORCH_DTYPES:
                raise StateTreeError(f"the checkpoint names a tensor {name!r} that it does not hold")
            tensor = tensor_of(raw)
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


# ---- the state of a process ------------------------------------------------------------------------------------------


class HasState(Protocol):
    """An object with the two methods that torch's optimizers, schedulers and loaders have."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def same_optimizers() -> str:
    """The remedy for a checkpoint of other optimizers."""
    return (
        "resume with the same optimizers in the same order (of `dips train`: the same --inner-optimizer), or without "
        f"{option('resume')}"
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


def tensor_of(raw: RawTensor) -> torch.Tensor:
    """The inverse of raw_of(), in the same memory."""
    dtype = TORCH_DTYPES[raw.dtype]
    flat = torch.from_numpy(raw.data).view(dtype) if raw.data.size else torch.empty(0, dtype=dtype)
    return flat.reshape(raw.shape)


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
