"""Exports a version as one file: named float32 tensors in safetensors format, with their origin in its metadata.

Works for any layout, also for the user's own models, and without torch. Never leaves an incomplete file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dips.core.errors import ConfigError, Refused
from dips.core.ids import Version, parse_version
from dips.core.layout import FLOAT32_BYTES, Layout, layout_from_json
from dips.core.observe.failpoints import failpoint
from dips.worker.checkpoint_file import ITEM_BYTES, RawTensor

FORMAT = "dips-export-1"
_SEQUENCE_TOKENS = "sequence_tokens"
T = TypeVar("T")


class Fetched(Protocol):
    """The version to export, as worker/reader.py fetches it. flat: (layout.n_elems,) float32."""

    @property
    def run_id(self) -> str: ...
    @property
    def version(self) -> Version: ...
    @property
    def tokens(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def flat(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Exported:
    """Content of an export. flat: (layout.n_elems,) float32. sequence_tokens: as the model was trained, if known."""

    run_id: str
    version: Version
    tokens: int
    layout: Layout
    flat: NDArray[np.float32]
    sequence_tokens: int | None = None


def export_model(
    fetched: Fetched,
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


def read_export(path: Path) -> Exported:
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
    return Exported(run_id, version, tokens, layout, _flat(path, layout), sequence_tokens)


def named_tensors(layout: Layout, flat: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Each parameter in its shape, as a view of the flat vector where that is contiguous."""
    if flat.shape != (layout.n_elems,):
        raise ValueError(f"the vector has shape {flat.shape}, the layout has {layout.n_elems} elements")
    vector = np.ascontiguousarray(flat, dtype=np.float32)
    return {
        span.parameter.name: vector[span.start_elem : span.stop_elem].reshape(span.parameter.shape)
        for span in layout.spans
    }


def serialized(tensors: Mapping[str, NDArray[np.float32] | RawTensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file. Written by hand, because the library's numpy has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts: list[memoryview] = []
    stop = 0
    # The widest elements first, as in the library: so each tensor begins at a multiple of its elements' size.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item_bytes(item[1])):
        data = tensor.data if isinstance(tensor, RawTensor) else np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        dtype = tensor.dtype if isinstance(tensor, RawTensor) else "F32"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [stop, stop + data.nbytes]}
        parts.append(data.data)
        stop += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-len(text) % 8 + len(text))
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def item_bytes(tensor: NDArray[np.float32] | RawTensor) -> int:
    """Bytes of one element."""
    return ITEM_BYTES[tensor.dtype] if isinstance(tensor, RawTensor) else FLOAT32_BYTES


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
    if not path.is_file():
        raise ConfigError(f"there is no model file {path}: write one with `dips export`")
    try:
        with safe_open(path, framework="numpy") as file:
            return read(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a safetensors file: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as a whole: temporary file next to it, fsync, rename, fsync of the folder. Raises ConfigError."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        failpoint("worker.export.before_rename")
        os.replace(temporary, path)
        _fsync_folder(path.parent)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise ConfigError(f"the export {path} cannot be written: {error.strerror or error}") from error


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        failpoint("worker.export.before_directory_fsync")
        os.fsync(handle)
    finally:
        os.close(handle)
