"""Starts transfers on the data thread for the driver, and turns their ends into events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import zmq

from dips.core.chunks import Chunk
from dips.core.clock import Clock
from dips.core.ids import PushId
from dips.core.layout import Layout
from dips.core.messages import PlacementSpec, Settings
from dips.core.net.curve import CurvePair
from dips.core.wire import DIFFERENCES, Codec
from dips.worker.data import DataThread
from dips.worker.link_counts import LinkCounts, TransferDirection
from dips.worker.state.effects import StartPull, StartPush
from dips.worker.state.events import Event, Pulled, PullFailed, PushFailed, PushSent
from dips.worker.state.times import Times
from dips.worker.transfer import TransferSettings
from dips.worker.transfer_zmq import Common, carry_pull, carry_push
from dips.worker.vectors import F32, Vectors
from dips.worker.wire import Difference

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

    def push(self, effect: StartPush, run_id: str, settings: Settings, times: Times) -> None:
        """Send the push vector; ends in PushSent or PushFailed."""
        vectors, clock = self._vectors, self._clock
        (flat, ready), wire = vectors.sending(), effect.ticket.wire
        difference = Difference(vectors.base, vectors.residual) if wire in DIFFERENCES else None
        limits = _settings(settings.chunk_bytes, settings.window_chunks, times)
        common = Common(run_id, effect.epoch, effect.cause, self._layout, limits, curve=self._curve)
        checksums = self._checksums_of(effect.push, wire)

        def job(context: zmq.Context[zmq.Socket[bytes]], cancelled: threading.Event) -> None:
            began_s = clock.monotonic_s()
            counted = self._counted(common, TransferDirection.PUSH, effect.ticket.placement, wire)
            transfer, digests = carry_push(
                context, counted, flat, effect.push, effect.ticket, clock, cancelled, difference=difference,
                ready=ready, checksums=checksums,
            )  # fmt: skip
            if transfer.done:
                self._deliver(PushSent(effect.transfer_id, digests, clock.monotonic_s() - began_s))
            elif transfer.failure:
                self._deliver(PushFailed(effect.transfer_id, transfer.failure, transfer.base_gone))

        self._thread.run(effect.transfer_id, job, lambda why: self._deliver(PushFailed(effect.transfer_id, why)))

    def pull(self, effect: StartPull, flat: F32, times: Times) -> None:
        """Fetch into `flat`; ends in Pulled or PullFailed."""
        grant, clock = effect.grant, self._clock
        limits = _settings(grant.chunk_bytes, PULL_WINDOW_CHUNKS, times)
        common = Common(grant.run_id, grant.epoch, effect.cause, self._layout, limits, curve=self._curve)

        def job(context: zmq.Context[zmq.Socket[bytes]], cancelled: threading.Event) -> None:
            began_s = clock.monotonic_s()
            counted = self._counted(common, TransferDirection.PULL, grant.placement, Codec.F32)
            transfer = carry_pull(context, counted, flat, grant, clock, cancelled)
            if transfer.done:
                self._deliver(Pulled(effect.transfer_id, clock.monotonic_s() - began_s))
            elif transfer.failure:
                self._deliver(PullFailed(effect.transfer_id, transfer.failure, transfer.corrupt))

        self._thread.run(effect.transfer_id, job, lambda why: self._deliver(PullFailed(effect.transfer_id, why)))

    def settle(self) -> None:
        """Cancel the running transfer; returns once no transfer reads or writes a vector."""
        self._thread.settle()

    def cancel(self, transfer_id: int) -> None:
        self._thread.cancel(transfer_id)

    def close(self) -> None:
        self._thread.close()

    def _counted(self, common: Common, direction: TransferDirection, placement: PlacementSpec, wire: Codec) -> Common:
        """The same Common, with progress reported to the counts. On the data thread, which owns them."""
        if self._links is None:
            return common
        slaves = [address.slave_id for address in placement.slaves]
        return replace(common, tell=self._links.begin(direction, wire, slaves, self._clock.monotonic_s()).tell)

    def _checksums_of(self, push: PushId, wire: Codec) -> dict[Chunk, int]:
        """Checksums of the chunks of earlier attempts: a push's bytes change only with its codec."""
        if self._sums is None or self._sums[:2] != (push, wire):
            self._sums = (push, wire, {})
        return self._sums[2]


def _settings(chunk_bytes: int, window_chunks: int, times: Times) -> TransferSettings:
    return TransferSettings(chunk_bytes, window_chunks, times.data_silence_s, times.data_stall_s)
