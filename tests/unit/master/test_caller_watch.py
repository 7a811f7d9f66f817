"""Which callers of the control port are known by what gRPC says of them."""

from __future__ import annotations

import socket

import pytest

from dips.core.net.newcomers import Bounds
from dips.master import rpc
from dips.master.rpc import CallerWatch

PEERS = {
    "ipv4:127.0.0.1:700": ("127.0.0.1", 700),
    "ipv6:%5B::1%5D:700": ("::1", 700, 0, 0),
    "ipv6:%5Bfe80::1%25eth0%5D:700": ("fe80::1", 700, 0, 2),
    "ipv6:[fe80::1%25eth0]:700": ("fe80::1%eth0", 700, 0, 2),
    "ipv4:10.0.0.1:700": ("::ffff:10.0.0.1", 700, 0, 0),
}
"""As gRPC writes it, and as the system gives it."""


def test_where_files_cannot_be_listed_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc, "files_of_process", lambda: None)
    watch = CallerWatch(1, 1)
    for _ in range(2):
        watch.look()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("peer", [*PEERS, "unix:", "nothing"])
def test_who_has_called_is_found_among_the_connections(monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    monkeypatch.setattr(rpc, "newcomer_bounds", lambda peers: Bounds(0, 0, 10.0))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as far:
        near, _ = listener.accept()
        listener.close()
        watch = CallerWatch(near.getsockname()[1], 1)
        watch.admitted(peer)
        with near, monkeypatch.context() as patched:
            patched.setattr(socket.socket, "getpeername", lambda _: PEERS.get(peer, ("127.0.0.1", 700)))
            watch.look()
        if peer in PEERS:
            assert far.recv(1) == b"", "closed by its server"
        else:
            with pytest.raises(ConnectionResetError):
                far.recv(1)
