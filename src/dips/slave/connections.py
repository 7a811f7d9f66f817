"""Closes data-port connections before their peers fill this process's memory or its file table.

Strangers are closed by number: so many connections without a finished handshake (core/net/newcomers.py). Peers that are
let in are closed by what they do.

libzmq bounds the size of a frame and the number of whole messages that wait, not the number of frames of one message:
a message that never ends grows in memory that only libzmq sees. This module can see how much memory the process uses,
how many bytes each connection sent, and which connections delivered a whole message. Connections that send bytes and
deliver no message are closed when a budget is reached. A healthy one among them connects again by itself and sends what
was lost (docs/capacity.md).

The guard has its own thread, since the connections to be closed may keep the data thread busy. A connection is closed
below libzmq, which sees that as if the peer had closed it: no other connection is touched.
"""

from __future__ import annotations

import ctypes
import logging
import math
import resource
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dips.core.net.newcomers import (
    LOOK_S,
    Bounds,
    Connection,
    PortWatch,
    connection_of,
    files_of_process,
    received_bytes,
    reset,
    taken_bytes,
)
from dips.core.observe.logs import ChangeLogger
from dips.slave.data_server import DataServer, resident_bytes

# ---- which to close --------------------------------------------------------------------------------------------------


LEAST_BYTES = 256
"""An idle connection sends fewer bytes than this in many minutes: its greeting and its heartbeats."""

SETTLE_S = 1.0
"""Another thread frees the memory of closed connections and returns it to the system within this time."""

QUIET_S = 60.0
"""When closing all connections did not help, the memory is not theirs; it is tried again after this time."""

FILES_SHARE = 0.8
"""Share of the files that this process may open, connections included; the rest is for the disk."""


@dataclass(frozen=True)
class Pressure:
    """The process's use of memory and files."""

    memory_bytes: int  # private memory of this process (without mapped files)
    limit_bytes: int
    headroom_bytes: int  # how far below the limit connections begin to be watched
    n_files: int  # open now, of most_files
    most_files: int

    @property
    def near(self) -> bool:
        """Whether a budget is so near that connections must be watched."""
        files_near = self.n_files > FILES_SHARE / 2 * self.most_files
        return files_near or self.memory_bytes > self.limit_bytes - self.headroom_bytes

    @property
    def files_over(self) -> bool:
        return self.n_files > FILES_SHARE * self.most_files

    @property
    def over(self) -> bool:
        return self.files_over or self.memory_bytes > self.limit_bytes

    def sentence(self) -> str:
        if self.files_over:
            return f"{self.n_files} of the {self.most_files} files that this slave may open are in use"
        return f"this slave has {self.memory_bytes} bytes of memory, its budget is {self.limit_bytes}"


@dataclass(frozen=True)
class Cut:
    """Connections to close, by their keys; None: all of them."""

    connections: tuple[int, ...] | None
    sentence: str  # why, for the log and the master


class ConnectionLimits:
    """Watches connections from the moment that a budget is near until it is far again."""

    def __init__(self) -> None:
        self._watching = False
        self._at_first: dict[int, int] = {}
        self._delivered: set[int] = set()
        self._last_cut_s = -math.inf
        self._all_cut_s: float | None = None
        self._all_cut_bytes = 0

    def look(
        self, pressure: Pressure, received: Mapping[int, int], delivered: Collection[int], now_s: float
    ) -> Cut | None:
        """The connections to close now; None: none. Pure: the numbers and the time are arguments.

        received: bytes that each connection sent so far, by its key; delivered: the keys of those that delivered a
        whole message since the last call. Both may be empty while no budget is near.
        """
        if not pressure.near:
            self._watching = False
            return None
        # A connection that opens while others are watched is watched from its first byte.
        just_begun, known = not self._watching, self._at_first if self._watching else received
        self._at_first = {key: known.get(key, 0) for key in received}
        before = self._delivered if self._watching else set()
        self._delivered = {key for key in received if key in before or key in delivered}
        self._watching = True
        if not pressure.over:
            self._all_cut_s = None
            return None
        if self._rests(pressure, now_s):
            return None
        least = 0 if pressure.files_over else LEAST_BYTES
        suspects = tuple(
            key for key, n in received.items() if key not in self._delivered and n - self._at_first[key] >= least
        )
        if suspects:
            self._last_cut_s = now_s
            return Cut(suspects, f"{pressure.sentence()}: cut {len(suspects)} connections that delivered nothing")
        # Which connection fills the memory shows between two calls, and what was closed last may not be free yet.
        last_s = self._last_cut_s if self._all_cut_s is None else max(self._last_cut_s, self._all_cut_s)
        if just_begun or now_s - last_s < SETTLE_S:
            return None
        self._all_cut_s, self._all_cut_bytes = now_s, pressure.memory_bytes
        return Cut(None, f"{pressure.sentence()}: cut all {len(received)} connections, since none is suspect")

    def _rests(self, pressure: Pressure, now_s: float) -> bool:
        """After all connections were closed: memory that is still over budget is not theirs, unless it grows."""
        if self._all_cut_s is None:
            return False
        if pressure.files_over:
            return now_s - self._all_cut_s < SETTLE_S
        grew = pressure.memory_bytes > self._all_cut_bytes + pressure.headroom_bytes
        return not grew and now_s - self._all_cut_s < QUIET_S


# ---- the guard -------------------------------------------------------------------------------------------------------


NEWCOMERS, NEWCOMERS_OF_ADDRESS = 512, 64
"""Connections without a finished handshake that there may be, in all and from one address, in addition to twice the
keys on the master's list: all their owners may come back at once, behind one router. Each costs 5 KB, or
50 KB where it has begun with CURVE."""

ROOM_BYTES = 256 << 20
"""Memory for everything without its own formula: messages of the master (64 MiB at most, several times over), the
temporary arrays of a round, samples of old versions (8 MiB), connections."""

TOO_MANY_NEWCOMERS = "connections that had not shown a key: there were more than this port may have of them"

UNCOUNTED = (
    "this system does not count a connection's bytes (TCP_INFO of Linux 4.1): connections that show no key are not "
    "bounded by number here; let only the run's own machines reach the data port"
)

_libc = ctypes.CDLL(None)

log = logging.getLogger("dips.slave")


class ConnectionGuard:
    """Watches the connections from start() until stop(). memory_bytes: the slave's, for parameters.

    The process's memory when this object is made (interpreter, libraries, compiled kernels) counts as its base.
    """

    def __init__(self, data: DataServer, memory_bytes: int, room_bytes: int = ROOM_BYTES) -> None:
        self._data = data
        self._port = int(data.endpoint.rsplit(":", 1)[1])
        self._fixed_bytes = resident_bytes() + memory_bytes + room_bytes
        self._headroom_bytes = room_bytes // 2
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._n_files = 0
        self._looks = 0
        self._watch = PortWatch(self._port, self._newcomer_bounds(), data.accept_filter)
        self._guard = ConnectionLimits()
        self._changes = ChangeLogger(log)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dips-guard", daemon=True)

    @property
    def limit_bytes(self) -> int:
        """The slave's budget: docs/capacity.md has the formula."""
        return self._fixed_bytes + self._data.port.traffic_bytes

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(LOOK_S):
                self._look()
        except BaseException as error:
            log.exception("the guard's thread ended")
            self._data.crashed(error)
        finally:
            self._data.accept_filter.off()

    def _look(self) -> None:
        self._looks += 1
        files = self._files()
        self._n_files = len(files)
        self._watch.newcomers.bounds = self._newcomer_bounds()
        closed = self._watch.look(files, self._has_shaken_hands, time.monotonic())
        if closed:
            self._data.do(self._data.port.refuse_connection, TOO_MANY_NEWCOMERS, closed)
        pressure = self._pressure()
        if pressure.memory_bytes > pressure.limit_bytes:
            # What malloc keeps of freed memory (core/allocator.py) goes back to the system: only used memory is left.
            if hasattr(_libc, "malloc_trim"):  # glibc's
                _libc.malloc_trim(0)
            pressure = self._pressure()
        if not pressure.near:
            self._data.note_deliveries(False)
            self._guard.look(pressure, {}, (), time.monotonic())
            return
        received: dict[int, int] = {}
        by_file: dict[int, int] = {}
        for fd in files:
            with connection_of(fd, self._port) as found:
                if found is not None:
                    received[found[0]], by_file[fd] = received_bytes(found[1]), found[0]
        delivered = {by_file[fd] for fd in self._data.note_deliveries(True) if fd in by_file}
        cut = self._guard.look(pressure, received, delivered, time.monotonic())
        if cut is not None:
            self._cut(cut)

    def _newcomer_bounds(self) -> Bounds:
        keys = self._data.n_allowed
        # Without keys all peers are on this machine, behind one address. libzmq itself ends what takes too long.
        of_one = NEWCOMERS if keys is None else NEWCOMERS_OF_ADDRESS + 2 * keys
        return Bounds(NEWCOMERS + 2 * (keys or 0), of_one, handshake_s=math.inf)

    def _has_shaken_hands(self, connection: Connection) -> bool:
        with self._watch.opened(connection) as handle:
            if handle is None:
                return True
            taken = taken_bytes(handle)
        if taken is None:
            self._changes.report("newcomers", UNCOUNTED, logging.WARNING)
        return taken is None or taken > self._data.handshake_bytes

    def _pressure(self) -> Pressure:
        return Pressure(resident_bytes(), self.limit_bytes, self._headroom_bytes, self._n_files, self._most_files)

    def _cut(self, cut: Cut) -> None:
        wanted, n_reset = None if cut.connections is None else set(cut.connections), 0
        for fd in self._files():
            with connection_of(fd, self._port) as found:
                if found is not None and (wanted is None or found[0] in wanted):
                    reset(found[1])
                    n_reset += 1
        log.warning("%s", cut.sentence)
        self._data.do(self._data.port.refuse_connection, cut.sentence, n_reset)
        self._n_files = len(self._files())

    def _files(self) -> Sequence[int]:
        found = files_of_process()
        return range(self._most_files) if found is None else found
