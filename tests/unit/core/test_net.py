"""Addresses: what is understood, and that nothing but this machine is served. Handshakes that fail are counted."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.manual_clock import ManualClock

from dips.core.errors import ConfigError
from dips.core.net import addresses
from dips.core.net.zmq_sockets import SETTLED_S, SILENT_S, Failure, Handshakes


@pytest.mark.parametrize(("text", "address"), [
    ("127.0.0.1:4711", ("127.0.0.1", 4711)), ("localhost:0", ("localhost", 0)), ("[::1]:65535", ("::1", 65535)),
    ("tcp://127.0.0.1:80", ("127.0.0.1", 80)), ("master.local:4711", ("master.local", 4711)),
])  # fmt: skip
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert addresses.parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "4711", "127.0.0.1", "127.0.0.1:", ":4711", "a:b", "a:-1", "a:65536", "::1:80", "a:1:2", "a:1 "),
        *("a:\u0661", "10.0.0.1:tcp://80", "tcp://tcp://a:1"),
    ],
)
def test_anything_else_is_refused_with_its_name_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--master .* is not an address: ") as caught:
        addresses.parse_address(text, "--master")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["a:1", "a:1,b:1", "a:1, [::1]:2", "a:1,a:2,a:3,a:4"])
def test_several_addresses_have_commas_between_them(text: str) -> None:
    assert ",".join(addresses.split_addresses(text)) == text.replace(", ", ",")


@pytest.mark.parametrize(
    ("text", "named"),
    [("a:1,", "''"), ("a:1,b", "'b'"), ("a:1,,b:1", "''"), ("a:1,b:2,a:1", "a:1 twice"), ("a:1,a:2,a:3,a:4,a:5", "5")],
)
def test_of_several_addresses_the_faulty_one_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"^--master ") as caught:
        addresses.split_addresses(text, "--master")
    assert named in str(caught.value)


def test_addresses_of_a_master_are_used_in_turn_and_left_once_by_all_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not addresses.MasterAddresses("a:1").leave("a:1", "refused"), "there is no other"
    masters = addresses.MasterAddresses("a:1,b:1,c:1")
    assert (masters.now, str(masters)) == ("a:1", "a:1,b:1,c:1")
    assert masters.leave("a:1", "refused")
    assert not masters.leave("a:1", "refused"), "another thread's call, which had begun before"
    assert masters.now == "b:1"
    for address in ("b:1", "c:1", "a:1", "b:1", "c:1"):
        assert masters.leave(address, "again")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" ")[2] for line in lines] == ["b:1", "c:1", "a:1"], "each once until one answers"
    masters.answered()
    masters.leave("a:1", "gone again")
    assert "gone again" in caplog.records[-1].getMessage()


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        host, port = addresses.parse_address(text)
    except ConfigError:
        return
    assert addresses.parse_address(addresses.format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("bound", "here"),
    [("0.0.0.0:5", "127.0.0.1:5"), ("[::]:5", "[::1]:5"), ("10.0.0.1:5", "10.0.0.1:5"), ("localhost:5", "localhost:5")],
)
def test_a_wildcard_is_reached_by_the_loopback(bound: str, here: str) -> None:
    assert addresses.dialable(bound) == here


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "127.0.0.1", "localhost:80", "[::1]:80", "[::1]", "::1", "tcp://127.0.0.1:5"]
)
def test_this_machine_is_served(address: str) -> None:
    addresses.require_loopback(address, "listen")


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "0.0.0.0", "192.168.1.5:80", "tcp://*:80", "[::]:80", "::", "tcp://10.0.0.1:1", ""]
)
def test_another_machine_is_refused_with_the_reason(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen is .* not a loopback address: .*, or use 127\.0\.0\.1$"):
        addresses.require_loopback(address, "listen")


def test_a_name_has_all_its_addresses_those_of_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "s0.example": ["2001:db8::7", "192.0.2.7", "192.0.2.8", "192.0.2.7"],
        "192.0.2.9": ["192.0.2.9"],
        "2001:db8::9": ["2001:db8::9"],
    }

    def answered(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        if host not in found:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET6 if ":" in at else socket.AF_INET, 1, 6, "", (at, port)) for at in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    of = addresses.addresses_of
    assert of("tcp://s0.example:295") == ["tcp://192.0.2.7:295", "tcp://192.0.2.8:295", "tcp://[2001:db8::7]:295"]
    for same in ("tcp://192.0.2.9:1", "tcp://[2001:db8::9]:1", "tcp://unknown.example:1"):
        assert of(same) == [same]


class Watched:
    """Handshakes of a port, whose peers' file numbers are in `spoke` if they have sent a byte; events come as told."""

    def __init__(self, *, bound: bool = True) -> None:
        self.spoke, self.events, self._clock = {8}, list[tuple[int, int]](), ManualClock()
        itself: Any = self
        arrivals = self.spoke.__contains__ if bound else None
        self.handshakes = Handshakes(
            itself, itself, endings=not bound, arrivals=arrivals, clock_s=self._clock.monotonic_s
        )

    def monitor(self, endpoint: str, wanted: int) -> None:
        self.wanted = wanted

    def socket(self, kind: int) -> Watched:
        return self

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def connect(self, endpoint: str) -> None:
        pass

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.events:
            raise zmq.Again
        return [struct.pack("=HI", *self.events.pop(0)), b"tcp://192.0.2.1:1"]

    def after(self, seconds: float, *events: tuple[int, int]) -> tuple[list[Failure], bool]:
        """What failed, and whether a peer may still have to be counted."""
        assert all(event & self.wanted for event, _ in events)
        self._clock.advance(seconds)
        self.events += events
        return [failed.failure for failed in self.handshakes.failures()], self.handshakes.unsettled


QUIET, SPOKEN = (zmq.EVENT_ACCEPTED, 7), (zmq.EVENT_ACCEPTED, 8)
MADE, KEY = (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0), (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
HUNG_UP, DROPPED = ((zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, code) for code in (errno.ECONNRESET, errno.EAGAIN))
FAILED, OPEN = [Failure.OTHER], True


@pytest.mark.parametrize(
    "told",
    [
        [(0.0, (QUIET, MADE), [], not OPEN), (2 * SETTLED_S, (), [], not OPEN)],
        [(0.0, (SPOKEN,), [], OPEN), (SETTLED_S / 2, (), [], OPEN), (SETTLED_S / 2, (), FAILED, not OPEN)],
        [(0.0, (SPOKEN, SPOKEN), [], OPEN), (1.0, (MADE,), [], OPEN), (SETTLED_S, (), FAILED, not OPEN)],
        [(0.0, (QUIET, HUNG_UP), [], not OPEN)],
        [(0.0, (QUIET,), [], OPEN), (SILENT_S - 0.1, (HUNG_UP,), [], not OPEN)],
        [(0.0, (QUIET,), [], OPEN), (SILENT_S, (HUNG_UP,), FAILED, not OPEN)],
        [(0.0, (SPOKEN, HUNG_UP), FAILED, not OPEN)],
        [(0.0, (QUIET, SPOKEN), [], OPEN), (0.0, (HUNG_UP,), [], OPEN), (SETTLED_S, (), FAILED, not OPEN)],
        [(0.0, (QUIET, DROPPED), FAILED, not OPEN)],
        [(0.0, (SPOKEN, KEY), [Failure.KEY], not OPEN)],
        [(0.0, (HUNG_UP,), FAILED, not OPEN)],
        [(0.0, ((zmq.EVENT_ACCEPTED, 8), (zmq.EVENT_ACCEPTED, 8), HUNG_UP), [], OPEN)],
    ],
    ids=[
        "made", "says no more", "one of two is made", "a probe", "a probe that waited", "silent for too long",
        "hung up after a byte", "a probe next to another", "dropped for its silence", "another key", "unknown",
        "a file number that was used twice",
    ],
)  # fmt: skip
def test_a_port_counts_handshakes_that_fail_and_no_probe(told: list[tuple[float, Any, list[Failure], bool]]) -> None:
    port = Watched()
    assert [port.after(seconds, *events) for seconds, events, _, _ in told] == [
        (found, left) for *_, found, left in told
    ]


def test_who_connects_hears_of_ends_and_of_what_the_peer_does_not_speak() -> None:
    port = Watched(bound=False)
    wrong = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
    ended = [(zmq.EVENT_DISCONNECTED, 0), (zmq.EVENT_CONNECT_RETRIED, 0)]
    assert port.after(0.0, KEY, wrong, *ended) == ([Failure.KEY, Failure.OTHER, Failure.GONE, Failure.GONE], False)
