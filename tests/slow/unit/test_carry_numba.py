"""The loops of a transfer on checked memory: whatever a slave answers, no byte outside a buffer is read or written."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checked_memory import Memory, Twins
from support.checked_zmq import CheckedZmq, FakeSocket

from dips.core.chunks import checksum
from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.core.math.landing_numba import copy_hashed
from dips.core.math.wire_numba import encode_at
from dips.core.math.xxh3_numba import xxh3
from dips.core.messages import PlacementSpec, Refusal, SlaveAddress
from dips.core.net import carry_numba, flow
from dips.core.net.carry_numba import PullLoop, PushLoop, texts_of
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.payloads import Difference, Differences, Parameters, Payloads, Places, bytes_of
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.transfer import PullTransfer, PushTransfer, TransferSettings, chunks_by_slave
from dips.core.net.zmq_numba import EAGAIN, EINTR, FREED, is_ready, now_s
from dips.core.wire import Codec

CHUNK_BYTES = 256
N_CHUNKS = 12
LAYOUT = Layout((Parameter("w", (CHUNK_BYTES // 4 * N_CHUNKS - 5,), "float32", "w"),), CHUNK_BYTES)
PLACEMENT = PlacementSpec(
    (SlaveAddress("s0", "x"), SlaveAddress("s1", "x")), tuple(b.block_id % 2 for b in LAYOUT.blocks), b""
)
SHARES = chunks_by_slave(LAYOUT, PLACEMENT, range(len(LAYOUT.blocks)), CHUNK_BYTES)
SETTINGS = TransferSettings(CHUNK_BYTES, 4, silence_s=1e6, stall_s=1e6)
PUSH, VERSION = PushId(ClusterId("a"), Incarnation(1, 1), 1), Version(1, 2)
NOW_S, FOREVER_S = 1.0, 1e12
"""The clock stands still, so that a busy machine makes no silence."""
PLACES = Places(LAYOUT)


class Port:
    """The sockets of both slaves, and the slaves: each answers what was sent to it when the loop waits."""

    def __init__(self, answer: Callable[[DataHeader, bytes], list[list[bytes]]]) -> None:
        self.memory = Memory()
        self.zmq = CheckedZmq(self.memory)
        self.sockets = {slave: self.zmq.socket() for slave in ("s0", "s1")}
        self.monitor = self.zmq.socket()
        self.changes = 0
        self._answer = answer
        self.heard: list[tuple[DataHeader, bytes]] = []
        self.zmq.polled = self._answer_all

    def dealer(self, slave: str) -> FakeSocket:
        return self.sockets[slave]

    def monitors(self) -> list[FakeSocket]:
        return [self.monitor]

    def twin(self, loop: Any, instead: dict[Any, Callable[..., Any]] | None = None) -> Callable[..., Any]:
        def ready(items: Any, index: int) -> bool:
            return bool(items[index]["revents"])

        replaced: dict[Any, Callable[..., Any]] = {is_ready: ready, now_s: lambda: NOW_S, **(instead or {})}
        return Twins(self.memory, self.zmq.functions, replaced).of(loop)

    def _answer_all(self, timeout_ms: int) -> int:
        assert timeout_ms >= 0
        n_ready = 0
        for socket in self.sockets.values():
            for frames in socket.sent:
                header, payload = DataHeader.decode(frames[0]), b"".join(frames[1:])
                self.heard.append((header, payload))
                socket.inbox.extend((answer, "") for answer in self._answer(header, payload))
            socket.sent.clear()
            n_ready += bool(socket.inbox)
        return n_ready


def acknowledge(header: DataHeader, payload: bytes) -> list[list[bytes]]:
    assert header.op is DataOp.PUT_CHUNK
    assert checksum(payload) == header.checksum
    return [[DataHeader("run", 1, DataOp.ACK, header.request, credit=3).encode()]]


def vector(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=LAYOUT.n_elems).astype(np.float32)


class Pusher:
    """A push by the twin of its loop."""

    def __init__(self, port: Port, payloads: Payloads, memory: Sequence[NDArray[Any]]) -> None:
        self.port, self.payloads = port, payloads
        self.transfer = PushTransfer(SHARES, SETTINGS, 0.0, arrays=True)
        self.transfer.columns.lanes.must_query[:] = [0, 0]
        self.loop = PushLoop(
            self.transfer, cast(SlaveSockets, port), 1, texts_of("run", PUSH, "cause"), 1, PLACES, payloads
        )
        for array in memory:
            port.memory.add(array, writable=False)
        # The kernels have tests of their own; here it counts which bytes they are given.
        read, write = port.memory.read, port.memory.write

        def encode(codec: int, now: Any, base: Any, residual: Any, into: int) -> None:
            part = np.zeros(int(self.loop._source.payload_bytes[0]), np.uint8)
            port.memory.check(into, 1, write=True)
            assert len(now) == len(base)
            assert len(residual) in (0, len(now))
            assert len(now[:]) * 4 <= len(part) * 8
            assert base[:].shape == now[:].shape
            assert residual[:].size in (0, len(now))
            write(into, bytes(2 * len(now)))

        self.twin = port.twin(
            carry_numba.push,
            {xxh3: lambda place, n_bytes: np.uint64(checksum(read(place, n_bytes))), encode_at: encode},
        )

    def run(self) -> int:
        loop = self.loop
        loop._take_sockets()
        found: int = self.twin(
            loop._columns, loop._links, loop._held, loop._source, loop._texts, loop._scratch, loop._numbers,
            FREED, FOREVER_S,
        )  # fmt: skip
        return found

    def finish(self) -> set[int]:
        """Run until each slave is asked what it lacks; the codes before."""
        codes, n_queries = set(), 0
        while n_queries < 2:
            why = self.run()
            if why == carry_numba.SEND:
                assert self.transfer.request_in(self.loop.slot).chunk is None
                self.loop.sent()
                n_queries += 1
            else:
                codes.add(why)
                _hear(self.port, self.loop, why)
        return codes


def test_a_push_reads_its_payloads_and_nothing_else() -> None:
    """One lane's answers do not wait for the other's, and each payload comes back."""
    flat = vector(1)
    port = Port(acknowledge)
    pusher = Pusher(port, Parameters(flat, PLACES), [bytes_of(flat)])
    pusher.loop.read_from([bytes_of(flat)])
    assert pusher.finish() == set()
    assert sorted(b"".join(payload for _, payload in port.heard)) == sorted(flat.tobytes())
    assert all(pusher.transfer.columns.chunks.moved)
    assert (pusher.loop._links.handed[:, carry_numba.SENT] == pusher.loop._links.handed[:, carry_numba.BACK]).all()
    assert port.zmq.n_open == 0


@pytest.mark.parametrize("edges", [(1, 5, 100), (64, 128), (300, 301, 302, 700)])
def test_a_push_of_several_arrays_puts_their_bytes_together(edges: tuple[int, ...]) -> None:
    flat = vector(2)
    parts = [part.copy().view(np.uint8) for part in np.split(flat, edges)]
    port = Port(acknowledge)
    pusher = Pusher(port, Parameters(flat, PLACES), parts)
    pusher.loop.read_from(parts)
    assert pusher.finish() == set()
    starts = [block.start_elem for block in LAYOUT.blocks]
    for header, payload in port.heard:
        begin = starts[header.block] * 4 + header.offset_bytes
        assert payload == flat.tobytes()[begin : begin + header.length_bytes]
    assert port.zmq.n_open == 0


def test_a_difference_is_given_its_vectors_and_room_for_itself() -> None:
    now, base, residual = vector(3), vector(4), vector(5)
    port = Port(acknowledge)
    difference = Difference(base, residual)
    payloads = Differences(Codec.BF16, now, difference, PLACES, CHUNK_BYTES)
    pusher = Pusher(port, payloads, [now, base, residual])
    pusher.loop.write_differences(bytes_of(now), difference)
    assert pusher.finish() == set()
    assert all(len(payload) == header.length_bytes // 2 for header, payload in port.heard)
    assert len(port.heard) == sum(map(len, SHARES.values()))
    assert port.zmq.n_open == 0


def test_a_queue_that_is_full_loses_a_chunk_and_no_memory() -> None:
    flat = vector(6)
    port, refusals = Port(acknowledge), iter([0, EAGAIN, 0, EAGAIN])
    port.sockets["s0"].refuses = lambda: next(refusals, 0)
    pusher = Pusher(port, Parameters(flat, PLACES), [bytes_of(flat)])
    pusher.loop.read_from([bytes_of(flat)])
    port.zmq.polled = _until_nothing_comes(port)
    while (why := pusher.run()) == carry_numba.SEND:
        pusher.loop.sent()
    assert why == carry_numba.AGAIN
    chunks = pusher.transfer.columns.chunks
    lost_bytes = sum(n for n, moved in zip(chunks.length_bytes, chunks.moved, strict=True) if not moved)
    assert CHUNK_BYTES < lost_bytes <= 2 * CHUNK_BYTES
    assert port.zmq.n_open == 0


def _until_nothing_comes(port: Port) -> Callable[[int], int]:
    """As a slave that answers; when there is nothing to answer, a signal ends the wait."""

    def polled(timeout_ms: int) -> int:
        return port._answer_all(timeout_ms) or port.zmq._fail(EINTR)

    return polled


def test_a_lane_has_no_more_chunks_in_libzmq_s_hands_than_it_may_and_waits_longer_for_each() -> None:
    """Slaves answer at once, but payloads come back late: at each third poll the oldest one."""
    flat, port = vector(9), Port(acknowledge)
    pusher = Pusher(port, Parameters(flat, PLACES), [bytes_of(flat)])
    pusher.loop.read_from([bytes_of(flat)])
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
    assert pusher.finish() == set()
    while port.zmq.give_back():
        pass
    assert sorted(b"".join(payload for _, payload in port.heard)) == sorted(flat.tobytes())
    assert (held.first == held.stop).all()
    assert (held.first > flow.MOST_REQUESTS).all()
    assert (handed[:, carry_numba.SENT] == handed[:, carry_numba.BACK]).all()
    while_nothing_came = [carry_numba.SHORTEST_WAIT_MS, 2 * carry_numba.SHORTEST_WAIT_MS]
    assert any(waits_ms[n : n + 2] == while_nothing_came for n in range(len(waits_ms)))
    assert port.zmq.n_open == 0


def test_a_request_that_was_given_up_while_it_waited_for_libzmq_is_not_sent() -> None:
    flat, port = vector(10), Port(acknowledge)
    pusher = Pusher(port, Parameters(flat, PLACES), [bytes_of(flat)])
    pusher.loop.read_from([bytes_of(flat)])
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
    assert pusher.finish() == set()
    assert not waiting & {header.request for header, _ in port.heard}
    assert all(pusher.transfer.columns.chunks.moved)
    assert port.zmq.n_open == 0


def rubbish(rng: random.Random, right: list[bytes]) -> list[bytes]:
    """A right answer, damaged; often so that its trailer is right again, or with other frames."""
    header = DataHeader.decode(right[0])
    changes: list[Callable[[], list[bytes]]] = [
        lambda: [],
        lambda: [rng.randbytes(rng.randrange(200))],
        lambda: [right[0][: rng.randrange(len(right[0]))], *right[1:]],
        lambda: [replace(header, request=rng.choice([0, 1, 7, 1 << 33, (1 << 63) + 1])).encode(), *right[1:]],
        lambda: [replace(header, run_id="another").encode(), *right[1:]],
        lambda: [replace(header, op=DataOp.ACK, complete=True, request=1 << 20).encode(), *right[1:]],
        lambda: [replace(header, op=DataOp.REFUSED, refusal=Refusal(RefusalCode.BUSY, "no")).encode()],
        lambda: [replace(header, length_bytes=rng.choice([0, 4, 1 << 40])).encode(), *right[1:]],
        lambda: [replace(header, checksum=rng.getrandbits(64)).encode(), *right[1:]],
        lambda: [right[0], b"".join(right[1:])[: rng.randrange(CHUNK_BYTES)]],
        lambda: [right[0], bytes(CHUNK_BYTES + 4)],
        lambda: [right[0]] + [b"x"] * rng.randrange(2, 5),
        lambda: right[:1],
    ]
    return rng.choice(changes)() or [b""]


def _hear(port: Port, loop: PushLoop | PullLoop, why: int) -> None:
    """What Python does with a message: here nothing but to take its frames."""
    if why == carry_numba.UNUSUAL:
        with port.zmq.for_python():
            slave, head, payload = loop.message()
            assert slave in port.sockets
            assert len(head) <= 1 << 20
            del payload
            gc.collect()


@pytest.mark.parametrize("seed", range(3))
def test_a_push_survives_whatever_is_answered(seed: int) -> None:
    rng, flat = random.Random(seed), vector(7)

    def answer(header: DataHeader, payload: bytes) -> list[list[bytes]]:
        right = acknowledge(header, payload)[0]
        return [*(rubbish(rng, right) for _ in range(rng.randrange(4))), right]

    port = Port(answer)
    pusher = Pusher(port, Parameters(flat, PLACES), [bytes_of(flat)])
    pusher.loop.read_from([bytes_of(flat)])
    assert pusher.finish() == {carry_numba.UNUSUAL}
    assert all(pusher.transfer.columns.chunks.moved)
    assert port.zmq.n_open == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_pull_writes_only_where_the_chunk_that_it_asked_for_belongs(seed: int) -> None:
    rng, flat = random.Random(seed), vector(8)
    into = np.zeros_like(flat)
    starts = [block.start_elem for block in LAYOUT.blocks]

    def answer(header: DataHeader, _: bytes) -> list[list[bytes]]:
        begin = starts[header.block] * 4 + header.offset_bytes
        payload = flat.tobytes()[begin : begin + header.length_bytes]
        chunk = replace(header, op=DataOp.CHUNK, checksum=checksum(payload), cause_id="", credit=2)
        right = [chunk.encode(), payload]
        return [*(rubbish(rng, right) for _ in range(rng.randrange(4))), right]

    port = Port(answer)
    transfer = PullTransfer(SHARES, {}, SETTINGS, 0.0, arrays=True)
    loop = PullLoop(
        transfer, cast(SlaveSockets, port), 1, texts_of("run", VERSION, "cause"), PLACES, bytes_of(into), momentum=False
    )
    port.memory.add(bytes_of(into))
    read, write = port.memory.read, port.memory.write

    def copy(place: int, source: int, n_bytes: int, acc: Any) -> np.uint64:
        data = read(source, n_bytes)
        write(place, data)
        return np.uint64(checksum(data))

    twin = port.twin(
        carry_numba.pull,
        {copy_hashed: copy, xxh3: lambda place, n_bytes: np.uint64(checksum(read(place, n_bytes)))},
    )
    loop._take_sockets()
    n_whole = 0
    while n_whole < 2:
        why = twin(
            loop._columns, loop._links, loop._landing, loop._texts, loop._scratch, loop._numbers, FOREVER_S
        )  # fmt: skip
        assert why in (carry_numba.UNUSUAL, carry_numba.WHOLE)
        _hear(port, loop, why)
        n_whole += why == carry_numba.WHOLE
    assert into.tobytes() == flat.tobytes()
    assert all(transfer.columns.chunks.moved)
    assert port.zmq.n_open == 0
