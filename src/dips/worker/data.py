"""Runs a worker's transfers on one thread. Never touches live parameters."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import zmq

from dips.core.allocator import keep_freed_memory
from dips.core.chunks import Chunk
from dips.core.clock import Clock
from dips.core.errors import DipsError
from dips.core.ids import PushId
from dips.core.layout import Layout
from dips.core.messages import Caller, PlacementSpec, PullGrant, Settings
from dips.core.net.carriers import Common, carry_pull, carry_push
from dips.core.net.payloads import Difference
from dips.core.net.transfer import TransferSettings
from dips.core.net.zmq_sockets import CurvePair
from dips.core.wire import DIFFERENCES, Codec
from dips.worker.link_counts import LinkCounts, TransferDirection
from dips.worker.state.effects import Done, Event, Failed, SendPush
from dips.worker.state.waiting import Times
from dips.worker.vectors import F32, Vectors

_logger = logging.getLogger("dips.worker.data")

SWITCH_INTERVAL_S = 0.0002
"""The switch interval during transfers. With Python's default each chunk would wait 5 ms while the training thread
computes in Python."""

DataTask = Callable[[zmq.Context[zmq.Socket[bytes]], threading.Event], None]
"""A transfer, called with the context and the event that cancels it."""


class _SwitchInterval:
    """The interpreter's switch interval, shortened while at least one transfer of this process runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._usual_s = 0.0

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        with self._lock:
            if not self._running:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._usual_s))
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    sys.setswitchinterval(self._usual_s)


_switch_interval = _SwitchInterval()


class DataThread:
    """Runs transfers one after the other; only one is needed at a time, so a new one cancels the one before."""

    def __init__(self) -> None:
        keep_freed_memory()  # for the frames of a pull
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._executor = ThreadPoolExecutor(1, "dips-data")
        self._current: tuple[int, threading.Event] | None = None
        self._running: Future[None] | None = None

    def run(self, job: int, task: DataTask, failed: Callable[[str], None]) -> None:
        """Call task(context, cancelled) on the data thread; `failed` gets a sentence if it raises."""
        if self._current is not None:
            self.cancel(self._current[0])
        cancelled = threading.Event()
        self._current = (job, cancelled)
        self._running = self._executor.submit(self._guarded, task, cancelled, failed)

    def cancel(self, job: int) -> None:
        if self._current is not None and self._current[0] == job:
            self._current[1].set()

    def settle(self) -> None:
        """Cancel the running transfer, if any, and return once no transfer reads or writes a vector."""
        if self._current is not None and self._running is not None:
            self._current[1].set()
            self._running.result()
            self._current = self._running = None

    def close(self) -> None:
        """Stop the running transfer, wait for it, and close the sockets."""
        if self._current is not None:
            self._current[1].set()
        self._executor.shutdown(wait=True)
        self._context.destroy(linger=0)

    def _guarded(self, task: DataTask, cancelled: threading.Event, failed: Callable[[str], None]) -> None:
        try:
            if not cancelled.is_set():
                with _switch_interval.shortened():
                    task(self._context, cancelled)
        except (DipsError, OSError) as error:
            failed(str(error))
        except Exception as error:
            _logger.exception("a transfer failed unexpectedly")
            failed(f"{type(error).__name__}: {error}")


# ---- transfers -------------------------------------------------------------------------------------------------------
#
# Starts transfers on the data thread for the driver, and turns their ends into events.


PULL_WINDOW_CHUNKS = 64
"""Most chunks requested at a time from one slave in a pull; pushes use the master's window_chunks."""


class Transfers:
    """Runs one transfer at a time. `deliver` is called on the data thread. curve: this process's keys, if any."""

    def __init__(
        self,
        layout: Layout,
        vectors: Vectors,
        deliver: Callable[[Event], None],
        clock: Clock,
        curve: CurvePair | None = None,
        links: LinkCounts | None = None,
    ) -> None:
        """links: counts the traffic; None: it is not counted."""
        self._curve = curve
        self._links = links
        self._layout = layout
        self._vectors = vectors
        self._deliver = deliver
        self._clock = clock
        self._thread = DataThread()
        self._sums: tuple[PushId, Codec, dict[Chunk, int]] | None = None

    def push(self, job: int, push: SendPush, caller: Caller, settings: Settings, times: Times) -> None:
        """Send the push vector; ends in Done with the digests, or in Failed."""
        vectors, clock, ticket = self._vectors, self._clock, push.ticket
        (flat, ready), wire = vectors.sending(), ticket.wire
        difference = Difference(vectors.base, vectors.residual) if wire in DIFFERENCES else None
        limits = _settings(settings.chunk_bytes, settings.window_chunks, times)
        common = Common(caller.run_id, caller.epoch, caller.cause_id, self._layout, limits, curve=self._curve)
        checksums = self._checksums_of(push.push, wire)

        def carry(context: zmq.Context[zmq.Socket[bytes]], cancelled: threading.Event) -> None:
            began_s = clock.monotonic_s()
            counted = self._counted(common, TransferDirection.PUSH, ticket.placement, wire)
            transfer, digests = carry_push(
                context, counted, flat, push.push, ticket, clock, cancelled, difference=difference, ready=ready,
                checksums=checksums,
            )  # fmt: skip
            if transfer.done:
                self._deliver(Done(job, digests, clock.monotonic_s() - began_s))
            elif transfer.failure:
                self._deliver(Failed(job, transfer.failure, base_gone=transfer.base_gone))

        self._thread.run(job, carry, lambda why: self._deliver(Failed(job, why)))

    def pull(self, job: int, grant: PullGrant, flat: F32, cause: str, times: Times) -> None:
        """Fetch into `flat`; ends in Done or Failed."""
        clock = self._clock
        limits = _settings(grant.chunk_bytes, PULL_WINDOW_CHUNKS, times)
        common = Common(grant.run_id, grant.epoch, cause, self._layout, limits, curve=self._curve)

        def carry(context: zmq.Context[zmq.Socket[bytes]], cancelled: threading.Event) -> None:
            began_s = clock.monotonic_s()
            counted = self._counted(common, TransferDirection.PULL, grant.placement, Codec.F32)
            transfer = carry_pull(context, counted, flat, grant, clock, cancelled)
            if transfer.done:
                self._deliver(Done(job, None, clock.monotonic_s() - began_s))
            elif transfer.failure:
                self._deliver(Failed(job, transfer.failure, corrupt=transfer.corrupt))

        self._thread.run(job, carry, lambda why: self._deliver(Failed(job, why)))

    def settle(self) -> None:
        """Cancel the running transfer; returns once no transfer reads or writes a vector."""
        self._thread.settle()

    def cancel(self, job: int) -> None:
        self._thread.cancel(job)

    def close(self) -> None:
        self._thread.close()

    def _counted(self, common: Common, direction: TransferDirection, placement: PlacementSpec, wire: Codec) -> Common:
        """The same Common, with progress reported to the counts. On the data thread, which owns them."""
        if self._links is None:
            return common
        slaves = [address.slave_id for address in placement.slaves]
        return replace(common, tell=self._links.begin(direction, wire, slaves, self._clock.monotonic_s()).tell)

    def _checksums_of(self, push: PushId, wire: Codec) -> dict[Chunk, int]:
        """Checksums of earlier attempts' chunks, and those that were taken in the snapshot: a push's bytes change only
        with its codec.
        """
        if self._sums is None or self._sums[:2] != (push, wire):
            self._sums = (push, wire, self._vectors.checksums() if wire is Codec.F32 else {})
        return self._sums[2]


def _settings(chunk_bytes: int, window_chunks: int, times: Times) -> TransferSettings:
    return TransferSettings(chunk_bytes, window_chunks, times.data_silence_s, times.data_stall_s)
