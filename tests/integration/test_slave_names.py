"""A slave's name with several addresses: they are tried in turn, and the next transfer begins at the one that answered.

gRPC does so by itself; libzmq takes the first.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import zmq
from support.waiting import until

from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net.slave_sockets import SlaveSockets


def test_the_addresses_of_a_name_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.core.net.slave_sockets.require_loopback", lambda address, what: None)
    asked = socket.getaddrinfo

    def answered(host: str, port: int, *more: Any, **options: Any) -> list[Any]:
        """127.0.0.2 stands for a record of old: nothing listens there."""
        places = ("127.0.0.2", "127.0.0.1") if host == "slave.example" else (host,)
        return [row for place in places for row in asked(place, port, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://slave.example:{port}"
        placement = PlacementSpec((SlaveAddress("s0", endpoint),), (0,), b"p")
        refused: list[int] = []
        for _ in range(2):
            links, failures = SlaveSockets(context, placement, 4096), 0

            def answers(links: SlaveSockets = links) -> bool:
                nonlocal failures
                list(links.receive(0.02))
                for slave, _ in list(links.turned_away()):
                    failures += 1
                    links.reconnect(slave)
                    links.send(slave, b"x")
                return bool(router.poll(0))

            links.open(["s0"])
            links.send("s0", b"x")
            until(answers, "the slave hears it")
            while router.poll(0):
                router.recv_multipart()
            links.all_answered()
            links.close()
            refused.append(failures)
    assert refused[0] > 0
    assert refused[1] == 0
