"""A data port under peers that would fill its memory or its table of files: they are cut and counted, others served."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from support import hostile
from support.data_port_process import GuardedPort
from support.slave_wire import LAYOUT, RUN, DataClient, push_id
from support.waiting import NO_LIMIT_S, until

from dips.core.layout import digest_of_array
from dips.core.net.data_header import DataHeader, DataOp
from dips.slave.data_server import LoopName

A = push_id("a")
BLOCKS = list(LAYOUT.blocks)
VALUES = np.random.default_rng(5).standard_normal(LAYOUT.n_elems).astype(np.float32)

ROOM_BYTES = 32 << 20
OVERSHOOT_BYTES = 100 << 20
"""What newcomers.LOOK_S allows for. The sender waits for the guard's looks, so that this depends on no scheduler: two
pauses' worth, and what the sockets hold."""


class Peak:
    """The most memory that a process had while this lasted."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self.n_bytes = hostile.own_memory_bytes(pid)
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.n_bytes = max(self.n_bytes, hostile.own_memory_bytes(self._pid))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


def told(port: GuardedPort, count: str, at_least: int, why: str = "") -> None:
    """Wait until the port has counted so many, with this in the last sentence."""

    def is_told() -> bool:
        now = port.count()
        return now[count] >= at_least and why in now["why"]

    until(is_told, f"{at_least} {count}", lambda: str(port.count()))


LOOPS: tuple[LoopName, ...] = ("python", "compiled")


@pytest.fixture(scope="module", params=LOOPS)
def filled_port(request: pytest.FixtureRequest) -> Iterator[GuardedPort]:
    """For those who fill its memory. It stays near its budget for a while, and cuts whoever brings bytes meanwhile."""
    with GuardedPort(ROOM_BYTES, loop=request.param) as port:
        yield port


@pytest.fixture(scope="module", params=LOOPS)
def port(request: pytest.FixtureRequest) -> Iterator[GuardedPort]:
    """For those whose messages are small, and judged by their frames."""
    with GuardedPort(ROOM_BYTES, loop=request.param) as port:
        yield port


async def pushes_all(port: GuardedPort) -> None:
    client = DataClient(port.endpoint, BLOCKS)
    try:
        assert await client.put_all(A, VALUES) == digest_of_array(VALUES, BLOCKS, 1024)
    finally:
        client.close()


@pytest.mark.parametrize("frame_bytes", [0, 1000, 60_000])
async def test_a_message_without_an_end_ends_the_connection(filled_port: GuardedPort, frame_bytes: int) -> None:
    port = filled_port
    before = port.count()["connections"]
    with Peak(port.pid) as peak:
        sent = hostile.endless_message(port.endpoint, frame_bytes, most_bytes=2 << 30, pause=port.wait_for_looks)
    assert sent < 2 << 30, "it was never cut"
    assert peak.n_bytes <= port.limit_bytes + OVERSHOOT_BYTES
    told(port, "connections", before + 1, "cut 1 connections that delivered nothing")


async def test_a_message_of_many_frames_is_one_refusal(port: GuardedPort) -> None:
    before = port.count()["chunks"]
    with hostile.dealer(port.endpoint) as peer:
        peer.sendall(hostile.frame(b"x", hostile.MORE) * 5000 + hostile.frame(b""))
        assert peer.recv(1)[0] & 0b100 == 0, "an answer, not a command"
    told(port, "chunks", before + 1)


@pytest.mark.parametrize("flags", [hostile.LONG, hostile.LONG | hostile.MORE])
def test_a_frame_that_claims_more_than_a_chunk_ends_its_connection(port: GuardedPort, flags: int) -> None:
    with hostile.dealer(port.endpoint) as peer:
        peer.sendall(bytes([flags]) + (1 << 62).to_bytes(8, "big"))
        assert hostile.hung_up(peer)


def test_a_second_connection_under_a_routing_id_gets_no_answer_of_the_first(port: GuardedPort) -> None:
    ask = DataHeader(RUN, 1, DataOp.QUERY_MISSING, 1, push=A, attempt=1).encode()
    with zmq.Context() as context, context.socket(zmq.DEALER) as owner, context.socket(zmq.DEALER) as thief:
        for peer in (owner, thief):
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.ROUTING_ID, b"owner")
            peer.connect(port.endpoint)
            peer.send(ask)
            assert peer is thief or peer.recv()
        for _ in range(5):
            owner.send(ask)
            assert owner.poll(int(1000 * NO_LIMIT_S)), "the thief took its place"
            owner.recv()
        assert not thief.poll(100)


@pytest.mark.parametrize("loop", LOOPS)
async def test_connections_beyond_the_table_of_files_are_cut_and_honest_peers_come_back(loop: LoopName) -> None:
    with GuardedPort(256 << 20, n_files=200, loop=loop) as port:
        strangers = hostile.garbage_connections(port.endpoint, (b"\xff" for _ in range(400)))
        try:
            told(port, "connections", 1, "files that this slave may open")
            await pushes_all(port)
            assert hostile.n_files(port.pid) < 200
        finally:
            for stranger in strangers:
                stranger.close()
