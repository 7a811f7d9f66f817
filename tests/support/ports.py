"""Ports that a test owns until its process ends, for processes that must come back where they were.

They lie below the range from which the system takes ports for connections, and a lock on a file keeps other test
processes away. Whoever needs a port only once binds port 0 and says which it got.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

PLACE = Path("/tmp/dips-ports")
FIRST, STEP = 20_000, 97
_owned: dict[int, int] = {}
"""Ports and the files that stand for them, which stay open."""


def release(port: int) -> None:
    os.close(_owned.pop(port))


def own_port(among: range = range(FIRST, 1 << 16)) -> int:
    """among: where it has to be."""
    PLACE.mkdir(mode=0o777, exist_ok=True)
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(FIRST, among.start), min(beyond, among.stop))
    for number in range(len(ports)):
        port = ports[(os.getpid() * STEP + number) % len(ports)]
        if port in _owned:
            continue
        file = os.open(PLACE / str(port), os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError), socket.socket() as probe:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.bind(("127.0.0.1", port))  # no other program serves there
            _owned[port] = file
            return port
        os.close(file)
    raise AssertionError("no port is free")
