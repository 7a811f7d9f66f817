"""One snapshot on a slave's disk: the file with theta, momentum and residual, the manifest that commits it, and what a
start finds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import xxhash

from dips.core.errors import DipsError
from dips.core.ids import RoundId, Version
from dips.core.layout import FLOAT32_BYTES
from dips.core.messages import SnapshotInfo
from dips.slave.disk import IO_BYTES, Disk, json_sum
from dips.slave.memory import F32, U8, bytes_of

# ---- snapshot file ---------------------------------------------------------------------------------------------------
#
# Reads and writes the header of a snapshot file: theta and momentum, and the residual of a run whose pull_wire rounds
# versions, as safetensors, where an incomplete file shows.
#
# The format is safetensors' own (8-byte length, JSON header, raw tensors; any safetensors reader opens it), written by
# hand because the library copies every tensor and can only make new files. The header has a fixed length, so that every
# version of a shard has a file of the same size; it holds the checksums of all tensors and of itself, so that any
# mixture of two versions' bytes is detected. Nothing here writes to a disk or decides what to keep.


HEADER_BYTES = 4096
"""Size of the length and the JSON, padded with blanks: one page, so that the tensors begin on a new page."""

SNAPSHOT_FORMAT = "dips-snapshot-2"
TENSORS = ("theta", "momentum", "residual")
NO_RESIDUAL: U8 = np.empty(0, np.uint8)
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
    """Content of a header."""

    info: SnapshotInfo  # never committed, since only a manifest commits
    run_id: str
    slave_id: str
    n_elems: int
    stamp: SnapshotStamp
    sums: tuple[str, ...]  # of each tensor
    residual_bytes: int = 0  # 0: the file has no residual


def tensors_of(residual_bytes: int) -> tuple[str, ...]:
    """The tensors of a file, in their order."""
    return TENSORS if residual_bytes else TENSORS[:2]


def file_bytes(n_elems: int, residual_bytes: int = 0) -> int:
    """Length of the snapshot file of a shard of n_elems parameters: 8 bytes for each, the residual, and the header."""
    return HEADER_BYTES + 2 * FLOAT32_BYTES * n_elems + residual_bytes


def build_header(
    info: SnapshotInfo, n_elems: int, sums: tuple[str, ...], run_id: str, slave_id: str, residual_bytes: int = 0
) -> tuple[bytes, FileHead]:
    """The header of a file of n_elems parameters. sums: xxh3-128 of each tensor's bytes, as hex."""
    metadata = {
        "format": SNAPSHOT_FORMAT,
        "run_id": run_id,
        "slave_id": slave_id,
        "version": f"{info.version.timeline}:{info.version.v}",
        "round": f"{info.round.epoch}.{info.round.n}",
        **{name: getattr(info, name).hex() for name in _HASHES},
        **{f"xxh3_128_{name}": value for name, value in zip(tensors_of(residual_bytes), sums, strict=True)},
    }
    header = _tensor_places(n_elems, residual_bytes) | {"__metadata__": metadata}
    metadata[_SEAL] = _seal(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
    assert len(raw) == HEADER_BYTES, "names and hashes are bounded, so a page holds them"
    stamp = SnapshotStamp(file_bytes(n_elems, residual_bytes), xxhash.xxh3_128_hexdigest(raw))
    plain = replace(info, committed=False, commit_hash=b"")
    return raw, FileHead(plain, run_id, slave_id, n_elems, stamp, sums, residual_bytes)


def parse_head(raw: bytes, where: str) -> FileHead:
    """The header in the first HEADER_BYTES of a file. Raises SnapshotError when it is no header of this release."""
    if len(raw) < HEADER_BYTES or int.from_bytes(raw[:8], "little") != HEADER_BYTES - 8:
        raise SnapshotError(f"{where} does not begin as a snapshot of this release does")
    try:
        header = json.loads(raw[8:])
        metadata = header["__metadata__"]
        if metadata["format"] != SNAPSHOT_FORMAT:
            raise SnapshotError(f"{where} is not a snapshot of this release")
        n_elems, residual_bytes = header["theta"]["shape"][0], header.get("residual", {"shape": [0]})["shape"][0]
        places = _tensor_places(n_elems, residual_bytes)
        if type(n_elems) is not int or type(residual_bytes) is not int or min(n_elems, residual_bytes) < 0:
            raise SnapshotError(f"{where}: its header names tensors that cannot be")
        if metadata[_SEAL] != _seal(header) or header != places | {"__metadata__": metadata}:
            raise SnapshotError(f"{where}: its header is not the one that was written")
        layout_hash, placement_hash, digest = (bytes.fromhex(metadata[name]) for name in _HASHES)
        version, round_id = read_version(metadata["version"]), parse_round(metadata["round"])
        info = SnapshotInfo(version, round_id, layout_hash, placement_hash, digest, committed=False)
        sums = tuple(metadata[f"xxh3_128_{name}"] for name in tensors_of(residual_bytes))
        stamp = SnapshotStamp(file_bytes(n_elems, residual_bytes), xxhash.xxh3_128_hexdigest(raw))
        return FileHead(info, metadata["run_id"], metadata["slave_id"], n_elems, stamp, sums, residual_bytes)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{where}: its header cannot be read: {error}") from error


def read_head(file: BinaryIO, where: str) -> FileHead | None:
    """The header of a file at its beginning; None for a file that was made and never written.

    Raises SnapshotError when it is no header of this release or the file has not the length in the header.
    """
    raw = file.read(HEADER_BYTES)
    if len(raw) == HEADER_BYTES and not any(raw):
        return None
    head = parse_head(raw, where)
    size = file.seek(0, os.SEEK_END)
    if size != head.stamp.n_bytes:
        raise SnapshotError(f"{where} has {size} bytes, its header says {head.stamp.n_bytes}: it is torn")
    file.seek(HEADER_BYTES)
    return head


def read_tensors(file: BinaryIO, where: str, head: FileHead, into: tuple[F32, F32, U8] | None = None) -> None:
    """Read and check the tensors after the header, into theta and momentum, both (n,) float32, and the residual, if
    given. A residual becomes zeros where the file has none; an empty one is not wanted.

    Raises SnapshotError when a byte is not as it was written, or the arrays have another length.
    """
    sizes = (head.n_elems * FLOAT32_BYTES, head.n_elems * FLOAT32_BYTES, head.residual_bytes)
    targets: list[memoryview | None] = [None, None, None]
    if into is not None:
        theta, momentum, residual = into
        targets = [bytes_of(theta), bytes_of(momentum), residual.data if residual.size else None]
        if not head.residual_bytes:
            residual.fill(0)
    unread = max((size for target, size in zip(targets, sizes, strict=True) if target is None), default=0)
    scratch = memoryview(bytearray(min(IO_BYTES, unread)))
    for index, name in enumerate(tensors_of(head.residual_bytes)):
        target, n_bytes = targets[index], sizes[index]
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


def read_snapshot(
    file: BinaryIO, where: str, into: tuple[F32, F32, U8] | None = None, named_by: SnapshotManifest | None = None
) -> FileHead:
    """Read and check a whole file, as read_tensors() does. Raises SnapshotError when it is not whole, or not the file
    that the manifest names; OSError when it cannot be read."""
    head = read_head(file, where)
    if named_by is not None and (head is None or not named_by.fits(head)):
        raise SnapshotError(f"{where} is not the file that {named_by.info.version}'s manifest names")
    if head is None:
        raise SnapshotError(f"{where} was made and never written")
    read_tensors(file, where, head, into)
    return head


def parse_round(text: str) -> RoundId:
    """Read "r2.17" or "2.17", epoch and number. Raises ValueError."""
    epoch, n = text.removeprefix("r").split(".")
    return RoundId(int(epoch), int(n))


def read_version(text: str) -> Version:
    """Read "3:17". Raises ValueError; core's parse_version has sentences for operators instead."""
    timeline, v = text.split(":")
    return Version(int(timeline), int(v))


def _tensor_places(n_elems: int, residual_bytes: int) -> dict[str, Any]:
    n_bytes = n_elems * FLOAT32_BYTES
    places: dict[str, Any] = {
        name: {"dtype": "F32", "shape": [n_elems], "data_offsets": [index * n_bytes, (index + 1) * n_bytes]}
        for index, name in enumerate(TENSORS[:2])
    }
    if residual_bytes:
        ends = [2 * n_bytes, 2 * n_bytes + residual_bytes]
        places["residual"] = {"dtype": "U8", "shape": [residual_bytes], "data_offsets": ends}
    return places


def _seal(header: Mapping[str, Any]) -> str:
    """xxh3-128 of the header without the seal itself."""
    metadata = {key: value for key, value in header["__metadata__"].items() if key != _SEAL}
    return json_sum({**header, "__metadata__": metadata}, compact=True)


def _fill(where: str, file: BinaryIO, piece: memoryview) -> None:
    while piece:
        n = file.readinto(piece)  # type: ignore[attr-defined]  # every binary file has it, typing.BinaryIO does not say
        if not n:
            raise SnapshotError(f"{where} ends early: it is torn")
        piece = piece[n:]


# ---- manifest --------------------------------------------------------------------------------------------------------
#
# Reads and writes manifests: the small file that makes a snapshot a committed one and contains the COMMIT record.
#
# It names its snapshot file by slot, length and checksum, so that it never confirms other bytes than those that were
# committed. After a rollback the snapshot of the version that the run returned to has a second name: the file still has
# the old one, and the manifest has both. Pure: bytes in, bytes out.


MANIFEST_FORMAT = "dips-manifest-2"


@dataclass(frozen=True)
class SnapshotManifest:
    """One manifest."""

    info: SnapshotInfo  # committed
    run_id: str
    slave_id: str
    file: str
    stamp: SnapshotStamp
    # file_version, file_round: those of the file's own header, which differ after a rollback
    file_version: Version
    file_round: RoundId
    record: str

    def fits(self, head: FileHead) -> bool:
        """Whether this manifest was written for the file with this head."""
        said, ours = head.info, self.info
        return (self.run_id, self.slave_id, self.stamp, self.file_version, self.file_round) == (
            head.run_id,
            head.slave_id,
            head.stamp,
            said.version,
            said.round,
        ) and (ours.layout_hash, ours.placement_hash, ours.digest) == (
            said.layout_hash,
            said.placement_hash,
            said.digest,
        )


def encode(manifest: SnapshotManifest) -> bytes:
    """The file's bytes: JSON, the body and its checksum."""
    info = manifest.info
    body = {
        "format": MANIFEST_FORMAT,
        "run_id": manifest.run_id,
        "slave_id": manifest.slave_id,
        "version": str(info.version),
        "round": str(info.round),
        "layout_hash": info.layout_hash.hex(),
        "placement_hash": info.placement_hash.hex(),
        "digest": info.digest.hex(),
        "file": manifest.file,
        "file_bytes": manifest.stamp.n_bytes,
        "header_xxh3_128": manifest.stamp.header_xxh3_128,
        "file_version": str(manifest.file_version),
        "file_round": str(manifest.file_round),
        "commit_hash": info.commit_hash.hex(),
        "commit_record": manifest.record,
    }
    if info.restored_timeline:
        body["restored_timeline"] = info.restored_timeline
    return json.dumps({"body": body, "xxh3_128": json_sum(body, compact=True)}, indent=1).encode()


def decode(data: bytes, where: str) -> SnapshotManifest:
    """Read a manifest. Raises SnapshotError when it is damaged or of another release."""
    try:
        outer = json.loads(data)
        body = outer["body"]
        if outer["xxh3_128"] != json_sum(body, compact=True) or body["format"] != MANIFEST_FORMAT:
            raise SnapshotError(f"{where} was altered, or is of another release")
        restored_timeline = body.get("restored_timeline", 0)
        if type(restored_timeline) is not int or not 0 <= restored_timeline < 1 << 63:
            raise SnapshotError(f"{where}: {restored_timeline!r} is no timeline")
        info = SnapshotInfo(
            read_version(body["version"]),
            parse_round(body["round"]),
            bytes.fromhex(body["layout_hash"]),
            bytes.fromhex(body["placement_hash"]),
            bytes.fromhex(body["digest"]),
            committed=True,
            commit_hash=bytes.fromhex(body["commit_hash"]),
            restored_timeline=restored_timeline,
        )
        return SnapshotManifest(
            info,
            body["run_id"],
            body["slave_id"],
            body["file"],
            SnapshotStamp(body["file_bytes"], body["header_xxh3_128"]),
            read_version(body["file_version"]),
            parse_round(body["file_round"]),
            body["commit_record"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{where} cannot be read: {error}") from error


# ---- inventory -------------------------------------------------------------------------------------------------------


_SLOT = re.compile(r"(?:ring-(\d{1,4})\.safetensors|manifest-(\d{1,4})\.json)\Z")


@dataclass(frozen=True)
class SlotContent:
    """A verified snapshot in a slot."""

    info: SnapshotInfo  # as committed by its manifest, else a shadow as its header says
    head: FileHead


def ring_name(slot: int) -> str:
    return f"ring-{slot}.safetensors"


def manifest_name(slot: int) -> str:
    return f"manifest-{slot}.json"


def take_stock(disk: Disk, run_id: str, slave_id: str) -> tuple[dict[int, SlotContent | None], list[str]]:
    """The existing slots (None: nothing usable), and a sentence for each file that cannot be used."""
    names = disk.names()
    found = {int(match[1] or match[2]) for match in map(_SLOT.match, names) if match}
    slots: dict[int, SlotContent | None] = {}
    problems: list[str] = []
    for slot in sorted(found):
        slots[slot] = _stock(disk, slot, names, (run_id, slave_id), problems)
    _drop_doubles(slots, problems, disk)
    return slots, problems


def _stock(disk: Disk, slot: int, names: list[str], owner: tuple[str, str], problems: list[str]) -> SlotContent | None:
    name, named_by = ring_name(slot), manifest_name(slot)
    where = disk.where(name)
    try:
        if name not in names:
            raise SnapshotError(f"{disk.where(named_by)} names a file that is not there")
        with disk.open(name) as file:
            head = read_head(file, where)
            if head is not None and (head.run_id, head.slave_id) != owner:
                raise SnapshotError(f"{where} belongs to slave {head.slave_id!r} of run {head.run_id!r}")
            if head is not None:
                read_tensors(file, where, head)
        if head is None and named_by in names:
            raise SnapshotError(f"{where} is empty, and {disk.where(named_by)} names it")
    except (SnapshotError, OSError) as error:
        problems.append(f"snapshot skipped: {error}")
        return None
    if head is None:
        return None
    shadow = SlotContent(head.info, head)
    if named_by not in names:
        return shadow
    try:
        return replace(shadow, info=read_manifest(disk, slot, head).info)
    except (SnapshotError, OSError) as error:
        problems.append(f"not a committed snapshot, its manifest cannot be used: {error}")
        return shadow


def read_manifest(disk: Disk, slot: int, head: FileHead) -> SnapshotManifest:
    """The manifest of a slot whose file has this head. Raises SnapshotError unless it names that very file."""
    where = disk.where(manifest_name(slot))
    with disk.open(manifest_name(slot)) as file:
        found = decode(file.read(), where)
    if not found.fits(head) or found.file != ring_name(slot):
        raise SnapshotError(f"{where} names another file than the one of its slot")
    return found


def _drop_doubles(slots: dict[int, SlotContent | None], problems: list[str], disk: Disk) -> None:
    """Of two files of the same version and round keep the committed one; a copy made by hand is no second snapshot."""
    kept: dict[object, int] = {}
    for slot, content in sorted(slots.items(), key=lambda item: not (item[1] and item[1].info.committed)):
        if content is None:
            continue
        key = (content.info.version, content.info.round)
        if key in kept:
            slots[slot] = None
            other = disk.where(ring_name(kept[key]))
            problems.append(f"snapshot skipped: {disk.where(ring_name(slot))} holds the same version as {other}")
        else:
            kept[key] = slot
