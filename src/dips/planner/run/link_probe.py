"""Measures links for `dips profile links`: bandwidth and latency of both directions, over TCP.

`dips profile serve` at one end, the measuring command at the other. A round sends a small payload (five integers) and
a large one in each direction and waits for the answer of one integer, after rounds that only warm up (they open the
window of the connection). time(bytes) = latency + bytes / bandwidth is fitted to both (SpanTrain, section 3.2.1, whose
alpha + beta / bytes mixes units).

The serving end takes and gives zeros of a limited size, one peer at a time, and does nothing else with what it gets.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from dips.core.errors import ConfigError, FatalError
from dips.planner.profile import LinkRate

REQUEST = struct.Struct(">8sBQ")
"""The name of the protocol, what is asked, and how many bytes."""

PROTOCOL = b"dipslink"
TAKE, GIVE = 1, 2
ANSWER = b"\0" * 8
SMALL_BYTES = 5 * 8
MOST_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
IDLE_S = 30.0
"""After so long without a byte an end gives up the connection."""


class LinkTimes(NamedTuple):
    """Nanoseconds of one direction's rounds: of the small payload and of the large one, with the answer."""

    small_ns: list[int]
    large_ns: list[int]


def fit(times: LinkTimes, large_bytes: int, sender: str, receiver: str, at: datetime) -> LinkRate:
    """Bandwidth and latency from the medians of the rounds; an answer takes as long as a message without bytes.

    Raises FatalError where the large payload took no longer than the small one.
    """
    small_s, large_s = (statistics.median(column) / 1e9 for column in times)
    if large_s <= small_s:
        raise FatalError(
            f"from {sender} to {receiver} {large_bytes} bytes took no longer than {SMALL_BYTES}: give a larger "
            "--payload-mb"
        )
    bytes_per_s = (large_bytes - SMALL_BYTES) / (large_s - small_s)
    latency_s = max(0.0, small_s - SMALL_BYTES / bytes_per_s) / 2
    low, middle, high = (
        statistics.quantiles(times.large_ns, n=4, method="inclusive") if len(times.large_ns) > 1 else (0.0, 1.0, 0.0)
    )
    return LinkRate(
        sender=sender, receiver=receiver, bandwidth_gbps=bytes_per_s * 8 / 1e9, latency_ms=latency_s * 1e3,
        spread=min(10.0, (high - low) / middle), rounds=len(times.large_ns), at=at,
    )  # fmt: skip


def probe(host: str, port: int, large_bytes: int, rounds: int, warm_up: int) -> tuple[LinkTimes, LinkTimes]:
    """The times of messages to a serving end, and of those from it. Raises FatalError where it cannot be reached or
    does not answer."""
    sent, got = LinkTimes([], []), LinkTimes([], [])
    try:
        with socket.create_connection((host, port), timeout=IDLE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for number in range(warm_up + rounds):
                for size, which in ((SMALL_BYTES, 0), (large_bytes, 1)):
                    for what, times in ((TAKE, sent), (GIVE, got)):
                        begin_ns = time.perf_counter_ns()
                        _ask(link, what, size)
                        lasted_ns = time.perf_counter_ns() - begin_ns
                        if number >= warm_up:
                            times[which].append(lasted_ns)
    except (OSError, UnicodeError) as error:
        raise FatalError(
            f"the link to {host}:{port} cannot be measured: {error}: run dips profile serve --listen there, and let "
            "this machine reach it"
        ) from error
    return sent, got


def _ask(link: socket.socket, what: int, size: int) -> None:
    link.sendall(REQUEST.pack(PROTOCOL, what, size))
    if what == TAKE:
        _send(link, size)
        _take(link, len(ANSWER))
    else:
        _take(link, size)


def _send(link: socket.socket, size: int) -> None:
    for done in range(0, size, PIECE_BYTES):
        link.sendall(bytes(min(size - done, PIECE_BYTES)))


def _take(link: socket.socket, size: int) -> None:
    """Receive so many bytes. Raises ConnectionError when the other end closes before."""
    room = memoryview(bytearray(min(size, PIECE_BYTES)))
    while size:
        got = link.recv_into(room[: min(size, PIECE_BYTES)])
        if not got:
            raise ConnectionError("the other end has closed the connection")
        size -= got


# ---- the other end ---------------------------------------------------------------------------------------------------


def listening(host: str, port: int) -> socket.socket:
    """The socket of the serving end. Raises ConfigError where the address cannot be used."""
    try:
        return socket.create_server((host, port))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--listen {host}:{port} cannot be used: {error}: give an address of this machine") from error


def serve(server: socket.socket, until_s: float, now_s: Callable[[], float] = time.monotonic) -> int:
    """Answer one peer after another until the clock shows until_s; returns how many it served to their end."""
    served = 0
    while (left_s := until_s - now_s()) > 0:
        server.settimeout(left_s)
        try:
            link, _ = server.accept()
        except TimeoutError:
            break
        with link, contextlib.suppress(OSError):  # a peer that leaves, or never says a word, is no reason to end
            link.settimeout(IDLE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            served += _answer(link, lambda: now_s() >= until_s)
    return served


def _answer(link: socket.socket, is_over: Callable[[], bool]) -> bool:
    """Answer a peer's requests until it leaves; False when it speaks something else, or goes on when it is over."""
    while not is_over():
        asked = b""
        while len(asked) < REQUEST.size:
            more = link.recv(REQUEST.size - len(asked))
            if not more:
                return not asked
            asked += more
        name, what, size = REQUEST.unpack(asked)
        if name != PROTOCOL or what not in (TAKE, GIVE) or not 0 < size <= MOST_BYTES:
            return False
        if what == TAKE:
            _take(link, size)
            link.sendall(ANSWER)
        else:
            _send(link, size)
    return False
