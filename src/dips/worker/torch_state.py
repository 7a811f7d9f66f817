"""Captures a torch training process's state besides the flat parameters, for its checkpoint.

Inner optimizer, the model's buffers, random number generators, and the parts that the loop adds (a scheduler, its place
in the data). The training thread waits only for capture(), which copies into reused host memory; another thread writes
the bytes later. Never pickles, never touches the parameters themselves.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from dips.core.errors import ConfigError
from dips.worker.checkpoint_files import ByteArray, JsonTree, RawTensor, StateTreeError, flatten, unflatten
from dips.worker.torch_model import wait_for

_TORCH_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _TORCH_NAMES.items()}
_TORCH, _NUMPY = "torch", "numpy"
"""Kinds of tensors, so that each is restored as the same kind."""


class HasState(Protocol):
    """An object with the two methods that torch's optimizers, schedulers and loaders have."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class TorchState:
    """The state of one process, part by part; restore() gives every part the state that capture() took from it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, HasState] | None = None,
    ) -> None:
        """parts: the loop's own things."""
        self._parts: dict[str, HasState] = {
            "optimizer": optimizer,
            "buffers": _Buffers(model),
            **{f"loop.{name}": part for name, part in (parts or {}).items()},
            "random": RandomState(),
        }
        self._copies: dict[str, _Copy] = {}

    def capture(self) -> tuple[JsonTree, dict[str, RawTensor]]:
        """Copy the state of all parts. The result is valid until the next capture().

        Raises StateTreeError when a part's state has a value that a checkpoint cannot hold.
        """
        state = {name: part.state_dict() for name, part in self._parts.items()}
        skeleton, tensors = flatten(state, _kind_of)
        raw = {name: self._copied(name, tensor) for name, tensor in tensors.items()}
        wait_for({item.device for item in tensors.values() if isinstance(item, torch.Tensor) and item.is_cuda})
        return skeleton, raw

    def restore(self, skeleton: JsonTree, tensors: Mapping[str, RawTensor]) -> None:
        """Give every part its state back. Raises ConfigError when a part is missing or does not accept it."""
        state = unflatten(skeleton, lambda kind, name: _uncopied(kind, name, tensors))
        if not isinstance(state, dict) or state.keys() != self._parts.keys():
            there = sorted(state) if isinstance(state, dict) else "nothing"
            raise ConfigError(
                f"the checkpoint holds the state of {there}, this loop has {sorted(self._parts)}: resume with the "
                "same loop, or without --resume"
            )
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise ConfigError(
                    f"the checkpoint's state of {name!r} does not fit this loop's ({error}): resume with the same "
                    "model, optimizer and loop, or without --resume"
                ) from error

    def _copied(self, name: str, tensor: Any) -> RawTensor:
        source = torch.from_numpy(np.array(tensor)) if isinstance(tensor, np.ndarray) else tensor.detach()
        copy = self._copies.get(name)
        if copy is None or not copy.fits(source):
            copy = self._copies[name] = _Copy(name, source)
        return copy.take(source)


def _kind_of(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        return _TORCH
    return _NUMPY if isinstance(value, np.ndarray) else None


class _Copy:
    """Host memory for one tensor; pinned when it comes from a GPU, so that the copy goes at the link's speed."""

    def __init__(self, name: str, source: torch.Tensor) -> None:
        if source.dtype not in _TORCH_NAMES or source.layout is not torch.strided:
            raise StateTreeError(f"the state at {name!r} is a tensor of {source.dtype}, which a checkpoint cannot hold")
        self.is_pinned = source.is_cuda
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.is_pinned)
        self._raw = RawTensor(_TORCH_NAMES[source.dtype], tuple(source.shape), _bytes_of(self._host))

    def fits(self, source: torch.Tensor) -> bool:
        same = self._host.shape == source.shape and self._host.dtype == source.dtype
        return same and self.is_pinned == source.is_cuda

    def take(self, source: torch.Tensor) -> RawTensor:
        self._host.copy_(source, non_blocking=self.is_pinned)
        return self._raw


def _bytes_of(host: torch.Tensor) -> ByteArray:
    return host.reshape(-1).view(torch.uint8).numpy()


def _uncopied(kind: str, name: str, tensors: Mapping[str, RawTensor]) -> Any:
    raw = tensors.get(name)
    if raw is None or raw.dtype not in _TORCH_DTYPES:
        raise StateTreeError(f"the checkpoint names a tensor {name!r} that it does not hold")
    dtype = _TORCH_DTYPES[raw.dtype]
    flat = torch.from_numpy(raw.data).view(dtype) if raw.data.size else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(raw.shape)
    return tensor.numpy() if kind == _NUMPY else tensor


class _Buffers:
    """The model's buffers (running statistics): each cluster has its own, so no version contains them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_buffers())

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        buffers = self.state_dict()
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
