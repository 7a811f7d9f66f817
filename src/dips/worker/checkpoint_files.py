"""A directory of checkpoints: the files of one, written whole, and the newest few of them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dips.core.errors import DipsError, option
from dips.core.files import TEMPORARY, FolderLock, make_folder, replace_file, sync_folder
from dips.core.observe.failpoints import failpoint
from dips.worker.state.effects import PushRecord
from dips.worker.state.saved import SavedStateError, push_from_json, push_to_json

# ---- checkpoint file -------------------------------------------------------------------------------------------------
#
# Reads and writes a checkpoint's files: tensors in safetensors' format, and small JSON records with a checksum.
#
# Each is written whole under a temporary name, flushed, renamed, and its directory flushed, so that a crash at any
# point leaves the old file or the complete new one. The tensors' format is safetensors' own (8-byte
# length, JSON header, raw tensors), written by hand because the library copies every tensor and never flushes. Never
# reads a byte that it does not check.


IO_BYTES = 4 << 20
"""Size of one read, or of what is hashed and written at once: large enough for the disk, small enough for the cache."""

MAX_HEADER_BYTES = 64 << 20
"""Largest header. It takes about 100 bytes for each tensor, so this allows some hundred thousand of them."""

ITEM_BYTES: Mapping[str, int] = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8},
}
"""safetensors' names of element types, and their sizes."""

INNER = "state."
"""Prefix of the names of the inner state's tensors in the file of one process; the flat vectors have none."""

ByteArray = NDArray[np.uint8]


class CheckpointError(DipsError):
    """A file of a checkpoint is damaged or not as it was written; the sentence says how."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor's bytes, little-endian and contiguous."""

    dtype: str  # a name of ITEM_BYTES
    shape: tuple[int, ...]
    data: ByteArray

    def __post_init__(self) -> None:
        assert self.data.nbytes == math.prod(self.shape) * ITEM_BYTES[self.dtype], "as many bytes as the shape says"


@dataclass(frozen=True)
class CheckpointStamp:
    """Identifies a file as it was written: its length, and xxh3-128 of all its bytes."""

    n_bytes: int
    xxh3_128: str


# ---- tensors ----


def write_tensors(path: Path, tensors: Mapping[str, RawTensor]) -> CheckpointStamp:
    """Write all tensors to one file. Raises OSError and then leaves an old file unchanged."""
    header = safetensors_header(tensors, {"format": "dips-checkpoint-1"})
    return write_durably(path, [memoryview(header), *(tensor.data.data for tensor in tensors.values())])


def places_of(path: Path, n_bytes: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, shape and place in the file of each of its tensors; n_bytes: of the file. Reads its header alone.
    Raises CheckpointError.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, n_bytes):
                raise CheckpointError(f"{path.name} does not begin as a file of tensors does")
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    rows, place = [], 8 + len(header)
    for name, dtype, shape in _described(path, header, n_bytes - place):
        rows.append((name, dtype, shape, place))
        place += math.prod(shape) * ITEM_BYTES[dtype]
    return rows


def check_file(path: Path, stamp: CheckpointStamp) -> None:
    """Read a file and compare every byte of it. Raises CheckpointError when it is not the one that was stamped."""
    whole, n_bytes = xxhash.xxh3_128(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(IO_BYTES):
                whole.update(piece)
                n_bytes += len(piece)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if n_bytes != stamp.n_bytes:
        raise CheckpointError(f"{path.name} has {n_bytes} bytes, {stamp.n_bytes} were written: it is torn")
    if whole.hexdigest() != stamp.xxh3_128:
        raise CheckpointError(f"{path.name}: its bytes are not those that were written")


def safetensors_header(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file of these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _described(path: Path, header: bytes, n_bytes: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor; they must fill the file, or nothing is allocated for them."""
    try:
        rows = {name: row for name, row in json.loads(header).items() if name != "__metadata__"}
        found = [(name, str(row["dtype"]), tuple(map(int, row["shape"]))) for name, row in rows.items()]
        sizes = [math.prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in found]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its header cannot be read ({error})") from error
    if sum(sizes) != n_bytes or any(size < 0 for size in sizes):
        raise CheckpointError(f"{path.name}: its header says {sum(sizes)} bytes, there are {n_bytes}")
    return found


# ---- records ----


def write_record(path: Path, body: Mapping[str, Any]) -> None:
    """Write a JSON record with the checksum of its body. Raises OSError and then leaves an old file unchanged."""
    text = _canonical(body)
    record = json.dumps({"body": body, "xxh3_128": xxhash.xxh3_128_hexdigest(text)}, allow_nan=False)
    write_durably(path, [memoryview(record.encode())])


def read_record(path: Path) -> dict[str, Any]:
    """The body of a record. Raises CheckpointError when it cannot be read or is not what was written."""
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: it is torn or was changed") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("body"), dict):
        raise CheckpointError(f"{path.name} is not a record of a checkpoint")
    body: dict[str, Any] = raw["body"]
    try:
        digest = xxhash.xxh3_128_hexdigest(_canonical(body))
    except (ValueError, RecursionError):
        digest = None  # Python's reader accepts infinities and surrogates, which are never written
    if digest is None or digest != raw.get("xxh3_128"):
        raise CheckpointError(f"{path.name}: its content is not what was written")
    return body


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# ---- durable writes ----


def write_durably(path: Path, parts: Iterable[memoryview]) -> CheckpointStamp:
    """Replace a file as a whole. Raises OSError; the file is then the old one or the complete new one."""
    hasher, total = xxhash.xxh3_128(), 0

    def pieces() -> Iterator[memoryview]:
        nonlocal total
        for part in parts:
            for begin in range(0, part.nbytes, IO_BYTES):
                piece = part[begin : begin + IO_BYTES]
                hasher.update(piece)
                total += piece.nbytes
                yield piece

    replace_file(path, pieces(), place="worker.checkpoint")
    return CheckpointStamp(total, hasher.hexdigest())


# ---- checkpoint store ------------------------------------------------------------------------------------------------


FORMAT = "dips-checkpoint-1"
_LOCK = "lock"
_PUSH = "push.json"
_FOLDER = "ranks"
_NAME = re.compile(r"checkpoint-(\d{8,})\.(json|safetensors|ranks)\Z")


@dataclass(frozen=True)
class Manifest:
    """What is said of a checkpoint by its last file, whose presence makes it one.

    content: the writer's JSON. stored: of its tensors' file, or, of several ranks, those of their folder.
    """

    number: int
    content: Mapping[str, Any]
    stored: Mapping[str, Any]

    @property
    def is_by_names(self) -> bool:
        """Whether state is kept by names of the full model, so that any number of ranks goes on from it."""
        state = self.content.get("state")
        return self.files_of_ranks is not None or (isinstance(state, dict) and "parts" in state)

    @property
    def stamp(self) -> CheckpointStamp:
        """Of the file of one process. Raises CheckpointError."""
        if not isinstance(self.stored.get("n_bytes"), int):
            raise CheckpointError("its manifest does not describe its tensors")
        return CheckpointStamp(self.stored["n_bytes"], str(self.stored.get("xxh3_128")))

    @property
    def files_of_ranks(self) -> Sequence[Any] | None:
        """What several ranks have written, file by file; None: one process has written it."""
        files = self.stored.get("files_of_ranks")
        return files if isinstance(files, list) else None


def read_manifest(directory: Path, number: int) -> Manifest:
    """Raises CheckpointError when it cannot be read or is not what was written."""
    body = read_record(_path(directory, number, "json"))
    content, stored = body.get("content"), body.get("tensors")
    if body.get("format") != FORMAT or not isinstance(content, dict):
        raise CheckpointError(f"it is of the form {body.get('format')!r}, this release reads {FORMAT!r}")
    if not isinstance(stored, dict):
        raise CheckpointError("its manifest does not describe its tensors")
    return Manifest(number, content, stored)


def folder_of_ranks(directory: Path, number: int) -> Path:
    """Where several ranks write the tensors of a checkpoint."""
    return _path(directory, number, _FOLDER)


def file_of_one(directory: Path, number: int) -> Path:
    """Where one process writes them."""
    return _path(directory, number, "safetensors")


def _path(directory: Path, number: int, kind: str) -> Path:
    return directory / f"checkpoint-{number:08d}.{kind}"


class CheckpointStore:
    """The directory; made if it is not there. Only record_push() may be called by several threads."""

    def __init__(self, directory: Path, kept: int) -> None:
        """kept: checkpoints to keep. Raises ConfigError when another process uses the directory, or it is unusable."""
        self.directory = directory
        self._kept = kept
        self._lock = FolderLock(
            directory,
            _LOCK,
            unusable=f"checkpoints cannot be kept in {directory}: {{why}}; give another {option('checkpoint_dir')}",
            held=f"another process ({{holder}}) keeps its checkpoints in {directory}: end it first, or give each "
            f"cluster a {option('checkpoint_dir')} of its own",
            of_process=True,
        )
        # A crash leaves temporary files, and tensors without a manifest.
        numbers = set(self.numbers())
        started = {*self._named("safetensors"), *self._named(_FOLDER)}
        self._next = max([0, *numbers, *started]) + 1
        for path in directory.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                path.unlink()
        for number in started - numbers:
            self._remove(number)

    def close(self) -> None:
        """Unlock the directory. May be called twice."""
        self._lock.release()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def numbers(self) -> list[int]:
        """The checkpoints that have a manifest, oldest first."""
        return self._named("json")

    # ---- writing ----

    def write(self, content: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> Manifest:
        """Make a checkpoint durable, and remove those beyond the kept ones. Raises OSError; older ones then stay."""
        number = self._next
        self._next += 1
        data = file_of_one(self.directory, number)
        try:
            stamp = write_tensors(data, tensors)
            described = {"file": data.name, "n_bytes": stamp.n_bytes, "xxh3_128": stamp.xxh3_128}
            body = {"format": FORMAT, "number": number, "content": content, "tensors": described}
            failpoint("worker.checkpoint.before_manifest")
            write_record(self._path(number, "json"), body)
        except OSError:
            self._remove(number)  # tensors alone would only take space, on a full disk
            raise
        self._prune()
        return Manifest(number, content, described)

    def begin_folder(self) -> int:
        """Make the folder in which several ranks will write; returns the number of their checkpoint. Raises OSError."""
        number = self._next
        self._next += 1
        make_folder(folder_of_ranks(self.directory, number))
        return number

    def commit_folder(self, number: int, content: Mapping[str, Any], files: Sequence[Any]) -> None:
        """Make what all ranks have written the newest checkpoint; files: of each rank, as Manifest.files_of_ranks will
        return them. Raises OSError, and then there is none of this number.
        """
        body = {"format": FORMAT, "number": number, "content": content, "tensors": {"files_of_ranks": list(files)}}
        try:
            sync_folder(folder_of_ranks(self.directory, number), "worker")
            sync_folder(self.directory, "worker")
            failpoint("worker.checkpoint.before_manifest")
            write_record(self._path(number, "json"), body)
        except OSError:
            self._remove(number)
            raise
        self._prune()

    def drop_folder(self, number: int) -> None:
        """Remove what ranks have begun to write."""
        self._remove(number)

    def record_push(self, record: PushRecord) -> None:
        """Make the newest push's record durable, replacing the one before. Raises OSError."""
        failpoint("worker.push_record.before_write")
        write_record(self.directory / _PUSH, {"format": FORMAT, "push": push_to_json(record)})
        failpoint("worker.push_record.after_write")

    # ---- reading ----

    def manifests(self, label: str | None = None) -> Iterator[Manifest | str]:
        """What is said of each checkpoint, newest first; a sentence in place of what cannot be read. label: only those
        whose content has this `label`; None: any.
        """
        for number in reversed(self.numbers()):
            try:
                manifest = read_manifest(self.directory, number)
            except (CheckpointError, MemoryError) as error:
                yield self.cannot_be_used(number, error)
                continue
            if label is None or manifest.content.get("label") == label:
                yield manifest

    def cannot_be_used(self, number: int, why: object) -> str:
        """The sentence about it."""
        return f"checkpoint {number} in {self.directory} cannot be used: {why}"

    def newest_push(self) -> tuple[PushRecord | None, str]:
        """The push that was recorded last; None with a sentence when its record cannot be used."""
        path = self.directory / _PUSH
        if not path.exists():
            return None, ""
        try:
            return push_from_json(read_record(path).get("push")), ""
        except (CheckpointError, SavedStateError) as error:
            return None, f"the record of the last push in {self.directory} cannot be used: {error}"

    # ---- removing files ----

    def _path(self, number: int, kind: str) -> Path:
        return _path(self.directory, number, kind)

    def _prune(self) -> None:
        failpoint("worker.checkpoint.before_prune")
        for old in self.numbers()[: -self._kept]:
            self._remove(old)

    def _named(self, kind: str) -> list[int]:
        matches = (_NAME.match(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match and match[2] == kind)

    def _remove(self, number: int) -> None:
        """Remove a checkpoint, its manifest first, so that none is left without its tensors. Errors are ignored."""
        with contextlib.suppress(OSError):
            for kind in ("json", "safetensors"):
                self._path(number, kind).unlink(missing_ok=True)
            shutil.rmtree(folder_of_ranks(self.directory, number), ignore_errors=True)
