"""One cluster of the plain synchronous server: pushes its parameters after each inner loop, and waits for the merge."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import zmq
from plain_server import pack, unpack
from training import Training, arguments

NONE = b""


class Client:
    """Asks one thing at a time, and asks again over a new connection where the server hung up."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def ask(self, *message: bytes) -> list[bytes]:
        while True:
            with self._context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                hung_up = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                socket.connect(self._address)
                socket.send_multipart(message)
                poller = zmq.Poller()
                poller.register(socket, zmq.POLLIN)
                poller.register(hung_up, zmq.POLLIN)
                answered = socket in dict(poller.poll())
                answer = socket.recv_multipart() if answered else []
                socket.disable_monitor()
            if answered:
                return answer


class Cluster:
    def __init__(self, training: Training, options: argparse.Namespace) -> None:
        self._training = training
        self._options = options
        self._client = Client(options.address)
        self._version = self._pushed = 0
        self._exchange(hello=True)

    def after_step(self) -> None:
        training = self._training
        if training.position < self._options.inner_steps:
            return
        training.position = 0
        first, self._pushed = self._pushed + 1, training.steps
        self._exchange(hello=False, first=first, last=training.steps)

    @torch.no_grad()
    def _exchange(self, **more: Any) -> None:
        """Push, unless it is a hello, and take the newest version. A push that was not merged is lost."""
        tensors = list(self._training.model.tensors)
        header = {"cluster": f"c{self._options.cluster}", "version": self._version, "life": os.getpid(), **more}
        payload = NONE if more["hello"] else pack([tensor.detach() for tensor in tensors])
        answer, parameters = self._client.ask(json.dumps(header).encode(), payload)
        self._version = json.loads(answer)["version"]
        for mine, theirs in zip(tensors, unpack(parameters), strict=True):
            mine.copy_(theirs)


def main() -> None:
    options = arguments(__doc__, "--address")
    training = Training(options)
    training.run(Cluster(training, options).after_step)


if __name__ == "__main__":
    main()
