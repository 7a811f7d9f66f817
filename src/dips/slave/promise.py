"""Keeps the epoch that this slave promised, durable before it is sent, so that an older master is refused for ever.

It must never decrease, and must never be guessed: a promise that cannot be read ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import xxhash

from dips.core.errors import ConfigError
from dips.slave.durable import Disk, replace_durably

NAME = "promise.json"


class Promise:
    """The promised epoch, read from disk. Raises ConfigError when it cannot be read."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.epoch = read_promise(disk) if NAME in disk.names() else 0

    def save(self, epoch: int) -> None:
        """Save an epoch; durable when this returns. One below the promised epoch changes nothing. Raises OSError."""
        if epoch > self.epoch:
            write_small(self._disk, NAME, {"promised_epoch": epoch})
            self.epoch = epoch


def read_promise(disk: Disk) -> int:
    """The epoch in the file. Raises ConfigError when it is damaged."""
    epoch = read_small(disk, NAME, {"promised_epoch"}).get("promised_epoch")
    if not isinstance(epoch, int) or epoch < 0:
        raise ConfigError(f"{disk.where(NAME)} holds no epoch: this slave must not guess what it promised; {_REMEDY}")
    return epoch


def read_small(disk: Disk, name: str, keys: Collection[str]) -> dict[str, object]:
    """Read a small JSON file of this slave that has only these keys. Raises ConfigError with the remedy."""
    where = disk.where(name)
    try:
        with disk.open(name) as file:
            body = json.loads(file.read())
        # A release before this one wrote no checksum.
        if not isinstance(body, dict) or body.pop(_CHECKSUM, _sum(body)) != _sum(body) or not body.keys() <= {*keys}:
            raise ConfigError(f"{where} was not written by a slave; {_REMEDY}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; {_REMEDY}") from error
    return body


def write_small(disk: Disk, name: str, body: Mapping[str, object]) -> None:
    """Replace a small JSON file, with its checksum. Raises OSError."""
    replace_durably(disk, name, json.dumps({**body, _CHECKSUM: _sum(body)}).encode())


def _sum(body: Mapping[str, object]) -> str:
    said = {key: value for key, value in body.items() if key != _CHECKSUM}
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())


_CHECKSUM = "xxh3_128"


_REMEDY = "restore it from a copy, or begin again in an empty directory"
