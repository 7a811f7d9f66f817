"""What only a push's compiled loop does: it waits for libzmq, and gives up what waited. A twin on checked memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.carried_twice import SLAVES, End, Time, Transfers

from dips.core.layout import checksum
from dips.core.net import carry_numba, flow
from dips.core.net.carry_numba import PushLoop
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.payloads import bytes_of
from dips.core.net.zmq_numba import EINTR

FOREVER_S = 1e12


class Pusher:
    """A push of a vector by the twin of its loop, to slaves that acknowledge all. Its clock stands still."""

    def __init__(self, transfers: Transfers) -> None:
        self.theta, time = transfers._theta, Time()
        self._twins = transfers._twins(time, [transfers._theta, transfers._base])
        self.zmq, memory = self._twins.__enter__()
        sockets = {slave: self.zmq.socket() for slave in SLAVES}
        end = End(lambda links: transfers._carrier(links, time, np.zeros(0, np.float32), compiled=True), sockets, time)
        assert isinstance(end.carrier._loop, PushLoop)
        self.end, self.transfer, self.loop = end, end.transfer, end.carrier._loop
        self.transfer.columns.lanes.must_query[:] = [0, 0]
        self.loop.read_from([bytes_of(self.theta)])
        memory.add(self.loop._links.handed)
        self.heard: list[tuple[DataHeader, bytes]] = []
        self.zmq.polled = self.answer_all

    def answer_all(self, timeout_ms: int) -> int:
        """What the slaves do when the loop waits."""
        assert timeout_ms >= 0
        n_ready = 0
        for slave, socket in self.end.sockets.items():
            for frames in socket.sent:
                header, payload = DataHeader.decode(frames[0]), b"".join(frames[1:])
                assert (header.op, header.checksum) == (DataOp.PUT_CHUNK, checksum(payload))
                self.heard.append((header, payload))
                self.end.deliver(slave, [DataHeader("run", 1, DataOp.ACK, header.request, credit=3).encode()])
            socket.sent.clear()
            n_ready += bool(socket.inbox)
        return n_ready

    def finish(self) -> None:
        """Run until each slave is asked what it lacks."""
        for _ in SLAVES:
            assert self.loop.run(FOREVER_S) == carry_numba.SEND
            assert self.transfer.request_in(self.loop.slot).chunk is None
            self.loop.sent()

    def close(self) -> None:
        while self.zmq.give_back():
            pass
        self._twins.__exit__(None, None, None)
        assert self.zmq.n_open == 0


@pytest.fixture
def pusher() -> Iterator[Pusher]:
    made = Pusher(Transfers("push", 9))
    yield made
    made.close()


def test_a_lane_has_no_more_chunks_in_libzmq_s_hands_than_it_may_and_waits_longer_for_each(pusher: Pusher) -> None:
    """Slaves answer at once, but payloads come back late: at each third poll the oldest one."""
    held, handed, waits_ms = pusher.loop._held, pusher.loop._links.handed, list[int]()
    held.first[:] = held.stop[:] = flow.MOST_REQUESTS - 2  # the ring's end is passed
    pusher.zmq.is_late = True

    def polled(timeout_ms: int) -> int:
        out = handed[:, carry_numba.SENT] - handed[:, carry_numba.BACK]
        assert (out <= carry_numba.LEAD).all()
        waits_ms.append(timeout_ms)
        answered = pusher.answer_all(timeout_ms)
        if len(waits_ms) % 3 == 0:
            pusher.zmq.give_back()
        return answered

    pusher.zmq.polled = polled
    pusher.finish()
    while pusher.zmq.give_back():
        pass
    assert sorted(b"".join(payload for _, payload in pusher.heard)) == sorted(bytes_of(pusher.theta).tobytes())
    assert (held.first == held.stop).all()
    assert (held.first > flow.MOST_REQUESTS).all()
    assert (handed[:, carry_numba.SENT] == handed[:, carry_numba.BACK]).all()
    while_nothing_came = [carry_numba.SHORTEST_WAIT_MS, 2 * carry_numba.SHORTEST_WAIT_MS]
    assert any(waits_ms[n : n + 2] == while_nothing_came for n in range(len(waits_ms)))


def test_a_request_that_was_given_up_while_it_waited_for_libzmq_is_not_sent(pusher: Pusher) -> None:
    pusher.zmq.is_late = True
    pusher.zmq.polled = lambda timeout_ms: pusher.answer_all(timeout_ms) or pusher.zmq._fail(EINTR)
    assert pusher.loop.run(FOREVER_S) == carry_numba.AGAIN
    held, lane = pusher.loop._held, 0
    waiting = set(held.request[lane, held.first[lane] : held.stop[lane]].tolist())
    assert waiting
    pusher.transfer._start_over(lane)  # as after a silence
    pusher.transfer.columns.lanes.must_query[lane] = 0
    pusher.zmq.is_late = False
    while pusher.zmq.give_back():
        pass
    pusher.zmq.polled = pusher.answer_all
    pusher.finish()
    assert not waiting & {header.request for header, _ in pusher.heard}
    assert all(pusher.transfer.columns.chunks.moved)
