"""The data port's compiled loop, run as twins: hostile messages are answered as by the port alone, and no access of the
loop is outside its buffers. tests/slow/test_serve_guarded.py has the compiled form."""

from __future__ import annotations

import itertools
import math
import random
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from support.hostile_data import PUSHES, V0, V1, V2, Traffic
from support.served_port import Both, Kept, TwinLoop
from support.slave_wire import LAYOUT

from dips.core.ids import Version
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.zmq_numba import EINTR
from dips.slave.serve_numba import COMPLETE, ENOUGH, FREED_AGAIN, IDLE, NEWS, SENT, UNUSUAL, Lent

WITHOUT_SUMS, WITH_SUMS = 1024, 65536
"""Chunks of whole pieces are measured when they land."""


each_size = pytest.mark.parametrize("chunk_bytes", [WITHOUT_SUMS, WITH_SUMS])


@each_size
def test_right_messages_are_served_by_the_loop(chunk_bytes: int) -> None:
    traffic, rng = Traffic(chunk_bytes), random.Random(1)
    both = Both(traffic, TwinLoop)
    both.feed(traffic.right(rng) for _ in range(200))
    assert both.served > 100


@each_size
def test_hostile_messages_touch_nothing_outside(chunk_bytes: int) -> None:
    traffic, rng = Traffic(chunk_bytes), random.Random(2)
    both = Both(traffic, TwinLoop)
    both.feed(traffic.hostile(rng) for _ in range(400))
    assert both.left > 150


@each_size
def test_keys_are_looked_up_inside_of_their_table(chunk_bytes: int) -> None:
    """Every listed key but those of another cluster pushes and reads; ids that are not listed are left to Python."""
    traffic, rng = Traffic(chunk_bytes), random.Random(4)
    both = Both(traffic, TwinLoop, keyed=True)
    both.feed(traffic.right(rng) for _ in range(250))
    assert both.served > 40
    assert both.left > 80
    both.feed(traffic.hostile(rng) for _ in range(150))


@pytest.mark.parametrize(("routing_id", "served"), [(b"1", 4), (b"1234567", 4), (b"12345678", 0), (b"", 0)])
def test_the_loop_knows_readers_by_short_routing_ids_once_python_has_met_them(routing_id: bytes, served: int) -> None:
    traffic = Traffic(WITHOUT_SUMS)
    both = Both(traffic, TwinLoop, peer=routing_id)
    both.feed([traffic.get(chunk).encode()] for chunk in traffic.chunks()[:5])
    assert (both.served, both.left) == (served, 5 - served)


@pytest.mark.parametrize(("version", "base"), [(V1, V0), (V2, V1), (V2, V0), (V1, V2)])
def test_differences_are_served_by_the_loop_where_they_lead_to_the_version(version: Version, base: Version) -> None:
    traffic, n = Traffic(WITHOUT_SUMS), 3
    both = Both(traffic, TwinLoop)
    both.feed([traffic.get(chunk, 7, version, base).encode()] for chunk in traffic.chunks()[:n])
    assert both.served == (n - 1 if base < version else 0), "the first request is left to Python, which knows the peer"


# ---- several messages in one call ----

SMALL = Traffic(WITHOUT_SUMS)
PEERS = (b"1", b"2", b"3")


@pytest.fixture
def twin() -> Iterator[TwinLoop]:
    """With a push in each slot, in which nothing has landed. It knows PEERS."""
    rows = np.zeros((len(PUSHES), LAYOUT.n_elems), np.float32)
    with TwinLoop(SMALL, rows, Kept.of(SMALL), keyed=False) as made:
        for peer in PEERS:
            made.loop.meet(made.port.port, peer)
        yield made


def puts() -> list[list[bytes]]:
    """Each chunk for each push; the request is the place in the list."""
    rng, made = random.Random(5), list[list[bytes]]()
    for chunk in SMALL.chunks():
        for cluster in PUSHES:
            payload = SMALL.payload(rng, cluster, chunk)
            made.append([SMALL.put(cluster, chunk, payload, len(made)).encode(), payload])
    return made


PUT, GET = puts()[0], [SMALL.get(SMALL.chunks()[0], request=0).encode()]


def send(twin: TwinLoop, messages: list[list[bytes]], peers: tuple[bytes, ...] = PEERS) -> None:
    """From each peer in turn."""
    twin.end.inbox.extend(([peer, *frames], "") for peer, frames in zip(itertools.cycle(peers), messages))


def serve(twin: TwinLoop, until_s: float = -math.inf, refresh_s: float = 0.0) -> int:
    why = twin.loop.serve(until_s, refresh_s)
    twin.loop.settle(twin.port.port)
    return why


def answers(twin: TwinLoop) -> list[tuple[bytes, DataHeader]]:
    """What was sent since the last call, each with its peer."""
    sent = [(peer, DataHeader.decode(header)) for peer, header, *_ in twin.end.sent]
    twin.end.sent.clear()
    return sent


def test_one_call_serves_what_waits_and_each_peer_gets_its_own_answers(twin: TwinLoop) -> None:
    messages, port = puts(), twin.port.port
    table = port.table
    assert table is not None
    send(twin, messages)
    whys, heard, credits = list[int](), list[tuple[bytes, DataHeader]](), list[int]()
    then_due = [port.push_credit(staging) for staging in table.stagings()]
    while whys[-1:] != [IDLE]:
        due = then_due
        whys.append(serve(twin))
        then_due = [port.push_credit(staging) for staging in table.stagings()]
        if whys[-1] == COMPLETE:
            n_before = len(twin.end.sent)
            port.note_complete(twin.loop.complete)
            twin.loop.flush()
            assert len(twin.end.sent) == n_before + 1, "the push is noted before its sender hears of it"
        credits += [due[(len(heard) + n) % len(PUSHES)] for n in range(len(twin.end.sent))]
        heard += answers(twin)
    assert whys == [ENOUGH, *[COMPLETE] * len(PUSHES), IDLE]
    assert [(peer, header.request) for peer, header in heard] == [(PEERS[n % 3], n) for n in range(len(messages))]
    assert [header.credit for _, header in heard] == credits
    assert len(set(credits)) == 2, "some pushes are held back"
    assert [n for n, (_, header) in enumerate(heard) if header.complete] == list(range(len(heard)))[-len(PUSHES) :]
    assert [event.slot.push.cluster for event in twin.port.staged] == list(PUSHES)
    assert port.figures().staged_of == dict.fromkeys(PUSHES, 4 * LAYOUT.n_elems)


def test_all_answers_are_sent_before_a_message_is_left_to_python(twin: TwinLoop) -> None:
    port, stranger = twin.port.port, b"9"
    for _ in range(2):
        due = [port.pull_credit(peer) for peer in PEERS]
        send(twin, [*puts()[:2], GET, GET, GET], (*PEERS[:2], *PEERS))
        send(twin, [GET], (stranger,))
        assert serve(twin) == UNUSUAL
        assert twin.loop.left()[0] == stranger
        heard = answers(twin)
        assert [(peer, header.request) for peer, header in heard if header.op is DataOp.ACK] == [(b"1", 0), (b"2", 1)]
        chunks = [(peer, header.credit) for peer, header in heard if header.op is DataOp.CHUNK]
        assert chunks == list(zip(PEERS, due, strict=True))
    assert len(set(due)) == 2, "one reader is held back"
    assert port.figures().beat.served_bytes == 2 * len(PEERS) * SMALL.chunks()[0].length_bytes


@pytest.mark.parametrize("errno", [zmq.EHOSTUNREACH, zmq.EAGAIN])
@pytest.mark.parametrize("messages", [puts()[:3], [GET] * 3], ids=["put", "get"])
def test_a_peer_that_is_gone_or_does_not_read_alone_loses_its_answer(
    twin: TwinLoop, messages: list[list[bytes]], errno: int
) -> None:
    refusals = iter([0, errno])
    twin.end.refuses = lambda: next(refusals, 0)
    send(twin, messages)
    assert serve(twin) == IDLE
    assert [peer for peer, _ in answers(twin)] == [b"1", b"3"]
    assert twin.n_open == 0


def test_signals_interrupt_nothing(twin: TwinLoop) -> None:
    turns = itertools.count()
    twin.zmq.fails = lambda: EINTR if next(turns) % 2 else 0
    send(twin, [GET, *puts()[:1], GET])
    assert serve(twin) == IDLE
    assert sorted(peer for peer, _ in answers(twin)) == list(PEERS)
    assert twin.n_open == 0


@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("message", [PUT, GET], ids=["put", "get"])
def test_a_socket_that_fails_at_any_frame_ends_the_loop_with_its_reason(
    twin: TwinLoop, message: list[bytes], nth: int
) -> None:
    turns = itertools.count()
    twin.zmq.fails = lambda: int(zmq.ETERM) if next(turns) == nth else 0
    send(twin, [message])
    with pytest.raises(zmq.ZMQError) as raised:
        serve(twin)
    assert raised.value.errno == zmq.ETERM
    assert twin.n_open == (message is PUT and nth == 3), "then an acknowledgement waits for further messages"


def test_it_waits_as_long_as_it_may_and_returns_for_what_else_is_ready(twin: TwinLoop) -> None:
    waits, coming = list[int](), [[PUT], [GET]]

    def polled(timeout_ms: int) -> int:
        waits.append(timeout_ms)
        send(twin, coming[0] if coming else [])
        return len(coming.pop(0)) if coming else 0

    twin.zmq.polled = polled
    hour_s = 3600.0
    assert serve(twin, math.inf, hour_s) == IDLE, "messages came while it waited"
    assert [header.op for _, header in answers(twin)] == [DataOp.ACK, DataOp.CHUNK]
    assert serve(twin, time.monotonic() + hour_s) == IDLE
    assert waits[0] == -1
    assert all(0.9 * hour_s < wait / 1000 <= hour_s for wait in waits[1:])
    assert len(waits) == 4
    twin.other.inbox.append(([b"news"], ""))
    assert serve(twin, -math.inf) == IDLE
    send(twin, [PUT])
    assert serve(twin, math.inf, hour_s) == NEWS
    assert twin.loop.is_ready(1)
    assert not twin.loop.is_ready(0)
    assert len(answers(twin)) == 1
    assert len(waits) == 4


def test_memory_that_a_closed_socket_may_still_read_is_held(twin: TwinLoop) -> None:
    twin.zmq.is_late = True
    send(twin, [GET])
    assert serve(twin) == IDLE
    assert not twin.loop.holds_memory
    twin.connect()
    twin.loop.give_up()
    assert twin.loop.holds_memory
    send(twin, [GET])
    assert serve(twin) == UNUSUAL, "peers of the new socket are others"
    twin.zmq.give_back()
    twin.loop.give_up()
    assert not twin.loop.holds_memory
    lent, arrays = Lent(), [np.zeros(1) for _ in range(3)]
    seen = [weakref.ref(array) for array in arrays]
    lent.keep([arrays.pop(0)])
    lent.counts[SENT] += 1
    lent.keep([arrays.pop(0)])
    assert [ref() is not None for ref in seen] == [True, True, True]
    lent.counts[FREED_AGAIN] += 1
    lent.keep([arrays.pop(0)])
    assert [ref() is not None for ref in seen] == [False, False, True]
