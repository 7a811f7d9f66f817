"""Writes bytes into an existing file at the speed of the disk. Linux; elsewhere plain writes.

Two ways. Through the page cache: after each piece the kernel is asked to begin writing it, since it would otherwise
leave all of it to the flush; this is the fastest way. Or directly to the device (O_DIRECT), for memory whose place in
the file suits it: no copy, half the work for the processors, and other programs' pages stay in memory. Neither makes
anything durable: the flush afterwards does. Never creates, lengthens or flushes a file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dips.core.observe.failpoints import failpoint

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


class _Overwritten:
    """An open file with its two ways of writing; any thread may write, each its own bytes. `with` closes it."""

    def __init__(self, path: Path, straight: bool) -> None:
        self._plain = os.open(path, os.O_WRONLY)
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
        while data:
            n_direct = 0 if self._refused else _direct_bytes(at, data)
            done = self._write_direct(at, data[:n_direct]) if n_direct else self._write_plain(at, data)
            at, data = at + done, data[done:]

    def _write_direct(self, at: int, data: memoryview) -> int:
        assert self._direct is not None
        try:
            return os.pwrite(self._direct, data, at)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._refused = True  # this device wants larger sectors, memory of another alignment, or no such writes
            return 0

    def _write_plain(self, at: int, data: memoryview) -> int:
        done = os.pwrite(self._plain, data, at)
        begin_writing(self._plain, at, done)
        return done


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
