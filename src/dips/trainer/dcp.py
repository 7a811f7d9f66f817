"""Exports a version as a torch.distributed.checkpoint: a folder that a model of any parallelism loads.

Tensors have the names, shapes and values of the full model, whatever the clusters' ranks held, as in the other formats.
They are written in pieces, which are made one after the other: so memory is that of the version and of one piece.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from dips.core.layout import PublishedModel
from dips.trainer.export import ABOUT, OF_TORCH, about_version, named_tensors, write_whole
from dips.worker.checkpoint_files import RawTensor

PIECE_BYTES = 64 << 20
"""Of a tensor in one piece, unless one row of its first dimension is larger. Who loads it needs room for a piece."""

_DTYPES: Mapping[str, torch.dtype] = {of_file: getattr(torch, of_torch) for of_torch, of_file in OF_TORCH.items()}


@dataclass(frozen=True)
class CheckpointFolder:
    """A version, and further tensors (`filled`) that are written unchanged."""

    fetched: PublishedModel
    filled: Mapping[str, RawTensor] = field(default_factory=dict)
    piece_bytes: int = PIECE_BYTES

    def write_files(self, folder: Path) -> None:
        """Write it into a folder that is empty. Raises OSError, and ConfigError for the file about the version."""
        tensors = {
            name: RawTensor("F32", values.shape, values.reshape(-1).view(np.uint8))
            for name, values in named_tensors(self.fetched.layout, self.fetched.flat).items()
        }
        state = {name: _Pieces(tensor, self.piece_bytes) for name, tensor in {**tensors, **self.filled}.items()}
        # One thread, and no reading ahead: a piece is written before the next one is asked for.
        writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # only read
                save(cast(dict[str, Any], state), storage_writer=writer, planner=_Planner())
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, OSError):
                    raise cause from error
            raise RuntimeError(f"the checkpoint could not be written: {error}") from error
        n_bytes = sum(file.stat().st_size for file in folder.glob("*.distcp"))
        if n_bytes < (least := sum(pieces.n_bytes for pieces in state.values())):
            raise RuntimeError(f"the checkpoint has {n_bytes} bytes, and its tensors have {least}")
        text = json.dumps(about_version(self.fetched), indent=2) + "\n"
        write_whole(folder / ABOUT, [memoryview(text.encode())])


class _Planner(DefaultSavePlanner):
    """Makes a piece when torch asks for it, and frees the one before it.

    That one is written by then, but torch's writer would keep one piece of each tensor until its file is complete.
    """

    _last: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        pieces = self.state_dict[index.fqn]
        assert isinstance(pieces, _Pieces)
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        self._last = pieces.take(index)
        return self._last


class _Pieces:
    """A tensor as torch.distributed.checkpoint asks for it: which pieces there are, and then one after the other."""

    def __init__(self, tensor: RawTensor, piece_bytes: int) -> None:
        self._tensor = tensor
        self._dtype = _DTYPES[tensor.dtype]
        n_rows = tensor.shape[0] if tensor.shape else 1
        self._row_bytes = tensor.data.nbytes // n_rows if n_rows else 0
        self._rows = max(1, piece_bytes // self._row_bytes) if self._row_bytes else max(1, n_rows)
        self._n_rows = n_rows
        self.n_bytes = tensor.data.nbytes

    def __create_write_items__(self, fqn: str, pieces: object) -> list[WriteItem]:
        """Its place in the checkpoint; called by torch."""
        size = torch.Size(self._tensor.shape)
        properties = TensorProperties(dtype=self._dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, offsets, index),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, size),
            )
            for index, (offsets, sizes) in enumerate(self._boxes())
        ]

    def take(self, index: MetadataIndex) -> torch.Tensor:
        """A copy with memory of its own, which can be freed."""
        begin = index.offset[0] if index.offset else 0
        rows = min(self._rows, self._n_rows - begin)
        taken = self._tensor.data[begin * self._row_bytes : (begin + rows) * self._row_bytes]
        copy = torch.empty(taken.size, dtype=torch.uint8)
        copy.copy_(torch.from_numpy(taken))  # (what numpy has seen as its own cannot be freed)
        return copy.view(self._dtype).view((rows, *self._tensor.shape[1:]) if self._tensor.shape else ())

    def _boxes(self) -> Iterator[tuple[torch.Size, torch.Size]]:
        """Start and size of each piece."""
        shape = self._tensor.shape
        if not shape or not math.prod(shape):
            yield torch.Size([0] * len(shape)), torch.Size(shape)
            return
        for begin in range(0, self._n_rows, self._rows):
            rows = min(self._rows, self._n_rows - begin)
            yield torch.Size([begin] + [0] * (len(shape) - 1)), torch.Size([rows, *shape[1:]])
