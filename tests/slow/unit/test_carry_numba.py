"""What only a push's compiled loop does: it waits for libzmq, and gives up what waited. A twin on checked memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from support.checked_memory import Memory, Twins
from support.checked_zmq import CheckedZmq, FakeSocket

from dips.core.chunks import checksum
from dips.core.ids import ClusterId, Incarnation, PushId
from dips.core.layout import Layout, Parameter
from dips.core.math.xxh3_numba import xxh3
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net import carry_numba, flow
from dips.core.net.carry_numba import PushLoop, texts_of
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.payloads import Parameters, Places, bytes_of
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.transfer import PushTransfer, TransferSettings, chunks_by_slave
from dips.core.net.zmq_numba import EINTR, FREED, is_ready, now_s

CHUNK_BYTES = 256
N_CHUNKS = 12
LAYOUT = Layout((Parameter("w", (CHUNK_BYTES // 4 * N_CHUNKS - 5,), "float32", "w"),), CHUNK_BYTES)
PLACEMENT = PlacementSpec(
    (SlaveAddress("s0", "x"), SlaveAddress("s1", "x")), tuple(b.block_id % 2 for b in LAYOUT.blocks), b""
)
SHARES = chunks_by_slave(LAYOUT, PLACEMENT, range(len(LAYOUT.blocks)), CHUNK_BYTES)
SETTINGS = TransferSettings(CHUNK_BYTES, 4, silence_s=1e6, stall_s=1e6)
PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
NOW_S, FOREVER_S = 1.0, 1e12
"""The clock stands still, so that a busy machine makes no silence."""
PLACES = Places(LAYOUT)


def acknowledge(header: DataHeader, payload: bytes) -> list[bytes]:
    assert header.op is DataOp.PUT_CHUNK
    assert checksum(payload) == header.checksum
    return [DataHeader("run", 1, DataOp.ACK, header.request, credit=3).encode()]


class Port:
    """The sockets of both slaves, and the slaves: each answers what was sent to it when the loop waits."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.zmq = CheckedZmq(self.memory)
        self.sockets = {slave: self.zmq.socket() for slave in ("s0", "s1")}
        self.monitor = self.zmq.socket()
        self.changes = 0
        self.heard: list[tuple[DataHeader, bytes]] = []
        self.zmq.polled = self._answer_all

    def dealer(self, slave: str) -> FakeSocket:
        return self.sockets[slave]

    def monitors(self) -> list[FakeSocket]:
        return [self.monitor]

    def _answer_all(self, timeout_ms: int) -> int:
        assert timeout_ms >= 0
        n_ready = 0
        for socket in self.sockets.values():
            for frames in socket.sent:
                header, payload = DataHeader.decode(frames[0]), b"".join(frames[1:])
                self.heard.append((header, payload))
                socket.inbox.append((acknowledge(header, payload), ""))
            socket.sent.clear()
            n_ready += bool(socket.inbox)
        return n_ready


class Pusher:
    """A push of a vector by the twin of its loop, to slaves that acknowledge all."""

    def __init__(self, seed: int) -> None:
        self.flat = np.random.default_rng(seed).normal(size=LAYOUT.n_elems).astype(np.float32)
        self.port = port = Port()
        self.transfer = PushTransfer(SHARES, SETTINGS, 0.0, arrays=True)
        self.transfer.columns.lanes.must_query[:] = [0, 0]
        texts, payloads = texts_of("run", PUSH, "cause"), Parameters(self.flat, PLACES)
        self.loop = PushLoop(self.transfer, cast(SlaveSockets, port), 1, texts, 1, PLACES, payloads)
        self.loop.read_from([bytes_of(self.flat)])
        port.memory.add(bytes_of(self.flat), writable=False)
        read = port.memory.read
        instead: dict[Any, Callable[..., Any]] = {
            xxh3: lambda place, n_bytes: np.uint64(checksum(read(place, n_bytes))),
            is_ready: lambda items, index: bool(items[index]["revents"]),
            now_s: lambda: NOW_S,
        }
        self.twin = Twins(port.memory, port.zmq.functions, instead).of(carry_numba.push)

    def run(self) -> int:
        loop = self.loop
        loop._take_sockets()
        found: int = self.twin(
            loop._columns, loop._links, loop._held, loop._source, loop._texts, loop._scratch, loop._numbers,
            FREED, FOREVER_S,
        )  # fmt: skip
        return found

    def finish(self) -> None:
        """Run until each slave is asked what it lacks."""
        for _ in SHARES:
            assert self.run() == carry_numba.SEND
            assert self.transfer.request_in(self.loop.slot).chunk is None
            self.loop.sent()


def _until_nothing_comes(port: Port) -> Callable[[int], int]:
    """As a slave that answers; when there is nothing to answer, a signal ends the wait."""

    def polled(timeout_ms: int) -> int:
        return port._answer_all(timeout_ms) or port.zmq._fail(EINTR)

    return polled


def test_a_lane_has_no_more_chunks_in_libzmq_s_hands_than_it_may_and_waits_longer_for_each() -> None:
    """Slaves answer at once, but payloads come back late: at each third poll the oldest one."""
    pusher = Pusher(9)
    port = pusher.port
    held, handed, waits_ms = pusher.loop._held, pusher.loop._links.handed, list[int]()
    held.first[:] = held.stop[:] = flow.MOST_REQUESTS - 2  # the ring's end is passed
    port.zmq.is_late = True

    def polled(timeout_ms: int) -> int:
        out = handed[:, carry_numba.SENT] - handed[:, carry_numba.BACK]
        assert (out <= carry_numba.LEAD).all()
        waits_ms.append(timeout_ms)
        answered = port._answer_all(timeout_ms)
        if len(waits_ms) % 3 == 0:
            port.zmq.give_back()
        return answered

    port.zmq.polled = polled
    pusher.finish()
    while port.zmq.give_back():
        pass
    assert sorted(b"".join(payload for _, payload in port.heard)) == sorted(pusher.flat.tobytes())
    assert (held.first == held.stop).all()
    assert (held.first > flow.MOST_REQUESTS).all()
    assert (handed[:, carry_numba.SENT] == handed[:, carry_numba.BACK]).all()
    while_nothing_came = [carry_numba.SHORTEST_WAIT_MS, 2 * carry_numba.SHORTEST_WAIT_MS]
    assert any(waits_ms[n : n + 2] == while_nothing_came for n in range(len(waits_ms)))
    assert port.zmq.n_open == 0


def test_a_request_that_was_given_up_while_it_waited_for_libzmq_is_not_sent() -> None:
    pusher = Pusher(10)
    port = pusher.port
    port.zmq.is_late = True
    port.zmq.polled = _until_nothing_comes(port)
    assert pusher.run() == carry_numba.AGAIN
    held, lane = pusher.loop._held, 0
    waiting = set(held.request[lane, held.first[lane] : held.stop[lane]].tolist())
    assert waiting
    pusher.transfer._start_over(lane)  # as after a silence
    pusher.transfer.columns.lanes.must_query[lane] = 0
    port.zmq.is_late = False
    while port.zmq.give_back():
        pass
    port.zmq.polled = port._answer_all
    pusher.finish()
    assert not waiting & {header.request for header, _ in port.heard}
    assert all(pusher.transfer.columns.chunks.moved)
    assert port.zmq.n_open == 0
