"""What runs inside a namespace of bench_links.py: a slave's data port, a cluster's carrier, and the links' own floor.

No master: the bench itself asks the real scheduler for the order of each transfer, and hands it to the clusters.
Everything is one float32 vector of the layout's n elements; slave i holds block i.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from dips.core.allocator import keep_freed_memory, zeros
from dips.core.clock import SystemClock
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, SlaveId
from dips.core.layout import Layout, Parameter, shard_digest
from dips.core.math import outer_numba
from dips.core.messages import PlacementSpec, PullGrant, SlaveAddress, SnapshotInfo, Ticket
from dips.core.net.carriers import Common, carry_pull, carry_push
from dips.core.placement import Placement
from dips.slave.calculation import chunk_checksums
from dips.slave.data_server import DataServer
from dips.slave.memory import ThetaBuffer
from dips.slave.process import SWITCH_INTERVAL_S
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import ShardMap, Slot
from flows.ends import RUN, V0, parameters
from flows.simulated import TransferMethod, settings_of

F32 = NDArray[np.float32]
CHUNK_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
TCP_PORT, RING_PORT = 5001, 5002
SILENCE_S, STALL_S = 30.0, 120.0
"""Links here are slow on purpose: the first chunk of a window may take seconds."""

Endpoints = tuple[tuple[str, str], ...]
"""(slave, data endpoint), in the order of the placement."""


def layout_of(n_elems: int, n_slaves: int) -> Layout:
    """One layer and one block for each slave."""
    each = n_elems // n_slaves
    return Layout(tuple(Parameter(f"w{i}", (each,), "float32", f"layer{i}") for i in range(n_slaves)), each)


def placement_of(slaves: Sequence[str]) -> Placement:
    return Placement(tuple(SlaveId(name) for name in slaves), tuple(range(len(slaves))))


def push_id(cluster: str, number: int) -> PushId:
    return PushId(ClusterId(cluster), Incarnation(1, 1), number)


class SlaveSite:
    """A slave's data port, with one staging slot for each cluster and one version to pull."""

    def __init__(self, host: str, index: int, n_elems: int, n_slaves: int, n_clusters: int) -> None:
        keep_freed_memory()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        outer_numba.warm_up()
        layout = layout_of(n_elems, n_slaves)
        blocks = [layout.blocks[index]]
        theta = parameters(blocks[0].n_elems, index)
        checksums = chunk_checksums(theta, blocks, CHUNK_BYTES)
        self._digest = shard_digest(checksums)
        info = SnapshotInfo(V0, RoundId(1, 1), b"", b"", self._digest, committed=True)
        staging = zeros(n_clusters, blocks[0].n_elems)
        self._server = DataServer(host, 0, RUN, CHUNK_BYTES, self._staged, lambda error: None)
        self._server.start()
        self._slots: dict[int, Slot] = {}
        done = threading.Event()
        self._server.do(self._server.port.set_memory, ShardMap(blocks, CHUNK_BYTES), staging)
        self._server.do(self._server.port.set_readable, {V0: ThetaBuffer(theta, info, checksums)}, V0)
        self._server.do(done.set)
        done.wait()

    def _staged(self, event: PushStaged) -> None:
        """The cluster's own clock tells how long it took."""

    def endpoint(self) -> str:
        return self._server.endpoint

    def digest(self) -> bytes:
        return self._digest

    def open(self, cluster: str, number: int, slot: int) -> None:
        """Expect this push; the cluster's one before leaves its slot."""
        self._slots[slot] = Slot(push_id(cluster, number), 1, slot, number)
        self._server.do(self._server.port.hold, list(self._slots.values()))

    def close(self) -> None:
        self._server.stop()


class ClusterSite:
    """A cluster's carrier: `source` is what it pushes, `target` where it pulls to."""

    def __init__(self, name: str, n_elems: int, endpoints: Endpoints, digests: tuple[bytes, ...]) -> None:
        keep_freed_memory()
        self._name = name
        self._layout = layout_of(n_elems, len(endpoints))
        self._source = parameters(self._layout.n_elems, 99)
        self._target = zeros(self._layout.n_elems)
        slaves = tuple(SlaveAddress(slave, endpoint) for slave, endpoint in endpoints)
        self._placement = PlacementSpec(slaves, tuple(range(len(slaves))), b"")
        self._digests = tuple((slave, digest) for (slave, _), digest in zip(endpoints, digests, strict=True))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clock = SystemClock()
        self._never = threading.Event()

    def push(self, number: int, order: tuple[int, ...], method: str) -> float:
        """Seconds until every chunk was acknowledged. Raises RuntimeError for a transfer that failed."""
        began_s = time.perf_counter()
        ticket = Ticket(1, self._placement, order)
        transfer = carry_push(
            self._context, self._common(method), self._source, push_id(self._name, number), ticket, self._clock,
            self._never,
        )  # fmt: skip
        elapsed_s = time.perf_counter() - began_s
        if not transfer.done:
            raise RuntimeError(transfer.failure)
        return elapsed_s

    def pull(self, order: tuple[int, ...], method: str) -> float:
        began_s = time.perf_counter()
        grant = PullGrant(V0, 1, 1, self._placement, order, self._digests, 0, 1, None, CHUNK_BYTES, 1, RUN)
        transfer = carry_pull(self._context, self._common(method), self._target, grant, self._clock, self._never)
        elapsed_s = time.perf_counter() - began_s
        if not transfer.done:
            raise RuntimeError(transfer.failure)
        return elapsed_s

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _common(self, method: str) -> Common:
        settings = settings_of(TransferMethod(method), CHUNK_BYTES, SILENCE_S, STALL_S)
        return Common(RUN, 1, "bench", self._layout, settings)

    # ---- without servers ----

    def listen(self, host: str) -> None:
        """Where the one before this cluster in the ring connects to."""
        self._listener = socket.create_server((host, RING_PORT))

    def connect(self, host: str) -> None:
        self._next = socket.create_connection((host, RING_PORT))
        self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def accept(self) -> None:
        self._before, _ = self._listener.accept()
        self._listener.close()

    def ring(self, n_clusters: int) -> float:
        """Seconds of a ring all-reduce (mean) of the whole vector: 2 (K-1) steps of a K-th of it each."""
        began_s = time.perf_counter()
        parts = np.array_split(self._target, n_clusters)
        arriving = np.empty(max(map(len, parts)), np.float32)
        for step in range(2 * (n_clusters - 1)):
            out, into = parts[step % n_clusters], parts[(step + 1) % n_clusters]
            sender = threading.Thread(target=self._next.sendall, args=(out.view(np.uint8).data,))
            sender.start()
            _receive(self._before, arriving[: len(into)])
            sender.join()
            if step < n_clusters - 1:
                np.add(into, arriving[: len(into)], out=into)
            else:
                into[:] = arriving[: len(into)]
        return time.perf_counter() - began_s

    def hang_up(self) -> None:
        self._next.close()
        self._before.close()

    # ---- the links' own floor ----

    def send_tcp(self, host: str, n_bytes: int) -> float:
        """Seconds for one TCP stream, landed: until the receiver says that it has everything."""
        with socket.create_connection((host, TCP_PORT)) as stream:
            began_s = time.perf_counter()
            data = self._source.view(np.uint8).data
            for begin in range(0, n_bytes, len(data)):
                stream.sendall(data[: min(len(data), n_bytes - begin)])
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b"."
            return time.perf_counter() - began_s


class TcpSite:
    """Lands one TCP stream after the other."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, TCP_PORT))
        self._buffer = np.zeros(PIECE_BYTES, np.uint8).data

    def receive(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while connection.recv_into(self._buffer):
                pass
            connection.sendall(b".")

    def close(self) -> None:
        self._listener.close()


def _receive(stream: socket.socket, into: F32) -> None:
    view = into.view(np.uint8).data
    while view:
        n = stream.recv_into(view)
        if not n:
            raise ConnectionError("the cluster before this one hung up")
        view = view[n:]
