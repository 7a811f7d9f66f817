"""A slave's directory: its promise, its snapshots, and who may use it.

A snapshot is a safetensors file; a manifest beside it, written only at COMMIT, makes it a committed one.
Without a manifest it is a shadow. Order is everything here: file before manifest, manifest before Flipped, and
when a snapshot leaves, its manifest before its file (docs/architecture.md). Never deletes what a manifest of a kept
version names, and never trusts a file that it has not read back in full since the process began or written itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave.memory import F32
from dips.slave.snapshot_file import (
    FileStamp,
    SnapshotError,
    fsync_directory,
    read_snapshot,
    verify_snapshot,
    write_durably,
    write_snapshot,
)

Key = tuple[Version, RoundId]


@dataclass(frozen=True)
class Kept:
    """One verified snapshot on disk."""

    info: SnapshotInfo
    stamp: FileStamp


class SnapshotStore:
    """One slave's directory, locked while this object is open.

    Raises ConfigError when the directory cannot be used, belongs to another run or slave, or is in use.
    """

    def __init__(self, directory: Path, run_id: str, slave_id: str, snapshots_kept: int) -> None:
        self.directory = directory
        self._run_id = run_id
        self._slave_id = slave_id
        self._snapshots_kept = snapshots_kept
        self._kept: dict[Key, Kept] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"the slave's directory {directory} cannot be used: {error.strerror}") from error
        try:
            self._take_lock()
            self._check_identity()
            self.promised_epoch = self._read_promise()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    # ---- identity and promise ----

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another slave uses the directory {self.directory}: stop it, or give this one its own directory"
            ) from error

    def _check_identity(self) -> None:
        path = self.directory / "identity.json"
        ours = {"run_id": self._run_id, "slave_id": self._slave_id}
        if not path.exists():
            self._write_small(path, ours)
            return
        theirs = self._read_small(path)
        if theirs != ours:
            raise ConfigError(
                f"the directory {self.directory} belongs to slave {theirs.get('slave_id')!r} of run "
                f"{theirs.get('run_id')!r}, not to {self._slave_id!r} of {self._run_id!r}: give another directory"
            )

    def _read_promise(self) -> int:
        path = self.directory / "promise.json"
        if not path.exists():
            return 0
        epoch = self._read_small(path).get("promised_epoch")
        if not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"{path} holds no epoch: this slave must not guess what it promised; {_REMEDY}")
        return epoch

    def save_promise(self, epoch: int) -> None:
        """Durable before it returns. A smaller epoch than the one promised changes nothing. Raises OSError."""
        if epoch > self.promised_epoch:
            write_durably(self.directory / "promise.json", json.dumps({"promised_epoch": epoch}).encode())
            self.promised_epoch = epoch

    def _write_small(self, path: Path, body: dict[str, str]) -> None:
        try:
            write_durably(path, json.dumps(body).encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def _read_small(self, path: Path) -> dict[str, Any]:
        try:
            body = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; {_REMEDY}") from error
        if not isinstance(body, dict):
            raise ConfigError(f"{path} is not what a slave wrote; {_REMEDY}")
        return body

    # ---- what is there ----

    def infos(self) -> tuple[SnapshotInfo, ...]:
        """Verified snapshots, newest first."""
        return tuple(kept.info for _, kept in sorted(self._kept.items(), reverse=True))

    def scan(self) -> list[str]:
        """Verify every file, newest first. Returns one sentence for each that cannot be used; it stays on disk."""
        problems: list[str] = []
        for leftover in self.directory.glob(".tmp-*"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        for path in sorted(self.directory.glob("*.safetensors"), reverse=True):
            try:
                kept = self._verify(path)
                self._kept[_key(kept.info)] = kept
            except (SnapshotError, OSError) as error:
                problems.append(f"snapshot skipped: {error}")
        for manifest in sorted(self.directory.glob("v*.json")):
            if not manifest.with_suffix(".safetensors").exists():
                problems.append(f"snapshot skipped: {manifest} names a file that is not there")
        return problems

    def _verify(self, path: Path) -> Kept:
        info, metadata, stamp = verify_snapshot(path)
        if (metadata.get("run_id"), metadata.get("slave_id")) != (self._run_id, self._slave_id):
            raise SnapshotError(
                f"{path} belongs to slave {metadata.get('slave_id')!r} of run {metadata.get('run_id')!r}"
            )
        if path.stem != _stem(info):
            raise SnapshotError(f"{path} holds {_stem(info)}: its name was changed")
        manifest = path.with_suffix(".json")
        if not manifest.exists():
            return Kept(info, stamp)
        return Kept(_read_manifest(manifest, info, stamp), stamp)

    # ---- the life of a snapshot ----

    def write_shadow(self, info: SnapshotInfo, theta: F32, momentum: F32) -> None:
        """theta, momentum: (n,) float32 of this slave's blocks. Raises Refused(DISK), leaving no file."""
        path = self._path(info)
        try:
            stamp = write_snapshot(path, info, theta, momentum, self._run_id, self._slave_id)
        except OSError as error:
            raise disk_refusal(path, error) from error
        self._kept[_key(info)] = Kept(replace(info, committed=False), stamp)

    def drop_shadow(self, info: SnapshotInfo) -> None:
        """Delete the file of a shadow; a committed snapshot is left alone. Raises OSError."""
        kept = self._kept.get(_key(info))
        if kept is not None and not kept.info.committed:
            del self._kept[_key(info)]
            self._path(info).unlink(missing_ok=True)

    def commit(self, info: SnapshotInfo, commit_hash: bytes, commit_record: bytes) -> SnapshotInfo:
        """Make a shadow a committed snapshot: its manifest is durable when this returns. Raises Refused(DISK)."""
        kept = self._kept.get(_key(info))
        path = self._path(info).with_suffix(".json")
        if kept is None:
            raise Refused(RefusalCode.DISK, f"{path.with_suffix('.safetensors')} is gone: it cannot be committed")
        committed = replace(kept.info, committed=True, commit_hash=commit_hash)
        try:
            record = commit_record.decode()
            write_durably(path, _manifest(committed, kept.stamp, self._run_id, self._slave_id, record))
        except UnicodeDecodeError as error:
            raise Refused(RefusalCode.MALFORMED, f"the COMMIT record of {info.round} is not text: {error}") from error
        except OSError as error:
            raise disk_refusal(path, error) from error
        self._kept[_key(info)] = Kept(committed, kept.stamp)
        return committed

    def load(self, info: SnapshotInfo, theta: F32, momentum: F32) -> None:
        """Read a snapshot into memory. Raises Refused(DISK) when it changed since it was verified."""
        path = self._path(info)
        kept = self._kept.get(_key(info))
        try:
            stamp = read_snapshot(path, theta, momentum)
        except (OSError, SnapshotError) as error:
            self._kept.pop(_key(info), None)
            raise Refused(RefusalCode.DISK, f"{path} cannot be loaded: {error}") from error
        if kept is None or stamp != kept.stamp:
            self._kept.pop(_key(info), None)
            raise Refused(RefusalCode.DISK, f"{path} changed since it was verified")

    def tidy(self, current: SnapshotInfo) -> list[str]:
        """Delete what is no longer needed: committed ones beyond snapshots_kept, and shadows of other rounds.

        Returns one sentence for each file that could not be deleted; a full or failing disk must not undo a
        COMMIT that is durable already.
        """
        problems: list[str] = []
        newest_first = sorted(self._kept.items(), reverse=True)
        committed = [key for key, kept in newest_first if kept.info.committed and key != _key(current)]
        leaving = committed[max(0, self._snapshots_kept - 1) :]
        leaving += [key for key, kept in newest_first if not kept.info.committed]
        for key in leaving:
            path = self._path(self._kept[key].info)
            try:
                path.with_suffix(".json").unlink(missing_ok=True)
                fsync_directory(self.directory)
                path.unlink(missing_ok=True)
                del self._kept[key]
            except OSError as error:
                problems.append(f"{path} cannot be deleted: {error.strerror}")
        return problems

    def _path(self, info: SnapshotInfo) -> Path:
        return self.directory / f"{_stem(info)}.safetensors"


DISK_RETRY_S = 1.0
"""How soon a COMMIT that the disk refused is tried again."""

_REMEDY = "restore it from a copy, or begin anew in an empty directory"


def disk_refusal(path: Path, error: OSError) -> Refused:
    """What a peer is told when this slave's disk is full or fails."""
    return Refused(
        RefusalCode.DISK, f"{path} cannot be written: {error.strerror}: free space on the slave's disk", DISK_RETRY_S
    )


def _key(info: SnapshotInfo) -> Key:
    return (info.version, info.round)


def _stem(info: SnapshotInfo) -> str:
    """Zero-padded, so that the order of names is the order of versions."""
    version, round_id = info.version, info.round
    return f"v{version.timeline:06d}-{version.v:010d}-r{round_id.epoch:06d}-{round_id.n:010d}"


def _manifest(info: SnapshotInfo, stamp: FileStamp, run_id: str, slave_id: str, record: str) -> bytes:
    body = {
        "format": "dips-manifest-1",
        "run_id": run_id,
        "slave_id": slave_id,
        "version": str(info.version),
        "round": str(info.round),
        "layout_hash": info.layout_hash.hex(),
        "placement_hash": info.placement_hash.hex(),
        "digest": info.digest.hex(),
        "file": f"{_stem(info)}.safetensors",
        "file_bytes": stamp.n_bytes,
        "file_xxh3_128": stamp.xxh3_128,
        "commit_hash": info.commit_hash.hex(),
        "commit_record": record,
    }
    return json.dumps({"body": body, "xxh3_128": _body_checksum(body)}, indent=1).encode()


def _body_checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _read_manifest(path: Path, info: SnapshotInfo, stamp: FileStamp) -> SnapshotInfo:
    """The committed form of `info`. Raises SnapshotError unless the manifest names this very file."""
    try:
        outer = json.loads(path.read_text())
        body = outer["body"]
        if outer["xxh3_128"] != _body_checksum(body):
            raise SnapshotError(f"{path} was altered")
        commit_hash = bytes.fromhex(body["commit_hash"])
        named = (body["version"], body["round"], body["digest"], body["file_bytes"], body["file_xxh3_128"])
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    if named != (str(info.version), str(info.round), info.digest.hex(), stamp.n_bytes, stamp.xxh3_128):
        raise SnapshotError(f"{path} names another file than the one beside it")
    return replace(info, committed=True, commit_hash=commit_hash)
