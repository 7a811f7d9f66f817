"""Bounds connections that have not shown yet who they are, at every port of every role.

A newcomer is a connection without a finished handshake. Whoever reaches a port can open thousands, and each costs the
process memory: 5 to 50 KB in libzmq, 60 KB in gRPC, 600 KB in asyncio's TLS. So each port has a budget: so many
newcomers, so many of them from one address, each for so long. Which one is closed is decided by Newcomers, a state
machine without sockets or clocks.

Where we accept ourselves, it is asked before a connection's handshake. Where a library accepts (gRPC, libzmq),
a PortWatch looks at this process's files and closes below the library, which sees that as if the peer had closed.
Decision 68 has the designs that were compared, and what they cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

# ---- which to close --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """The budget of a port for newcomers."""

    most: int
    of_one_address: int
    """Behind one address, such as a router's, there may be all the processes of a cluster."""
    handshake_s: float
    """A newcomer that came so long ago is closed."""
    patience_s: float = 3.0
    """One that came so long ago makes room for others where there is none. Over a far and slow link a handshake takes
    2 s."""
    sending_s: float = 0.0
    """One whose first request is on its way after handshake_s has until then: patience_s more each time that more bytes
    have come."""


Key = TypeVar("Key", bound=Hashable)


class Newcomers(Generic[Key]):
    """The newcomers of one port. Pure: connections have keys, and the time is an argument.

    Room is taken from the address that has the most newcomers, so a peer with an address of its own is let in as long
    as strangers have fewer addresses than there may be newcomers.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._of_address: dict[str, dict[Key, float]] = {}
        """When each newcomer came, oldest first."""
        self._address_of: dict[Key, str] = {}
        self._spared: dict[Key, tuple[float, int]] = {}
        """Until when, and how many bytes had come by then, of those whose handshake_s are over."""

    def __len__(self) -> int:
        return len(self._address_of)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._address_of)

    def came(self, key: Key, address: str, now_s: float) -> Key | None:
        """Notes a newcomer. Returns the one to close, which is forgotten: an older one, this one, or None."""
        mine = self._of_address.setdefault(address, {})
        mine[key], self._address_of[key] = now_s, address
        if len(mine) > self.bounds.of_one_address:
            crowd = mine
        elif len(self) > self.bounds.most:
            crowd = max(self._of_address.values(), key=len)
        else:
            return None
        oldest, came_s = next(iter(crowd.items()))
        # A handshake gets its time: before it is over, whoever comes on top is the one to go.
        closed = oldest if now_s - came_s >= self.bounds.patience_s else next(reversed(crowd))
        self.settled(closed)
        return closed

    def settled(self, key: Key) -> None:
        """Forgets one that has finished its handshake, or is closed. One that is not known is no matter."""
        self._spared.pop(key, None)
        address = self._address_of.pop(key, None)
        if address is not None:
            mine = self._of_address[address]
            del mine[key]
            if not mine:
                del self._of_address[address]

    def late(self, now_s: float, received: Callable[[Key], int] = lambda key: 0) -> Sequence[Key]:
        """Those whose time is over, to be closed. They are forgotten. received: bytes that came from one so far."""
        found = []
        for mine in self._of_address.values():
            for key, came_s in mine.items():
                until_s, n_before = self._spared.get(key, (now_s, 0))
                if now_s - came_s < self.bounds.handshake_s or now_s < until_s:
                    continue
                n = received(key) if now_s - came_s < self.bounds.sending_s else 0
                if n > n_before:
                    self._spared[key] = now_s + self.bounds.patience_s, n
                else:
                    found.append(key)
        for key in found:
            self.settled(key)
        return found


# ---- connections below a library -------------------------------------------------------------------------------------
#
# Finds the connections of a port among this process's files, and closes one without the library that serves it.


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
    further file can be opened. Only sockets are closed here: closing any handle of a file ends all locks that this
    process has on it, and SQLite relies on its own.
    """
    own, handle, inode = fd, None, 0
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            own = _duplicate(fd)
            info = os.fstat(own)
            inode = info.st_ino
            # Where the number was given to a file meanwhile, the duplicate stays open.
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


_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
"""Offsets of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info, 8 bytes each (Linux 4.1 and newer)."""


def received_bytes(connection: socket.socket) -> int:
    """Bytes that came by a connection so far; 0 where the system cannot say."""
    return _counted(connection, _BYTES_RECEIVED) or 0


def taken_bytes(connection: socket.socket) -> int | None:
    """Bytes of ours that the peer's system has received so far; None where this system cannot say."""
    return _counted(connection, _BYTES_ACKED)


def _counted(connection: socket.socket, offset: int) -> int | None:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + 8)
        return int(struct.unpack_from("<Q", info, offset)[0])
    except (OSError, struct.error):
        return None


NO_PACKET = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction, which lets nothing pass: BPF_RET | BPF_K, 0 bytes (linux/filter.h)."""

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux."""


class AcceptFilter:
    """Lets a listening socket take no further connections while it is on.

    The system drops what would begin one, and tries again after a second where that was no stranger. Connections that
    are open, or wait to be accepted, stay. Needs no rights; a system without such filters always takes connections.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.is_on = False

    def on(self) -> None:
        if not self.is_on:
            self._set(_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(NO_PACKET)))
            self.is_on = True

    def off(self) -> None:
        if self.is_on:
            self._set(_DETACH_FILTER, bytes(4))
            self.is_on = False

    def _set(self, option: int, value: bytes) -> None:
        with contextlib.suppress(OSError):
            self._listener.setsockopt(socket.SOL_SOCKET, option, value)


# ---- where a library accepts -----------------------------------------------------------------------------------------


class Connection(NamedTuple):
    """A connection to a port, as it is among this process's files."""

    fd: int
    inode: int
    host: str
    port: int  # of the peer


class PortWatch:
    """Holds the bounds of a port whose library accepts by itself; for one thread.

    What comes between two looks is let in first: the port's budget counts a few hundred connections more for it.
    """

    def __init__(self, port: int, bounds: Bounds, accept_filter: AcceptFilter | None = None) -> None:
        """accept_filter: of the port; on while more come than a look can judge. None: the library has its own bound."""
        self._port = port
        self._filter = accept_filter
        self.newcomers = Newcomers[Connection](bounds)
        self._files: dict[int, int] = {}
        """The inode of each file that was there at the last look."""
        self._connections: dict[int, Connection] = {}

    def look(self, files: Sequence[int], finished: Callable[[Connection], bool], now_s: float) -> int:
        """Closes what is beyond the bounds, among these files of the process. Returns the number closed.

        finished: whether a newcomer has finished its handshake since the last look.
        """
        if self._filter is not None and len(self.newcomers) > self.newcomers.bounds.most // 2:
            self._filter.on()  # until this look is over, however long it takes
        # Those that came since the last look; then those that have ended are forgotten.
        before, self._files, arrived = self._files, {}, []
        for fd in files:
            try:
                inode = self._files[fd] = os.fstat(fd).st_ino
                if before.get(fd) == inode:
                    continue
                with connection_of(fd, self._port) as found:
                    if found is not None and found[0] == inode:
                        host, port = found[1].getpeername()[:2]
                        arrived.append(Connection(fd, inode, plain_host(host), port))
            except OSError:
                continue  # closed meanwhile
        for fd in [fd for fd, known in self._connections.items() if self._files.get(fd) != known.inode]:
            self.newcomers.settled(self._connections.pop(fd))
        self._connections.update((connection.fd, connection) for connection in arrived)
        for connection in [connection for connection in self.newcomers if finished(connection)]:
            self.newcomers.settled(connection)
        closed = [
            one_too_many
            for connection in arrived
            if not finished(connection)
            and (one_too_many := self.newcomers.came(connection, origin_of(connection.host), now_s)) is not None
        ]
        closed += self.newcomers.late(now_s, self._received)
        for connection in closed:
            with self.opened(connection) as handle:
                if handle is not None:
                    reset(handle)
        if self._filter is not None:
            self._filter.off() if len(arrived) < self.newcomers.bounds.most else self._filter.on()
        return len(closed)

    @contextmanager
    def opened(self, connection: Connection) -> Iterator[socket.socket | None]:
        """A handle to the connection; None when it has ended."""
        with connection_of(connection.fd, self._port) as found:
            yield found[1] if found is not None and found[0] == connection.inode else None

    def _received(self, connection: Connection) -> int:
        with self.opened(connection) as handle:
            return 0 if handle is None else received_bytes(handle)


def plain_host(host: str) -> str:
    """An address without its zone; one of IPv4 as such, where a port for both kinds sees it as one of IPv6."""
    host = host.partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host


def origin_of(host: str) -> str:
    """What counts as one address: of IPv6 the network of 64 bits, since each of its machines has all of them."""
    host = plain_host(host)
    return socket.inet_pton(socket.AF_INET6, host)[:8].hex() if ":" in host else host


LOOK_S = 0.05
"""Interval of the looks at a port. gRPC and libzmq accept some hundred connections meanwhile, and libzmq receives less
than 100 MB."""


def files_of_process() -> Sequence[int] | None:
    """The numbers of the files that this process has open; None when it cannot open even the list of them."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None
