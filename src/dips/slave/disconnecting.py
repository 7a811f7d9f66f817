"""Closes one connection below libzmq, which sees that as if the peer had closed it: no other connection is touched."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_libc = ctypes.CDLL(None)


def cut(fd: int, port: int) -> bool:
    """Close the connection that libzmq names with a message (SRCFD), if it still is one to this port. Returns whether
    it was."""
    with connection_of(fd, port) as found:
        if found is not None:
            reset(found[1])
        return found is not None


@contextmanager
def connection_of(fd: int, port: int) -> Iterator[tuple[int, socket.socket] | None]:
    """The inode of `fd` and a separate handle to it, if it is a connection to this port.

    The file may be closed, and its number given to another, at any time: so all is read from a duplicate, unless no
    further file can be opened.
    """
    own, handle, inode = _duplicate(fd), None, 0
    try:
        info = os.fstat(own)
        inode = info.st_ino
        handle = socket.socket(fileno=own) if stat.S_ISSOCK(info.st_mode) else None
    except OSError:
        pass  # closed meanwhile
    try:
        yield (inode, handle) if handle is not None and _is_connection(handle, port) else None
    finally:
        if handle is not None:
            handle.detach()
        if own != fd:
            os.close(own)


def _duplicate(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError:
        return fd


def _is_connection(handle: socket.socket, port: int) -> bool:
    try:
        handle.getpeername()
        address = handle.getsockname()
    except OSError:
        return False
    return handle.type is socket.SOCK_STREAM and isinstance(address, tuple) and address[1] == port


def reset(connection: socket.socket) -> None:
    """Undo its connect, which sends the peer a reset and drops all arrived bytes. shutdown() would not do: the peer's
    bytes would still arrive after it."""
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    _libc.connect(connection.fileno(), nowhere, len(nowhere))  # if it ended by itself, nothing is left to do
