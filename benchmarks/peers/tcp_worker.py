"""The floor's cluster: one copy out of the model, raw TCP to every sink and back, one copy into the model.

What comes back are not new parameters: nothing was computed. So what is copied in is what was copied out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
from tcp_sink import receive, send
from turns import Exchange, Model, arguments, serve

OPTIONS = arguments(__doc__, "--ports")


class Floor:
    """One flat vector to send from and one to land in."""

    def __init__(self, model: Model) -> None:
        self._tensors = [tensor.detach() for tensor in model.tensors]
        self._out, self._back = (torch.from_numpy(np.ones(OPTIONS.params, np.float32)) for _ in range(2))
        self._connections = [socket.create_connection(("127.0.0.1", int(p))) for p in OPTIONS.ports.split(",")]
        edges = np.linspace(0, OPTIONS.params, len(self._connections) + 1).astype(int).tolist()
        self._parts = list(zip(self._connections, edges, edges[1:], strict=False))
        self._stages: list[tuple[str, float]] = []

    def sync(self) -> None:
        self._stages = []
        self._copy(self._out, out=True)
        self._ended("copy out of the model")
        exchanges = [threading.Thread(target=self._exchange, args=part) for part in self._parts]
        for thread in exchanges:
            thread.start()
        for thread in exchanges:
            thread.join()
        self._ended("send, and fetch")
        self._copy(self._out, out=False)
        self._ended("install into the model")

    def stages(self) -> list[tuple[str, float]]:
        """Of the last sync(), each with the time of its end."""
        return self._stages

    def _ended(self, stage: str) -> None:
        self._stages.append((stage, time.monotonic()))

    def _exchange(self, connection: socket.socket, begin: int, end: int) -> None:
        send(connection, self._out[begin:end].numpy().view(np.uint8).data)
        receive(connection, self._back[begin:end].numpy().view(np.uint8).data)

    def _copy(self, flat: torch.Tensor, *, out: bool) -> None:
        begin = 0
        for tensor in self._tensors:
            part = flat[begin : begin + tensor.numel()].view(tensor.shape)
            part.copy_(tensor) if out else tensor.copy_(part)
            begin += tensor.numel()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def connect(model: Model) -> Iterator[Exchange]:
    floor = Floor(model)
    try:
        yield Exchange(floor.sync, stages=floor.stages)
    finally:
        floor.close()


if __name__ == "__main__":
    serve(OPTIONS, connect)
