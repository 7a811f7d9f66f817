"""The master's directory: the lock that allows one process to write there, and the address of the running master.

One process holds the directory at a time. A file's content must never decide this: only the kernel knows whether a
process is gone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from dips.core.errors import ConfigError, FatalError, of_disk
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger

_left = ChangeLogger(logging.getLogger(__name__))
"""Logs which address files could not be removed: each once, however often that is tried."""

LOCK_NAME = "master.lock"
ADDRESS_NAME = "master.json"
TAPE_NAME = "master.tape.jsonl"


@dataclass(frozen=True)
class MasterAddress:
    """The address of a running master: the content of master.json from its start to its clean stop."""

    address: str
    run_id: str
    pid: int
    epoch: int


class DirectoryLock:
    """The lock of one directory, held until release() or until the process ends in any way."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when another master holds the directory or it cannot be made or written, FatalError when
        its disk is full or fails."""
        self._handle = _open_lock(directory)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise ConfigError(
                f"another master (process {holder}) runs in {directory}: stop it first, or give this one "
                "another directory"
            ) from error
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            self.release()
            raise FatalError(
                f"the master's directory {directory} cannot be written ({error.strerror}): check that the disk has "
                "room and works, then start the master again"
            ) from error

    def release(self) -> None:
        """Releases the lock; may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _open_lock(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        sentence = f"the master's directory {directory} cannot be used ({error.strerror}): give one that it may write"
        raise of_disk(error, sentence) from error


def write_address(directory: Path, address: MasterAddress) -> None:
    """Writes the master's address for others on this machine. A reader gets the old file or the new one, whole.

    Raises FatalError when the disk does not take it.
    """
    path = directory / ADDRESS_NAME
    temporary = path.with_suffix(f".{address.pid}.tmp")
    try:
        temporary.write_text(json.dumps(asdict(address)) + "\n", encoding="utf-8")
        failpoint("master.address.before_rename")
        os.replace(temporary, path)
        failpoint("master.address.after_rename")
        sync_directory(directory)
    except OSError as error:
        raise FatalError(
            f"the master's address {path} cannot be written ({error.strerror or error}): check that the disk has room "
            "and works, then start the master again"
        ) from error


def remove_address(directory: Path) -> None:
    """Removes the address, because no master runs here any longer; the lock must be held."""
    remove_file(directory / ADDRESS_NAME)


def remove_file(path: Path) -> None:
    """Removes an address file, if it is there. An error is only logged: the master ends at this moment, perhaps because
    of the same disk, and that reason must not be hidden."""
    sentence = ""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or error
        sentence = f"{path} cannot be removed ({why}): it names a master that has ended, until the next one starts"
    _left.report(str(path), sentence, logging.WARNING)


def read_address(directory: Path) -> MasterAddress | None:
    """Reads the address that the newest master wrote, or None. After a crash it may name a process that is gone.

    Raises ConfigError when the file was not written by a master.
    """
    path = directory / ADDRESS_NAME
    try:
        return MasterAddress(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} does not name a master ({error}): remove it, or name the master's HOST:PORT"
        ) from error


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable: flushing a file does not flush its name."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        failpoint("master.directory.before_fsync")
        os.fsync(handle)
    finally:
        os.close(handle)
