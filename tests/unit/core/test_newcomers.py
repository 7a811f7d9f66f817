"""Which newcomers a port closes, and how connections that a library has accepted are found and closed."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strangers import is_reset

from dips.core.net.newcomers import AcceptFilter, Bounds, Connection, Newcomers, PortWatch, files_of_process, origin_of

BOUNDS = Bounds(most=4, of_one_address=3, handshake_s=10.0, patience_s=3.0)


def crowd(*came: tuple[str, str, float], bounds: Bounds = BOUNDS) -> Newcomers[str]:
    """Of newcomers that all found room: key, address, time."""
    newcomers = Newcomers[str](bounds)
    assert [newcomers.came(*one) for one in came] == [None] * len(came)
    return newcomers


@pytest.mark.parametrize(
    ("now_s", "closed"), [(2.9, "d"), (3.0, "a")], ids=["a handshake gets its time", "then the oldest makes room"]
)
def test_an_address_that_has_all_it_may_have_makes_room_itself(now_s: float, closed: str) -> None:
    newcomers = crowd(("a", "far", 0.0), ("b", "far", 1.0), ("c", "far", 1.0))
    assert newcomers.came("d", "far", now_s) == closed
    assert set(newcomers) == {"a", "b", "c", "d"} - {closed}


@pytest.mark.parametrize(("now_s", "closed"), [(1.0, "c"), (3.0, "a")])
def test_where_all_is_full_the_address_with_the_most_makes_room(now_s: float, closed: str) -> None:
    newcomers = crowd(("a", "far", 0.0), ("b", "far", 0.0), ("x", "other", 0.0), ("c", "far", 0.0))
    assert newcomers.came("y", "new", now_s) == closed
    assert "y" in set(newcomers)


def test_who_has_finished_the_handshake_or_has_gone_counts_no_longer() -> None:
    newcomers = crowd(("a", "far", 0.0), ("b", "far", 0.0), ("c", "far", 0.0))
    newcomers.settled("b")
    newcomers.settled("never seen")
    assert newcomers.came("d", "far", 9.0) is None
    assert newcomers.late(10.0) == ["a", "c"]
    assert set(newcomers) == {"d"}


def test_whose_first_request_is_long_has_time_while_more_of_it_comes() -> None:
    bounds = Bounds(most=4, of_one_address=3, handshake_s=10.0, patience_s=3.0, sending_s=20.0)
    newcomers = crowd(("sends", "far", 0.0), ("stops", "far", 0.0), ("silent", "far", 0.0), bounds=bounds)

    def looked(now_s: float, **received: int) -> list[str]:
        return list(newcomers.late(now_s, lambda key: received[key]))

    assert looked(9.9, sends=500, stops=500, silent=0) == []
    assert looked(10.0, sends=500, stops=500, silent=0) == ["silent"]
    assert looked(12.9, sends=500, stops=500) == [], "between two packets"
    assert looked(13.0, sends=900, stops=500) == ["stops"]
    assert looked(16.0, sends=901) == []
    assert looked(19.9, sends=999) == []
    assert looked(22.9, sends=2000) == ["sends"], "but not for ever"
    assert newcomers.came("sends", "far", 30.0) is None, "it is a new one"
    assert looked(40.0, sends=10) == []


Move = tuple[str, int, int, float]


@given(
    st.lists(st.tuples(st.sampled_from(["came", "settled", "late"]), st.integers(0, 9), st.integers(0, 3),
                       st.floats(0, 5)), max_size=60)
)  # fmt: skip
def test_bounds_hold_whatever_comes_and_one_alone_at_its_address_is_not_closed_for_others(moves: list[Move]) -> None:
    newcomers, now_s, here = Newcomers[int](BOUNDS), 0.0, dict[int, tuple[str, float]]()
    for number, (kind, pick, address, pause_s) in enumerate(moves):
        now_s += pause_s
        if kind == "came":
            here[number] = (str(address), now_s)
            closed = newcomers.came(number, str(address), now_s)
            if closed is not None:
                of_it = here.pop(closed)[0]
                assert any(where == of_it for where, _ in here.values()), "it was the only one of its address"
        elif kind == "settled" and here:
            gone = sorted(here)[pick % len(here)]
            del here[gone]
            newcomers.settled(gone)
        elif kind == "late":
            for gone in newcomers.late(now_s):
                assert now_s - here.pop(gone)[1] >= BOUNDS.handshake_s
        assert set(newcomers) == set(here)
        assert len(here) <= BOUNDS.most
        counts = [sum(where == str(one) for where, _ in here.values()) for one in range(4)]
        assert max(counts) <= BOUNDS.of_one_address


def test_what_one_machine_can_have_many_of_is_one_address() -> None:
    assert origin_of("10.1.2.3") == origin_of("::ffff:10.1.2.3") != origin_of("10.1.2.4")
    assert origin_of("2001:db8:1:2::7") == origin_of("2001:db8:1:2:ffff::1%eth0") != origin_of("2001:db8:1:3::7")


class Port:
    """A port whose peers a library would serve; all ends are in this process."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.number: int = self.listener.getsockname()[1]
        self.near: list[socket.socket] = []
        self.far: list[socket.socket] = []

    def connected(self, n: int) -> None:
        for _ in range(n):
            self.far.append(socket.create_connection(("127.0.0.1", self.number)))
            self.near.append(self.listener.accept()[0])

    def open_ends(self) -> list[int]:
        """Which of the peers are still connected."""
        return [index for index, end in enumerate(self.far) if end.fileno() >= 0 and not is_reset(end)]

    def close(self) -> None:
        for end in (*self.far, *self.near, self.listener):
            end.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def look(watch: PortWatch, now_s: float, *finished: int) -> int:
    """finished: files of connections whose handshakes are over."""
    files = files_of_process()
    assert files is not None
    return watch.look(sorted(files), lambda connection: connection.fd in finished, now_s)


def test_a_port_that_a_library_serves_keeps_its_bounds_and_those_who_have_shown_themselves(port: Port) -> None:
    watch = PortWatch(port.number, BOUNDS)
    port.connected(2)
    first, second = (end.fileno() for end in port.near)
    assert look(watch, 0.0, first) == 0
    assert look(watch, 0.1, second) == 0
    assert len(watch.newcomers) == 0
    port.connected(5)
    n_files = len(os.listdir("/proc/self/fd"))
    assert look(watch, 0.2) == 2
    assert port.open_ends() == [0, 1, 2, 3, 4]
    assert look(watch, 10.2) == 3
    assert port.open_ends() == [0, 1]
    assert len(os.listdir("/proc/self/fd")) == n_files, "what is closed here is closed by the library, too"


def test_no_more_are_accepted_while_more_come_than_a_look_can_judge(port: Port) -> None:
    accepts = create_autospec(AcceptFilter, instance=True)
    watch = PortWatch(port.number, BOUNDS, accepts)
    for n_more, now_s, so in ((3, 0.0, ["off"]), (0, 0.1, ["on", "off"]), (4, 0.2, ["on", "on"])):
        port.connected(n_more)
        accepts.reset_mock()
        look(watch, now_s)
        assert [call[0] for call in accepts.method_calls] == so


def test_a_port_that_a_library_serves_spares_who_still_sends(port: Port) -> None:
    watch = PortWatch(port.number, Bounds(4, 4, handshake_s=10.0, patience_s=3.0, sending_s=60.0))
    port.connected(2)
    assert look(watch, 0.0) == 0
    port.far[1].sendall(b"the beginning of a request")
    select.select([port.near[1]], [], [])
    assert look(watch, 10.0) == 1
    assert port.open_ends() == [1]
    assert look(watch, 13.0) == 1
    assert port.open_ends() == []


def test_a_connection_that_takes_the_file_of_another_is_a_new_one(port: Port) -> None:
    watch = PortWatch(port.number, BOUNDS)
    port.connected(1)
    assert look(watch, 0.0) == 0
    old = port.near[0].fileno()
    port.near[0].close()
    port.far[0].close()
    port.connected(1)
    replaced = port.near[1].fileno()
    if replaced != old:  # the peer's end may have taken the number
        os.dup2(replaced, old)
        port.near[1].close()
    assert look(watch, 0.1) == 0
    (newcomer,) = watch.newcomers
    assert newcomer.fd == old
    with watch.opened(newcomer) as handle:
        assert handle is not None
    gone = Connection(newcomer.fd, newcomer.inode + 1, newcomer.host, newcomer.port)
    with watch.opened(gone) as handle:
        assert handle is None
