"""The relay that harms bytes between processes does what it says, and counts it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.fault_proxy import Harm, NetFault, Proxies, Way

PIECE = bytes(range(256)) * 4
WAIT_S = 10.0


class Echo:
    """A server that says back whatever it hears, and remembers it by connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.heard: list[bytearray] = []
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def target(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            heard = bytearray()
            self.heard.append(heard)
            self._open.append(end)
            threading.Thread(target=self._serve, args=(end, heard), daemon=True).start()

    def _serve(self, end: socket.socket, heard: bytearray) -> None:
        try:
            while data := end.recv(65536):
                heard += data
                end.sendall(data)
            end.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxies(echo: Echo) -> Iterator[Proxies]:
    with Proxies() as made:
        made.add("link", echo.target)
        yield made


def dial(proxies: Proxies) -> socket.socket:
    host, _, port = proxies["link"].address.partition(":")
    end = socket.create_connection((host, int(port)), WAIT_S)
    end.settimeout(WAIT_S)
    return end


def exchange(end: socket.socket, data: bytes = PIECE) -> bytes:
    """Send and read as much back, or what came until the end."""
    end.sendall(data)
    got = b""
    while len(got) < len(data) and (more := end.recv(65536)):
        got += more
    return got


def read_to_the_end(end: socket.socket) -> None:
    while end.recv(65536):
        pass


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_without_a_harm_bytes_pass_as_they_are(proxies: Proxies) -> None:
    with dial(proxies) as end:
        assert exchange(end) == PIECE
    assert proxies["link"].bites == []


def test_a_flip_changes_one_bit_of_as_many_pieces_as_asked_for(proxies: Proxies) -> None:
    proxies.harm("link", NetFault(Harm.FLIP, frozenset({Way.UP}), times=1))
    with dial(proxies) as end:
        spoilt = exchange(end)
        wrong = [before ^ after for before, after in zip(PIECE, spoilt, strict=True) if before != after]
        assert [bin(bits).count("1") for bits in wrong] == [1]
        assert exchange(end) == PIECE
    assert len(proxies["link"].bites) == 1


@pytest.mark.parametrize("harm", [Harm.RESET, Harm.TRUNCATE])
def test_a_reset_and_a_truncation_pass_half_of_a_piece(harm: Harm, proxies: Proxies, echo: Echo) -> None:
    with dial(proxies) as end:
        assert exchange(end) == PIECE
        proxies.harm("link", NetFault(harm, frozenset({Way.UP}), times=1))
        end.sendall(PIECE)
        until(lambda: len(echo.heard[0]) == len(PIECE) + len(PIECE) // 2)
        if harm is Harm.RESET:
            with pytest.raises(ConnectionResetError):
                read_to_the_end(end)
    assert len(proxies["link"].bites) == 1


def test_a_cut_ends_connections_and_refuses_new_ones_until_it_is_healed(proxies: Proxies) -> None:
    with dial(proxies) as end:
        assert exchange(end) == PIECE
        proxies.harm("link", NetFault(Harm.CUT))
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with dial(proxies) as refused:
        assert refused.recv(1) == b""
    proxies.heal("link")
    with dial(proxies) as again:
        assert exchange(again) == PIECE
    assert len(proxies["link"].bites) == 2


def test_silence_keeps_connections_and_lets_everything_pass_when_it_is_over(proxies: Proxies) -> None:
    with dial(proxies) as end:
        assert exchange(end) == PIECE
        proxies.harm("link", NetFault(Harm.SILENCE, frozenset({Way.UP})))
        end.sendall(PIECE)
        until(lambda: bool(proxies["link"].bites))
        end.settimeout(0.05)
        with pytest.raises(TimeoutError):
            end.recv(1)
        proxies.heal("link")
        end.settimeout(WAIT_S)
        assert exchange(end, b"") == b""
        until(lambda: len(end.recv(65536, socket.MSG_PEEK)) == len(PIECE))


def test_a_delay_holds_each_piece_back_and_a_throttle_spreads_bytes(proxies: Proxies) -> None:
    with dial(proxies) as end:
        for fault in (NetFault(Harm.DELAY, delay_s=0.1), NetFault(Harm.THROTTLE, bytes_per_s=10 * len(PIECE))):
            proxies.harm("link", fault)
            began_s = time.monotonic()
            assert exchange(end) == PIECE
            assert time.monotonic() - began_s >= 0.19
            proxies.heal("link")
            assert len(proxies["link"].bites) >= 2


def test_a_duplicate_says_everything_twice_on_connections_made_after_it(proxies: Proxies, echo: Echo) -> None:
    proxies.harm("link", NetFault(Harm.DUPLICATE))
    with dial(proxies) as end:
        assert exchange(end) == PIECE
        until(lambda: [bytes(heard) for heard in echo.heard] == [PIECE, PIECE])


def test_a_replay_says_again_what_was_said_on_earlier_connections(proxies: Proxies, echo: Echo) -> None:
    with dial(proxies) as end:
        exchange(end)
        exchange(end, b"more")
    proxies.harm("link", NetFault(Harm.REPLAY))
    until(lambda: [bytes(heard) for heard in echo.heard] == [PIECE + b"more"] * 2)
    assert len(proxies["link"].bites) == 1
