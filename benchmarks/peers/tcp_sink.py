"""The floor's server: lands a share of every cluster's bytes, and sends as many back. It computes nothing.

Prints its port. A cluster's answer begins when the shares of all clusters are there, as that of a round would.
"""

from __future__ import annotations

import argparse
import socket
import threading

import numpy as np

PIECE_BYTES = 4 << 20


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises ConnectionError when the other side is gone."""
    begin = 0
    while begin < len(into):
        n = connection.recv_into(into[begin : begin + PIECE_BYTES])
        if n == 0:
            raise ConnectionError("the other side has closed")
        begin += n


def send(connection: socket.socket, data: memoryview) -> None:
    for begin in range(0, len(data), PIECE_BYTES):
        connection.sendall(data[begin : begin + PIECE_BYTES])


def _serve(connection: socket.socket, staging: memoryview, theta: memoryview, all_here: threading.Barrier) -> None:
    while True:
        try:
            receive(connection, staging)
        except ConnectionError:
            return
        all_here.wait()
        send(connection, theta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    options = parser.parse_args()
    theta = np.ones(options.bytes, np.uint8).data
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    all_here = threading.Barrier(options.clusters)
    serving = []
    for _ in range(options.clusters):
        connection, _ = server.accept()
        staging = np.ones(options.bytes, np.uint8).data
        serving.append(threading.Thread(target=_serve, args=(connection, staging, theta, all_here)))
        serving[-1].start()


if __name__ == "__main__":
    main()
