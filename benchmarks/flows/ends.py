"""The slave's end and the worker's end of bench_transfer.py: the real data port and the real carrier, no master.

SlaveEnd receives pushes (and the baselines) and serves pulls; WorkerEnd is the other side. Shapes: everything is one
float32 vector of the layout's n elements, one cluster, one slave. torch is imported only for pushes out of a model.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import zmq
from numpy.typing import NDArray

from dips.core.allocator import keep_freed_memory, zeros
from dips.core.clock import SystemClock
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Buffer as Bytes
from dips.core.layout import Layout, Parameter, checksum, shard_digest
from dips.core.math import outer_numba
from dips.core.messages import AllowedKey, KeyRole, PlacementSpec, PullGrant, SlaveAddress, SnapshotInfo, Ticket
from dips.core.net.carriers import Common, carry_pull, carry_push
from dips.core.net.transfer import TransferSettings
from dips.core.net.zmq_sockets import CurvePair
from dips.core.placement import shard_bytes_needed
from dips.core.threads import usable_processor_numbers
from dips.slave.calculation import chunk_checksums
from dips.slave.data_server import DataServer, LoopName
from dips.slave.memory import ShardMemory, ThetaBuffer
from dips.slave.process import SWITCH_INTERVAL_S
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import Slot
from flows import baselines
from flows.watched import ServedMetrics

if TYPE_CHECKING:
    from flows.trainer import Trainer

F32 = NDArray[np.float32]
V0 = Version(1, 0)


@dataclass(frozen=True)
class Way:
    """How a data port and a carrier speak. placed: the data port's threads on one processor, as data_cpu = own does.
    python: the Python loop at both ends.
    """

    checksum: bool = True
    curve: bool = False
    placed: bool = False
    python: bool = False

    def loop(self, usual: LoopName) -> LoopName:
        """Of both ends. usual: where this way does not decide it. Only the Python loop goes without checksums."""
        return "python" if self.python or not self.checksum else usual


WAYS: Mapping[str, Way] = {
    "plain": Way(),
    "python": Way(python=True),
    "placed": Way(placed=True),
    "without_checksum": Way(checksum=False),
    "curve": Way(curve=True),
    "curve_python": Way(curve=True, python=True),
}

RUN = "bench"
PART_ELEMS = 4 << 20


def layout_of(n_elems: int, n_tensors: int) -> Layout:
    """n_elems in n_tensors tensors of nearly equal size."""
    edges = np.linspace(0, n_elems, n_tensors + 1).astype(int)
    sizes = (edges[1:] - edges[:-1]).tolist()
    return Layout(tuple(Parameter(f"layer{i}.weight", (n,), "float32", f"layer{i}") for i, n in enumerate(sizes)))


def parameters(n_elems: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(n_elems, np.float32)


def push_id(number: int) -> PushId:
    return PushId(ClusterId("a"), Incarnation(1, 1), number)


def no_checksum(payload: Bytes) -> int:
    """In the place of core.layout.checksum, to see what that costs."""
    return 0


def _crashed(error: BaseException) -> None:
    raise error


def pin(cpus: Collection[int], usable: Collection[int]) -> None:
    """Let the calling thread run on these processors only; none: on the usable ones again."""
    os.sched_setaffinity(0, cpus or usable)


class SlaveEnd:
    """One memory, served by one data port for each of `ways`, names of WAYS. loop: of those that leave it open."""

    def __init__(
        self, layout: Layout, chunk_bytes: int, data_threads: int, ways: Sequence[str], loop: LoopName
    ) -> None:
        keep_freed_memory()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        outer_numba.warm_up()
        room = shard_bytes_needed((block.n_elems for block in layout.blocks), chunk_bytes, 1, pins=0)
        self._memory = ShardMemory(layout.blocks, chunk_bytes, 1, room)
        theta = self._memory.take().theta
        theta[:] = parameters(layout.n_elems, 0)
        sums = chunk_checksums(theta, layout.blocks, chunk_bytes)
        unchecked = [no_checksum(b"")] * len(sums)
        self.checksums = {way: sums if WAYS[way].checksum else unchecked for way in ways}
        info = SnapshotInfo(V0, RoundId(1, 1), b"", b"", shard_digest(sums), committed=True)
        self._memory.name_shadow(info, sums)
        self._memory.flip(info)
        self._staged = threading.Event()
        self._computing = threading.Event()
        self._parts_per_s = 0.0
        self._arrays = [zeros(3 * PART_ELEMS) for _ in range(5)]
        self._digest = b""
        self._metrics: ServedMetrics | None = None
        self._pair = CurvePair.new()
        self._usable = usable_processor_numbers()
        self._servers = {way: self._serve(chunk_bytes, data_threads, way, loop) for way in ways}
        target = self._memory.staging[0]
        self._receivers: dict[str, baselines.Receiver] = {
            "tcp": baselines.TcpReceiver(target),
            "grpc_bytes": baselines.GrpcReceiver(target, landing=False),
            "grpc_protobuf": baselines.GrpcReceiver(target, landing=True),
            "pickle": baselines.PickleReceiver(target),
        }

    def _serve(self, chunk_bytes: int, data_threads: int, way: str, loop: LoopName) -> DataServer:
        how = WAYS[way]
        server = DataServer(
            *("127.0.0.1", 0, RUN, chunk_bytes, self._note_staged, _crashed),
            data_threads=1 if how.placed else data_threads,
            checksum=checksum if how.checksum else no_checksum,
            curve=self._pair if how.curve else None,
            cpu=self._usable[-1] if how.placed else None,
            loop=how.loop(loop),
        )
        assert self._memory.current is not None
        buffer = ThetaBuffer(self._memory.current.theta, self._memory.current.info, self.checksums[way])
        done = threading.Event()
        server.start()
        server.do(server.port.set_memory, self._memory.map, self._memory.staging)
        server.do(server.port.set_readable, {V0: buffer}, V0)
        server.do(done.set)
        done.wait()
        return server

    def _note_staged(self, event: PushStaged) -> None:
        self._digest = event.digest
        self._staged.set()

    def allow(self, key: bytes) -> bytes:
        """Let the cluster with this key in; returns this slave's own."""
        for way, server in self._servers.items():
            if WAYS[way].curve:
                server.do(server.port.set_allowed, [AllowedKey(KeyRole.CLUSTER, push_id(0).cluster, key)])
        return self._pair.public

    def is_compiled(self, way: str) -> bool:
        """Whether the compiled loop serves this way."""
        return self._servers[way].is_compiled

    def endpoint(self, way: str) -> str:
        return self._servers[way].endpoint

    def digest(self, way: str) -> bytes:
        return shard_digest(self.checksums[way])

    def port(self, name: str) -> int:
        return self._receivers[name].port

    def metrics_url(self, chunk_bytes: int) -> str:
        """Of the port without keys; served from the first call on."""
        self._metrics = self._metrics or ServedMetrics(RUN, self._servers["plain"], self._memory, chunk_bytes)
        return self._metrics.url

    def receive(self, name: str) -> None:
        self._receivers[name].receive()

    def pin(self, cpus: tuple[int, ...]) -> None:
        """Where this thread, which receives the baselines, may run; (): anywhere."""
        pin(cpus, self._usable)

    def open(self, number: int, way: str) -> None:
        """Open the staging of this push; the one before leaves the slot."""
        self._staged.clear()
        server = self._servers[way]
        server.do(server.port.hold, [Slot(push_id(number), 1, 0, number)])

    def wait_staged(self) -> bytes:
        self._staged.wait()
        return self._digest

    def compute(self) -> None:
        """Begin to compute outer steps, one after the other on one thread, on memory that no transfer touches."""
        self._computing.clear()
        self._computer = threading.Thread(target=self._compute)
        self._computer.start()

    def computed(self) -> float:
        """Parts of outer steps a second since compute()."""
        self._computing.set()
        self._computer.join()
        return self._parts_per_s

    def _compute(self) -> None:
        theta, momentum, out_theta, out_momentum, staged = self._arrays
        scalars = (1.0, 0.7, 0.8, 0.8, 1.0)
        slots, weights = np.zeros(1, np.int64), np.ones(1, np.float32)
        began_s, parts = time.perf_counter(), 0
        while not self._computing.is_set():
            start = parts % 3 * PART_ELEMS
            outer_numba.outer_step(
                *(theta, momentum, staged.reshape(1, -1), slots, weights, *scalars, out_theta, out_momentum),
                *(start, start + PART_ELEMS),
            )
            parts += 1
        self._parts_per_s = parts / (time.perf_counter() - began_s)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.stop()
        for server in self._servers.values():
            server.stop()


class WorkerEnd:
    """The cluster: `source` is what it pushes, `target` where it pulls to, and where a plain copy of a model lands."""

    def __init__(self, layout: Layout, chunk_bytes: int, window_chunks: int, loop: LoopName) -> None:
        keep_freed_memory()
        self._loop = loop
        self._usable = usable_processor_numbers()
        self._layout = layout
        self._settings = TransferSettings(chunk_bytes, window_chunks)
        self._source = zeros(layout.n_elems)
        self._source[:] = parameters(layout.n_elems, 1)
        self._target = zeros(layout.n_elems)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clock = SystemClock()
        self._pair = CurvePair.new()
        self._server_key = b""

    def key(self) -> bytes:
        return self._pair.public

    def trust(self, server_key: bytes) -> None:
        """The key of the slave's encrypted port."""
        self._server_key = server_key

    def pin(self, cpus: tuple[int, ...]) -> None:
        """Where this thread, which sends the baselines, may run; (): anywhere."""
        pin(cpus, self._usable)

    def push(self, number: int, endpoint: str, way: str, source: str) -> float:
        """Seconds until every chunk was acknowledged and the digest known. source: as bench_transfer.Row has it."""
        ticket = Ticket(1, self._placement(endpoint, way), self._order())
        if source != "vector":
            return self._trainer.push(push_id(number), ticket, copied=source == "copied")
        began_s = time.perf_counter()
        transfer = carry_push(
            self._context, self._common(way), self._source, push_id(number), ticket, self._clock,
            threading.Event(),
        )  # fmt: skip
        elapsed_s = time.perf_counter() - began_s
        assert transfer.done, transfer.failure
        return elapsed_s

    @functools.cached_property
    def _trainer(self) -> Trainer:
        from flows.trainer import Trainer

        return Trainer(self._layout, self._source, RUN, self._settings.chunk_bytes, self._settings.window_chunks)

    def pull(self, endpoint: str, digest: bytes, way: str) -> float:
        began_s = time.perf_counter()
        grant = PullGrant(
            V0, 1, 1, self._placement(endpoint, way), self._order(), (("s", digest),), 0, 1, None,
            self._settings.chunk_bytes, 1, RUN,
        )  # fmt: skip
        transfer = carry_pull(self._context, self._common(way), self._target, grant, self._clock, threading.Event())
        elapsed_s = time.perf_counter() - began_s
        assert transfer.done, transfer.failure
        return elapsed_s

    def send(self, name: str, port: int, source: str) -> float:
        began_s = time.perf_counter()
        match name:
            case "tcp" if source == "copied":
                for span in self._layout.spans:
                    here = slice(span.start_elem, span.stop_elem)
                    np.copyto(self._target[here], self._source[here])
                baselines.send_tcp(self._target, port)
            case "tcp":
                baselines.send_tcp(self._source, port)
            case "pickle":
                baselines.send_pickle(self._source, port)
            case _:
                baselines.send_grpc(self._source, port, landing=name == "grpc_protobuf")
        return time.perf_counter() - began_s

    def close(self) -> None:
        if "_trainer" in vars(self):
            self._trainer.close()
        self._context.destroy(linger=0)

    def _common(self, way: str) -> Common:
        function = checksum if WAYS[way].checksum else no_checksum
        curve = self._pair if WAYS[way].curve else None
        loop = WAYS[way].loop(self._loop)
        return Common(RUN, 1, "bench", self._layout, self._settings, function, curve, loop=loop)

    def _placement(self, endpoint: str, way: str) -> PlacementSpec:
        key = self._server_key if WAYS[way].curve else b""
        return PlacementSpec((SlaveAddress("s", endpoint, key),), (0,) * len(self._layout.blocks), b"")

    def _order(self) -> tuple[int, ...]:
        return tuple(range(len(self._layout.blocks)))
