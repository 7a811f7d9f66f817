"""The epoch that this slave promised, durable before it is said, so that an older master is refused for ever.

Must never sink, and must never be guessed: a promise that cannot be read ends the process.
"""

from __future__ import annotations

import json

from dips.core.errors import ConfigError
from dips.slave.durable import Disk, replace_durably

NAME = "promise.json"


class Promise:
    """Reads what was promised. Raises ConfigError when that cannot be known."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.epoch = _read(disk) if NAME in disk.names() else 0

    def save(self, epoch: int) -> None:
        """Durable when this returns. A smaller epoch than the one promised changes nothing. Raises OSError."""
        if epoch > self.epoch:
            replace_durably(self._disk, NAME, json.dumps({"promised_epoch": epoch}).encode())
            self.epoch = epoch


def _read(disk: Disk) -> int:
    epoch = read_small(disk, NAME).get("promised_epoch")
    if not isinstance(epoch, int) or epoch < 0:
        raise ConfigError(f"{disk.where(NAME)} holds no epoch: this slave must not guess what it promised; {_REMEDY}")
    return epoch


def read_small(disk: Disk, name: str) -> dict[str, object]:
    """A small JSON file that this slave wrote. Raises ConfigError, with what to do."""
    where = disk.where(name)
    try:
        with disk.open(name) as file:
            body = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; {_REMEDY}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is not what a slave wrote; {_REMEDY}")
    return body


_REMEDY = "restore it from a copy, or begin anew in an empty directory"
