"""Real connections to a port: what is known of each by its file, and which of them the guard resets when memory is
short."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
from support.strangers import is_reset

from dips.core.net.newcomers import AcceptFilter, connection_of, cut, received_bytes
from dips.slave import connections
from dips.slave.connections import ConnectionGuard
from dips.slave.data_server import resident_bytes

Ends = tuple[socket.socket, socket.socket]
"""A peer's, and ours."""


class Listener:
    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.ends: list[socket.socket] = [self.socket]

    def peer(self) -> Ends:
        far = socket.create_connection(("127.0.0.1", self.port))
        near, _ = self.socket.accept()
        self.ends += [far, near]
        return far, near


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    for end in made.ends:
        end.close()


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_only_connections_to_the_port_are_cut_and_no_file_is_left_open(listener: Listener) -> None:
    far, near = listener.peer()
    other, _ = listener.peer()
    closed = os.dup(near.fileno())
    os.close(closed)
    before = n_files()
    with open("/dev/null", "rb") as file:
        for fd in (file.fileno(), closed, listener.socket.fileno(), far.fileno()):
            assert not cut(fd, listener.port)
    assert not cut(near.fileno(), listener.port + 1)
    assert n_files() == before
    assert not is_reset(far)
    assert cut(near.fileno(), listener.port)
    select.select([far], [], [])
    assert is_reset(far)
    assert not is_reset(other)
    assert not cut(near.fileno(), listener.port), "it is none any longer"
    assert n_files() == before


def test_what_came_by_a_connection_is_counted_and_it_has_a_number_of_its_own(listener: Listener) -> None:
    (far, near), (_, quiet) = listener.peer(), listener.peer()
    numbers = set()
    far.sendall(bytes(3000))
    for end, n_bytes in ((near, 3000), (quiet, 0)):
        if n_bytes:
            end.recv(n_bytes, socket.MSG_WAITALL)
        with connection_of(end.fileno(), listener.port) as found:
            assert found is not None
            assert received_bytes(found[1]) == n_bytes
            numbers.add(found[0])
    assert len(numbers) == 2
    with socket.socket(socket.AF_UNIX) as other:
        assert received_bytes(other) == 0


class Data:
    """A data port whose peers send at each look of the guard that watches deliveries; `delivers` hands its bytes on."""

    traffic_bytes = 0
    n_allowed = None
    handshake_bytes = 0

    @property
    def port(self) -> Data:
        return self

    def do(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def __init__(self, listener: Listener, sends: Sequence[Ends], delivers: Ends) -> None:
        self.endpoint = f"tcp://127.0.0.1:{listener.port}"
        self._sends, self._delivers = sends, delivers
        self.accept_filter = AcceptFilter(listener.socket)
        self.crashes = queue.SimpleQueue[BaseException]()
        self.crashed = self.crashes.put
        self.watched: list[bool] = []
        self.looked, self.refused = threading.Event(), threading.Event()
        self.cut: list[tuple[str, int]] = []

    def note_deliveries(self, wanted: bool) -> Sequence[int]:
        self.watched.append(wanted)
        self.looked.set()
        if not wanted or self.cut:
            return ()
        for far, near in self._sends:
            far.sendall(bytes(1000))
            select.select([near], [], [])
        return (self._delivers[1].fileno(),)

    def refuse_connection(self, sentence: str, n: int) -> None:
        self.cut.append((sentence, n))
        self.refused.set()


def test_the_guard_resets_the_one_that_brings_bytes_and_delivers_nothing(listener: Listener) -> None:
    """The memory of this process is far above the budget that it is given."""
    bad, good, idle = (listener.peer() for _ in range(3))
    assert resident_bytes() > 0
    before = n_files()
    data = Data(listener, (bad, good), good)
    guard = ConnectionGuard(cast(Any, data), -(1 << 40))
    assert guard.limit_bytes < 0
    guard.start()
    data.refused.wait()
    guard.stop()
    (sentence, n_reset) = data.cut[0]
    assert sentence
    assert n_reset == 1
    assert all(data.watched)
    assert [is_reset(far) for far, _ in (bad, good, idle)] == [True, False, False]
    assert n_files() == before


def test_while_memory_suffices_nobody_is_watched(listener: Listener) -> None:
    peer = listener.peer()
    data = Data(listener, (), peer)
    guard = ConnectionGuard(cast(Any, data), 1 << 40)
    assert guard.limit_bytes > resident_bytes() > 0
    guard.start()
    data.looked.wait()
    guard.stop()
    assert not any(data.watched)
    assert not data.cut
    assert not is_reset(peer[0])


class Broken(Data):
    @property
    def handshake_bytes(self) -> int:  # type: ignore[override]
        raise ValueError("a bug")


def test_a_guard_that_ends_says_so_and_leaves_the_port_open(listener: Listener) -> None:
    data = Broken(listener, (), listener.peer())
    data.accept_filter.on()
    guard = ConnectionGuard(cast(Any, data), 1 << 40)
    guard.start()
    assert str(data.crashes.get()) == "a bug"
    guard.stop()
    assert not data.accept_filter.is_on


def test_where_bytes_are_not_counted_none_is_a_newcomer_and_it_is_said_once(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "taken_bytes", lambda handle: None)
    monkeypatch.setattr(connections, "NEWCOMERS", 1)
    peers = [listener.peer() for _ in range(3)]
    data = Data(listener, (), peers[0])
    guard = ConnectionGuard(cast(Any, data), 1 << 40)
    guard.start()
    data.looked.wait()
    guard.stop()
    assert not any(is_reset(far) for far, _ in peers)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert data.crashes.empty()
