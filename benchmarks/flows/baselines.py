"""Other ways to move one float32 vector between two processes: the floor, and what straightforward code gets.

Each is a pair: a Receiver, which lands all bytes in `target` unless its text says otherwise, and a function that sends
`source` (both float32 (n,)) and returns when the receiver has said that everything is there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import numpy as np
import zmq
from google.protobuf.wrappers_pb2 import BytesValue
from numpy.typing import NDArray

F32 = NDArray[np.float32]

TCP_PIECE_BYTES = 4 << 20
GRPC_PIECE_BYTES = 1 << 20
"""Of one message: larger ones are slower, and gRPC's own limit is 4 MiB."""

PICKLE_PIECE_BYTES = 64 << 20


class Receiver(Protocol):
    """Listens from its making on; receive() returns when one whole vector is there."""

    port: int

    def receive(self) -> None: ...


def _bytes_of(array: F32) -> memoryview:
    return array.view(np.uint8).data


def _pieces(array: F32, piece_bytes: int) -> Iterator[memoryview]:
    data = _bytes_of(array)
    return (data[begin : begin + piece_bytes] for begin in range(0, len(data), piece_bytes))


# ---- raw TCP, one stream ----


class TcpReceiver:
    """recv_into the target's own memory: the floor."""

    def __init__(self, target: F32) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def receive(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            for piece in _pieces(self._target, TCP_PIECE_BYTES):
                at = 0
                while at < len(piece):
                    n_bytes = connection.recv_into(piece[at:])
                    if n_bytes == 0:
                        raise ConnectionError("the sender ended in the middle")
                    at += n_bytes
            connection.sendall(b"x")


def send_tcp(source: F32, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in _pieces(source, TCP_PIECE_BYTES):
            connection.sendall(piece)
        connection.recv(1)


# ---- gRPC ----


class GrpcReceiver:
    """One client-streaming call. `landing`: protobuf messages, copied into the target; else bytes, dropped unread."""

    def __init__(self, target: F32, landing: bool) -> None:
        self._target = target
        self._server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.stream_unary_rpc_method_handler(
            self._land if landing else self._drop,
            request_deserializer=BytesValue.FromString if landing else _same,
            response_serializer=_same,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"put": handler}),))
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def receive(self) -> None:
        """The server's own threads receive."""

    def _land(self, messages: Iterable[BytesValue], _: grpc.ServicerContext) -> bytes:
        target, at = self._target.view(np.uint8), 0
        for message in messages:
            target[at : at + len(message.value)] = np.frombuffer(message.value, np.uint8)
            at += len(message.value)
        return b"x"

    def _drop(self, messages: Iterable[bytes], _: grpc.ServicerContext) -> bytes:
        return str(sum(len(message) for message in messages)).encode()


def send_grpc(source: F32, port: int, landing: bool) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        put: Callable[..., Any] = channel.stream_unary(
            "/bench/put",
            request_serializer=BytesValue.SerializeToString if landing else _same,
            response_deserializer=_same,
        )
        pieces = (bytes(piece) for piece in _pieces(source, GRPC_PIECE_BYTES))
        put((BytesValue(value=piece) for piece in pieces) if landing else pieces)


def _same(value: bytes) -> bytes:
    return value


# ---- pickle over ZeroMQ ----


class PickleReceiver:
    """recv_pyobj and an assignment: what one writes first."""

    def __init__(self, target: F32) -> None:
        self._target = target
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def receive(self) -> None:
        at = 0
        while at < len(self._target):
            piece = self._socket.recv_pyobj()
            self._target[at : at + len(piece)] = piece
            at += len(piece)
            self._socket.send(b"x")


def send_pickle(source: F32, port: int) -> None:
    connection: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    try:
        connection.connect(f"tcp://127.0.0.1:{port}")
        for begin in range(0, len(source), PICKLE_PIECE_BYTES // 4):
            connection.send_pyobj(source[begin : begin + PICKLE_PIECE_BYTES // 4])
            connection.recv()
    finally:
        connection.close(linger=0)
