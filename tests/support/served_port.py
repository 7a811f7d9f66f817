"""The same messages to a data port, and to one behind the compiled loop; both must answer the same and hold the same.

Behind it the loop runs in one of two ways, in both of which no access outside its buffers goes unnoticed: as twins over
a libzmq that checks (support/checked_zmq.py), or compiled, with real sockets, where everything that it reads or writes
lies between pages that must not be touched; the latter in a process of its own.
"""

from __future__ import annotations

import gc
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from support.checked_memory import Guarded, Memory, Twins, in_guards
from support.checked_zmq import CheckedZmq
from support.hostile_data import DIFFERENCE, PUSHES, V0, VERSIONS, Traffic, every_flip
from support.slave_wire import LAYOUT, RUN, push_id

from dips.core.errors import Refused
from dips.core.ids import RoundId, Version
from dips.core.layout import checksum
from dips.core.math import xxh3_numba
from dips.core.math.simd_numba import address
from dips.core.messages import AllowedKey, KeyRole, SnapshotInfo
from dips.core.net import zmq_numba
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.zmq_numba import POLL_ITEM, freed, new_messages, poll_items
from dips.core.protocol import CURVE_KEY_BYTES
from dips.core.wire import Codec, encoded_bytes
from dips.slave import serve_numba
from dips.slave.calculation import chunk_checksums
from dips.slave.data_port import DataPort
from dips.slave.landing import Sums
from dips.slave.memory import F32, U8, EncodedShard, ThetaBuffer
from dips.slave.serve_numba import COMPLETE, IDLE, UNUSUAL, ServeLoop
from dips.slave.state.admission import Admission
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import ShardMap, Slot


class Differs(AssertionError):
    """The loop did something else than the port alone."""


KEYS = [
    AllowedKey(role, owner, bytes([number]) * CURVE_KEY_BYTES)
    for number, (role, owner) in enumerate(
        [*((KeyRole.CLUSTER, name) for name in "aabc"), (KeyRole.READER, "a"), (KeyRole.SLAVE, "s1")]
    )
]
"""Two ranks of a cluster, two clusters of one process, a reader with a cluster's name, and another slave."""

USERS = ("", *(allowed.curve_key.hex() for allowed in KEYS[:3]), "ff" * CURVE_KEY_BYTES, "00", "00" * 40,
         *(allowed.curve_key.hex() for allowed in KEYS[3:]))  # fmt: skip
"""Of connections of a port with KEYS: those, keys that are not listed, shorter and longer ids, and one without."""


class Kept(NamedTuple):
    """What can be read, of each of VERSIONS."""

    thetas: Sequence[F32]
    differences: Sequence[U8]
    starts: NDArray[np.int64]  # of the chunks in each difference

    @classmethod
    def of(cls, traffic: Traffic) -> Kept:
        """Numbers that differ by version, each array in a guarded place."""
        sizes = [encoded_bytes(DIFFERENCE, chunk.length_bytes // 4) for chunk in traffic.chunks()]
        starts, rng = np.cumsum([0, *sizes]), np.random.default_rng(1)
        thetas = [Guarded(4 * LAYOUT.n_elems).array(np.float32) for _ in VERSIONS]
        differences = [Guarded(int(starts[-1])).array(np.uint8) for _ in VERSIONS]
        for array in (*thetas, *differences):
            array[:] = rng.integers(0, 256, array.size)
        return cls(thetas, differences, starts)

    def buffers(self, traffic: Traffic) -> dict[Version, ThetaBuffer]:
        readable, before = {}, None
        for version, theta, data in zip(VERSIONS, self.thetas, self.differences, strict=True):
            info = SnapshotInfo(version, RoundId(1, 1), b"", b"", b"", committed=True)
            sums = chunk_checksums(theta, LAYOUT.blocks, traffic.chunk_bytes)
            difference = EncodedShard(DIFFERENCE, data, self.starts)
            readable[version] = ThetaBuffer(theta, info, sums, difference=difference, base=before)
            before = version
        return readable


class Port:
    """A data port with a push in each slot and VERSIONS to read, in this memory. keyed: it admits KEYS, and messages
    come from `user`."""

    def __init__(self, traffic: Traffic, rows: F32, kept: Kept, keyed: bool) -> None:
        self.rows, self.staged, self.user = rows, list[PushStaged](), ""
        rows[:] = 0
        admission = Admission() if keyed else None
        if admission is not None:
            admission.set_keys(KEYS)
        self.port = DataPort(RUN, self.staged.append, now_s=lambda: 0.0, admission=admission)
        self.port.set_epoch(traffic.epoch)
        self.port.set_memory(ShardMap(LAYOUT.blocks, traffic.chunk_bytes), rows)
        self.port.set_readable(kept.buffers(traffic), V0)
        self.port.hold(
            Slot(push_id(cluster), 1, number, opening=1, wire=codec, base=None if codec is Codec.F32 else V0)
            for number, (cluster, codec) in enumerate(PUSHES.items())
        )

    def answer(self, frames: Sequence[bytes | memoryview], peer: bytes) -> list[bytes]:
        answer = self.port.answer([memoryview(frame) for frame in frames], peer, self.user)
        return [answer.header.encode(), *([] if answer.payload is None else [bytes(answer.payload)])]

    def facts(self) -> object:
        figures = self.port.figures()
        return figures.beat, figures.refused, figures.staged_of, self.port.last_refusal, self.staged

    def sums(self) -> Sums:
        receipts = self.port.receipts
        assert receipts is not None
        return receipts.sums


class BehindLoop(ABC):
    """A port behind the compiled loop, served one message at a time; `served` counts those that the loop answered."""

    def __init__(self, port: Port, loop: ServeLoop) -> None:
        self.port, self.loop, self.peer, self.served, self.left = port, loop, PEER, 0, 0
        loop.renew(port.port)

    def answer(self, frames: Sequence[bytes]) -> list[bytes]:
        self.put_in(frames)
        why = self.loop.serve(-math.inf, 0.0)
        any_served = self.loop.settle(self.port.port)
        if why == UNUSUAL:
            self.left += 1
            return self._answer_what_was_left(frames)
        if why == COMPLETE:
            self.port.port.note_complete(self.loop.complete)
            self.loop.flush()
        elif why != IDLE:
            raise Differs(f"serve() returned {why} after one message")
        if not any_served:
            raise Differs("serve() says nothing of the message")
        self.served += 1
        return self.take_out()

    def _answer_what_was_left(self, frames: Sequence[bytes]) -> list[bytes]:
        peer, first, more = self.loop.left()
        if [frame.bytes for frame in first] != list(frames[: len(first)]) or more != (len(first) < len(frames)):
            raise Differs("the loop left other frames than it was sent")
        del first
        gc.collect(0)
        if more:
            self.drop_rest()
        header, *_ = answer = self.port.answer(frames, peer)
        if DataHeader.decode(header).op is DataOp.CHUNK:
            self.loop.meet(self.port.port, peer)
        return answer

    @abstractmethod
    def put_in(self, frames: Sequence[bytes]) -> None:
        """Have a peer send a message."""

    @abstractmethod
    def drop_rest(self) -> None:
        """Receive the further frames of a message that the loop left."""

    @abstractmethod
    def take_out(self) -> list[bytes]:
        """The answer that the peer received."""


PEER = b"peer1"


class TwinLoop(BehindLoop):
    """The loop's source in the interpreter, over a libzmq that checks. It serves `end`, until `other` has something.
    Use as a context."""

    def __init__(self, traffic: Traffic, rows: F32, kept: Kept, keyed: bool) -> None:
        self._memory = Memory()
        self.zmq = CheckedZmq(self._memory)
        self.end, self.other = self.zmq.socket(), self.zmq.socket()
        arrays: list[NDArray[Any]] = [rows, *kept.thetas, *kept.differences]
        for array in arrays:
            self._memory.add(array)
        twins = Twins(self._memory, self.zmq.functions, {xxh3_numba.xxh3: self._checksum})
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(serve_numba, "serve", twins.of(serve_numba.serve))
        self._patch.setattr(serve_numba, "flush", twins.of(serve_numba.flush))
        self._python = self.zmq.for_python()
        loop = ServeLoop(RUN)
        items = np.zeros(2, POLL_ITEM).view(np.recarray)  # whose elements have attributes, as numba's do
        items["socket"] = self.end.underlying, self.other.underlying
        router: Any = self.end
        self.connect: Callable[[], None] = lambda: loop.watch(router, items)
        self.connect()
        self._lent = self._memory.add(loop._lent.counts)
        super().__init__(Port(traffic, rows, kept, keyed), loop)

    def _checksum(self, place: int, n_bytes: int) -> np.uint64:
        """As xxh3, which has a test of its own."""
        return np.uint64(checksum(self._memory.read(place, n_bytes)))

    def __enter__(self) -> TwinLoop:
        self._python.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        gc.collect()  # of frames that were taken over
        self._python.__exit__(None, None, None)
        self._patch.undo()

    @property
    def n_open(self) -> int:
        return self.zmq.n_open

    def put_in(self, frames: Sequence[bytes]) -> None:
        self.end.inbox.append(([self.peer, *frames], self.port.user))

    def drop_rest(self) -> None:
        self.end.rest.clear()

    def take_out(self) -> list[bytes]:
        ((peer, *frames),) = self.end.sent
        self.end.sent.clear()
        assert peer == self.peer
        return frames


class GuardedLoop(BehindLoop):
    """The compiled loop over real sockets, on guarded memory. Use as a context."""

    def __init__(self, traffic: Traffic, rows: F32, kept: Kept, keyed: bool) -> None:
        assert not keyed, "connections inside of a process have no keys"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router, self._dealer = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._router.bind("inproc://port")
        self._dealer.setsockopt(zmq.ROUTING_ID, PEER)
        self._dealer.connect("inproc://port")
        self._message, self._counts, self._sent = new_messages(1), np.zeros(1, np.int64), 0
        self._rooms = [Guarded(1 << 18, at_end=index % 2 == 0) for index in range(2 * MOST_FRAMES)]
        loop = ServeLoop(RUN)
        scratch = loop._scratch
        loop._scratch = scratch._replace(**{name: in_guards(array) for name, array in scratch._asdict().items()})
        loop.watch(self._router, in_guards(poll_items(self._router)))
        super().__init__(Port(traffic, rows, kept, keyed), loop)

    def __enter__(self) -> GuardedLoop:
        return self

    def __exit__(self, *raised: object) -> None:
        self._context.destroy(linger=0)

    def put_in(self, frames: Sequence[bytes]) -> None:
        """Each frame is received where it lies: inproc does not copy."""
        gc.collect(0)
        if self._counts[0] != self._sent:
            raise Differs(f"{self._sent - self._counts[0]} frames were not closed")
        message, socket = address(self._message), self._dealer.underlying
        for index, frame in enumerate(frames):
            room = self._rooms[2 * index + self.served % 2].bytes
            place = room[len(room) - len(frame) :] if self.served % 2 == 0 else room[: len(frame)]
            place[:] = np.frombuffer(frame, np.uint8)
            zmq_numba._call("zmq_msg_init_data", message, address(place), len(frame), freed(), address(self._counts))
            more = zmq.SNDMORE if index + 1 < len(frames) else 0
            zmq_numba._call("zmq_msg_send", message, socket, int(zmq.DONTWAIT) | int(more))
            self._sent += 1

    def drop_rest(self) -> None:
        while self._router.recv(copy=False).more:
            pass

    def take_out(self) -> list[bytes]:
        return self._dealer.recv_multipart(zmq.DONTWAIT)


MOST_FRAMES = 8


class Both:
    def __init__(
        self, traffic: Traffic, behind: type[TwinLoop] | type[GuardedLoop], *, keyed: bool = False, peer: bytes = PEER,
    ) -> None:  # fmt: skip
        """keyed: messages come from all USERS in turn."""
        self._traffic, self._kind, self._keyed = traffic, behind, keyed
        self._peer = peer
        self._rows = Guarded(4 * len(PUSHES) * LAYOUT.n_elems).array(np.float32).reshape(len(PUSHES), -1)
        self._kept = Kept.of(traffic)
        self.served = self.left = 0

    def feed(self, messages: Iterable[Sequence[bytes]]) -> None:
        """Raises Differs for the first message that is answered in another way, and Outside or Misused."""
        traffic, kept = self._traffic, self._kept
        alone = Port(traffic, np.zeros_like(self._rows), kept, self._keyed)
        with self._kind(traffic, self._rows, kept, self._keyed) as behind:
            behind.peer = self._peer
            for number, frames in enumerate(messages):
                if self._keyed:
                    alone.user = behind.port.user = USERS[number % len(USERS)]
                expected, found = alone.answer(frames, self._peer), behind.answer(frames)
                if _without_credit(found) != _without_credit(expected):
                    raise Differs(f"{told(frames)} is answered with {told(found)} instead of {told(expected)}")
                if behind.port.facts() != alone.facts():
                    raise Differs(f"after {told(frames)} the port holds {behind.port.facts()}, not {alone.facts()}")
            if not np.array_equal(self._rows, alone.rows):
                raise Differs("other bytes landed")
            for name, of_loop, of_port in zip(Sums._fields, behind.port.sums(), alone.sums(), strict=True):
                if not np.array_equal(of_loop, of_port):
                    raise Differs(f"other sums were taken: {name}")
            self.served += behind.served
            self.left += behind.left


def _without_credit(answer: Sequence[bytes]) -> tuple[DataHeader, list[bytes]]:
    """The loop gives the credit that was due before its message."""
    header = DataHeader.decode(answer[0])
    return replace(header, credit=0), list(answer[1:])


def told(frames: Sequence[bytes]) -> str:
    try:
        header = repr(DataHeader.decode(frames[0])) if frames else "nothing"
    except Refused as refused:
        header = f"{frames[0].hex()} ({refused.sentence})"
    return f"{header} with {[len(frame) for frame in frames[1:]]} bytes"


def flip_every_bit(chunk_bytes: int) -> None:
    """All that every_flip() yields, to the compiled loop."""
    traffic = Traffic(chunk_bytes)
    both = Both(traffic, GuardedLoop)
    both.feed(every_flip(traffic, random.Random(1)))
    assert both.left > 1000


def send_hostile(chunk_bytes: int, seed: int, n: int, each: int = 2000) -> None:
    """n hostile messages to the compiled loop, which begins again after each so many."""
    traffic, rng = Traffic(chunk_bytes), random.Random(seed)
    both = Both(traffic, GuardedLoop)
    for first in range(0, n, each):
        both.feed(traffic.hostile(rng) for _ in range(min(each, n - first)))
    print(f"{both.served} messages served by the loop, {both.left} left to Python")
    assert both.served > n // 20
    assert both.left > n // 20
