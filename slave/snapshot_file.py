"""One snapshot file: theta and momentum as safetensors, written so that a crash leaves a whole file or none.

The format is safetensors' own (8-byte length, JSON header, raw tensors; any safetensors reader opens it),
written by hand because the library copies every tensor and never fsyncs. Nothing here decides what to keep.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dips.core.errors import DipsError
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave.memory import F32, bytes_of

IO_BYTES = 4 << 20
"""Read and written in pieces of this size: large enough for the disk, small enough for the cache."""

MAX_HEADER_BYTES = 1 << 20
TENSORS = ("theta", "momentum")
_HASHES = ("layout_hash", "placement_hash", "digest")


class SnapshotError(DipsError):
    """A snapshot file or manifest is not what was written; the sentence says how."""


@dataclass(frozen=True)
class FileStamp:
    """What proves that a file is the one that was written: length and xxh3-128 of all its bytes."""

    n_bytes: int
    xxh3_128: str


def write_snapshot(path: Path, info: SnapshotInfo, theta: F32, momentum: F32, run_id: str, slave_id: str) -> FileStamp:
    """Write, fsync and rename into place. theta, momentum: (n,) float32. Raises OSError, leaving no file behind."""
    header = _header(info, {"theta": theta, "momentum": momentum}, run_id, slave_id)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        stamp = _write_parts(temporary, [header, bytes_of(theta), bytes_of(momentum)])
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError:
        for leftover in (temporary, path):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise
    return stamp


def read_snapshot(path: Path, theta: F32, momentum: F32) -> FileStamp:
    """Read both tensors into the arrays given, checking each against the header's checksum.

    Raises SnapshotError when the file is torn, altered or of another length; OSError when it cannot be read.
    """
    return _read(path, {"theta": bytes_of(theta), "momentum": bytes_of(momentum)})


def verify_snapshot(path: Path) -> tuple[SnapshotInfo, Mapping[str, str], FileStamp]:
    """Read the whole file and check it. Returns what it is, its metadata and stamp. Raises as read_snapshot."""
    metadata = _metadata(path)
    stamp = _read(path, None)
    return _info(path, metadata), metadata, stamp


def fsync_directory(directory: Path) -> None:
    """Make names durable: a rename is not until its directory is synced."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file as a whole: temporary file, fsync, rename, fsync of the directory. Raises OSError."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        _write_parts(temporary, [memoryview(data)])
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def _write_parts(path: Path, parts: list[memoryview]) -> FileStamp:
    hasher, total = xxhash.xxh3_128(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            for begin in range(0, len(part), IO_BYTES):
                piece = part[begin : begin + IO_BYTES]
                hasher.update(piece)
                total += len(piece)
                while piece:
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileStamp(total, hasher.hexdigest())


def _header(info: SnapshotInfo, tensors: Mapping[str, F32], run_id: str, slave_id: str) -> memoryview:
    metadata = {
        "format": "dips-snapshot-1",
        "run_id": run_id,
        "slave_id": slave_id,
        "version": f"{info.version.timeline}:{info.version.v}",
        "round": f"{info.round.epoch}.{info.round.n}",
        "layout_hash": info.layout_hash.hex(),
        "placement_hash": info.placement_hash.hex(),
        "digest": info.digest.hex(),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, tensor in tensors.items():
        metadata[f"xxh3_128_{name}"] = xxhash.xxh3_128_hexdigest(bytes_of(tensor))
        stop = start + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": [tensor.size], "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _read_header(path: Path, file: Any) -> tuple[dict[str, Any], bytes]:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise SnapshotError(f"{path} does not begin as a snapshot does")
    text = file.read(length)
    try:
        header = json.loads(text)
        begins = [header[name]["data_offsets"][0] for name in TENSORS]
        ends = [header[name]["data_offsets"][1] for name in TENSORS]
        size = file.seek(0, os.SEEK_END)
        file.seek(8 + length)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SnapshotError(f"{path}: its header cannot be read: {error}") from error
    if begins[0] != 0 or begins[1] != ends[0] or size != 8 + length + ends[1]:
        raise SnapshotError(f"{path} has {size} bytes, its header speaks of {8 + length + ends[1]}: it is torn")
    return header, prefix + text


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        header, _ = _read_header(path, file)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != "dips-snapshot-1":
        raise SnapshotError(f"{path} is not a snapshot of this release")
    return metadata


def _read(path: Path, into: Mapping[str, memoryview] | None) -> FileStamp:
    """One pass over the file: hash all of it and each tensor, and fill `into` if given."""
    with path.open("rb", buffering=0) as file:
        header, prefix = _read_header(path, file)
        whole = xxhash.xxh3_128(prefix)
        scratch = memoryview(bytearray(IO_BYTES))
        total = len(prefix)
        for name in TENSORS:
            begin, end = header[name]["data_offsets"]
            target = into[name] if into is not None else None
            if target is not None and len(target) != end - begin:
                raise SnapshotError(f"{path}: {name} has {end - begin} bytes, this slave's blocks have {len(target)}")
            part = xxhash.xxh3_128()
            for at in range(0, end - begin, IO_BYTES):
                size = min(IO_BYTES, end - begin - at)
                piece = target[at : at + size] if target is not None else scratch[:size]
                _fill(path, file, piece)
                part.update(piece)
                whole.update(piece)
            total += end - begin
            if part.hexdigest() != header["__metadata__"].get(f"xxh3_128_{name}"):
                raise SnapshotError(f"{path}: the bytes of {name} are not those that were written")
    return FileStamp(total, whole.hexdigest())


def _fill(path: Path, file: Any, piece: memoryview) -> None:
    while piece:
        n = file.readinto(piece)
        if not n:
            raise SnapshotError(f"{path} ends early: it is torn")
        piece = piece[n:]


def _info(path: Path, metadata: Mapping[str, str]) -> SnapshotInfo:
    try:
        timeline, v = metadata["version"].split(":")
        epoch, n = metadata["round"].split(".")
        layout, placement, digest = (bytes.fromhex(metadata[name]) for name in _HASHES)
        version, round_id = Version(int(timeline), int(v)), RoundId(int(epoch), int(n))
        return SnapshotInfo(version, round_id, layout, placement, digest, committed=False)
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"{path}: its metadata cannot be read: {error}") from error
