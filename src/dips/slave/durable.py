"""The operations of a slave on its disk, in one flat directory, each a step after which a crash can come.

Nothing is durable until `sync` (a file's bytes) or `sync_names` (which names exist) returned. Tests and simulations
put another Disk in the place of LocalDisk and replay every prefix of the steps (docs/storage.md). Never decides what
to write or keep.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO, Protocol

from dips.core.observe.failpoints import failpoint
from dips.slave.overwrite import OnWritten, overwrite

IO_BYTES = 4 << 20
"""Read in pieces of this size: large enough for the disk, small enough for the cache."""

TEMPORARY = ".tmp-"
BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the file system's own is (stat(2))."""


class Disk(Protocol):
    """One directory without subdirectories. Every method may raise OSError."""

    def where(self, name: str) -> str:
        """The path of a file, for sentences."""

    def names(self) -> list[str]:
        """All files, sorted."""

    def open(self, name: str) -> BinaryIO:
        """Read a file from its beginning."""

    def missing_bytes(self, name: str, n_bytes: int) -> int:
        """Bytes still to be allocated until the file has exactly n_bytes, all of them allocated; 0 when it has."""

    def free_bytes(self) -> int:
        """Bytes that this process may still allocate."""

    def allocate(self, name: str, n_bytes: int) -> None:
        """Make the file exactly n_bytes long and allocate them, durably; existing bytes are kept."""

    def overwrite(
        self, name: str, at: int, data: memoryview, seen: OnWritten | None = None, straight: bool = False
    ) -> None:
        """Write the bytes at this place of an existing file. seen: gets all of the data in order, for checksums.

        straight: with less load on other work, but not the fastest way.
        """

    def create(self, name: str, data: bytes) -> None:
        """Write a new file, or replace all of an old one."""

    def sync(self, name: str) -> None:
        """Return when the file's bytes are durable."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, replacing the file that had it."""

    def remove(self, name: str) -> None:
        """Remove the name; one that is not there is no error."""

    def sync_names(self) -> None:
        """Return when creations, renames and removals are durable."""


class LocalDisk:
    """A Disk that is a directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def where(self, name: str) -> str:
        return str(self._directory / name)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._directory))

    def open(self, name: str) -> BinaryIO:
        return (self._directory / name).open("rb")

    def missing_bytes(self, name: str, n_bytes: int) -> int:
        try:
            status = os.stat(self._directory / name)
        except FileNotFoundError:
            return n_bytes
        room = status.st_blocks * BLOCK_BYTES
        return 0 if status.st_size == n_bytes and room >= n_bytes else max(1, n_bytes - room)

    def free_bytes(self) -> int:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def allocate(self, name: str, n_bytes: int) -> None:
        handle = os.open(self._directory / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            failpoint("slave.ring.before_allocate")
            os.posix_fallocate(handle, 0, n_bytes)
            os.ftruncate(handle, n_bytes)
            failpoint("slave.ring.after_allocate")
            os.fsync(handle)
        finally:
            os.close(handle)

    def overwrite(
        self, name: str, at: int, data: memoryview, seen: OnWritten | None = None, straight: bool = False
    ) -> None:
        overwrite(self._directory / name, at, data, seen, straight)

    def create(self, name: str, data: bytes) -> None:
        file = kind_of(name)
        failpoint(f"slave.{file}.before_create")
        handle = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(handle, memoryview(data))
        finally:
            os.close(handle)

    def sync(self, name: str) -> None:
        kind = kind_of(name)
        handle = os.open(self._directory / name, os.O_RDONLY)
        try:
            failpoint(f"slave.{kind}.before_fsync")
            os.fsync(handle)
            failpoint(f"slave.{kind}.after_fsync")
        finally:
            os.close(handle)

    def rename(self, old: str, new: str) -> None:
        file = kind_of(new)
        failpoint(f"slave.{file}.before_rename")
        os.replace(self._directory / old, self._directory / new)
        failpoint(f"slave.{file}.after_rename")

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / name)

    def sync_names(self) -> None:
        handle = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            failpoint("slave.directory.before_fsync")
            os.fsync(handle)
            failpoint("slave.directory.after_fsync")
        finally:
            os.close(handle)


def replace_durably(disk: Disk, name: str, data: bytes) -> None:
    """Replace a small file as a whole: temporary file, sync, rename, sync of the names. Raises OSError."""
    temporary = TEMPORARY + name
    try:
        disk.create(temporary, data)
        disk.sync(temporary)
        disk.rename(temporary, name)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    disk.sync_names()


def kind_of(name: str) -> str:
    """The kind of a file, as failpoints name it: "ring", "manifest", "promise", "identity" or "round"."""
    return name.removeprefix(TEMPORARY).partition(".")[0].partition("-")[0]


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]
