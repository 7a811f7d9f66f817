"""Opens a slave's directory with its lock, its promise and its ring of snapshots (docs/storage.md)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dips.core.errors import ConfigError
from dips.slave import directory as owner
from dips.slave.durable import TEMPORARY, LocalDisk
from dips.slave.promise import Promise
from dips.slave.ring import Ring


class SnapshotStore:
    """One slave's directory, locked while this object is open.

    Raises ConfigError when the directory cannot be used, belongs to another run or slave, or is in use.
    """

    def __init__(self, directory: Path, run_id: str, slave_id: str, snapshots_kept: int) -> None:
        self.directory = directory
        self._lock = owner.DirectoryLock(directory)
        try:
            self._disk = LocalDisk(directory)
            self.directory_id = owner.claim(self._disk, run_id, slave_id)
            self._promise = Promise(self._disk)
            self.ring = Ring(self._disk, run_id, slave_id, snapshots_kept)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    @property
    def promised_epoch(self) -> int:
        return self._promise.epoch

    def save_promise(self, epoch: int) -> None:
        """Save an epoch; durable when this returns. One below the promised epoch changes nothing. Raises OSError."""
        self._promise.save(epoch)

    def scan(self) -> list[str]:
        """Verify every snapshot. Returns one sentence for each that cannot be used. Raises ConfigError."""
        try:
            names = self._disk.names()
        except OSError as error:
            raise ConfigError(
                f"the slave's directory {self.directory} cannot be read: {error.strerror}; make it readable for this "
                "user, or give another directory"
            ) from error
        for name in names:
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    self._disk.remove(name)
        return self.ring.scan()
