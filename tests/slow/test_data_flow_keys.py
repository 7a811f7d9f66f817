"""The data flow with keys: what is seen on the way, who gets in, who may push what, and what a refused peer is told."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import zmq
from support.fault_proxy import Harm, NetFault, Proxies, Way
from support.keyed_port import (
    LAYOUT,
    RUN,
    THETA,
    Cluster,
    KeyedPort,
    fresh_context,
)
from support.waiting import until

from dips.core.errors import ConfigError
from dips.core.net import zmq_sockets
from dips.core.net.zmq_sockets import CurvePair
from dips.slave import data_server
from dips.slave.data_server import DataServer


@pytest.fixture(autouse=True, params=["python", "compiled"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with both loops of the data port."""
    monkeypatch.setattr(data_server, "AUTO", request.param)


@pytest.fixture
def port() -> Iterator[KeyedPort]:
    with KeyedPort(CurvePair.new()) as port:
        yield port


class DoorClock:
    """Stands still until it is turned: however slow this machine is, who shakes hands is in time."""

    def __init__(self, port: KeyedPort) -> None:
        self._port = port
        self._now_s = 0.0
        port.server._handshakes._clock_s = lambda: self._now_s

    def wait_for_refused(self, at_least: int) -> None:
        """Turn the clock beyond the time for handshakes until so many are counted; no honest peer may be coming."""

        def counted() -> bool:
            self._now_s += 2 * zmq_sockets.SETTLED_S
            return self._port.server.figures.beat.refused_connections >= at_least

        until(counted, "the data port counts it")


@pytest.fixture
def door_clock(port: KeyedPort, monkeypatch: pytest.MonkeyPatch) -> DoorClock:
    """So that no test waits for the time that a handshake may take."""
    monkeypatch.setattr(data_server, "LOOK_AGAIN_MS", 20)
    return DoorClock(port)


def cluster(port: KeyedPort, *, allowed: bool = True) -> Cluster:
    """With a push open."""
    who = Cluster("a", CurvePair.new(), port)
    port.open("a")
    if allowed:
        port.allow(who)
    return who


def test_a_list_that_comes_late_is_waited_for(port: KeyedPort) -> None:
    """Join may be answered before the slave has heard of the new key."""
    who = cluster(port, allowed=False)
    threading.Timer(0.2, port.allow, (who,)).start()
    transfer = who.push()
    assert transfer.done, transfer.failure


def test_a_slave_that_has_another_key_than_the_master_named_gets_nothing(port: KeyedPort) -> None:
    """Another process on its port, or the slave itself in its next life."""
    who = cluster(port)
    who.server_key = CurvePair.new().public
    transfer = who.push()
    assert "fails: another process listens there" in transfer.failure
    assert port.staged == {}


def test_a_peer_without_keys_is_counted_and_gets_nothing(port: KeyedPort, door_clock: DoorClock) -> None:
    port.open("a")
    with socket.create_connection(("127.0.0.1", port.port)) as peer:
        peer.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3")  # as libzmq begins; it hangs up where it finds CURVE
        until(lambda: port.server._handshakes.unsettled, "the data port counts it")
    door_clock.wait_for_refused(1)
    # Who of the two hangs up first is a race.
    either = ("has not this port's key", "it may want other security (CURVE, or none)")
    assert any(words in port.server.figures.beat.refused_connection for words in either)
    with fresh_context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(port.server.endpoint)
        dealer.send(b"not a header")
        assert not dealer.poll(300)


@pytest.mark.parametrize("way", [Way.UP, Way.DOWN])
def test_a_bit_that_is_flipped_on_the_way_costs_a_connection_and_nothing_else(port: KeyedPort, way: Way) -> None:
    who = cluster(port)
    with Proxies() as proxies:
        relay = proxies.add("data", ("127.0.0.1", port.port))
        who.endpoint = f"tcp://{relay.address}"
        proxies.harm("data", NetFault(Harm.FLIP, frozenset({way}), least_bytes=20_000, times=2))
        pull, flat = who.pull() if way is Way.DOWN else (who.push(), THETA)
        assert pull.done, pull.failure
        assert len(relay.bites) == 2
    assert flat.tobytes() == THETA.tobytes()


def test_what_was_recorded_and_is_said_again_is_not_understood(port: KeyedPort, door_clock: DoorClock) -> None:
    """Each connection has keys of its own: a replay fails at the handshake, and lands nothing."""
    who = cluster(port)
    with Proxies() as proxies:
        relay = proxies.add("data", ("127.0.0.1", port.port))
        who.endpoint = f"tcp://{relay.address}"
        assert who.push().done
        until(lambda: port.server.figures.beat.staging_bytes == LAYOUT.n_bytes, "the data port counts it")
        before = port.server.figures.beat
        proxies.harm("data", NetFault(Harm.REPLAY))
        assert relay.bites
        door_clock.wait_for_refused(before.refused_connections + 1)
        after = port.server.figures.beat
    assert (after.staging_bytes, after.refused_chunks) == (before.staging_bytes, before.refused_chunks)


def test_who_does_not_shake_hands_is_counted_once_among_those_who_do(port: KeyedPort, door_clock: DoorClock) -> None:
    who = cluster(port)
    with contextlib.ExitStack() as strangers:
        for _ in range(3):
            strangers.enter_context(_stranger(port))
            assert who.pull()[0].done
        door_clock.wait_for_refused(3)
        assert port.server.figures.beat.refused_connections == 3
        for _ in range(3):
            assert who.pull()[0].done
        strangers.enter_context(_stranger(port))
        door_clock.wait_for_refused(4)
        assert port.server.figures.beat.refused_connections == 4, "and whoever came between is not"


@pytest.mark.parametrize("by_reset", [False, True])
def test_probes_that_connect_and_close_are_no_strangers(port: KeyedPort, door_clock: DoorClock, by_reset: bool) -> None:
    """As a kubelet and the health checks of load balancers do, every few seconds."""
    who = cluster(port)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port.port)) as probe:
            if by_reset:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert who.pull()[0].done, "it was taken after all probes"
    until(lambda: not port.server._handshakes.unsettled, "the data port counts it")
    with _stranger(port):
        door_clock.wait_for_refused(1)
        beat = port.server.figures.beat
    assert beat.refused_connections == 1
    assert "has not this port's key" in beat.refused_connection


def test_a_peer_that_stays_and_says_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_server, "HANDSHAKE_MS", 200)
    with KeyedPort(CurvePair.new()) as port, socket.create_connection(("127.0.0.1", port.port)) as peer:
        while peer.recv(64):  # until it is dropped
            pass
        until(lambda: port.server.figures.beat.refused_connections == 1, "the data port counts it")


def test_neither_side_falls_back_to_the_clear(port: KeyedPort) -> None:
    bare = Cluster("a", None, port)
    with pytest.raises(ConfigError, match="this process has no keys"):
        bare.push()
    with KeyedPort(None) as open_port, pytest.raises(ConfigError, match="nothing is sent to it unencrypted"):
        cluster(open_port, allowed=False).push()


def test_without_keys_only_loopback_is_bound() -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        DataServer("0.0.0.0", 0, RUN, 1 << 16, lambda event: None, lambda error: None)
    server = DataServer("0.0.0.0", 0, RUN, 1 << 16, lambda e: None, lambda e: None, curve=CurvePair.new())
    server.stop()


IPV6 = pytest.mark.skipif(not socket.has_ipv6, reason="this system has no IPv6")


@IPV6
@pytest.mark.parametrize(("host", "way"), [("::1", "[::1]"), ("::", "[::1]"), ("::", "127.0.0.1")])
def test_parameters_are_pushed_and_pulled_over_ipv6(host: str, way: str) -> None:
    with KeyedPort(CurvePair.new(), host=host) as port:
        assert port.server.endpoint == f"tcp://[{host}]:{port.port}"
        who = cluster(port)
        who.endpoint = f"tcp://{way}:{port.port}"
        push = who.push()
        assert push.done, push.failure
        pull, flat = who.pull()
        assert pull.done, pull.failure
        assert flat.tobytes() == THETA.tobytes()
        assert port.server.figures.beat.refused_connections == 0


def _stranger(port: KeyedPort) -> socket.socket:
    """A client that speaks another protocol, and stays."""
    stranger = socket.create_connection(("127.0.0.1", port.port))
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 4)
    return stranger
