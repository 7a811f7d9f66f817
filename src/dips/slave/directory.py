"""Locks a slave's directory while it is used, and checks the run and the slave that it belongs to. A number that is
drawn once for the directory distinguishes it from every other."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from dips.core.errors import ConfigError
from dips.slave.durable import Disk
from dips.slave.promise import read_small, write_small

IDENTITY = "identity.json"
KEYS = frozenset({"run_id", "slave_id", "directory_id"})
DRAWN_BYTES = 16


class DirectoryLock:
    """One slave's directory, made if needed and locked while this object is open. Raises ConfigError."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"the slave's directory {directory} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._handle)
            raise ConfigError(
                f"another slave uses the directory {directory}: stop it, or give this one its own directory"
            ) from error

    def close(self) -> None:
        os.close(self._handle)


def claim(disk: Disk, run_id: str, slave_id: str) -> bytes:
    """Name the directory for this run and slave; returns its own number, which is drawn with the name.

    Raises ConfigError when it is another's, or of an older release.
    """
    names = disk.names()
    old = next((name for name in names if name.startswith("v") and name.endswith(".safetensors")), None)
    if old is not None:
        raise ConfigError(
            f"{disk.where(old)} is a snapshot of an older release, which this one does not read: end that run with the "
            "release that it began with (`dips export` keeps its model), or give another directory"
        )
    ours = {"run_id": run_id, "slave_id": slave_id}
    theirs = read_small(disk, IDENTITY, KEYS) if IDENTITY in names else dict[str, object](ours)
    if {key: theirs.get(key) for key in ours} != ours:
        raise ConfigError(
            f"the directory {disk.where('')} belongs to slave {theirs.get('slave_id')!r} of run "
            f"{theirs.get('run_id')!r}, not to {slave_id!r} of {run_id!r}: give another directory"
        )
    try:
        drawn = bytes.fromhex(str(theirs["directory_id"]))
    except (KeyError, ValueError):  # new, or of a release that drew none
        drawn = b""
    if len(drawn) != DRAWN_BYTES:
        drawn = secrets.token_bytes(DRAWN_BYTES)
        _write(disk, {**ours, "directory_id": drawn.hex()})
    return drawn


def _write(disk: Disk, body: dict[str, str]) -> None:
    try:
        write_small(disk, IDENTITY, body)
    except OSError as error:
        raise ConfigError(f"{disk.where(IDENTITY)} cannot be written: {error.strerror}") from error
