"""Runs a worker's transfers on one thread. Never touches live parameters."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum

import zmq

from dips.core.allocator import keep_freed_memory
from dips.core.clock import Clock
from dips.core.errors import DipsError
from dips.core.ids import PushId
from dips.core.layout import FLOAT32_BYTES, Chunk, Layout, Share
from dips.core.messages import Caller, PlacementSpec, PullGrant, Settings
from dips.core.net.carriers import Common, carry_pull, carry_push
from dips.core.net.payloads import Difference
from dips.core.net.transfer import SlaveProgress, Transfer, TransferSettings, digests_of
from dips.core.net.zmq_sockets import CurvePair
from dips.core.wire import Codec, encoded_bytes
from dips.worker.parallel.meetings import PartEnd
from dips.worker.state.effects import DigestOfSlave, Done, Event, Failed, SendPush
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
"""Most chunks requested at a time from one slave in a cluster's pull; pushes use the master's window_chunks."""


@dataclass(frozen=True)
class RankShare:
    """What one rank of a cluster carries. ended: gets the end of each of its parts, on the data thread.

    n_ranks: ranks that push and pull at the same time. They divide a cluster's window of chunks on each slave, for
    which its memory for messages was reckoned.
    """

    rank: int
    share: Share
    ended: Callable[[PartEnd], None]
    n_ranks: int = 1


class Transfers:
    """Runs one transfer at a time. `deliver` is called on the data thread. curve: this process's keys, if any.

    A process that has all of the model delivers Done or Failed. A rank of several carries its share, and gives the end
    of its part to `of_rank.ended` instead: with the checksums of all its chunks, from which whoever has all ranks' ends
    computes the digests (worker/parallel/meetings.py). A transfer that was cancelled has no end.
    """

    def __init__(
        self,
        layout: Layout,
        vectors: Vectors,
        deliver: Callable[[Event], None],
        clock: Clock,
        curve: CurvePair | None = None,
        links: LinkCounts | None = None,
        of_rank: RankShare | None = None,
    ) -> None:
        """vectors: of the whole model, or of of_rank's share. links: counts the traffic; None: it is not counted."""
        self._of_rank = of_rank
        self._curve = curve
        self._links = links
        self._layout = layout
        self._vectors = vectors
        self._deliver = deliver
        self._clock = clock
        self._thread = DataThread()
        self._sums: tuple[PushId, Codec, dict[Chunk, int]] | None = None

    def push(self, job: int, push: SendPush, caller: Caller, settings: Settings, times: Times) -> None:
        """Send the push vector; ends in Done with the digests, or in Failed, or as a part."""
        vectors, clock, ticket = self._vectors, self._clock, push.ticket
        (flat, ready), wire = vectors.sending(), ticket.wire
        difference = Difference(vectors.base, vectors.residual) if wire.is_difference else None
        n_ranks = 1 if self._of_rank is None else self._of_rank.n_ranks
        limits = _settings(settings.chunk_bytes, window_of_rank(settings.window_chunks, n_ranks), times)
        common = self._common(caller.run_id, caller.epoch, caller.cause_id, limits)
        # Checksums of earlier attempts' chunks, and those that were taken in the snapshot: a push's bytes change only
        # with its codec.
        if self._sums is None or self._sums[:2] != (push.push, wire):
            self._sums = (push.push, wire, self._vectors.checksums() if wire is Codec.F32 else {})
        checksums = self._sums[2]

        def carry(context: zmq.Context[zmq.Socket[bytes]], cancelled: threading.Event) -> None:
            began_s = clock.monotonic_s()
            counted = self._counted(common, TransferDirection.PUSH, ticket.placement, wire)
            transfer = carry_push(
                context, counted, flat, push.push, ticket, clock, cancelled, difference=difference, ready=ready,
                checksums=checksums,
            )  # fmt: skip

            def digests() -> tuple[tuple[str, bytes], ...]:
                order, known = ticket.block_order, transfer.known()
                return digests_of(self._layout, ticket.placement, settings.chunk_bytes, known, order)

            self._end(job, transfer, clock.monotonic_s() - began_s, digests)

        self._thread.run(job, carry, lambda why: self._failed(job, why))

    def pull(self, job: int, grant: PullGrant, flat: F32, cause: str, times: Times) -> None:
        """Fetch into `flat`; ends in Done or Failed, or as a part, whose digests no one has compared yet."""
        clock = self._clock
        base = self._vectors.base if grant.wire.is_difference else None
        n_ranks = 1 if self._of_rank is None else self._of_rank.n_ranks
        limits = _settings(grant.chunk_bytes, window_of_rank(PULL_WINDOW_CHUNKS, n_ranks), times)
        common = self._common(grant.run_id, grant.epoch, cause, limits)

        def carry(context: zmq.Context[zmq.Socket[bytes]], cancelled: threading.Event) -> None:
            began_s = clock.monotonic_s()
            counted = self._counted(common, TransferDirection.PULL, grant.placement, *wire_of_pull(grant))
            transfer = carry_pull(context, counted, flat, grant, clock, cancelled, base=base)
            self._end(job, transfer, clock.monotonic_s() - began_s, lambda: None)

        self._thread.run(job, carry, lambda why: self._failed(job, why))

    def settle(self) -> None:
        """Cancel the running transfer; returns once no transfer reads or writes a vector."""
        self._thread.settle()

    def cancel(self, job: int) -> None:
        self._thread.cancel(job)

    def close(self) -> None:
        self._thread.close()

    def _common(self, run_id: str, epoch: int, cause: str, limits: TransferSettings) -> Common:
        common = Common(run_id, epoch, cause, self._layout, limits, curve=self._curve)
        of_rank = self._of_rank
        return common if of_rank is None else replace(common, share=of_rank.share, rank=of_rank.rank)

    def _end(self, job: int, transfer: Transfer, seconds: float, result: Callable[[], DigestOfSlave | None]) -> None:
        """Deliver the end of a transfer, unless it was cancelled. result: of a Done."""
        if transfer.failure:
            self._failed(job, transfer.failure, base_gone=transfer.base_gone, corrupt=transfer.corrupt)
        elif transfer.done and self._of_rank is not None:
            rank, ended = self._of_rank.rank, self._of_rank.ended
            ended(PartEnd(job, rank, checksums=transfer.known(), seconds=seconds))
        elif transfer.done:
            self._deliver(Done(job, result(), seconds))

    def _failed(self, job: int, why: str, *, base_gone: bool = False, corrupt: bool = False) -> None:
        if self._of_rank is not None:
            self._of_rank.ended(PartEnd(job, self._of_rank.rank, why, base_gone=base_gone, corrupt=corrupt))
        else:
            self._deliver(Failed(job, why, base_gone=base_gone, corrupt=corrupt))

    def _counted(
        self, common: Common, direction: TransferDirection, placement: PlacementSpec, wire: Codec, n_parts: int = 1
    ) -> Common:
        """The same Common, with progress reported to the counts. On the data thread, which owns them."""
        if self._links is None:
            return common
        slaves = [address.slave_id for address in placement.slaves]
        now_s = self._clock.monotonic_s()
        return replace(common, tell=self._links.begin(direction, wire, slaves, now_s, n_parts).tell)


def wire_of_pull(grant: PullGrant) -> tuple[Codec, int]:
    """How a grant's version is fetched: its codec, and how many payloads each chunk has."""
    if not grant.wire.is_difference or grant.base is None:
        return Codec.F32, 1
    return grant.wire, grant.version.v - grant.base.v


def window_of_rank(window_chunks: int, n_ranks: int) -> int:
    """Most chunks of one rank that are unanswered by one slave: a slave's memory is reckoned for the window of a
    cluster, and so is that of all its ranks together.
    """
    return max(1, window_chunks // n_ranks)


def _settings(chunk_bytes: int, window_chunks: int, times: Times) -> TransferSettings:
    return TransferSettings(chunk_bytes, window_chunks, times.data_silence_s, times.data_stall_s)


class TransferDirection(Enum):
    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True)
class SlaveLinkCounts:
    """Counts of one slave."""

    # n_bytes, bytes_per_s: by direction; the rate is the newest transfer's, NaN before the first
    n_bytes: Mapping[TransferDirection, int] = field(default_factory=dict)
    bytes_per_s: Mapping[TransferDirection, float] = field(default_factory=dict)
    resumed_bytes: int = 0  # bytes that the slave held already when an attempt of a push began
    reconnects: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)  # by code
    round_trip_s: float | None = None


@dataclass(frozen=True)
class Transferring:
    """Adds the progress of one transfer to the counts. For the data thread."""

    counts: LinkCounts
    direction: TransferDirection
    wire: Codec
    began_s: float
    before: Mapping[str, SlaveLinkCounts]
    n_parts: int = 1  # payloads of each chunk: of a pull of differences several may follow each other

    def tell(self, moved: Mapping[str, SlaveProgress], now_s: float) -> None:
        """Take the transfer's progress since its beginning."""
        links = {
            slave: self._link(self.before.get(slave, SlaveLinkCounts()), part, now_s) for slave, part in moved.items()
        }
        self.counts.show({**self.before, **links})

    def _link(self, before: SlaveLinkCounts, part: SlaveProgress, now_s: float) -> SlaveLinkCounts:
        way, n_bytes = self.direction, self.n_parts * encoded_bytes(self.wire, part.carried_bytes // FLOAT32_BYTES)
        refusals = dict(before.refusals)
        for code, count in part.refusals.items():
            refusals[code] = refusals.get(code, 0) + count
        moves = (
            {**before.bytes_per_s, way: n_bytes / max(now_s - self.began_s, 1e-6)} if n_bytes else before.bytes_per_s
        )
        return replace(
            before,
            n_bytes={**before.n_bytes, way: before.n_bytes.get(way, 0) + n_bytes},
            bytes_per_s=moves,
            resumed_bytes=before.resumed_bytes + encoded_bytes(self.wire, part.resumed_bytes // FLOAT32_BYTES),
            reconnects=before.reconnects + part.reconnects,
            refusals=refusals,
            round_trip_s=part.round_trip_s if part.round_trip_s is not None else before.round_trip_s,
        )


class LinkCounts:
    """Counts the traffic on the links to the slaves of the newest transfer's placement, in all transfers of a process.

    The data thread makes a new immutable view a few times a second during a transfer; readers get the last one. Bytes
    are those on the wire: differences have fewer than parameters. Of several ranks those are counted that the leader
    moves.
    """

    def __init__(self) -> None:
        self._view: Mapping[str, SlaveLinkCounts] = {}

    @property
    def view(self) -> Mapping[str, SlaveLinkCounts]:
        """The newest view; from any thread, never changed afterwards."""
        return self._view

    def show(self, links: Mapping[str, SlaveLinkCounts]) -> None:
        self._view = links

    def begin(
        self, direction: TransferDirection, wire: Codec, slaves: Iterable[str], now_s: float, n_parts: int = 1
    ) -> Transferring:
        """A transfer with these slaves begins; those of an earlier placement are forgotten."""
        before = {slave: self._view[slave] for slave in slaves if slave in self._view}
        return Transferring(self, direction, wire, now_s, before, n_parts)
