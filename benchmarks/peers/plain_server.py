"""The straightforward parameter server: a share of the tensors, torch.save over ZeroMQ, plain torch arithmetic.

It binds a free port of the loopback and prints it. The first message of all carries the first parameters (the others
say the same); every round takes one message of each cluster, and answers all with the new parameters.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

import torch
import zmq
from work import OUTER_LR, OUTER_MOMENTUM

Tensors = list[torch.Tensor]


def pack(tensors: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def unpack(message: bytes) -> Tensors:
    tensors: Tensors = torch.load(io.BytesIO(message))
    return tensors


class Share:
    """The parameters of this server and their outer optimizer."""

    def __init__(self, first: Tensors) -> None:
        self.theta = [torch.nn.Parameter(tensor) for tensor in first]
        self.outer = torch.optim.SGD(self.theta, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)

    def merge(self, pushes: list[Tensors]) -> None:
        for i, theta in enumerate(self.theta):
            theta.grad = torch.stack([theta.detach() - push[i] for push in pushes]).mean(0)
        self.outer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    router = zmq.Context().socket(zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    share: Share | None = None
    while True:
        messages = [router.recv_multipart() for _ in range(options.clusters)]
        pushes = [unpack(payload) for _, _, payload in messages]
        if share is None:
            share = Share(pushes[0])
        else:
            share.merge(pushes)
        answer = pack([theta.detach() for theta in share.theta])
        for peer, empty, _ in messages:
            router.send_multipart([peer, empty, answer])


if __name__ == "__main__":
    main()
