"""Watches the data port's connections from outside of libzmq, and closes those that slave/state/connections.py names.

It has its own thread, since the connections to be closed may keep the data thread busy. A connection is closed below
libzmq, which sees that as if the peer had closed it: no other connection is touched.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Sequence

from dips.slave.data_server import PAGE_BYTES, DataServer, connection_of, reset
from dips.slave.state.connections import ConnectionLimits, Cut, Pressure

LOOK_S = 0.05
"""Interval of the checks. libzmq receives about 2 GB/s, so between two checks less than 100 MB arrive."""

FILES_EVERY = 20
"""Files are counted at one of so many checks: with 10,000 of them it takes 5 ms."""

ROOM_BYTES = 256 << 20
"""Memory for everything without its own formula: messages of the master (64 MiB at most, several times over), the
temporary arrays of a round, samples of old versions (8 MiB)."""

_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in struct tcp_info, 8 bytes (Linux 4.1 and newer)."""

_libc = ctypes.CDLL(None)

log = logging.getLogger("dips.slave")


class ConnectionGuard:
    """Watches the connections from start() until stop(). memory_bytes: the slave's, for parameters.

    The process's memory when this object is made (interpreter, libraries, compiled kernels) counts as its base.
    """

    def __init__(self, data: DataServer, memory_bytes: int, room_bytes: int = ROOM_BYTES) -> None:
        self._data = data
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # kept open: files may have run out when it counts
        self._port = int(data.endpoint.rsplit(":", 1)[1])
        self._fixed_bytes = self.memory_bytes() + memory_bytes + room_bytes
        self._headroom_bytes = room_bytes // 2
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._n_files = 0
        self._looks = 0
        self._guard = ConnectionLimits()
        self._delivering: set[int] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dips-guard", daemon=True)

    @property
    def limit_bytes(self) -> int:
        """The slave's budget: docs/budgets.md has the formula."""
        return self._fixed_bytes + self._data.traffic_bytes

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._statm)

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        if self._looks % FILES_EVERY == 0:
            self._n_files = len(self._files())
        self._looks += 1
        pressure = self._pressure()
        if pressure.memory_bytes > pressure.limit_bytes:
            give_back_freed_memory()
            pressure = self._pressure()
        if not pressure.near:
            self._data.note_deliveries(False)
            self._guard.look(pressure, {}, (), time.monotonic())
            return
        received, by_file = self._connections()
        self._delivering = {by_file[fd] for fd in self._data.note_deliveries(True) if fd in by_file}
        cut = self._guard.look(pressure, received, self._delivering, time.monotonic())
        if cut is not None:
            self._cut(cut)

    def _pressure(self) -> Pressure:
        return Pressure(self.memory_bytes(), self.limit_bytes, self._headroom_bytes, self._n_files, self._most_files)

    def _connections(self) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes received by each connection's inode, and the inode by its file number."""
        received, by_file = {}, {}
        for fd in self._files():
            with connection_of(fd, self._port) as found:
                if found is not None:
                    inode, connection = found
                    received[inode], by_file[fd] = _received_bytes(connection), inode
        return received, by_file

    def _cut(self, cut: Cut) -> None:
        wanted = None if cut.connections is None else set(cut.connections)
        for fd in self._files():
            with connection_of(fd, self._port) as found:
                if found is not None and (wanted is None or found[0] in wanted):
                    reset(found[1])
        log.warning("%s", cut.sentence)
        self._data.refuse_connection(cut.sentence)
        self._n_files = len(self._files())

    def _files(self) -> Sequence[int]:
        try:
            return [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError:  # not even one file more can be opened
            return range(self._most_files)

    def memory_bytes(self) -> int:
        """Resident memory of this process without files that are mapped: heap, arrays, frames. From any thread."""
        _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
        return (int(resident) - int(shared)) * PAGE_BYTES


def give_back_freed_memory() -> None:
    """Return the free memory that malloc keeps (core/allocator.py) to the system, so that only used memory is left."""
    if hasattr(_libc, "malloc_trim"):  # glibc's
        _libc.malloc_trim(0)


def _received_bytes(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
        return int(struct.unpack_from("<Q", info, _BYTES_RECEIVED)[0])
    except (OSError, struct.error):
        return 0
