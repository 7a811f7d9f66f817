"""Writes and reads the tensors of a checkpoint of several ranks, in torch.distributed.checkpoint's format.

A tensor has a global name and shape; of it each rank writes boxes, to one file of its own. Any ranks read any boxes, so
that another number of ranks, or another parallelism, goes on from what these have written. `.metadata`, and what
torch.save() puts around the elements, are pickles for torch's own tools (dcp.load, dcp_to_torch_save). Nothing here
reads them: the manifest says as JSON where the elements are.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.errors import ConfigError
from dips.core.layout import Share
from dips.worker.checkpoint_files import (
    INNER,
    CheckpointError,
    CheckpointStamp,
    Manifest,
    RawTensor,
    check_file,
    file_of_one,
    folder_of_ranks,
    places_of,
    write_durably,
)
from dips.worker.parallel.held import Box, part_of, pieces_of
from dips.worker.parameters import ParameterStore
from dips.worker.torch_state import TORCH_DTYPES, raw_of
from dips.worker.vectors import Vectors

if TYPE_CHECKING:  # it takes seconds to import, which only those wait for who keep checkpoints
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import ReadItem

F32 = NDArray[np.float32]

PIECE_BYTES = 64 << 20
"""About the most that is written or read at once; a larger box is cut."""

_VECTOR = "vectors."
"""Prefix of the names of the flat vectors."""

_FILE = re.compile(r"__\d+_0\.distcp\Z")


class Shard(NamedTuple):
    """A box of a global tensor, and the memory that has its elements; tensor: of box.sizes."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """A tensor of which no one else has a part."""
    return Shard(name, tuple(tensor.shape), Box.whole(tensor.shape), tensor)


# ---- writing ---------------------------------------------------------------------------------------------------------


class SavedBox(NamedTuple):
    """Where a box of a tensor is: from `offset`, in n_bytes, as torch.save() wrote it, and from data_offset its bare
    elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int
    n_bytes: int
    data_offset: int

    @property
    def data_bytes(self) -> int:
        return self.box.n_elems * _dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ShardFile:
    """One rank's file of a checkpoint, or the file of a cluster of one process."""

    name: str
    stamp: CheckpointStamp
    boxes: tuple[SavedBox, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [[e.name, e.dtype, e.shape, *e.box, e.offset, e.n_bytes, e.data_offset] for e in self.boxes]
        return {"file": self.name, "n_bytes": self.stamp.n_bytes, "xxh3_128": self.stamp.xxh3_128, "boxes": rows}

    @classmethod
    def from_json(cls, raw: Any) -> ShardFile:
        """Raises CheckpointError for what to_json() cannot have returned."""
        try:
            stamp = CheckpointStamp(int(raw["n_bytes"]), str(raw["xxh3_128"]))
            name, boxes = str(raw["file"]), tuple(map(_saved_box, raw["boxes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"its manifest does not describe the files of its ranks ({error})") from error
        if not _FILE.match(name):
            raise CheckpointError(f"its manifest names {name!r}, which is no file of a rank")
        for each in boxes:
            begin, end = each.data_offset, each.data_offset + each.data_bytes
            if not 0 <= each.offset <= begin <= end <= each.offset + each.n_bytes <= stamp.n_bytes:
                raise CheckpointError(f"its manifest says that {each.name!r} is where {name} does not have it")
        return cls(name, stamp, boxes)

    @classmethod
    def of_one_process(cls, path: Path, stamp: CheckpointStamp, names: Callable[[str], str]) -> ShardFile:
        """Of a file in safetensors' format, by its header. names: of a tensor in the file -> here. Raises
        CheckpointError.
        """
        boxes = []
        for name, dtype, shape, place in places_of(path, stamp.n_bytes):
            box, kind = Box.whole(shape), str(TORCH_DTYPES[dtype]).removeprefix("torch.")
            n_bytes = box.n_elems * TORCH_DTYPES[dtype].itemsize
            boxes.append(SavedBox(names(name), kind, shape, box, place, n_bytes, place))
        return cls(path.name, stamp, tuple(boxes))


def _saved_box(row: Any) -> SavedBox:
    name, dtype, shape, starts, sizes, offset, n_bytes, data_offset = row
    box = Box(tuple(map(int, starts)), tuple(map(int, sizes)))
    shape = tuple(map(int, shape))
    fits = len(shape) == len(box.starts) == len(box.sizes) and all(
        0 <= start and 0 < size and start + size <= extent for start, size, extent in zip(*box, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"a box of {name!r} is not in it")
    _dtype(dtype)
    return SavedBox(str(name), dtype, shape, box, int(offset), int(n_bytes), int(data_offset))


def write_shards(folder: Path, rank: int, shards: Iterable[Shard]) -> ShardFile:
    """Write one rank's file, and make it durable. shards: on the host, none empty. Raises OSError."""
    boxes: list[SavedBox] = []
    path = folder / f"__{rank}_0.distcp"
    return ShardFile(path.name, write_durably(path, saved_bytes(shards, boxes)), tuple(boxes))


def saved_bytes(shards: Iterable[Shard], boxes: list[SavedBox]) -> Iterator[memoryview]:
    """The bytes of one rank's file, piece by piece. boxes: gets a row for each piece."""
    offset = 0
    for shard in shards:
        for piece in pieces_of(shard.box, PIECE_BYTES // shard.tensor.element_size()):
            tensor = part_of(shard.tensor, shard.box, piece)
            if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
                tensor = tensor.contiguous().clone()  # torch.save() writes all of a view's memory
            saved = io.BytesIO()
            torch.save(tensor, saved)
            data = saved.getbuffer()
            dtype = str(tensor.dtype).removeprefix("torch.")
            # Where the elements are in what torch.save() wrote of one tensor: a zip archive that is not compressed.
            with zipfile.ZipFile(saved) as archive:
                (entry,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
            assert entry.compress_type == zipfile.ZIP_STORED, "torch compresses nothing"
            n_name, n_more = struct.unpack_from("<HH", saved.getbuffer(), entry.header_offset + 26)
            data_offset = offset + (entry.header_offset + 30 + int(n_name) + int(n_more))
            boxes.append(SavedBox(shard.name, dtype, shard.shape, piece, offset, data.nbytes, data_offset))
            offset += data.nbytes
            yield data


def write_metadata(folder: Path, files: Sequence[ShardFile]) -> None:
    """Write what torch.distributed.checkpoint's own reader begins with. Raises OSError."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    found: dict[str, TensorStorageMetadata] = {}
    places: list[WriteResult] = []
    for file in files:
        for each in file.boxes:
            tensor = found.setdefault(each.name, _tensor_metadata(each, []))
            index = MetadataIndex(each.name, each.box.starts, len(tensor.chunks))
            tensor.chunks.append(_chunk(each.box))
            places.append(WriteResult(index, each.n_bytes, _StorageInfo(file.name, each.offset, each.n_bytes)))
    FileSystemWriter(folder).finish(Metadata(dict(found)), [places])


def _tensor_metadata(of: SavedBox, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    return TensorStorageMetadata(TensorProperties(dtype=_dtype(of.dtype)), torch.Size(of.shape), chunks)


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.starts), torch.Size(box.sizes))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of elements that torch {torch.__version__} has")
    return dtype


# ---- reading ---------------------------------------------------------------------------------------------------------


class SavedShards:
    """The tensors of a checkpoint of several ranks."""

    def __init__(self, folder: Path, files: Sequence[ShardFile]) -> None:
        """Raises CheckpointError where two boxes of one tensor are of different tensors."""
        self._folder = folder
        self._files = files
        self._boxes: dict[str, list[tuple[SavedBox, ShardFile]]] = {}
        for file in files:
            for each in file.boxes:
                others = self._boxes.setdefault(each.name, [])
                if others and (others[0][0].shape, others[0][0].dtype) != (each.shape, each.dtype):
                    raise CheckpointError(f"its manifest has two shapes or types of {each.name!r}")
                others.append((each, file))

    def with_names(self, names: Mapping[str, str]) -> SavedShards:
        """The same tensors; those of a model's tensor that `names` has, also under the name that it says."""
        if not names:
            return self
        other = SavedShards(self._folder, self._files)
        for name, boxes in self._boxes.items():
            kind, _, of_model = name.partition(".")
            key = ""
            if of_model not in names:  # of an optimizer's state the last part says what it is
                of_model, _, key = of_model.rpartition(".")
            if of_model in names:
                other._boxes.setdefault(".".join(filter(None, (kind, names[of_model], key))), boxes)
        return other

    def check(self, first: int = 0, step: int = 1) -> None:
        """Read every step-th file and compare it with what was written. Raises CheckpointError."""
        for file in self._files[first::step]:
            check_file(self._folder / file.name, file.stamp)

    def __contains__(self, name: str) -> bool:
        return name in self._boxes

    def dtype_of(self, name: str) -> torch.dtype:
        """Raises CheckpointError for a tensor that is not here."""
        return _dtype(self._of(name)[0][0].dtype)

    def read_whole(self, name: str) -> torch.Tensor:
        """All of a tensor, on the host."""
        tensor = torch.empty(self._of(name)[0][0].shape, dtype=self.dtype_of(name))
        self.read([whole(name, tensor)])
        return tensor

    def read_state(self) -> dict[str, RawTensor]:
        """All tensors but the flat vectors."""
        return {name: raw_of(self.read_whole(name)) for name in self._boxes if not name.startswith(_VECTOR)}

    def read(self, shards: Sequence[Shard], *, partly: bool = False) -> None:
        """Fill the memory of boxes of one tensor. partly: elements that no rank has written stay as they are.

        Raises CheckpointError where not all of them was written, and for another shape.
        """
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        shards = [shard for shard in shards if shard.box.n_elems]
        if not shards:
            return
        name, saved = shards[0].name, self._of(shards[0].name)
        if saved[0][0].shape != shards[0].shape:
            raise CheckpointError(
                f"it holds {name!r} of shape {list(saved[0][0].shape)}, and here it is {list(shards[0].shape)}"
            )
        metadata = _tensor_metadata(saved[0][0], [_chunk(each.box) for each, _ in saved])
        items = create_read_items_for_chunk_list(name, metadata, [_chunk(shard.box) for shard in shards])
        n_read = sum(math.prod(item.lengths) for item in items)
        if not partly and n_read != sum(shard.box.n_elems for shard in shards):
            raise CheckpointError(f"it does not hold all elements of {name!r}")
        for number, from_one in itertools.groupby(sorted(items, key=_source), _source):
            tensor = self._load(*saved[number])
            for item in from_one:
                shard = shards[_number(item.dest_index)]
                target = shard.tensor[_slices(item.dest_offsets, item.lengths)]
                with torch.no_grad():
                    target.copy_(tensor[_slices(item.storage_offsets, item.lengths)])

    def _of(self, name: str) -> list[tuple[SavedBox, ShardFile]]:
        if name not in self._boxes:
            raise CheckpointError(f"it does not hold {name!r}")
        return self._boxes[name]

    def _load(self, saved: SavedBox, file: ShardFile) -> torch.Tensor:
        """Only what is used of it is read from the disk."""
        try:
            data = np.memmap(self._folder / file.name, np.uint8, "c", saved.data_offset, saved.data_bytes)
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{file.name} ends early: it is torn") from error
        return torch.from_numpy(data).view(_dtype(saved.dtype)).view(saved.box.sizes)


def _number(index: MetadataIndex) -> int:
    assert index.index is not None, "the planner numbers them"
    return index.index


def _source(item: ReadItem) -> int:
    return _number(item.storage_index)


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def boxes_of(name: str, vector: F32, share: Share, n_elems: int) -> list[Shard]:
    """A share's vector as boxes of the whole one, of n_elems elements."""
    whole = torch.from_numpy(vector)
    return [
        Shard(_VECTOR + name, (n_elems,), Box((start,), (stop - start,)), whole[place : place + stop - start])
        for (start, stop), place in zip(share.runs(), share.places.tolist(), strict=True)
    ]


def _read_vector(saved: SavedShards, name: str, share: Share, n_elems: int) -> F32 | None:
    """None: the checkpoint has no such vector. Raises CheckpointError where it is of another model."""
    if _VECTOR + name not in saved:
        return None
    vector = np.zeros(share.n_elems, np.float32)
    saved.read(boxes_of(name, vector, share, n_elems))
    return vector


def restore_vectors(vectors: Vectors, saved: SavedShards, share: Share, n_elems: int, *, with_residual: bool) -> None:
    """Make a checkpoint's vectors those of this process. Raises CheckpointError for what cannot be read."""
    base = _read_vector(saved, "theta_base", share, n_elems)
    if base is None:
        raise CheckpointError("it does not hold theta_base")
    residual = _read_vector(saved, "residual", share, n_elems) if with_residual else None
    at_push, installed = _read_vector(saved, "theta_at_push", share, n_elems), None
    if _VECTOR + "theta_installed" in saved:
        # Ranks that own no parameter in fewer bits have not written theirs, and nothing reads those elements.
        installed = base.copy()
        saved.read(boxes_of("theta_installed", installed, share, n_elems), partly=True)
    vectors.restore(base, at_push, residual, installed)


class FoundCheckpoint:
    """A checkpoint of any form, of which every byte is as it was written."""

    def __init__(self, directory: Path, manifest: Manifest, first: int = 0, step: int = 1) -> None:
        """Reads every step-th file, and compares it with what was written. Raises CheckpointError."""
        self.manifest = manifest
        self._directory = directory
        files, number = manifest.files_of_ranks, manifest.number
        if files is None:

            def name_of(in_file: str) -> str:
                return in_file.removeprefix(INNER) if in_file.startswith(INNER) else _VECTOR + in_file

            one = ShardFile.of_one_process(file_of_one(directory, number), manifest.stamp, name_of)
            self.saved = SavedShards(directory, [one])
        else:
            self.saved = SavedShards(folder_of_ranks(directory, number), [ShardFile.from_json(raw) for raw in files])
        self.saved.check(first, step)

    def put_back(
        self,
        parameters: ParameterStore | None,
        vectors: Vectors,
        share: Share,
        n_elems: int,
        restore: Callable[[Any, SavedShards], None] | None,
        *,
        with_residual: bool,
    ) -> None:
        """Make it the state of this process, which has a share of a model of n_elems; on all ranks together.
        parameters, restore (InnerState.restore()): None: they stay as they are. Raises ConfigError where it does not
        fit.
        """
        saved = self.saved
        try:
            if parameters is not None:
                theta = _read_vector(saved, "theta", share, n_elems)
                if theta is None:
                    raise CheckpointError("it does not hold theta")
                parameters.install(theta)
            restore_vectors(vectors, saved, share, n_elems, with_residual=with_residual)
            if restore is not None:
                restore(self.manifest.content.get("state"), saved)
        except CheckpointError as error:
            raise ConfigError(
                f"checkpoint {self.manifest.number} in {self._directory} does not fit this cluster ({error}): remove it"
            ) from error
