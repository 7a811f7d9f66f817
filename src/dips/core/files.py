"""Files and folders as they are kept: closed to other users, replaced whole and durably, one process in a folder.

Closed means: whatever the umask, a file has mode 0600 and a folder 0700 from the moment at which it is made, since from
most of what a run keeps its model can be computed. With a group (files_group) they get 0640 and 2750, after they were
given to the group. A folder that is there is left as it is. A file that is there gets its mode when it is opened to be
written: an earlier release made it open.

Durable means: the bytes are flushed, then the file gets its name, then the folder is flushed, since a flush of a file
does not flush its name. A crash at any moment leaves the old file or the complete new one. The failpoints of a place
are `PLACE.STEP` and `ROLE.directory.STEP`, as far as core/observe/failpoints.py has them.

Not here, because it is something else: a slave's Disk, whose steps a simulation plays one by one; files that are
written in place (the ring's, pushes as evidence); the journal, which is SQLite's; the turn at compiling kernels, for
which users of one machine wait; the board of planner/run, whose lock is held for microseconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated

from pydantic import Field

from dips.core.errors import ConfigError, of_disk
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger

TEMPORARY = ".tmp-"
"""The name of a file that is not whole yet begins with it. A folder's owner may remove such files when it starts."""

WRITE_BYTES = 4 << 20
"""Size of one write: large enough for the disk, small enough for the cache."""


# ---- closed ----------------------------------------------------------------------------------------------------------


FilesGroup = Annotated[
    str,
    Field(
        description="Group, by name or number, that may read this process's files and open its folders (modes 0640 and "
        "2750), but no keys; empty: their owner alone may (0600 and 0700)"
    ),
]
"""The type of the setting `files_group`."""

GROUP_VARIABLE = "DIPS_FILES_GROUP"

Opener = Callable[[str | os.PathLike[str], int], int]
"""What open() takes as its opener: os.open() with a mode that it knows."""

_group: int | None = None
"""Of this process, as its umask is: whatever part of it makes a file."""

_log = logging.getLogger(__name__)
_without_modes = ChangeLogger(_log)


def share_with(group: str) -> None:
    """From now on what this process makes is for this group, too; empty: for its owner alone. Raises ConfigError."""
    global _group
    _group = None
    if not group:
        return
    gid = _number_of(group)
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"files_group is {group!r}, and this user is not in that group, so that it can give it no file: add the "
            "user to the group, or choose one of its own"
        )
    _group = gid


def _number_of(group: str) -> int:
    import grp  # not on Windows

    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"files_group is {group!r}, and this machine has no group of this name") from None


def closed(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for what a run keeps: for its owner, and for the group of files_group."""
    handle = os.open(path, flags, 0o600)
    try:
        if flags & (os.O_WRONLY | os.O_RDWR):
            with _modes(path):
                _settle(handle, os.fstat(handle), 0o600, _group)
    except BaseException:
        os.close(handle)
        raise
    return handle


def secret(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for keys and the like: for their owner alone. Raises OSError where that cannot be."""
    handle = os.open(path, flags, 0o600)
    try:
        os.fchmod(handle, 0o600)  # for one that was there
    except BaseException:
        os.close(handle)
        raise
    return handle


def by_umask(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for what a user has asked for, such as an export: the user's umask says who may read it."""
    return os.open(path, flags, 0o666)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder, and those above it, unless they are there. private: not for the group. Raises OSError."""
    try:
        folder.mkdir(0o700)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent, private=private)
        make_folder(folder, private=private)
        return
    except OSError:  # as of a file system that is read-only
        if not folder.is_dir():
            raise
        return
    with _modes(folder):
        _settle(folder, folder.lstat(), 0o700, None if private else _group)


def settle(path: Path) -> None:
    """Give a file that another library has made the mode of all others, if it is there. It is not opened: that could
    end a lock of SQLite's."""
    with _modes(path), contextlib.suppress(FileNotFoundError):
        _settle(path, path.lstat(), 0o600, _group)


def _settle(target: int | str | os.PathLike[str], status: os.stat_result, mode: int, group: int | None) -> None:
    """The group comes first, so that no other one can read it even for a moment. What is another user's, or no file or
    folder (a tape may be /dev/null), stays as it is."""
    if os.name != "posix" or status.st_uid != os.geteuid():
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return
    if group is not None:
        mode |= (mode >> 3) & 0o050 | (stat.S_ISGID if stat.S_ISDIR(status.st_mode) else 0)
        if status.st_gid != group:
            os.chown(target, -1, group)
    if stat.S_IMODE(status.st_mode) != mode:
        os.chmod(target, mode)


@contextlib.contextmanager
def _modes(path: str | os.PathLike[str]) -> Iterator[None]:
    """Some file systems have no modes (vfat, some network shares): whoever mounted them decides, and a run goes on."""
    try:
        yield
    except OSError as error:
        folder = os.path.dirname(os.path.abspath(path))
        _without_modes.report(
            folder, f"files in {folder} cannot be closed to other users: {error.strerror}", logging.WARNING
        )


def open_to_others(folder: Path, group: str = "") -> Iterator[Path]:
    """What other users can open in a folder, and the folder itself; not what is in one that is closed to them.

    group: of files_group, which may read. Raises OSError, and ConfigError for a group that is not there.
    """
    gid = _number_of(group) if group else None
    status = folder.lstat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return
    if not status.st_mode & (0o007 if status.st_gid == gid else 0o077):
        return
    yield folder
    if stat.S_ISDIR(status.st_mode) and os.access(folder, os.R_OK | os.X_OK):
        for path in sorted(folder.iterdir()):
            yield from open_to_others(path, group)


# ---- durable ---------------------------------------------------------------------------------------------------------


def replace_file(path: Path, parts: Iterable[bytes | memoryview], place: str = "", *, opener: Opener = closed) -> None:
    """Write a file whole, durably. place: of its failpoints, ROLE.THING. Raises OSError, and leaves no rest then."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")
    try:
        handle = opener(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
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


# ---- locked ----------------------------------------------------------------------------------------------------------


class FolderLock:
    """One process has a folder for itself, until release() or until it ends in any way: only the kernel knows that."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        unusable: str,
        held: str,
        of_process: bool = False,
        waits: bool = False,
        opener: Opener = closed,
    ) -> None:
        """Make the folder if it is not there, and take the lock, which is the file `name` in it.

        Raises ConfigError with the sentence `held` when another process has it ({holder}: its number), unless it waits;
        with `unusable` ({why}) when the folder cannot be used, FatalError if that is a disk that is full or fails.
        of_process: a forked child does not get the lock, and so cannot keep it after our end; but it keeps no second
        user in this process out.
        """
        self._handle, fcntl = -1, file_locks()
        try:
            make_folder(folder)
            self._handle = opener(folder / name, os.O_RDWR | os.O_CREAT)
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


def file_locks() -> ModuleType:
    """Python's module of file locks. Raises ConfigError where there is none, as on Windows: programs without a master
    run there, and import this module."""
    try:
        import fcntl
    except ImportError:
        raise ConfigError(
            "this system has no file locks (Python's module fcntl), which the processes of a run need: use Linux; "
            "a training program without a master runs here too"
        ) from None
    return fcntl


def is_locked(folder: Path, name: str) -> bool:
    """Whether a process has this lock of a folder now. Changes nothing."""
    fcntl = file_locks()
    try:
        with (folder / name).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
