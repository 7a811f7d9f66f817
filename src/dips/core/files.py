"""Files and folders as they are kept: replaced whole and durably, and one process at a time in a folder.

Durable means: the bytes are flushed, then the file gets its name, then the folder is flushed, since a flush of a file
does not flush its name. A crash at any moment leaves the old file or the complete new one. The failpoints of a place
are `PLACE.STEP` and `ROLE.directory.STEP`, as far as core/observe/failpoint_names.py has them.

Not here, because it is something else: a slave's Disk, whose steps a simulation plays one by one; files that are
written in place (the ring's, pushes as evidence); the journal, which is SQLite's; the turn at compiling kernels, for
which users of one machine wait; the board of planner/run, whose lock is held for microseconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from dips.core.errors import ConfigError, of_disk
from dips.core.observe.failpoints import failpoint

TEMPORARY = ".tmp-"
"""The name of a file that is not whole yet begins with it. A folder's owner may remove such files when it starts."""

WRITE_BYTES = 4 << 20
"""Size of one write: large enough for the disk, small enough for the cache."""


def replace_file(path: Path, parts: Iterable[bytes | memoryview], place: str = "", mode: int = 0o644) -> None:
    """Write a file whole, durably. place: of its failpoints, ROLE.THING. Raises OSError, and leaves no rest then."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            failpoint(f"{place}.before_write")
            for part in parts:
                rest = memoryview(part)
                rest = rest.cast("B") if rest.nbytes else rest
                while rest.nbytes:
                    rest = rest[os.write(handle, rest[:WRITE_BYTES]) :]
            failpoint(f"{place}.before_fsync")
            os.fsync(handle)
            failpoint(f"{place}.after_fsync")
        finally:
            os.close(handle)
        failpoint(f"{place}.before_rename")
        os.replace(temporary, path)
        failpoint(f"{place}.after_rename")
        sync_folder(path.parent, place.partition(".")[0])
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path, role: str = "") -> None:
    """Return when the names in a folder are durable. role: of its failpoints. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        failpoint(f"{role}.directory.before_fsync")
        os.fsync(handle)
        failpoint(f"{role}.directory.after_fsync")
    finally:
        os.close(handle)


class FolderLock:
    """One process has a folder for itself, until release() or until it ends in any way: only the kernel knows that."""

    def __init__(
        self, folder: Path, name: str, *, unusable: str, held: str, of_process: bool = False, waits: bool = False
    ) -> None:
        """Make the folder if it is not there, and take the lock, which is the file `name` in it.

        Raises ConfigError with the sentence `held` when another process has it ({holder}: its number), unless it waits;
        with `unusable` ({why}) when the folder cannot be used, FatalError if that is a disk that is full or fails.
        of_process: a forked child does not get the lock, and so cannot keep it after our end; but it keeps no second
        user in this process out.
        """
        import fcntl  # not on Windows, where programs without a master run

        self._handle = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
            lock = fcntl.lockf if of_process else fcntl.flock
            lock(self._handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise ConfigError(held.replace("{holder}", holder)) from error
        except OSError as error:
            self.release()
            raise of_disk(error, unusable.replace("{why}", error.strerror or str(error))) from error
        with contextlib.suppress(OSError):  # for sentences alone: a full disk is no reason to end
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """May be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def is_locked(folder: Path, name: str) -> bool:
    """Whether a process has this lock of a folder now. Changes nothing."""
    import fcntl

    try:
        with (folder / name).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
