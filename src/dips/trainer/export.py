"""Exports a version as one file: named float32 tensors in safetensors format, with their origin in its metadata.

Works for any layout, also for the user's own models, and without torch. Never leaves an incomplete file, and never
copies the model: memory is that of the version itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dips.core.errors import ConfigError, Refused
from dips.core.files import by_umask, replace_file
from dips.core.ids import parse_version
from dips.core.layout import Layout, PublishedModel, layout_from_json
from dips.core.model_description import Adapter, Lacking, ModelDescription
from dips.worker.checkpoint_files import ITEM_BYTES, MAX_HEADER_BYTES, RawTensor, safetensors_header

# ---- fill ------------------------------------------------------------------------------------------------------------
#
# Fills the tensors that a version lacks from a user's file: frozen weights and buffers, checked before an export.
#
# A version holds the trained tensors. The run's description of its model (core/model_description.py) lists the others
# with their shapes, and a digest of those that training does not change: so a file of another base is refused. Reads
# only safetensors: torch's own files are pickles, with which a stranger's file can run code. Never converts a tensor.


OF_TORCH = {
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
    adapter = described.adapter or Adapter()
    found, absent = {}, []
    for lacking in described.lacks:
        # An adapted model's file, or its base's.
        names = lacking.name, described.prefix + lacking.name, adapter.in_base(lacking.name)
        tensor = next((state[name] for name in names if name in state), None) or _tied(lacking, state)
        if tensor is None:
            absent.append(lacking.name)
        else:
            _check(lacking, tensor, path)
            found[lacking.name] = tensor
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ConfigError(f"{path} has no tensor {absent[0]!r}{more}: give the state of the model that was trained")
    return found


def _tied(lacking: Lacking, state: Mapping[str, RawTensor]) -> RawTensor | None:
    """The tensor under the name of another one that is tied to it: save_model() writes such a pair once."""
    dtype = OF_TORCH.get(lacking.dtype)
    alike = (each for each in state.values() if (each.shape, each.dtype) == (lacking.shape, dtype))
    return next((each for each in alike if lacking.digest == _digest_of(lacking, each)), None)


def read_state(path: Path) -> dict[str, RawTensor]:
    """All tensors of a .safetensors file, or of a folder of them. Raises ConfigError for anything else."""
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the file that holds the model's state"
        ) from error
    if is_folder:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} has no .safetensors file: give the file that holds the model's state")
        return {name: tensor for file in files for name, tensor in _of_safetensors(file).items()}
    if not is_file:
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
    dtype = OF_TORCH.get(lacking.dtype)
    if tensor.shape != lacking.shape or tensor.dtype != dtype:
        raise ConfigError(
            f"tensor {lacking.name!r} of {path} is {tensor.dtype} of shape {list(tensor.shape)}, the model's is "
            f"{dtype} of shape {list(lacking.shape)}: give the state of the model that was trained"
        )
    if lacking.digest is None:
        return
    if _digest_of(lacking, tensor) != lacking.digest:
        raise ConfigError(
            f"tensor {lacking.name!r} of {path} has other values than in the clusters' training: give the "
            "same model that training began with"
        )


def _digest_of(lacking: Lacking, tensor: RawTensor) -> int:
    digest = xxhash.xxh3_64(f"torch.{lacking.dtype} {list(lacking.shape)}".encode())
    digest.update(tensor.data.data)
    return digest.intdigest()


# ---- export ----------------------------------------------------------------------------------------------------------


FORMAT = "dips-export-1"
ABOUT = "dips_version.json"
_SEQUENCE_TOKENS = "sequence_tokens"
T = TypeVar("T")


def export_model(
    fetched: PublishedModel,
    path: Path,
    sequence_tokens: int | None = None,
    filled: Mapping[str, RawTensor] = MappingProxyType({}),
) -> None:
    """Write one safetensors file, complete or not at all; filled: further tensors, which are written unchanged.

    Raises ConfigError when `path` cannot be written.
    """
    metadata = {
        "format": FORMAT,
        "run_id": fetched.run_id,
        "version": str(fetched.version),
        "tokens": str(fetched.tokens),
        "layout_hash": fetched.layout.layout_hash.hex(),
        "layout": fetched.layout.to_json(),
    }
    if sequence_tokens is not None:
        metadata[_SEQUENCE_TOKENS] = str(sequence_tokens)
    write_whole(path, serialized({**named_tensors(fetched.layout, fetched.flat), **filled}, metadata))


def about_version(fetched: PublishedModel) -> dict[str, Any]:
    """Which version of which run it is, for the file of this name (ABOUT) in an exported folder."""
    return {
        "run_id": fetched.run_id,
        "version": str(fetched.version),
        "tokens": fetched.tokens,
        "layout_hash": fetched.layout.layout_hash.hex(),
    }


def read_export(path: Path) -> PublishedModel:
    """Read an export back. Raises ConfigError naming the file when it is not an export, or damaged."""
    metadata = _opened(path, lambda file: dict(file.metadata() or {}))
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path} is a safetensors file, but not one that `dips export` wrote")
    try:
        layout = layout_from_json(metadata["layout"])
        length = metadata.get(_SEQUENCE_TOKENS)
        run_id, version, tokens = metadata["run_id"], parse_version(metadata["version"]), int(metadata["tokens"])
        sequence_tokens = None if length is None else int(length)
    except (KeyError, ValueError, Refused, ConfigError) as error:
        raise ConfigError(f"the metadata of export {path} is damaged ({error}): export it again") from error
    if layout.layout_hash.hex() != metadata.get("layout_hash"):
        raise ConfigError(f"the metadata of export {path} does not have the layout's hash: export it again")
    return PublishedModel(run_id, version, tokens, layout, _flat(path, layout), sequence_tokens)


def named_tensors(layout: Layout, flat: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Each parameter in its shape, as a view of the flat vector where that is contiguous."""
    if flat.shape != (layout.n_elems,):
        raise ValueError(f"the vector has shape {flat.shape}, the layout has {layout.n_elems} elements")
    vector = np.ascontiguousarray(flat, dtype=np.float32)
    return {
        span.parameter.name: vector[span.start_elem : span.stop_elem].reshape(span.parameter.shape)
        for span in layout.spans
    }


def serialized(tensors: Mapping[str, NDArray[np.float32] | RawTensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """The bytes of a safetensors file, in parts. Written by hand, because the library's numpy has no bfloat16."""
    raw = {
        name: tensor
        if isinstance(tensor, RawTensor)
        else RawTensor("F32", tensor.shape, np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
        for name, tensor in tensors.items()
    }
    # The widest elements first, as in the library: so each tensor begins at a multiple of its elements' size.
    raw = dict(sorted(raw.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
    return [memoryview(safetensors_header(raw, metadata)), *(tensor.data.data for tensor in raw.values())]


def _flat(path: Path, layout: Layout) -> NDArray[np.float32]:
    def gather(file: Any) -> NDArray[np.float32]:
        names, flat = set(file.keys()), np.empty(layout.n_elems, np.float32)
        for span in layout.spans:
            if span.parameter.name not in names:
                raise ConfigError(f"export {path} lacks tensor {span.parameter.name!r}: export it again")
            tensor = file.get_tensor(span.parameter.name)
            if tensor.shape != span.parameter.shape or tensor.dtype != np.float32:
                raise ConfigError(
                    f"tensor {span.parameter.name!r} of export {path} does not fit its layout: export it again"
                )
            flat[span.start_elem : span.stop_elem] = tensor.reshape(-1)
        return flat

    return _opened(path, gather)


def _opened(path: Path, read: Callable[[Any], T]) -> T:
    try:
        if not path.is_file():
            raise ConfigError(f"there is no model file {path}: write one with `dips export`")
        with safe_open(path, framework="numpy") as file:
            return read(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a safetensors file: {error}") from error


def write_whole(path: Path, parts: Iterable[memoryview]) -> None:
    """Write a file as a whole, for those to read whom the user's umask allows it. Raises ConfigError."""
    try:
        replace_file(path, parts, place="worker.export", opener=by_umask)
    except OSError as error:
        raise ConfigError(f"the export {path} cannot be written: {error.strerror or error}") from error
