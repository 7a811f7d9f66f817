"""A real data port with a version to read and room for pushes, and clusters that reach it by the real carriers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import zmq
from numpy.typing import NDArray
from support.waiting import NO_LIMIT_S

from dips.core import messages
from dips.core.clock import SystemClock
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout, Parameter, shard_digest
from dips.core.math import outer_numba
from dips.core.net.carriers import Common, LoopChoice, carry_pull, carry_push
from dips.core.net.transfer import PullTransfer, PushTransfer, TransferSettings
from dips.core.net.zmq_sockets import CurvePair
from dips.slave import serve_numba
from dips.slave.calculation import chunk_checksums
from dips.slave.data_server import DataServer, LoopName
from dips.slave.memory import ShardMemory
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import Slot

RUN = "a-run-of-some-name"
CHUNK_BYTES = 1 << 16
LAYOUT = Layout((Parameter("layers.0.attention.weight", (1 << 18,), "float32", "layers.0"),))
ORDER = tuple(range(len(LAYOUT.blocks)))
V0 = Version(1, 0)
SETTINGS = TransferSettings(CHUNK_BYTES, 8, silence_s=5.0, stall_s=20.0)
RNG = np.random.default_rng(17)
THETA = RNG.standard_normal(LAYOUT.n_elems, np.float32)
F32 = NDArray[np.float32]


def push_id(cluster: str) -> PushId:
    return PushId(ClusterId(cluster), Incarnation(1, 1), 1)


def pushed(cluster: str) -> F32:
    return np.random.default_rng(sum(cluster.encode())).standard_normal(LAYOUT.n_elems, np.float32)


def settle(server: DataServer) -> None:
    """Waits until the data thread has done what it was told."""
    done = threading.Event()
    server.do(done.set)
    assert done.wait(NO_LIMIT_S)


@contextlib.contextmanager
def fresh_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


class KeyedPort:
    def __init__(self, curve: CurvePair | None, *, loop: LoopName = "auto", host: str = "127.0.0.1") -> None:
        outer_numba.warm_up()
        if loop != "python":
            serve_numba.warm_up()
        self.curve = curve
        self.staged: dict[PushId, bytes] = {}
        self.crashed: list[BaseException] = []
        self.server = DataServer(
            host, 0, RUN, CHUNK_BYTES, self._note, self.crashed.append, curve=curve, loop=loop
        )  # fmt: skip
        self._memory = ShardMemory(LAYOUT.blocks, CHUNK_BYTES, 3, 60 * THETA.size + (8 << 20))
        self._memory.take().theta[:] = THETA
        sums = chunk_checksums(THETA, LAYOUT.blocks, CHUNK_BYTES)
        self.digest = shard_digest(sums)
        info = messages.SnapshotInfo(V0, RoundId(1, 1), b"", b"", self.digest, committed=True)
        self._memory.name_shadow(info, sums)
        self._memory.flip(info)
        self._slots: list[Slot] = []

    def start(self) -> None:
        self.server.start()
        self.server.do(self.server.port.set_epoch, 1)
        self.server.do(self.server.port.set_memory, self._memory.map, self._memory.staging)
        self.server.do(self.server.port.set_readable, dict(self._memory.readable()), V0)
        settle(self.server)

    def allow(self, *clusters: Cluster, readers: tuple[Cluster, ...] = ()) -> None:
        keys = [messages.AllowedKey(messages.KeyRole.CLUSTER, c.name, c.public) for c in clusters]
        self.server.do(
            self.server.port.set_allowed,
            [*keys, *(messages.AllowedKey(messages.KeyRole.READER, c.name, c.public) for c in readers)],
        )
        settle(self.server)

    def open(self, cluster: str) -> None:
        self._slots.append(Slot(push_id(cluster), 1, len(self._slots), 1))
        self.server.do(self.server.port.hold, tuple(self._slots))
        settle(self.server)

    def landed(self, slot: int) -> F32:
        """What was opened as this slot, in the order of opening, holds."""
        assert self._memory.staging is not None
        row: F32 = self._memory.staging[slot]
        return row

    @property
    def port(self) -> int:
        return int(self.server.endpoint.rpartition(":")[2])

    def _note(self, event: PushStaged) -> None:
        self.staged[event.slot.push] = event.digest

    def __enter__(self) -> KeyedPort:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
        assert not self.crashed


@dataclass
class Cluster:
    name: str
    curve: CurvePair | None
    port: KeyedPort
    endpoint: str | None = None
    server_key: bytes | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    loop: LoopChoice = "auto"

    @property
    def public(self) -> bytes:
        assert self.curve is not None
        return self.curve.public

    def push(self, of: str | None = None) -> PushTransfer:
        name = of or self.name
        ticket = messages.Ticket(1, self._placement(), ORDER)
        with fresh_context() as context:
            transfer = carry_push(
                context, self._common(), pushed(name), push_id(name), ticket, SystemClock(), self.cancelled
            )
        return transfer

    def pull(self) -> tuple[PullTransfer, F32]:
        flat = np.zeros(LAYOUT.n_elems, np.float32)
        grant = messages.PullGrant(
            V0, 1, 1, self._placement(), ORDER, (("s0", self.port.digest),), 0, 1, None, CHUNK_BYTES, 1, RUN
        )
        with fresh_context() as context:
            transfer = carry_pull(context, self._common(), flat, grant, SystemClock(), self.cancelled)
        return transfer, flat

    def _common(self) -> Common:
        return Common(RUN, 1, "cause", LAYOUT, SETTINGS, curve=self.curve, loop=self.loop)

    def _placement(self) -> messages.PlacementSpec:
        key = self.server_key
        if key is None:
            key = b"" if self.port.curve is None else self.port.curve.public
        address = messages.SlaveAddress("s0", self.endpoint or self.port.server.endpoint, key)
        return messages.PlacementSpec((address,), (0,) * len(LAYOUT.blocks), b"")
