"""A slave's directory and what it asks of its disk: durable files, overwriting in place, the promised epoch, the
lock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import xxhash

from dips.core.errors import ConfigError, of_disk
from dips.core.files import TEMPORARY, closed, sync_folder
from dips.core.observe.failpoints import failpoint

# ---- overwrite -------------------------------------------------------------------------------------------------------
#
# Writes bytes into an existing file at the speed of the disk. Linux; elsewhere plain writes.
#
# Two ways. Through the page cache: after each piece the kernel is asked to begin writing it, since it would otherwise
# leave all of it to the flush; this is the fastest way. Or directly to the device (O_DIRECT), for memory whose place in
# the file suits it: no copy, half the work for the processors, and other programs' pages stay in memory. Neither makes
# anything durable: the flush afterwards does. Never creates, lengthens or flushes a file.


PIECE_BYTES = 4 << 20
"""Size of one write: large enough for the disk, small enough that the checksum finds it in the cache."""

IN_FLIGHT = 3
"""Pieces that are written directly to the device at a time: one alone would leave it idle between two."""

SECTOR_BYTES = 512
"""Sector size. A device that needs larger sectors answers EINVAL, and is written through the page cache."""

_PAGE_BYTES = 4096
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2)

OnWritten = Callable[[memoryview], object]


def overwrite(path: Path, at: int, data: memoryview, seen: OnWritten | None = None, straight: bool = False) -> None:
    """Write the bytes at this place of a file that is long enough. Raises OSError.

    seen: gets all of the data too, in order, in pieces. straight: bypass the page cache where possible.
    """
    pieces = [(begin, data[begin : begin + PIECE_BYTES]) for begin in range(0, len(data), PIECE_BYTES)]
    with _Overwritten(path, straight) as into:
        failpoint("slave.ring.before_write")
        if straight and len(pieces) > 1:
            _write_together(into, at, pieces, seen)
            return
        for begin, piece in pieces:
            into.write(at + begin, piece)
            if seen is not None:
                seen(piece)
            failpoint("slave.ring.after_piece")


def _write_together(into: _Overwritten, at: int, pieces: list[tuple[int, memoryview]], seen: OnWritten | None) -> None:
    """Write some pieces at a time, and compute the checksums meanwhile: direct writes leave the processors idle."""
    pool = ThreadPoolExecutor(IN_FLIGHT, "dips-disk-straight")
    try:
        writing = [pool.submit(into.write, at + begin, piece) for begin, piece in pieces]
        if seen is not None:
            for _, piece in pieces:
                seen(piece)
        for written in writing:
            written.result()
            failpoint("slave.ring.after_piece")
    finally:
        pool.shutdown(cancel_futures=True)


def begin_writing(handle: int, at: int, n_bytes: int) -> None:
    """Ask the kernel to begin writing these bytes of a file; returns at once, without a guarantee.

    Errors are not reported here: the flush that must follow reports them.
    """
    if _sync_file_range is not None:
        _sync_file_range(handle, at, n_bytes, _BEGIN_WRITING)


def write_all(handle: int, at: int, data: memoryview) -> None:
    """Write the data at this place of a file, and have the kernel begin with each piece at once. Raises OSError."""
    while data:
        done = os.pwrite(handle, data[:PIECE_BYTES], at)
        begin_writing(handle, at, done)
        at, data = at + done, data[done:]


class _Overwritten:
    """An open file with its two ways of writing; any thread may write, each its own bytes. `with` closes it."""

    def __init__(self, path: Path, straight: bool) -> None:
        self._plain = closed(path, os.O_WRONLY)  # an earlier release made it open
        self._direct = _open_direct(path) if straight else None
        self._refused = self._direct is None

    def __enter__(self) -> _Overwritten:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, at: int, data: memoryview) -> None:
        """Write all of the data."""
        while self._direct is not None and not self._refused and (n_direct := _direct_bytes(at, data)):
            try:
                done = os.pwrite(self._direct, data[:n_direct], at)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                # This device wants larger sectors, memory of another alignment, or no such writes.
                done, self._refused = 0, True
            at, data = at + done, data[done:]
        write_all(self._plain, at, data)


def _open_direct(path: Path) -> int | None:
    """Open a file for direct writes; None where the file system (such as one in memory) or the system has none.

    Nor where pages are larger than a snapshot's header: pieces would share one, and the page cache, which writes pages
    as a whole, could put back old bytes where new ones bypassed it.
    """
    flag = getattr(os, "O_DIRECT", None)
    if flag is None or mmap.PAGESIZE > _PAGE_BYTES:
        return None
    try:
        return os.open(path, os.O_WRONLY | flag)
    except OSError:
        return None


def _direct_bytes(at: int, data: memoryview) -> int:
    """Bytes from the beginning that may be written directly: whole sectors of memory that begins with a page."""
    if at % SECTOR_BYTES or np.frombuffer(data, np.uint8).ctypes.data % _PAGE_BYTES:
        return 0
    return len(data) - len(data) % SECTOR_BYTES


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _find_sync_file_range()


# ---- durable ---------------------------------------------------------------------------------------------------------
#
# The operations of a slave on its disk, in one flat directory, each a step after which a crash can come.
#
# Nothing is durable until `sync` (a file's bytes) or `sync_names` (which names exist) returned. Tests and simulations
# put another Disk in the place of LocalDisk and replay every prefix of the steps (docs/storage.md). Never decides what
# to write or keep.


IO_BYTES = 4 << 20
"""Read in pieces of this size: large enough for the disk, small enough for the cache."""

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
        handle = closed(self._directory / name, os.O_RDWR | os.O_CREAT)
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
        self.remove(name)  # someone may have it open
        handle = closed(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(handle, 0, memoryview(data))
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
        sync_folder(self._directory, "slave")


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


# ---- promise ---------------------------------------------------------------------------------------------------------
#
# Keeps the epoch that this slave promised, durable before it is sent, so that an older master is refused for ever.
#
# It must never decrease, and must never be guessed: a promise that cannot be read ends the process.


NAME = "promise.json"


class Promise:
    """The promised epoch, read from disk. Raises ConfigError when it cannot be read."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.epoch = read_promise(disk) if NAME in listed(disk) else 0

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


def listed(disk: Disk) -> list[str]:
    """All files of the slave's directory, sorted. Raises ConfigError where it cannot be listed."""
    try:
        return disk.names()
    except OSError as error:
        raise of_disk(
            error,
            f"the slave's directory {disk.where('')} cannot be read: {error.strerror}; make it readable for this user, "
            "or give another directory",
        ) from error


def read_small(disk: Disk, name: str, keys: Collection[str]) -> dict[str, object]:
    """Read a small JSON file of this slave that has only these keys. Raises ConfigError with the remedy."""
    where = disk.where(name)
    try:
        with disk.open(name) as file:
            body = json.loads(file.read())
        # A release before this one wrote no checksum.
        if (
            not isinstance(body, dict)
            or body.pop(_CHECKSUM, json_sum(body)) != json_sum(body)
            or not body.keys() <= {*keys}
        ):
            raise ConfigError(f"{where} was not written by a slave; {_REMEDY}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; {_REMEDY}") from error
    return body


def write_small(disk: Disk, name: str, body: Mapping[str, object]) -> None:
    """Replace a small JSON file, with its checksum. Raises OSError."""
    replace_durably(disk, name, json.dumps({**body, _CHECKSUM: json_sum(body)}).encode())


def json_sum(body: Mapping[str, object], compact: bool = False) -> str:
    """xxh3-128 of a JSON body, without the field that holds it; compact: of its text without blanks."""
    said = {key: value for key, value in body.items() if key != _CHECKSUM}
    separators = (",", ":") if compact else None
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True, separators=separators).encode())


_CHECKSUM = "xxh3_128"


_REMEDY = "restore it from a copy, or begin again in an empty directory"


# ---- directory -------------------------------------------------------------------------------------------------------


IDENTITY = "identity.json"
KEYS = frozenset({"run_id", "slave_id", "directory_id"})
DRAWN_BYTES = 16


def claim(disk: Disk, run_id: str, slave_id: str) -> bytes:
    """Name the directory for this run and slave; returns its own number, which is drawn with the name.

    Raises ConfigError when it is another's, or of an older release.
    """
    names = listed(disk)
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
        try:
            write_small(disk, IDENTITY, {**ours, "directory_id": drawn.hex()})
        except OSError as error:
            raise of_disk(error, f"{disk.where(IDENTITY)} cannot be written: {error.strerror}") from error
    return drawn
