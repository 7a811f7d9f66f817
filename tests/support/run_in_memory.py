"""A run in this process's memory for the worker: no socket, no thread that waits; its clock moves while it waits.

The worker's own code down to the stub of gRPC and to carry_push() and carry_pull() is the real one. What it gives to a
pool of threads is done at once, or, while `holds_transfers`, when the test says go_on().
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.failed_call import FailedCall
from support.manual_clock import ManualClock
from support.run_for_workers import F32, DataSlave, RefuseCall, RunForWorkers

from dips.core import messages
from dips.core.errors import Refused
from dips.core.ids import PushId
from dips.core.layout import Chunk, checksum
from dips.core.messages import HeartbeatReply, HeartbeatRequest, PullGrant, Settings, Ticket
from dips.core.net.carriers import Common
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.payloads import Difference, Differences, Parameters, ParameterSource, Payloads, Places, SnapshotReady
from dips.core.net.transfer import SlaveProgress
from dips.worker.checkpoint import PushRecorder
from dips.worker.state.effects import Beat, Event, PushRecord

MOST_IDLE = 20_000
"""Waits in which nothing arrived, after which a test has failed."""


class Done(Future[Any]):
    """Of a call that is made at once, or when its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def make(self) -> None:
        if not self.done():
            try:
                self.set_result(self._call())
            except BaseException as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.make()
        return super().result()


class AtOnce:
    def __init__(self, run: RunInMemory, *, transfers: bool = False) -> None:
        self._run, self._transfers = run, transfers

    def submit(self, call: Callable[..., Any], *given: Any) -> Done:
        made = Done(lambda: call(*given))
        if self._transfers and self._run.holds_transfers:
            self._run.held.append(made)
        else:
            made.make()
        return made

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """There is nothing to wait for."""

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *raised: object) -> None:
        """Likewise."""


class Recorder(PushRecorder):
    def record(self, job: int, record: PushRecord) -> None:
        self._wanted = record
        self._record(job, record)


class MemorySlave(DataSlave):
    def listen(self) -> None:
        """It is called directly."""

    def hang_up(self) -> None:
        """Likewise."""


class Beats:
    """In place of control.Heartbeat: beats when the run says so."""

    def __init__(self, run: RunInMemory, deliver: Callable[[Event], None]) -> None:
        self._run, self._deliver = run, deliver
        self.facts: HeartbeatRequest | None = None
        self.answered_s: float | None = None

    def tell(self, request: HeartbeatRequest, settings: Settings) -> None:
        self.facts = request

    def close(self) -> None:
        self.facts = None

    def beat(self) -> None:
        if self.facts is not None and self._run.is_up:
            incarnation, answer = self.facts.caller.incarnation, None
            assert incarnation is not None
            try:
                answer = self._run.call("Heartbeat", self.facts)
            except RefuseCall as refused:
                refusal = refused.refusal
                self._deliver(Beat(incarnation, Refused(refusal.code, refusal.sentence, refusal.retry_after_s)))
            if isinstance(answer, HeartbeatReply) and answer != self._run.said.get(incarnation):
                self._run.said[incarnation] = answer
                self._deliver(Beat(incarnation, answer))


class Waits(queue.SimpleQueue[Any]):
    """A queue whose wait for a time moves the clock; a wait without end is one of a thread."""

    run: RunInMemory

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is not None:
            if self.empty():
                self.run.passes(timeout)
            return super().get_nowait()
        if not block:
            return super().get_nowait()
        with self.run.resting:
            if self.empty():
                self.run.rests.add(id(self))
                self.run.resting.notify_all()
        got = super().get()
        with self.run.resting:
            self.run.rests.discard(id(self))
        return got


@dataclass
class Failure:
    failure: str
    base_gone: bool = False
    corrupt: bool = False


@dataclass
class Carried(Failure):
    done: bool = False
    checksums: dict[Chunk, int] = field(default_factory=dict)

    def known(self) -> dict[Chunk, int]:
        return self.checksums


class RunInMemory(RunForWorkers):
    slave_kind = MemorySlave

    def __init__(self, settings: Settings | None = None, theta: F32 | None = None, **given: Any) -> None:
        self.clock = ManualClock(1000.0)
        self.is_up = True
        self.holds_transfers = False
        self.held: list[Done] = []
        self.failures: list[Failure] = []
        self.heartbeats: list[Beats] = []
        self.said: dict[object, HeartbeatReply] = {}
        self.deadlines: list[tuple[str, float]] = []
        self.closed: list[str] = []
        self.while_waiting: Callable[[], None] = lambda: None
        self.n_idle = 0
        self.resting, self.rests = threading.Condition(), set[int]()
        super().__init__(settings, theta, **given)

    def up(self) -> None:
        self.is_up = True

    def down(self) -> None:
        self.is_up = False

    def passes(self, seconds: float) -> None:
        """Whoever trains waits for so long."""
        self.n_idle += 1
        assert self.n_idle < MOST_IDLE, "nothing comes of it"
        self.clock.advance(seconds)
        for each in self.heartbeats:
            each.beat()
        self.while_waiting()

    def go_on(self) -> None:
        held, self.held = self.held, []
        for each in held:
            each.make()

    def settled(self, waits: Waits) -> None:
        """Returns when the thread that waits for this queue has taken all that was put there."""
        with self.resting:
            assert self.resting.wait_for(lambda: id(waits) in self.rests and waits.empty(), timeout=20)

    def channel(self, address: str, security: object) -> Any:
        @contextmanager
        def opened() -> Iterator[RunInMemory]:
            yield self

        channel: Any = opened()
        channel.close = lambda: self.closed.append(address)
        return channel

    def stub(self, channel: object) -> Any:
        run = self

        class Stub:
            def __getattr__(self, method: str) -> Callable[..., Any]:
                kind = getattr(messages, f"{method}Request")

                def call(message: Any, timeout: float) -> Any:
                    run.deadlines.append((method, timeout))
                    if not run.is_up:
                        raise FailedCall(grpc.StatusCode.UNAVAILABLE)
                    try:
                        return to_message(run.call(method, from_message(message, kind)))
                    except RefuseCall as refused:
                        raise FailedCall.refused(grpc.StatusCode.ABORTED, refused.refusal) from None

                return call

        return Stub()

    def carry_push(
        self, context: object, common: Common, flat: F32 | ParameterSource, push: PushId, ticket: Ticket, clock: object,
        cancelled: threading.Event, *, difference: Difference | None = None, ready: SnapshotReady | None = None,
        checksums: dict[Chunk, int] | None = None,
    ) -> Any:  # fmt: skip
        places, sums = Places(common.layout, common.share), {} if checksums is None else checksums
        payloads: Payloads = Parameters(flat, places)
        if ticket.wire.is_difference:
            assert difference is not None
            payloads = Differences(ticket.wire, flat, difference, places, common.settings.chunk_bytes)  # type: ignore[arg-type]
        return self._carried(common, ticket.placement, ticket.block_order, cancelled, sums, (
            lambda slave, chunk: self._put(slave, push, chunk, payloads, ready, places, sums)
        ))  # fmt: skip

    def _put(
        self, slave: DataSlave, push: PushId, chunk: Chunk, payloads: Payloads, ready: SnapshotReady | None,
        places: Places, sums: dict[Chunk, int],
    ) -> None:  # fmt: skip
        if ready is not None:
            here = places.elems_at(chunk)
            ready.wait(here.start, here.stop)
        with payloads.lock:
            payload = bytes(payloads.of(chunk))
        assert sums.setdefault(chunk, checksum(payload)) == checksum(payload), "a checksum of other bytes"
        slave.landed.setdefault(push, {})[chunk.block_id, chunk.offset_bytes] = payload
        slave.codecs[push] = payloads.codec

    def carry_pull(
        self, context: object, common: Common, flat: F32, grant: PullGrant, clock: object, cancelled: threading.Event,
        *, base: F32 | None = None,
    ) -> Any:  # fmt: skip
        places, sums = Places(common.layout, common.share), dict[Chunk, int]()

        def get(slave: DataSlave, chunk: Chunk) -> None:
            start = sum(block.n_elems for block in slave.blocks if block.block_id < chunk.block_id)
            first = start + chunk.offset_bytes // 4
            part = slave.versions[grant.version][first : first + chunk.length_bytes // 4]
            flat[places.elems_at(chunk)] = part
            sums[chunk] = checksum(part.tobytes())

        return self._carried(common, grant.placement, grant.block_order, cancelled, sums, get)

    def _carried(
        self, common: Common, placement: Any, block_order: Any, cancelled: threading.Event, sums: dict[Chunk, int],
        move: Callable[[DataSlave, Chunk], None],
    ) -> Carried:  # fmt: skip
        self.clock.advance(0.25)
        fails = self.failures.pop(0) if self.failures else Failure("")
        if fails.failure or cancelled.is_set():
            return Carried(fails.failure, fails.base_gone, fails.corrupt)
        moved = {}
        for slave in self.slaves:
            chunks = common.chunks_by_slave(placement, block_order).get(slave.slave_id, ())
            for chunk in chunks:
                move(slave, chunk)
            n_bytes = sum(chunk.length_bytes for chunk in chunks)
            moved[slave.slave_id] = SlaveProgress(n_bytes, 0, 0, {}, 0.01)
        if common.tell is not None:
            common.tell(moved, self.clock.monotonic_s())
        return Carried("", done=True, checksums=sums)


def in_memory(monkeypatch: pytest.MonkeyPatch, run: RunInMemory) -> RunInMemory:
    monkeypatch.setattr("dips.worker.control.channel_to", run.channel)
    monkeypatch.setattr("dips.worker.control.clusters_pb2_grpc", SimpleNamespace(ClustersStub=run.stub))
    for module in ("control", "checkpoint", "parallel.rank_checkpoints", "reader", "data"):
        at_once = lambda *given, transfers=module == "data": AtOnce(run, transfers=transfers)  # noqa: E731
        monkeypatch.setattr(f"dips.worker.{module}.ThreadPoolExecutor", at_once)
    monkeypatch.setattr("dips.worker.checkpoint.PushRecorder", Recorder)
    monkeypatch.setattr("dips.worker.data.carry_push", run.carry_push)
    for module in ("data", "reader"):
        monkeypatch.setattr(f"dips.worker.{module}.carry_pull", run.carry_pull)

    def heartbeat(master: str, security: object, deliver: Callable[[Event], None], *more: object) -> Beats:
        run.heartbeats.append(Beats(run, deliver))
        return run.heartbeats[-1]

    monkeypatch.setattr("dips.worker.shell.Heartbeat", heartbeat)
    waits = type("RunsWaits", (Waits,), {"run": run})
    monkeypatch.setattr("dips.worker.shell.queue", SimpleNamespace(SimpleQueue=waits, Empty=queue.Empty))
    for module in ("shell", "parallel.rank_loop"):
        monkeypatch.setattr(f"dips.worker.{module}.SystemClock", lambda: run.clock)
    return run
