"""Reads and writes the header of a snapshot file: theta and momentum as safetensors, where an incomplete file shows.

The format is safetensors' own (8-byte length, JSON header, raw tensors; any safetensors reader opens it), written by
hand because the library copies every tensor and can only make new files. The header has a fixed length, so that every
version of a shard has a file of the same size; it holds the checksums of both tensors and of itself, so that any
mixture of two versions' bytes is detected. Nothing here writes to a disk or decides what to keep.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import xxhash

from dips.core.errors import DipsError
from dips.core.ids import RoundId, Version
from dips.core.layout import FLOAT32_BYTES
from dips.core.messages import SnapshotInfo
from dips.slave.durable import IO_BYTES
from dips.slave.memory import F32, bytes_of

HEADER_BYTES = 4096
"""Size of the length and the JSON, padded with blanks: one page, so that the tensors begin on a new page."""

FORMAT = "dips-snapshot-2"
TENSORS = ("theta", "momentum")
_HASHES = ("layout_hash", "placement_hash", "digest")
_SEAL = "xxh3_128_header"


class SnapshotError(DipsError):
    """A snapshot file or manifest is damaged or not as it was written; the sentence says how."""


@dataclass(frozen=True)
class SnapshotStamp:
    """Identifies a file as it was written: its length, and xxh3-128 of its header, which covers all bytes."""

    n_bytes: int
    header_xxh3_128: str


@dataclass(frozen=True)
class FileHead:
    """Content of a header. info: never committed, since only a manifest commits."""

    info: SnapshotInfo
    run_id: str
    slave_id: str
    n_elems: int
    stamp: SnapshotStamp
    sums: tuple[str, str]


def file_bytes(n_elems: int) -> int:
    """Length of the snapshot file of a shard of n_elems parameters: 8 bytes for each, and the header."""
    return HEADER_BYTES + len(TENSORS) * FLOAT32_BYTES * n_elems


def momentum_place(n_elems: int) -> int:
    """Offset of the momentum's bytes in the file; theta's begin at HEADER_BYTES."""
    return HEADER_BYTES + FLOAT32_BYTES * n_elems


def build_header(
    info: SnapshotInfo, n_elems: int, sums: tuple[str, str], run_id: str, slave_id: str
) -> tuple[bytes, FileHead]:
    """The header of a file of n_elems parameters. sums: xxh3-128 of theta's and of the momentum's bytes, as hex."""
    metadata = {
        "format": FORMAT,
        "run_id": run_id,
        "slave_id": slave_id,
        "version": f"{info.version.timeline}:{info.version.v}",
        "round": f"{info.round.epoch}.{info.round.n}",
        **{name: getattr(info, name).hex() for name in _HASHES},
        **{f"xxh3_128_{name}": value for name, value in zip(TENSORS, sums, strict=True)},
    }
    header = _tensor_places(n_elems) | {"__metadata__": metadata}
    metadata[_SEAL] = _seal(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
    assert len(raw) == HEADER_BYTES, "names and hashes are bounded, so a page holds them"
    stamp = SnapshotStamp(file_bytes(n_elems), xxhash.xxh3_128_hexdigest(raw))
    plain = replace(info, committed=False, commit_hash=b"")
    return raw, FileHead(plain, run_id, slave_id, n_elems, stamp, sums)


def read_head(file: BinaryIO, where: str) -> FileHead | None:
    """The header of a file at its beginning; None for a file that was made and never written.

    Raises SnapshotError when it is no header of this release or the file has not the length in the header.
    """
    raw = file.read(HEADER_BYTES)
    if len(raw) == HEADER_BYTES and not any(raw):
        return None
    if len(raw) < HEADER_BYTES or int.from_bytes(raw[:8], "little") != HEADER_BYTES - 8:
        raise SnapshotError(f"{where} does not begin as a snapshot of this release does")
    head = _parse(raw, where)
    size = file.seek(0, os.SEEK_END)
    if size != head.stamp.n_bytes:
        raise SnapshotError(f"{where} has {size} bytes, its header says {head.stamp.n_bytes}: it is torn")
    file.seek(HEADER_BYTES)
    return head


def read_tensors(file: BinaryIO, where: str, head: FileHead, into: tuple[F32, F32] | None = None) -> None:
    """Read and check the tensors after the header, into theta and momentum if given, both (n,) float32.

    Raises SnapshotError when a byte is not as it was written, or the arrays have another length.
    """
    n_bytes = head.n_elems * FLOAT32_BYTES
    scratch = memoryview(bytearray(min(IO_BYTES, n_bytes) if into is None else 0))
    for index, name in enumerate(TENSORS):
        target = bytes_of(into[index]) if into is not None else None
        if target is not None and len(target) != n_bytes:
            raise SnapshotError(f"{where}: {name} has {n_bytes} bytes, this slave's blocks have {len(target)}")
        found = xxhash.xxh3_128()
        for at in range(0, n_bytes, IO_BYTES):
            size = min(IO_BYTES, n_bytes - at)
            piece = target[at : at + size] if target is not None else scratch[:size]
            _fill(where, file, piece)
            found.update(piece)
        if found.hexdigest() != head.sums[index]:
            raise SnapshotError(f"{where}: the bytes of {name} are not those that were written")


def read_snapshot(file: BinaryIO, where: str, theta: F32, momentum: F32) -> FileHead:
    """Read a whole file into the arrays. Raises SnapshotError when it is not whole; OSError when it cannot be read."""
    head = read_head(file, where)
    if head is None:
        raise SnapshotError(f"{where} was made and never written")
    read_tensors(file, where, head, (theta, momentum))
    return head


def parse_round(text: str) -> RoundId:
    """Read "r2.17" or "2.17", epoch and number. Raises ValueError."""
    epoch, n = text.removeprefix("r").split(".")
    return RoundId(int(epoch), int(n))


def read_version(text: str) -> Version:
    """Read "3:17". Raises ValueError; core's parse_version has sentences for operators instead."""
    timeline, v = text.split(":")
    return Version(int(timeline), int(v))


def _tensor_places(n_elems: int) -> dict[str, Any]:
    n_bytes = n_elems * FLOAT32_BYTES
    return {
        name: {"dtype": "F32", "shape": [n_elems], "data_offsets": [index * n_bytes, (index + 1) * n_bytes]}
        for index, name in enumerate(TENSORS)
    }


def _seal(header: Mapping[str, Any]) -> str:
    """xxh3-128 of the header without the seal itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != _SEAL}
    said = {**header, "__metadata__": metadata}
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())


def _parse(raw: bytes, where: str) -> FileHead:
    try:
        header = json.loads(raw[8:])
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT:
            raise SnapshotError(f"{where} is not a snapshot of this release")
        n_elems = header["theta"]["shape"][0]
        if metadata[_SEAL] != _seal(header) or header != _tensor_places(n_elems) | {"__metadata__": metadata}:
            raise SnapshotError(f"{where}: its header is not the one that was written")
        layout_hash, placement_hash, digest = (bytes.fromhex(metadata[name]) for name in _HASHES)
        version, round_id = read_version(metadata["version"]), parse_round(metadata["round"])
        info = SnapshotInfo(version, round_id, layout_hash, placement_hash, digest, committed=False)
        sums = (metadata["xxh3_128_theta"], metadata["xxh3_128_momentum"])
        stamp = SnapshotStamp(file_bytes(n_elems), xxhash.xxh3_128_hexdigest(raw))
        return FileHead(info, metadata["run_id"], metadata["slave_id"], n_elems, stamp, sums)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{where}: its header cannot be read: {error}") from error


def _fill(where: str, file: BinaryIO, piece: memoryview) -> None:
    while piece:
        n = file.readinto(piece)  # type: ignore[attr-defined]  # every binary file has it, typing.BinaryIO does not say
        if not n:
            raise SnapshotError(f"{where} ends early: it is torn")
        piece = piece[n:]
