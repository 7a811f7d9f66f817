"""Strangers at a port, many at a time: connections from many addresses of the loopback that never finish a handshake.

`python -m support.strangers HOST:PORT KIND N FIRST ADDRESSES HOLD_S` opens N connections from ADDRESSES addresses,
the first 127.0.0.FIRST, keeps them HOLD_S seconds, resets them and begins again, until its input ends. After each burst
it says in JSON how many the other side took. `Strangers` runs several of these.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from support.hostile import GREETING
from support.repository import TESTS
from support.waiting import NO_LIMIT_S

from dips.core.net.addresses import parse_address

AT_ONCE = 500
"""Connections whose handshake with the kernel is under way at the same time."""

NO_LINGER = struct.pack("ii", 1, 0)


def first_bytes(kind: str) -> bytes:
    """What a stranger says before it falls silent."""
    if kind == "bare":
        return b""
    if kind == "byte":
        return b"\x16"
    if kind == "curve":
        return GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:]
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    hello = context.wrap_bio(incoming, outgoing, server_hostname="dips-master")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


class Burst:
    """Connections of one burst, opened by one process."""

    def __init__(self, address: tuple[str, int], says: bytes, sources: Sequence[str]) -> None:
        self._address, self._says, self._sources = address, says, sources
        self._sockets: dict[int, socket.socket] = {}
        self._opening = select.epoll()
        self._n_opening = 0
        self.taken = 0

    def open(self, n: int, until_s: float) -> None:
        """Open so many; those that the other side leaves waiting are given up at the time."""
        begun = 0
        while (begun < n or self._n_opening) and time.monotonic() < until_s:
            while begun < n and self._n_opening < AT_ONCE:
                self._begin(self._sources[begun % len(self._sources)])
                begun += 1
            for fd, _ in self._opening.poll(0.05):
                self._opening.unregister(fd)
                self._n_opening -= 1
                with contextlib.suppress(OSError):
                    if self._sockets[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        self.taken += 1
                        self._sockets[fd].send(self._says)

    def _begin(self, source: str) -> None:
        peer = socket.socket()
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        peer.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: the system takes a port at connect
        peer.bind((source, 0))
        if peer.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            peer.close()
            return
        self._sockets[peer.fileno()] = peer
        self._opening.register(peer.fileno(), select.EPOLLOUT)
        self._n_opening += 1

    def close(self) -> None:
        self._opening.close()
        for peer in self._sockets.values():
            peer.close()


def main(place: str, kind: str, n: str, first: str, addresses: str, hold_s: str) -> None:
    address, says = parse_address(place), first_bytes(kind)
    sources = [f"127.0.0.{int(first) + i}" for i in range(int(addresses))]
    ended = False
    while not ended:
        began_s = time.monotonic()
        burst = Burst(address, says, sources)
        burst.open(int(n), began_s + float(hold_s))
        print(json.dumps({"taken": burst.taken, "took_s": time.monotonic() - began_s}), flush=True)
        ended = bool(select.select([sys.stdin], [], [], float(hold_s))[0])
        burst.close()


def is_reset(end: socket.socket) -> bool:
    """Whether the peer learns that its connection is gone, or what it has sent so far was taken."""
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


class Strangers:
    """Context manager: so many connections in each burst, by `processes` processes, until its end."""

    def __init__(
        self,
        address: str,
        kind: str,
        n: int = 20_000,
        *,
        processes: int = 4,
        addresses: int = 5,
        hold_s: float = 6.0,
        first: int = 16,
    ) -> None:
        """addresses: of each process, so that an address has n / (processes * addresses)."""
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "support.strangers", address, kind),
                    *map(str, (n // processes, first + number * addresses, addresses, hold_s)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=TESTS,  # where the module is
            )
            for number in range(processes)
        ]
        self.taken = 0

    def burst(self) -> int:
        """Wait for the next burst of each process; returns the connections that the other side took."""
        taken = 0
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a process of strangers ended: see its error above"
            taken += json.loads(line)["taken"]
        self.taken += taken
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write("end\n")
                process.stdin.flush()
        for process in self._processes:
            process.communicate(timeout=NO_LIMIT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
