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
        places = ("127.0.0.2", "127.0.0.1") if host.endswith(".example") else (host,)
        return [row for place in places for row in asked(place, port, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        names = ("s0", "s1")
        placement = PlacementSpec(tuple(SlaveAddress(s, f"tcp://{s}.example:{port}") for s in names), (0, 1), b"p")
        refused: list[set[str]] = []
        for _ in range(2):
            links, received, failed = SlaveSockets(context, placement, 4096), set[bytes](), set[str]()
            links.open(names)
            for slave in names:
                links.send(slave, slave.encode())

            def both_receive(
                links: SlaveSockets = links, received: set[bytes] = received, failed: set[str] = failed
            ) -> bool:
                list(links.receive(0.02))
                for slave, _ in list(links.turned_away()):
                    failed.add(slave)
                    links.reconnect(slave)
                    links.send(slave, slave.encode())
                while router.poll(0):
                    received.add(router.recv_multipart()[-1])
                return received == {b"s0", b"s1"}

            until(both_receive, "both receive it")
            links.all_answered()
            links.close()
            refused.append(failed)
    assert refused == [{"s0", "s1"}, set()]
