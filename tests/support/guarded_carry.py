"""A worker's compiled loops over real sockets, between forbidden pages, while slaves answer hostile bytes.

Everything that the loops read or write lies there: columns, tables, room to work, vectors, and the frames that arrive,
since inproc hands frames over without a copy. For a process of its own, which an access outside ends.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from support.carried_twice import LAYOUT, SLAVES, Slave, Transfers
from support.checked_memory import Guarded, in_guards

from dips.core.chunks import checksum
from dips.core.clock import SystemClock
from dips.core.math.simd_numba import address
from dips.core.net import carry_numba, zmq_numba
from dips.core.net.carriers import _Carrier, _PushCarrier
from dips.core.net.carry_numba import PushLoop, TransferLoop
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.payloads import F32, Memory, bytes_of
from dips.core.net.transfer import SlaveRequest
from dips.core.net.zmq_numba import FREED, new_messages

KINDS = ("pull", "push", "parts", "INT8", "BF16", "pull INT4")
"""Of transfers. parts: a push of several arrays."""


class Wire:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._routers = {slave: self._context.socket(zmq.ROUTER) for slave in SLAVES}
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._message = new_messages(1)
        self._frames: list[tuple[Guarded, NDArray[np.int64]]] = []
        self._n_sent = 0
        self.changes = 0
        for slave, router in self._routers.items():
            router.bind(f"inproc://{slave}")
            self.reconnect(slave)

    def reconnect(self, slave: str) -> None:
        if slave in self._dealers:
            self._dealers[slave].close(linger=0)
        dealer = self._dealers[slave] = self._context.socket(zmq.DEALER)
        dealer.connect(f"inproc://{slave}")
        self.changes += 1

    def send(self, slave: str, header: bytes, payload: memoryview | None = None, *, copy: bool = False) -> None:
        self._dealers[slave].send_multipart([header, *([] if payload is None else [payload])], zmq.DONTWAIT)

    def dealer(self, slave: str) -> zmq.Socket[bytes]:
        return self._dealers[slave]

    def monitors(self) -> list[zmq.Socket[bytes]]:
        return []

    def look(self) -> None:
        """No monitor has news."""

    def requests(self, slave: str) -> list[list[bytes]]:
        found = []
        while self._routers[slave].poll(0):
            found.append(self._routers[slave].recv_multipart())
        return found

    def answer(self, slave: str, peer: bytes, frames: Sequence[bytes]) -> None:
        router, message = self._routers[slave], address(self._message)
        router.send(peer, zmq.SNDMORE)
        for index, frame in enumerate(frames):
            room, given_back = Guarded(len(frame), at_end=self._n_sent % 2 == 0), np.zeros(1, np.int64)
            room.bytes[:] = np.frombuffer(frame, np.uint8)
            self._frames.append((room, given_back))
            self._n_sent += 1
            zmq_numba._call("zmq_msg_init_data", message, address(room.bytes), len(frame), FREED, address(given_back))
            more = zmq.SNDMORE if index + 1 < len(frames) else 0
            zmq_numba._call("zmq_msg_send", message, router.underlying, int(zmq.DONTWAIT) | int(more))
        self._frames = [(room, given_back) for room, given_back in self._frames if not given_back[0]]

    def close(self) -> int:
        self._context.destroy(linger=0)
        return sum(not given_back[0] for _, given_back in self._frames)


class GuardedTransfers(Transfers):
    """kind: of KINDS."""

    def run(self, n_hostile: int) -> None:
        """Answer n_hostile times with hostile bytes before the right ones, then rightly until the end."""
        with pytest.MonkeyPatch.context() as patch:
            pieces = carry_numba._pieces
            patch.setattr(carry_numba, "poll_items", lambda *watched: in_guards(zmq_numba.poll_items(*watched)))
            patch.setattr(carry_numba, "_pieces", lambda *places: tuple(map(in_guards, pieces(*places))))
            self._run(n_hostile)

    def _run(self, n_hostile: int) -> None:
        wire, into = Wire(), in_guards(np.zeros_like(self._theta))
        carrier = self._guarded_carrier(wire, into)
        transfer, clock = carrier._transfer, SystemClock()
        slaves = {name: Slave(self._rng, self._theta, self._shares[name], self._differences) for name in SLAVES}
        while not (transfer.done or transfer.failure):
            asks = []
            for action in transfer.actions(clock.monotonic_s(), requests=False):
                if isinstance(action, SlaveRequest):
                    asks.append(action)
                else:
                    wire.reconnect(action.slave)
            carrier.send(asks)
            for slave, header, payload in carrier._messages(0.001):
                carrier._receive(slave, header, payload)
                del payload
            for name in SLAVES:
                for peer, *frames in wire.requests(name):
                    self._check(frames)
                    for _ in range(self._rng.randrange(5) if self.n_answers < n_hostile else 0):
                        self.n_answers += 1
                        wire.answer(name, peer, slaves[name].answer(frames, hostile=True))
                    wire.answer(name, peer, slaves[name].answer(frames, hostile=False))
        assert not self._pulls or not transfer.done or into.tobytes() == self._theta.tobytes()
        self.n_done += transfer.done
        if isinstance(carrier._loop, PushLoop):
            carrier._loop.close()
        gc.collect()
        assert wire.close() == 0, "frames were not closed"

    def _guarded_carrier(self, wire: Wire, into: F32) -> _Carrier:
        kind, self._kind = self._kind, "push" if self._kind == "parts" else self._kind
        carrier = self._carrier(wire, SystemClock(), into, compiled=True)
        self._kind, loop = kind, carrier._loop
        assert isinstance(loop, TransferLoop)
        carrier._transfer.columns = loop._columns = _all_in_guards(loop._columns)
        for name in ("_links", "_scratch", "_numbers", "_texts", "_held", "_source", "_landing"):
            if hasattr(loop, name):
                setattr(loop, name, _all_in_guards(getattr(loop, name)))
        if kind == "parts":
            assert isinstance(loop, PushLoop)
            assert isinstance(carrier, _PushCarrier)
            memory = Memory(tuple(in_guards(bytes_of(part)) for part in np.split(self._theta, (5, 300, 301, 5000))))
            carrier._payloads.memory = lambda: memory  # type: ignore[method-assign]
        return carrier

    def _check(self, frames: Sequence[bytes]) -> None:
        header = DataHeader.decode(frames[0])
        if header.op is DataOp.PUT_CHUNK:
            assert checksum(frames[1]) == header.checksum
            start = 4 * LAYOUT.blocks[header.block].start_elem + header.offset_bytes
            here = bytes_of(self._theta)[start : start + header.length_bytes]
            assert self._kind not in ("push", "parts") or frames[1] == here.tobytes()


def _all_in_guards(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return in_guards(value)
    return type(value)(*map(_all_in_guards, value))


def answer_guarded(kind: str, seed: int, n_transfers: int) -> None:
    logging.disable(logging.CRITICAL)
    n_answers = n_done = 0
    for number in range(n_transfers):
        transfers = GuardedTransfers(kind, seed + number)
        transfers.run(n_hostile=100)
        n_answers += transfers.n_answers
        n_done += transfers.n_done
    print(f"{n_transfers} transfers, {n_done} of them done, {n_answers} hostile answers")
    assert n_answers >= 50 * n_transfers
