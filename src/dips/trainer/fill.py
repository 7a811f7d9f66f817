"""Fills the tensors that a version lacks from a user's file: frozen weights and buffers, checked before an export.

A version holds the trained tensors. The run's description of its model (core/model_description.py) lists the others
with their shapes, and a digest of those that training does not change: so a file of another base is refused. Reads only
safetensors: torch's own files are pickles, with which a stranger's file can run code. Never converts a tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from dips.core.errors import ConfigError
from dips.core.layout import Layout
from dips.core.model_description import Lacking, ModelDescription
from dips.worker.checkpoint_file import ITEM_BYTES, MAX_HEADER_BYTES, RawTensor

_OF_TORCH = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""torch's names of element types, and safetensors'."""

_NAMED = 3


def fill(layout: Layout, described: ModelDescription | None, path: Path) -> dict[str, RawTensor]:
    """The tensors that the version lacks, from a file or folder, under the names that `described` has for them.

    Raises ConfigError when nothing is lacking, and with the tensor's name for one that the file lacks or that differs.
    """
    if described is None or not described.n_absent:
        raise ConfigError(f"the version lacks nothing that {path} could fill in: leave out --fill")
    state = read_state(path)
    if not described.lacks:  # too many to be described one by one
        known = {parameter.name for parameter in layout.parameters}
        known |= {name.removeprefix(described.prefix) for name in known}
        rest = {name: tensor for name, tensor in state.items() if name not in known}
        if len(rest) != described.n_absent:
            raise ConfigError(
                f"{path} has {len(rest)} tensors that the version lacks, the model has {described.n_absent} (such as "
                f"{described.absent[0]!r}): give the whole state of the model that training began with"
            )
        return {name.removeprefix(described.prefix): tensor for name, tensor in rest.items()}
    found = {}
    for lacking in described.lacks:
        tensor = state.get(lacking.name, state.get(described.prefix + lacking.name))
        if tensor is None:
            absent = [one.name for one in described.lacks if one.name not in state]
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise ConfigError(
                f"{path} has no tensor {lacking.name!r}{more}: give the state of the model that was trained"
            )
        _check(lacking, tensor, path)
        found[lacking.name] = tensor
    return found


def read_state(path: Path) -> dict[str, RawTensor]:
    """All tensors of a .safetensors file, or of a folder of them. Raises ConfigError for anything else."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} has no .safetensors file: give the file that holds the model's state")
        return {name: tensor for file in files for name, tensor in _of_safetensors(file).items()}
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to fill in from: give the file that holds the model's state")
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"{path} is not a .safetensors file, and no other kind is read: write one of the model's state with "
            "safetensors.torch.save_model(model, 'model.safetensors')"
        )
    return _of_safetensors(path)


def _of_safetensors(path: Path) -> dict[str, RawTensor]:
    """Views of the file, which is read when they are written."""
    try:
        with safe_open(path, framework="numpy"):
            pass  # the library checks header, offsets and lengths
        data = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        found = {}
        for name, place in header.items():
            start, stop = place["data_offsets"]
            if place["dtype"] not in ITEM_BYTES:
                raise ValueError(f"tensor {name!r} is {place['dtype']}")
            bytes_ = data[8 + length + start : 8 + length + stop]
            found[name] = RawTensor(place["dtype"], tuple(place["shape"]), bytes_)
        return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a safetensors file: {error}") from error


def _check(lacking: Lacking, tensor: RawTensor, path: Path) -> None:
    dtype = _OF_TORCH.get(lacking.dtype)
    if tensor.shape != lacking.shape or tensor.dtype != dtype:
        raise ConfigError(
            f"tensor {lacking.name!r} of {path} is {tensor.dtype} of shape {list(tensor.shape)}, the model's is "
            f"{dtype} of shape {list(lacking.shape)}: give the state of the model that was trained"
        )
    if lacking.digest is None:
        return
    digest = xxhash.xxh3_64(f"torch.{lacking.dtype} {list(lacking.shape)}".encode())
    digest.update(tensor.data.data)
    if digest.intdigest() != lacking.digest:
        raise ConfigError(
            f"tensor {lacking.name!r} of {path} has other values than in the clusters' training: give the "
            "same model that training began with"
        )
