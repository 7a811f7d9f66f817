"""Reads and writes manifests: the small file that makes a snapshot a committed one and contains the COMMIT record.

It names its snapshot file by slot, length and checksum, so that it never confirms other bytes than those that were
committed. After a rollback the snapshot of the version that the run returned to has a second name: the file still has
the old one, and the manifest has both. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import xxhash

from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave.snapshot_file import FileHead, SnapshotError, SnapshotStamp, parse_round, read_version

FORMAT = "dips-manifest-2"


@dataclass(frozen=True)
class Manifest:
    """One manifest. info: committed. file_version, file_round: those of the file's own header, which differ after a
    rollback."""

    info: SnapshotInfo
    run_id: str
    slave_id: str
    file: str
    stamp: SnapshotStamp
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


def encode(manifest: Manifest) -> bytes:
    """The file's bytes: JSON, the body and its checksum."""
    info = manifest.info
    body = {
        "format": FORMAT,
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
    return json.dumps({"body": body, "xxh3_128": _checksum(body)}, indent=1).encode()


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest. Raises SnapshotError when it is damaged or of another release."""
    try:
        outer = json.loads(data)
        body = outer["body"]
        if outer["xxh3_128"] != _checksum(body) or body["format"] != FORMAT:
            raise SnapshotError(f"{where} was altered, or is of another release")
        info = SnapshotInfo(
            read_version(body["version"]),
            parse_round(body["round"]),
            bytes.fromhex(body["layout_hash"]),
            bytes.fromhex(body["placement_hash"]),
            bytes.fromhex(body["digest"]),
            committed=True,
            commit_hash=bytes.fromhex(body["commit_hash"]),
        )
        return Manifest(
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


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
