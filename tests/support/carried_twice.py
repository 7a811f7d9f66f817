"""A worker's transfer on the Python loop and, beside it, on the compiled one, while a slave answers with hostile bytes.

Both get the same answers under one clock, and must send the same frames and hold the same columns and bytes. The
compiled loop runs as twins over a libzmq that checks (support/checked_memory.py, support/checked_zmq.py).
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from support.checked_memory import Memory, Twins, in_guards
from support.checked_zmq import CheckedZmq, FakeSocket
from support.hostile_data import V0, spoilt
from support.slave_wire import RUN, placement_over, push_id

from dips.core.clock import Clock
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.core.layout import Chunk, Layout, Parameter, checksum, shard_digest
from dips.core.math import wire_numpy, xxh3_numba
from dips.core.messages import PlacementSpec, Refusal, SlaveAddress
from dips.core.net import carry_numba, zmq_numba
from dips.core.net.carriers import Common, _Carrier, _PullCarrier, _PushCarrier
from dips.core.net.data_header import DataHeader, DataOp, MissingChunk
from dips.core.net.payloads import (
    F32,
    Difference,
    Differences,
    Parameters,
    Payloads,
    Places,
    PulledDifferences,
    bytes_of,
)
from dips.core.net.transfer import PullTransfer, PushTransfer, SlaveRequest, Transfer, TransferSettings, chunks_by_slave
from dips.core.wire import Codec, encoded_bytes
from dips.worker.vectors import Live

CHUNK_BYTES = 1024
LAYOUT = Layout(tuple(Parameter(f"w{i}", (n,), "float32", f"w{i}") for i, n in enumerate((2600, 2300, 2513, 64))), 700)
"""7477 elements in 13 blocks, few of them a multiple of a chunk: 35 chunks."""
SLAVES = ("s0", "s1")
SETTINGS = TransferSettings(CHUNK_BYTES, 4, silence_s=0.5, stall_s=1000.0)
ORDER = tuple(range(len(LAYOUT.blocks)))
ATTEMPT, EPOCH, CAUSE = 3, 1, "cause"
PUSH = push_id("a")
BASE, N_VERSIONS = Version(7, 1), 2


class Differs(AssertionError):
    """The loops did different things."""


class Time:
    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def monotonic_s(self) -> float:
        return self.ns / 1e9

    def wall_s(self) -> float:
        return self.monotonic_s()


class Links:
    """In the place of SlaveSockets: what is sent to each slave, and what it answers."""

    def __init__(self, sockets: Mapping[str, FakeSocket]) -> None:
        self._sockets = sockets
        self.changes = 0

    def send(self, slave: str, header: bytes, payload: memoryview | None = None, *, copy: bool = False) -> None:
        if not self._sockets[slave].refuses():
            self._sockets[slave].sent.append([header, *([] if payload is None else [bytes(payload)])])

    def reconnect(self, slave: str) -> None:
        self._sockets[slave].inbox.clear()
        self.changes += 1

    def dealer(self, slave: str) -> FakeSocket:
        return self._sockets[slave]

    def monitors(self) -> list[FakeSocket]:
        return []

    def look(self) -> None:
        """No monitor has news."""

    def answer(self, slave: str) -> Iterator[tuple[str, bytes, memoryview | None]]:
        inbox = self._sockets[slave].inbox
        while inbox:
            (header, *rest), _ = inbox.popleft()
            if len(rest) < 2:
                yield slave, header, memoryview(rest[0]) if rest else None


def full_now_and_then() -> Callable[[], int]:
    """Of a socket: whether its queue has no room for the next message, which it loses then."""
    asked = itertools.count(1)
    return lambda: zmq.EAGAIN if next(asked) % 19 == 0 else 0


class End:
    def __init__(self, make: Callable[[Links], _Carrier], sockets: Mapping[str, FakeSocket], time: Time) -> None:
        self.sockets, self._time = sockets, time
        self.links = Links(sockets)
        self.carrier = make(self.links)
        self.transfer: Transfer = self.carrier._transfer

    def deliver(self, slave: str, frames: Sequence[bytes]) -> None:
        self.sockets[slave].inbox.append((list(frames), ""))

    def _act(self, *, requests: bool) -> None:
        asks = []
        for action in self.transfer.actions(self._time.monotonic_s(), requests=requests):
            if isinstance(action, SlaveRequest):
                asks.append(action)
            else:
                self.links.reconnect(action.slave)
        self.carrier.send(asks)

    def over(self) -> bool:
        return bool(self.transfer.done or self.transfer.failure)

    def step_in_python(self) -> None:
        self._act(requests=True)
        for slave in self.transfer.slaves:
            for message in self.links.answer(slave):
                self.carrier._receive(*message)
        if not self.over():
            self._act(requests=True)

    def step_compiled(self) -> None:
        """The same; it ends with a wait, which moves the clock."""
        began_ns = self._time.ns
        while self._time.ns == began_ns and not self.over():
            self._act(requests=False)
            if self.over():
                break
            for slave, header, payload in self.carrier._messages(0.001):
                self.carrier._receive(slave, header, payload)


class Slave:
    """Answers requests rightly or not; it has the same chunks as any other. differences: of each chunk to BASE."""

    def __init__(
        self, rng: random.Random, theta: F32, chunks: Sequence[Chunk], differences: Mapping[Chunk, bytes] | None = None
    ) -> None:
        self._rng, self._chunks, self._places, self._differences = rng, chunks, Places(LAYOUT), differences or {}
        self._bytes, self._has = bytes_of(theta), set[Chunk]()

    def answer(self, request: Sequence[bytes], *, hostile: bool) -> list[bytes]:
        header, rng = DataHeader.decode(request[0]), self._rng
        frames = self._right(header)
        if hostile and rng.randrange(8):
            return spoilt(rng, frames, CHUNK_BYTES)
        if hostile:
            why = Refusal(rng.choice((RefusalCode.CHUNK, RefusalCode.BUSY)), "not now", 0.001)
            frames = [DataHeader(RUN, EPOCH, DataOp.REFUSED, header.request, refusal=why).encode()]
        return frames

    def _right(self, header: DataHeader) -> list[bytes]:
        chunk = Chunk(header.block, header.offset_bytes, header.length_bytes)
        answer = DataHeader(
            RUN, EPOCH, DataOp.ACK, header.request, header.push, header.attempt, header.version, header.block,
            header.offset_bytes, cause_id=header.cause_id, credit=self._rng.choice((0, 2, 9)),
        )  # fmt: skip
        if header.op is DataOp.GET_CHUNK:
            payload = self._bytes[self._places.bytes_at(chunk)].tobytes()
            answer = replace(
                answer, op=DataOp.CHUNK, length_bytes=len(payload), codec=header.codec, checksum=checksum(payload),
                base=header.base,
            )  # fmt: skip
            return [answer.encode(), payload if header.base is None else self._differences[chunk]]
        if header.op is DataOp.PUT_CHUNK:
            self._has.add(chunk)
        missing = tuple(MissingChunk(c.block_id, c.offset_bytes) for c in self._chunks if c not in self._has)
        if header.op is DataOp.QUERY_MISSING:
            answer = replace(answer, op=DataOp.MISSING, missing=missing)
        return [replace(answer, complete=not missing).encode()]


class Transfers:
    """kind: "push", "parts" (a push of several arrays) or "pull", or of differences a codec or "pull " and a codec."""

    def __init__(self, kind: str, seed: int) -> None:
        self._rng, self._kind = random.Random(seed), kind
        numbers = np.random.default_rng(seed)
        self._theta, self._base = map(in_guards, numbers.standard_normal((2, LAYOUT.n_elems)).astype(np.float32))
        placement = placement_over(*SLAVES, layout=LAYOUT)
        spec = PlacementSpec(tuple(SlaveAddress(name, "tcp://x") for name in SLAVES), placement.slave_of_block, b"")
        self.n_answers = self.n_done = 0
        self._shares, self._places = chunks_by_slave(LAYOUT, spec, ORDER, CHUNK_BYTES), Places(LAYOUT)
        self._pulls = kind.startswith("pull")
        self._pulled = Codec[kind.split()[1]] if kind not in ("pull", "push") and self._pulls else None
        self._differences: dict[Chunk, bytes] = {}
        if self._pulled is not None:
            self._publish(self._pulled, numbers)
        pieces = np.split(self._theta, (5, 300, 301, 5000)) if kind == "parts" else ()
        self._parts = [piece.copy() for piece in pieces]

    def _publish(self, codec: Codec, numbers: np.random.Generator) -> None:
        """Make theta what N_VERSIONS differences lead to."""
        self._theta[:] = self._base
        for chunk in (chunk for share in self._shares.values() for chunk in share):
            now = self._theta[self._places.elems_at(chunk)]
            for _ in range(N_VERSIONS):
                step = numbers.standard_normal(len(now)).astype(np.float32)
                payload = np.empty(encoded_bytes(codec, len(now)), np.uint8)
                wire_numpy.encode(codec, now + step, now, None, payload)
                wire_numpy.decode(codec, now.copy(), payload, now)
                self._differences[chunk] = self._differences.get(chunk, b"") + payload.tobytes()

    def run(self, n_hostile: int) -> None:
        """Answer n_hostile times with hostile bytes most often, then rightly until the end. Raises Differs, and what
        the twins raise."""
        time = Time()
        into = [np.zeros_like(self._theta) for _ in range(2)]
        plain_sockets = {name: FakeSocket(1 + number) for number, name in enumerate(SLAVES)}
        with self._twins(time, [into[1], self._theta, self._base, *self._parts]) as (libzmq, memory):
            sockets = {name: libzmq.socket() for name in SLAVES}
            for socket in (*plain_sockets.values(), *sockets.values()):
                socket.refuses = full_now_and_then()
            plain = End(lambda links: self._carrier(links, time, into[0], compiled=False), plain_sockets, time)
            twin = End(lambda links: self._carrier(links, time, into[1], compiled=True), sockets, time)
            if isinstance(twin.carrier._loop, carry_numba.PushLoop):
                memory.add(twin.carrier._loop._links.handed)
            slaves = {name: Slave(self._rng, self._theta, self._shares[name], self._differences) for name in SLAVES}
            asked: list[tuple[str, list[bytes]]] = []
            n_answers = 0
            for _ in range(100 * n_hostile + 10_000):
                if plain.over():
                    break
                began_ns = time.ns
                plain.step_in_python()
                time.ns = began_ns
                twin.step_compiled()
                gc.collect(0)
                asked += self._compare(plain, twin)
                if asked and self._rng.random() < 0.8:
                    slave, request = asked.pop(self._rng.randrange(len(asked)))
                    n_answers += 1
                    hostile = n_answers < n_hostile and self._rng.random() < 0.7
                    frames = slaves[slave].answer(request, hostile=hostile)
                    if hostile and self._rng.random() < 0.05:
                        slave = self._rng.choice(SLAVES)
                    for end in (plain, twin):
                        end.deliver(slave, frames)
            if not plain.over() or not twin.over():
                raise Differs(f"a transfer does not end: {plain.over()}, {twin.over()}")
            gc.collect()
            if libzmq.n_open:
                raise Differs(f"{libzmq.n_open} messages were not closed")
            for chunk, is_there in zip(plain.transfer.chunks, plain.transfer.columns.chunks.moved, strict=True):
                place = self._places.bytes_at(chunk)  # others may hold bytes whose checksum was wrong
                if is_there and bytes_of(into[0])[place].tobytes() != bytes_of(into[1])[place].tobytes():
                    raise Differs(f"other bytes landed: {chunk}")
            if self._pulls and plain.transfer.done and into[1].tobytes() != self._theta.tobytes():
                raise Differs("a pull ended with wrong bytes")
            self.n_answers += n_answers
            self.n_done += plain.transfer.done

    def _compare(self, plain: End, twin: End) -> list[tuple[str, list[bytes]]]:
        sent: list[tuple[str, list[bytes]]] = []
        for name in SLAVES:
            expected, found = plain.sockets[name].sent, twin.sockets[name].sent
            if expected != found:
                raise Differs(f"sent were {len(found)} messages instead of {len(expected)}, or others")
            sent += [(name, frames) for frames in expected]
            expected.clear()
            found.clear()
        if (plain.transfer.failure, plain.transfer.done) != (twin.transfer.failure, twin.transfer.done):
            raise Differs(f"the transfer is at {twin.transfer.failure!r}, not at {plain.transfer.failure!r}")
        for part in ("lanes", "chunks"):
            of_plain_columns, of_twin_columns = (
                getattr(plain.transfer.columns, part),
                getattr(twin.transfer.columns, part),
            )
            for field, a, b in zip(of_plain_columns._fields, of_plain_columns, of_twin_columns, strict=True):
                if list(a) != list(b) and field not in ("in_turn", "begun"):
                    raise Differs(f"{part}.{field} is {list(b)}, not {list(a)}")
        return sent

    def _carrier(self, links: Any, time: Clock, into: F32, *, compiled: bool) -> _Carrier:
        common = Common(RUN, EPOCH, CAUSE, LAYOUT, SETTINGS)
        arrays, now_s, loop = compiled, time.monotonic_s(), None
        if self._pulls:
            digests = {name: self._digest(name) for name in SLAVES}
            pull = PullTransfer(self._shares, digests, SETTINGS, now_s, arrays=arrays)
            differences = None
            if self._pulled is not None:
                differences = PulledDifferences(self._pulled, BASE, self._base, N_VERSIONS)
            if compiled:
                texts = carry_numba.texts_of(RUN, V0, CAUSE, None if differences is None else BASE)
                loop = carry_numba.PullLoop(
                    pull, links, EPOCH, texts, self._places, bytes_of(into), momentum=False, differences=differences
                )
            return _PullCarrier(
                common, links, pull, time, V0, into, self._places, loop, momentum=False, differences=differences
            )
        payloads: Payloads = Parameters(Live(self._parts) if self._parts else self._theta, self._places)
        if self._kind not in ("push", "parts"):
            difference = Difference(self._base, None)
            payloads = Differences(Codec[self._kind], self._theta, difference, self._places, CHUNK_BYTES)
        push = PushTransfer(self._shares, SETTINGS, now_s, arrays=arrays)
        push_loop = None
        if compiled:
            texts = carry_numba.texts_of(RUN, PUSH, CAUSE)
            push_loop = carry_numba.PushLoop(push, links, EPOCH, texts, ATTEMPT, self._places, payloads)
        return _PushCarrier(common, links, push, time, PUSH, ATTEMPT, payloads, push_loop)

    def _digest(self, slave: str) -> bytes:
        whole, chunks = bytes_of(self._theta), sorted(self._shares[slave])
        return shard_digest([checksum(whole[self._places.bytes_at(chunk)].data) for chunk in chunks])

    @contextmanager
    def _twins(self, time: Time, arrays: Sequence[F32]) -> Iterator[tuple[CheckedZmq, Memory]]:
        memory = Memory()
        for array in arrays:
            memory.add(array)
        libzmq = CheckedZmq(memory)

        def pass_time(timeout_ms: int) -> int:
            time.ns += 1_000_000 * timeout_ms
            return 0

        libzmq.polled = pass_time
        instead: dict[Any, Callable[..., Any]] = {
            xxh3_numba.xxh3: lambda place, n_bytes: np.uint64(checksum(memory.read(place, n_bytes))),
            zmq_numba.monotonic_ns: lambda: time.ns,
        }
        twins = Twins(memory, libzmq.functions, instead)
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name in ("push", "pull", "wait"):
                patch.setattr(carry_numba, name, twins.of(getattr(carry_numba, name)))
            stack.enter_context(libzmq.for_python())
            stack.callback(gc.collect)
            yield libzmq, memory


def answer_hostile(seed: int, n_transfers: int) -> None:
    logging.disable(logging.CRITICAL)
    for number in range(n_transfers):
        for kind in ("pull", "push", "parts", "INT8", "pull INT4"):
            Transfers(kind, seed + number).run(n_hostile=100)
