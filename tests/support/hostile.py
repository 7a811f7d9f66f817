"""Peers that mean harm, byte by byte: what ZMTP lets anybody send, without a library that would forbid it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from support.waiting import NO_LIMIT_S

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""ZMTP 3.1 without security, as a client (rfc.zeromq.org/spec/37)."""

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame."""

FRAME_BYTES = 64
"""What libzmq keeps for a frame, however small it is (zmq_msg_t)."""

PAUSE_EVERY_BYTES = 16 << 20


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return struct.pack(">BB", flags, len(body)) + body


def ready() -> bytes:
    """The READY command that ends the handshake without security."""
    pairs = ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
    body = b"".join(bytes([len(key)]) + key + struct.pack(">I", len(value)) + value for key, value in pairs)
    return frame(b"\x05READY" + body, COMMAND)


def connect(endpoint: str) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=NO_LIMIT_S)


def dealer(endpoint: str) -> socket.socket:
    peer = connect(endpoint)
    peer.sendall(GREETING + ready())
    heard = b""
    # Before it has said READY itself, libzmq takes a message for a breach of the handshake.
    while len(heard) < len(GREETING) + 2 or len(heard) < len(GREETING) + 2 + heard[len(GREETING) + 1]:
        piece = peer.recv(4096)
        if not piece:
            raise ConnectionError(f"{endpoint} ended the handshake after {len(heard)} bytes")
        heard += piece
    return peer


def endless_message(endpoint: str, frame_bytes: int, most_bytes: int, pause: Callable[[], None] | None = None) -> int:
    """Send one message of ever more frames; returns the bytes sent when the other side hung up, or `most_bytes`.

    pause: called whenever what was sent takes PAUSE_EVERY_BYTES more of the other side's memory; None: never.
    """
    one = frame(bytes(frame_bytes), MORE)
    n_frames = max(1, (1 << 18) // len(one))
    batch, taken_bytes = one * n_frames, n_frames * (FRAME_BYTES + frame_bytes)
    sent = since_pause = 0
    with dealer(endpoint) as peer, contextlib.suppress(ConnectionError):
        while sent < most_bytes:
            peer.sendall(batch)
            sent, since_pause = sent + len(batch), since_pause + taken_bytes
            if pause is not None and since_pause >= PAUSE_EVERY_BYTES:
                pause()
                since_pause = 0
    return sent


def many_frames(peer: socket.socket, n: int) -> None:
    """One message of so many frames; it may be hung up on before all of it is sent."""
    with contextlib.suppress(ConnectionError):
        peer.sendall(frame(b"", MORE) * n + frame(b""))


def hung_up(peer: socket.socket) -> bool:
    """Waits for it; whatever was sent before, such as a heartbeat, is read."""
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True


def garbage_connections(endpoint: str, payloads: Iterable[bytes]) -> list[socket.socket]:
    found = []
    for payload in payloads:
        peer = connect(endpoint)
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.send(payload)
        found.append(peer)
    return found


def own_memory_bytes(pid: int) -> int:
    """Resident memory of a process without files that are mapped."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def n_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
