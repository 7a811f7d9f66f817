"""One cluster of the straightforward parameter server (plain_server.py), with a share of the tensors at each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import zmq
from plain_server import pack, unpack
from turns import Exchange, Model, arguments, serve

OPTIONS = arguments(__doc__, "--ports")


def shares(tensors: list[torch.Tensor], n: int) -> list[list[torch.Tensor]]:
    """The tensors dealt out so that all shares have about the same size."""
    dealt: list[list[torch.Tensor]] = [[] for _ in range(n)]
    sizes = [0] * n
    for tensor in sorted(tensors, key=torch.numel, reverse=True):
        i = sizes.index(min(sizes))
        dealt[i].append(tensor)
        sizes[i] += tensor.numel()
    return dealt


@contextlib.contextmanager
def connect(model: Model) -> Iterator[Exchange]:
    context = zmq.Context()
    servers = []
    for port in OPTIONS.ports.split(","):
        servers.append(context.socket(zmq.REQ))
        servers[-1].connect(f"tcp://127.0.0.1:{port}")
    dealt = shares([tensor.detach() for tensor in model.tensors], len(servers))

    def sync() -> None:
        for server, tensors in zip(servers, dealt, strict=True):
            server.send(pack(tensors))
        for server, tensors in zip(servers, dealt, strict=True):
            for mine, theirs in zip(tensors, unpack(server.recv()), strict=True):
                mine.copy_(theirs)

    sync()  # the first parameters
    try:
        yield Exchange(sync)
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    serve(OPTIONS, connect)
