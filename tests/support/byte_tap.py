"""A TCP relay that lets everything pass and keeps a copy: what a listener on the way would see."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable

PIECE_BYTES = 1 << 18


class ByteTap:
    """Before one address; `with` ends it. seen(): every byte that passed, both ways, in pieces as they came."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pieces: list[bytearray] = []
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def seen(self) -> list[bytes]:
        """One string of bytes for each direction of each connection."""
        with self._lock:
            return [bytes(piece) for piece in self._pieces]

    def found(self, needles: Iterable[bytes]) -> list[bytes]:
        seen = self.seen()
        return [needle for needle in needles if any(needle in piece for piece in seen)]

    def __enter__(self) -> ByteTap:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        for end in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()  # nothing listens there now, as the client would find
                continue
            with self._lock:
                self._connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        kept = bytearray()
        with self._lock:
            self._pieces.append(kept)
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                with self._lock:
                    kept += piece
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
