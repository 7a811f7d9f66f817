"""The master's directory: the lock that allows one process to write there, and the address of the running master."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from dips.core.errors import ConfigError, FatalError
from dips.core.files import FolderLock, replace_file
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


def lock_directory(directory: Path) -> FolderLock:
    """Raises ConfigError when another master has the directory or it cannot be used, FatalError when its disk fails."""
    unusable = f"the master's directory {directory} cannot be used ({{why}}): give one that it may write"
    held = f"another master (process {{holder}}) runs in {directory}: stop it first, or give this one another directory"
    return FolderLock(directory, LOCK_NAME, unusable=unusable, held=held)


def write_address(directory: Path, address: MasterAddress) -> None:
    """Writes the master's address for others on this machine. A reader gets the old file or the new one, whole.

    Raises FatalError when the disk does not take it.
    """
    path = directory / ADDRESS_NAME
    try:
        replace_file(path, [f"{json.dumps(asdict(address))}\n".encode()], place="master.address")
    except OSError as error:
        raise FatalError(
            f"the master's address {path} cannot be written ({error.strerror or error}): check that the disk has room "
            "and works, then start the master again"
        ) from error


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

    Raises ConfigError when the file was not written by a master, PermissionError when it is closed to this user.
    """
    path = directory / ADDRESS_NAME
    try:
        return MasterAddress(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except PermissionError:  # another user's run
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} does not name a master ({error}): remove it, or name the master's HOST:PORT"
        ) from error
