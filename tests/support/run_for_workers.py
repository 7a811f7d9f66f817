"""A small run for the worker to talk to: a gRPC Clusters server and data slaves, in this process, on real sockets.

Much simpler than the real ones and independent of them: a push becomes the next version as it is. Faults are
switched on by the test: a slave can fall silent, be cut off and come back; the master can go away and come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import zmq
from numpy.typing import NDArray
from support.ports import own_port, release
from support.waiting import until

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Block, Layout, Parameter, checksum, chunks_of, digest_of_array, shard_digest
from dips.core.math.wire_numpy import decode
from dips.core.net.codec_protobuf import encode, from_message, to_message
from dips.core.net.data_header import DataHeader, DataOp, MissingChunk
from dips.core.net.grpc_calls import REFUSAL_KEY
from dips.core.protocol import RANKS
from dips.core.wire import Codec, encoded_bytes
from dips.protos import clusters_pb2_grpc
from dips.worker.model_part import ModelPart
from dips.worker.shell import ClusterShell

F32 = NDArray[np.float32]
RUN = "run"
CHUNK_BYTES = 4096
N_ELEMS = 6000
LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (N_ELEMS,), "float32", f"layers.{i}") for i in range(5)), 4000)
"""5 layers of 2 blocks of 4 and 2 chunks."""


def part_of(shell: ClusterShell) -> ModelPart:
    assert isinstance(shell._part, ModelPart)
    return shell._part


class FlatModel:
    """A ParameterStore; `training` is set while a step is made, and installing then is an error."""

    def __init__(self, seed: int, layout: Layout = LAYOUT) -> None:
        self._layout = layout
        self.theta: F32 = np.random.default_rng(seed).normal(size=layout.n_elems).astype(np.float32)
        self.thread = threading.current_thread()
        self.installs = 0
        self.resets = 0

    def layout(self) -> Layout:
        return self._layout

    def snapshot(self, into: F32) -> None:
        assert threading.current_thread() is self.thread, "live parameters belong to the training thread"
        into[:] = self.theta

    def install(self, flat: F32) -> None:
        assert threading.current_thread() is self.thread, "live parameters belong to the training thread"
        self.theta[:] = flat
        self.installs += 1

    def reset_inner_optimizer(self) -> None:
        self.resets += 1


def _bound(router: zmq.Socket[bytes], endpoint: str) -> bool:
    """libzmq gives a closed socket's port back in its own time."""
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return False
    return True


def until_version_changes(client: ClusterShell) -> None:
    before = client.version

    def changed() -> bool:
        client.step(100)
        return client.version != before

    until(changed, "another version", lambda: client.phase)


class DataSlave:
    """One ROUTER on one thread. `mute`: hears nothing. `hook(header)` may return a Refusal, or raise to say nothing."""

    def __init__(self, slave_id: str, blocks: list[Block]) -> None:
        self.slave_id = slave_id
        self.blocks = blocks
        self.landed: dict[PushId, dict[tuple[int, int], bytes]] = {}
        self.codecs: dict[PushId, Codec] = {}
        self.versions: dict[Version, F32] = {}
        self.mute = False
        self.hook: Callable[[DataHeader], messages.Refusal | None] = lambda header: None
        self.heard: list[DataHeader] = []
        self._context = zmq.Context()
        self._port = own_port()
        self._stop = threading.Event()
        self.listen()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def listen(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        self._stop.clear()
        until(lambda: _bound(router, self.endpoint), f"port {self._port} is free")
        self._thread = threading.Thread(target=self._serve, args=(router,), name=f"fake {self.slave_id}")
        self._thread.start()

    def hang_up(self) -> None:
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self.hang_up()
        release(self._port)
        self._context.destroy(linger=0)

    def digest(self, push: PushId) -> bytes | None:
        landed = self.landed.get(push, {})
        chunks = chunks_of(self.blocks, CHUNK_BYTES)
        if any((c.block_id, c.offset_bytes) not in landed for c in chunks):
            return None
        return shard_digest([checksum(landed[c.block_id, c.offset_bytes]) for c in chunks])

    def share(self, push: PushId, base: F32 | None = None) -> F32:
        """What it holds of a push; base: its own part of the version that differences are to."""
        landed, parts, start = self.landed[push], [], 0
        for chunk in chunks_of(self.blocks, CHUNK_BYTES):
            payload, stop = landed[chunk.block_id, chunk.offset_bytes], start + chunk.length_bytes // 4
            if self.codecs[push] is Codec.F32:
                parts.append(np.frombuffer(payload, "<f4"))
            else:
                assert base is not None, "differences have a base"
                parts.append(np.empty(stop - start, np.float32))
                decode(self.codecs[push], base[start:stop], np.frombuffer(payload, np.uint8), parts[-1])
            start = stop
        return np.concatenate(parts)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._stop.is_set():
            if router.poll(10):
                peer, *frames = router.recv_multipart()
                header = DataHeader.decode(frames[0])
                if not self.mute:
                    self.heard.append(header)
                    for answer in self._answer(header, frames[1] if len(frames) > 1 else b""):
                        router.send_multipart([peer, *answer])
        router.close(linger=0)

    def _answer(self, header: DataHeader, payload: bytes) -> list[list[bytes]]:
        refusal = self.hook(header)
        if self.mute:
            return []
        if refusal is not None:
            return [[DataHeader(RUN, header.epoch, DataOp.REFUSED, header.request, refusal=refusal).encode()]]
        if header.op is DataOp.GET_CHUNK:
            return [self._chunk(header)]
        assert header.push is not None
        landed = self.landed.setdefault(header.push, {})
        if header.op is DataOp.PUT_CHUNK:
            assert checksum(payload) == header.checksum
            assert len(payload) == encoded_bytes(header.codec, header.length_bytes // 4)
            assert self.codecs.setdefault(header.push, header.codec) is header.codec
            landed[header.block, header.offset_bytes] = payload
        chunks = chunks_of(self.blocks, CHUNK_BYTES)
        lacking = [c for c in chunks if (c.block_id, c.offset_bytes) not in landed]
        op = DataOp.ACK if header.op is DataOp.PUT_CHUNK else DataOp.MISSING
        begin = (header.block, header.offset_bytes)
        listed = [c for c in lacking if (c.block_id, c.offset_bytes) >= begin] if op is DataOp.MISSING else []
        missing = tuple(MissingChunk(c.block_id, c.offset_bytes) for c in listed)
        return [[DataHeader(RUN, header.epoch, op, header.request, missing=missing, complete=not lacking).encode()]]

    def _chunk(self, header: DataHeader) -> list[bytes]:
        assert header.version is not None
        begin = sum(block.n_bytes for block in self.blocks if block.block_id < header.block) + header.offset_bytes
        payload = self.versions[header.version].tobytes()[begin : begin + header.length_bytes]
        answer = DataHeader(
            RUN, header.epoch, DataOp.CHUNK, header.request, version=header.version, block=header.block,
            offset_bytes=header.offset_bytes, length_bytes=len(payload), codec=Codec.F32, checksum=checksum(payload),
        )  # fmt: skip
        return [answer.encode(), payload]


class RefuseCall(Exception):
    def __init__(self, code: RefusalCode, sentence: str, retry_after_s: float = 0.0) -> None:
        super().__init__(sentence)
        self.refusal = messages.Refusal(code, sentence, retry_after_s)


class RunForWorkers:
    """Master and two slaves. `decide(push_id)` gives each push its verdict's kind; None: not decided yet."""

    slave_kind: type[DataSlave] = DataSlave

    def __init__(
        self, settings: messages.Settings | None = None, theta: F32 | None = None, *, layout: Layout = LAYOUT
    ) -> None:
        """theta: of the version that is published already; None: the first cluster seeds the run."""
        half = len(layout.blocks) // 2
        indices = tuple(0 if block.block_id < half else 1 for block in layout.blocks)
        self.layout = layout
        blocks = [[b for b in layout.blocks if indices[b.block_id] == i] for i in range(2)]
        self.slaves = [self.slave_kind(f"s{i}", own) for i, own in enumerate(blocks)]
        self._indices = indices
        self.settings = settings or messages.Settings(
            sync_every_steps=4, heartbeat_s=0.05, verdict_wait_s=5.0, chunk_bytes=CHUNK_BYTES, window_chunks=4
        )
        self.decide: Callable[[PushId], messages.VerdictKind | None] = lambda push: messages.VerdictKind.APPLIED
        self.version: Version | None = None
        self.tokens = 0
        self.fence = 0
        self.epoch = 1
        self.n = 0
        self.stop = False
        self.pull_wire = Codec.F32
        self.donate: Version | None = None
        self.attempts: dict[PushId, int] = {}
        self.pushes: list[messages.BeginPushRequest] = []
        self.verdicts: dict[PushId, messages.Verdict] = {}
        self.joins: list[messages.JoinRequest] = []
        self.leaves: list[messages.LeaveRequest] = []
        self.beats: list[messages.HeartbeatRequest] = []
        self.returned: list[messages.DataRange] = []
        self.pulls: list[messages.BeginPullRequest] = []
        self.released: list[messages.FinishPullRequest] = []
        self.hook: Callable[[str, Any], None] = lambda method, request: None
        self._lock = threading.RLock()
        self._port = own_port()
        self._server: grpc.Server | None = None
        if theta is not None:
            self.publish(theta)
        self.up()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def up(self) -> None:
        options = [("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(16), options=options)
        clusters_pb2_grpc.add_ClustersServicer_to_server(_Servicer(self), self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def down(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def restart(self) -> None:
        """Come back in the next epoch: every cluster must join again."""
        self.down()
        self.epoch += 1
        self.up()

    def close(self) -> None:
        self.stop = True
        self.down()
        release(self._port)
        for slave in self.slaves:
            slave.close()

    def publish(self, theta: F32) -> None:
        with self._lock:
            self.version = self.version.next() if self.version else Version(1, 0)
            for slave in self.slaves:
                parts = [theta[b.start_elem : b.stop_elem] for b in slave.blocks]
                slave.versions[self.version] = np.concatenate(parts).astype(np.float32)

    def theta_of(self, push: PushId) -> F32:
        theta = np.empty(self.layout.n_elems, np.float32)
        base = next((request.base for request in self.pushes if self._id(request, request.seq) == push), None)
        for slave in self.slaves:
            share, start = slave.share(push, None if base is None else slave.versions[base]), 0
            for block in slave.blocks:
                theta[block.start_elem : block.stop_elem] = share[start : start + block.n_elems]
                start += block.n_elems
        return theta

    def wait_for(self, what: Callable[[], bool]) -> None:
        until(what, "another thread's part", lambda: f"{len(self.beats)} beats, {self.attempts}, {self.verdicts}")

    def call(self, method: str, request: Any) -> Any:
        self.hook(method, request)
        with self._lock:
            caller = request.caller
            if method != "Join" and not getattr(request, "reader", False):
                if caller.epoch != self.epoch:
                    raise RefuseCall(RefusalCode.STALE_EPOCH, f"epoch {caller.epoch} is over: join again")
                if caller.incarnation != Incarnation(self.epoch, self.n):
                    raise RefuseCall(RefusalCode.FENCED, f"incarnation {caller.incarnation} is over: join again")
            return getattr(self, f"_{method}")(request)

    def _Join(self, request: messages.JoinRequest) -> messages.JoinReply:
        self.joins.append(request)
        self.n += 1
        last = next(reversed(self.verdicts.values()), None)
        return messages.JoinReply(
            self.epoch, Incarnation(self.epoch, self.n), messages.Hello(1, 1, (RANKS,)), self.settings,
            self.version is None, self.fence, last, self.version, self.tokens, self.settings.sync_every_steps, RUN,
            request.held_ranges,
        )  # fmt: skip

    def _Heartbeat(self, request: messages.HeartbeatRequest) -> messages.HeartbeatReply:
        self.beats.append(request)
        steps = self.settings.sync_every_steps
        return messages.HeartbeatReply(
            self.epoch, self.version, self.tokens, steps, self.stop, "IDLE", self.donate, self.stop
        )

    def _BeginPush(self, request: messages.BeginPushRequest) -> messages.BeginPushReply:
        push = self._id(request, request.seq)
        if push in self.verdicts:
            return messages.BeginPushReply(self.verdicts[push])
        if push not in self.attempts and self.stop:
            raise RefuseCall(RefusalCode.STOPPING, "no more pushes: the run has reached its end")
        if push not in self.attempts:
            self.pushes.append(request)
        self.attempts[push] = self.attempts.get(push, 0) + 1
        return messages.BeginPushReply(
            messages.Ticket(self.attempts[push], self._placement(), tuple(range(len(self.layout.blocks))), request.wire)
        )

    def _FinishPush(self, request: messages.FinishPushRequest) -> messages.FinishPushReply:
        push = self._id(request, request.seq)
        for slave in self.slaves:
            digest = slave.digest(push)
            if digest is None:
                return messages.FinishPushReply(messages.Busy(0.05, f"slave {slave.slave_id} has not all of it"))
            assert dict(request.digest_of_slave)[slave.slave_id] == digest
        return messages.FinishPushReply(messages.Admitted(RoundId(self.epoch, 1), 0.1))

    def _AwaitVerdict(self, request: messages.AwaitVerdictRequest) -> messages.AwaitVerdictReply:
        push = request.push
        kind = self.decide(push)
        if push not in self.verdicts and kind is not None:
            self._apply(push, kind)
        if push in self.verdicts:
            return messages.AwaitVerdictReply(self.verdicts[push])
        return messages.AwaitVerdictReply(messages.Busy(0.05, "the round goes on"))

    def _apply(self, push: PushId, kind: messages.VerdictKind) -> None:
        if kind is messages.VerdictKind.APPLIED:
            self.publish(self.theta_of(push))
            self.tokens += self.pushes[-1].tokens
        if kind is not messages.VerdictKind.ABORTED:
            self.fence += 1
        version = None if kind is messages.VerdictKind.ABORTED else self.version
        self.verdicts[push] = messages.Verdict(push, kind, version, kind.name, kind is messages.VerdictKind.EXCLUDED)

    def _BeginPull(self, request: messages.BeginPullRequest) -> messages.BeginPullReply:
        wanted = request.at_least
        if self.version is None or (wanted is not None and wanted > self.version):
            return messages.BeginPullReply(messages.Busy(0.05, "no such version is published yet"))
        version = wanted if request.exact and wanted is not None else self.version
        if version not in self.slaves[0].versions:
            raise RefuseCall(RefusalCode.VERSION_GONE, f"version {version} is not kept")
        digests = tuple((s.slave_id, digest_of_array(s.versions[version], s.blocks, CHUNK_BYTES)) for s in self.slaves)
        self.pulls.append(request)
        differs = self.pull_wire.is_difference and request.base is not None
        return messages.BeginPullReply(
            messages.PullGrant(
                version, self.fence, len(self.pulls), self._placement(), tuple(range(len(self.layout.blocks))), digests,
                self.tokens, self.settings.sync_every_steps, self.layout if request.reader else None, CHUNK_BYTES,
                self.epoch, RUN, *((self.pull_wire, request.base) if differs else ()),
            )
        )  # fmt: skip

    def _FinishPull(self, request: messages.FinishPullRequest) -> messages.FinishPullReply:
        self.released.append(request)
        return messages.FinishPullReply(self.settings.sync_every_steps)

    def _LeaseData(self, request: messages.LeaseDataRequest) -> messages.LeaseDataReply:
        return messages.LeaseDataReply((messages.DataRange(1, 0, 0, 0, request.want_tokens),))

    def _ReturnData(self, request: messages.ReturnDataRequest) -> messages.ReturnDataReply:
        self.returned += request.ranges
        return messages.ReturnDataReply()

    def _Leave(self, request: messages.LeaveRequest) -> messages.LeaveReply:
        self.leaves.append(request)
        return messages.LeaveReply()

    def _id(self, request: Any, seq: int) -> PushId:
        return PushId(ClusterId(request.caller.name), request.caller.incarnation, seq)

    def _placement(self) -> messages.PlacementSpec:
        addresses = tuple(messages.SlaveAddress(s.slave_id, s.endpoint) for s in self.slaves)
        return messages.PlacementSpec(addresses, self._indices, b"placement")


class _Servicer(clusters_pb2_grpc.ClustersServicer):
    def __init__(self, run: RunForWorkers) -> None:
        self._run = run

    def Heartbeat(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for message in requests:
            yield self._answer("Heartbeat", messages.HeartbeatRequest, message, context)

    def _answer(self, method: str, kind: type[Any], message: Any, context: grpc.ServicerContext) -> Any:
        try:
            return to_message(self._run.call(method, from_message(message, kind)))
        except RefuseCall as stop:
            context.set_trailing_metadata(((REFUSAL_KEY, encode(stop.refusal)),))
            context.abort(grpc.StatusCode.ABORTED, stop.refusal.sentence)


def _serving(method: str) -> Callable[[_Servicer, Any, grpc.ServicerContext], Any]:
    kind = getattr(messages, f"{method}Request")
    return lambda self, message, context: self._answer(method, kind, message, context)


for _method in (
    *("Join", "BeginPush", "FinishPush", "AwaitVerdict", "BeginPull", "FinishPull"),
    *("LeaseData", "ReturnData", "Leave"),
):
    setattr(_Servicer, _method, _serving(_method))
