"""The data flow's sockets: carries out what worker/transfer.py decides, on the one thread "dips-data".

Chunks are sent straight from the push buffer and land straight in the pull buffer. Never touches live parameters,
never shares a socket or a thread with the control flow, and never lands a byte that nobody asked for or whose
checksum is wrong.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zmq
from numpy.typing import NDArray

from dips.core.chunks import Chunk, checksum
from dips.core.clock import Clock
from dips.core.data_header import MAX_HEADER_BYTES, Codec, DataHeader, DataOp
from dips.core.errors import DipsError, Refused
from dips.core.failpoint_spec import Action, Kind
from dips.core.failpoints import copies, failpoint
from dips.core.ids import PushId, Version
from dips.core.layout import FLOAT32_BYTES, Layout
from dips.core.messages import PlacementSpec, PullGrant, Ticket
from dips.core.net import require_loopback
from dips.worker.transfer import (
    Ask,
    PullTransfer,
    PushTransfer,
    Reconnect,
    Transfer,
    TransferSettings,
    shares_of,
)

_logger = logging.getLogger("dips.worker.data")

LONGEST_POLL_S = 0.1
"""How soon a cancelled transfer stops."""

HANDSHAKE_MS = 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000


@dataclass(frozen=True)
class Common:
    """What every message of one transfer carries, and where blocks stand in the flat vector."""

    run_id: str
    epoch: int
    cause: str
    layout: Layout
    settings: TransferSettings


class Links:
    """A DEALER socket for each slave; to be used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], placement: PlacementSpec, settings: TransferSettings):
        self._context = context
        self._settings = settings
        self._endpoints = {address.slave_id: address.data_endpoint for address in placement.slaves}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()

    def open(self, slaves: Sequence[str]) -> None:
        """Connect. Raises ConfigError for an endpoint that is not loopback."""
        for slave in slaves:
            if self._endpoints[slave]:
                require_loopback(self._endpoints[slave], f"the data endpoint of slave {slave}")
                self.reconnect(slave)

    def reconnect(self, slave: str) -> None:
        """A fresh socket has a fresh routing id, so that late answers to the old one go nowhere."""
        self._drop(slave)
        if not self._endpoints[slave]:
            return  # the slave is away: the transfer's silence will say so
        dealer = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,  # what is not sent is sent again by the next attempt
            zmq.SNDHWM: self._settings.window_chunks + 1,
            zmq.RCVHWM: self._settings.window_chunks + 1,
            zmq.MAXMSGSIZE: self._settings.chunk_bytes + MAX_HEADER_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: MAX_RECONNECT_MS,
        }
        for option, value in options.items():
            dealer.setsockopt(option, value)
        dealer.connect(self._endpoints[slave])
        self._sockets[slave] = dealer
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        """Never blocks: what does not fit counts as lost, and the transfer's silence repairs it."""
        dealer = self._sockets.get(slave)
        if dealer is None:
            return
        frames: list[bytes | memoryview] = [header.encode()] if payload is None else [header.encode(), payload]
        try:
            dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            _logger.debug("slave %s takes no more messages now", slave)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, list[zmq.Frame]]]:
        """What has arrived, waiting at most timeout_s for the first message."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        for slave, dealer in list(self._sockets.items()):
            while dealer in ready and self._sockets.get(slave) is dealer:
                try:
                    yield slave, dealer.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break

    def close(self) -> None:
        for slave in list(self._sockets):
            self._drop(slave)

    def _drop(self, slave: str) -> None:
        dealer = self._sockets.pop(slave, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=0)


class _Carrier(ABC):
    """Carries one transfer out, until it is done, has failed, or is cancelled."""

    def __init__(self, common: Common, links: Links, memory: memoryview, transfer: Transfer, clock: Clock) -> None:
        self._common = common
        self._links = links
        self._memory = memory
        self._transfer = transfer
        self._clock = clock

    def carry(self, cancelled: threading.Event) -> None:
        transfer, links = self._transfer, self._links
        links.open(transfer.slaves)
        while not (transfer.done or transfer.failure or cancelled.is_set()):
            for action in transfer.actions(self._clock.monotonic_s()):
                match action:
                    case Reconnect(slave):
                        links.reconnect(slave)
                    case Ask() as ask:
                        self.send(ask)
            pause_s = transfer.next_deadline_s() - self._clock.monotonic_s()
            for slave, frames in links.receive(min(max(pause_s, 0.0), LONGEST_POLL_S)):
                self._hear(slave, frames)

    def send(self, ask: Ask) -> None:
        self._links.send(ask.slave, *self.message(ask))

    @abstractmethod
    def message(self, ask: Ask) -> tuple[DataHeader, memoryview | None]:
        """The header, and the payload that goes with it."""

    @abstractmethod
    def take(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        """What a slave answered."""

    def place(self, chunk: Chunk) -> memoryview:
        """The chunk's bytes in the flat vector."""
        begin = self._common.layout.blocks[chunk.block_id].start_elem * FLOAT32_BYTES + chunk.offset_bytes
        return self._memory[begin : begin + chunk.length_bytes]

    def _hear(self, slave: str, frames: Sequence[zmq.Frame]) -> None:
        try:
            header = DataHeader.decode(frames[0].buffer)
            header.check_common(self._common.run_id)
        except Refused as refused:
            _logger.warning("slave %s sent what cannot be understood: %s", slave, refused)
            return
        if header.op is DataOp.REFUSED:
            assert header.refusal is not None, "decode refuses a REFUSED without refusal"
            self._transfer.refused(slave, header.request, header.refusal, self._clock.monotonic_s())
        else:
            self.take(slave, header, frames[1].buffer if len(frames) == 2 else None)


class _PushCarrier(_Carrier):
    def __init__(
        self, common: Common, links: Links, memory: memoryview, transfer: PushTransfer, clock: Clock, push: PushId,
        attempt: int,
    ) -> None:  # fmt: skip
        super().__init__(common, links, memory, transfer, clock)
        self._push_transfer = transfer
        self._push = push
        self._attempt = attempt
        self._checksums: dict[Chunk, int] = {}

    def send(self, ask: Ask) -> None:
        header, payload = self.message(ask)
        action = failpoint("worker.push.before_chunk") if payload is not None else None
        for _ in range(copies(action)):
            self._links.send(ask.slave, header, _spoilt(payload, action))

    def message(self, ask: Ask) -> tuple[DataHeader, memoryview | None]:
        common, chunk = self._common, ask.chunk
        if chunk is None:
            return self._header(DataOp.QUERY_MISSING, ask.request), None
        payload = self.place(chunk)
        header = DataHeader(
            common.run_id, common.epoch, DataOp.PUT_CHUNK, ask.request, self._push, self._attempt,
            block=chunk.block_id, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes,
            codec=Codec.F32, checksum=self.checksum_of(chunk), cause_id=common.cause,
        )  # fmt: skip
        return header, payload

    def take(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        now_s = self._clock.monotonic_s()
        if header.op is DataOp.ACK:
            self._push_transfer.acked(slave, header.request, header.complete, now_s)
        elif header.op is DataOp.MISSING:
            self._push_transfer.missing(slave, header.request, header.missing, header.complete, now_s)

    def checksum_of(self, chunk: Chunk) -> int:
        if chunk not in self._checksums:
            self._checksums[chunk] = checksum(self.place(chunk))
        return self._checksums[chunk]

    def _header(self, op: DataOp, request: int) -> DataHeader:
        common = self._common
        return DataHeader(common.run_id, common.epoch, op, request, self._push, self._attempt, cause_id=common.cause)


class _PullCarrier(_Carrier):
    def __init__(
        self, common: Common, links: Links, memory: memoryview, transfer: PullTransfer, clock: Clock, version: Version
    ) -> None:
        super().__init__(common, links, memory, transfer, clock)
        self._pull_transfer = transfer
        self._version = version

    def message(self, ask: Ask) -> tuple[DataHeader, memoryview | None]:
        common, chunk = self._common, ask.chunk
        assert chunk is not None, "a pull asks for chunks only"
        header = DataHeader(
            common.run_id, common.epoch, DataOp.GET_CHUNK, ask.request, version=self._version, block=chunk.block_id,
            offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=Codec.F32, cause_id=common.cause,
        )  # fmt: skip
        return header, None

    def take(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        now_s = self._clock.monotonic_s()
        chunk = self._pull_transfer.wants(slave, header.request)
        if header.op is not DataOp.CHUNK or chunk is None:
            return
        action = failpoint("worker.pull.before_chunk")
        if copies(action) == 0:
            return
        payload = _spoilt(payload, action)
        wrong = self._what_is_wrong(header, payload, chunk)
        if wrong:
            self._pull_transfer.damaged(slave, header.request, f"slave {slave}: {wrong}", now_s)
            return
        assert payload is not None, "a chunk without payload is wrong"
        self.place(chunk)[:] = payload
        self._pull_transfer.landed(slave, header.request, header.checksum, now_s)

    def _what_is_wrong(self, header: DataHeader, payload: memoryview | None, chunk: Chunk) -> str:
        named = Chunk(header.block, header.offset_bytes, header.length_bytes)
        if named != chunk or header.version != self._version or header.codec is not Codec.F32:
            return f"it answered with {named} of version {header.version}, asked for was {chunk} of {self._version}"
        if payload is None or payload.nbytes != chunk.length_bytes:
            return f"the payload of {chunk} has another length"
        return "" if checksum(payload) == header.checksum else f"the checksum of {chunk} is wrong"


def _spoilt(payload: memoryview | None, action: Action | None) -> memoryview | None:
    """The payload, with one bit flipped when a failpoint says corrupt."""
    if payload is None or action is None or action.kind is not Kind.CORRUPT:
        return payload
    damaged = bytearray(payload)
    damaged[len(damaged) // 2] ^= 1
    return memoryview(damaged)


def as_bytes(flat: NDArray[np.float32]) -> memoryview:
    """The vector's memory as bytes, without a copy."""
    return flat.data.cast("B")


def carry_push(
    context: zmq.Context[zmq.Socket[bytes]], common: Common, flat: NDArray[np.float32], push: PushId, ticket: Ticket,
    clock: Clock, cancelled: threading.Event,
) -> tuple[PushTransfer, tuple[tuple[str, bytes], ...]]:  # fmt: skip
    """Send a push; returns the transfer (done, failed or cancelled) and the digest of what each slave was sent.

    flat: the whole model, unchanged until this returns. Raises ConfigError for an endpoint that is not loopback.
    """
    shares = shares_of(common.layout, ticket.placement, ticket.block_order, common.settings.chunk_bytes)
    transfer = PushTransfer(shares, common.settings, clock.monotonic_s())
    links = Links(context, ticket.placement, common.settings)
    carrier = _PushCarrier(common, links, as_bytes(flat), transfer, clock, push, ticket.attempt)
    try:
        carrier.carry(cancelled)
    finally:
        links.close()
    if not transfer.done:
        return transfer, ()
    failpoint("worker.push.after_last_chunk")
    every = {chunk: carrier.checksum_of(chunk) for chunks in shares.values() for chunk in chunks}
    return transfer, transfer.digests(every)


def carry_pull(
    context: zmq.Context[zmq.Socket[bytes]], common: Common, flat: NDArray[np.float32], grant: PullGrant,
    clock: Clock, cancelled: threading.Event,
) -> PullTransfer:  # fmt: skip
    """Fetch a version into `flat`; when the transfer is done, every share has the digest that the grant names."""
    shares = shares_of(common.layout, grant.placement, grant.block_order, common.settings.chunk_bytes)
    transfer = PullTransfer(shares, dict(grant.digest_of_slave), common.settings, clock.monotonic_s())
    links = Links(context, grant.placement, common.settings)
    try:
        _PullCarrier(common, links, as_bytes(flat), transfer, clock, grant.version).carry(cancelled)
    finally:
        links.close()
    failpoint("worker.pull.after_last_chunk")
    return transfer


class DataThread:
    """Runs transfers one after the other; at most one is wanted at any time, a new one cancels the one before."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._executor = ThreadPoolExecutor(1, "dips-data")
        self._current: tuple[int, threading.Event] | None = None

    def run(
        self,
        transfer_id: int,
        job: Callable[[zmq.Context[zmq.Socket[bytes]], threading.Event], None],
        failed: Callable[[str], None],
    ) -> None:
        """Call job(context, cancelled) on the data thread; `failed` gets a sentence if it raises."""
        if self._current is not None:
            self.cancel(self._current[0])
        cancelled = threading.Event()
        self._current = (transfer_id, cancelled)
        self._executor.submit(self._guarded, job, cancelled, failed)

    def cancel(self, transfer_id: int) -> None:
        if self._current is not None and self._current[0] == transfer_id:
            self._current[1].set()

    def close(self) -> None:
        """Stop whatever runs, wait for it, and close the sockets."""
        if self._current is not None:
            self._current[1].set()
        self._executor.shutdown(wait=True)
        self._context.destroy(linger=0)

    def _guarded(
        self,
        job: Callable[[zmq.Context[zmq.Socket[bytes]], threading.Event], None],
        cancelled: threading.Event,
        failed: Callable[[str], None],
    ) -> None:
        try:
            job(self._context, cancelled)
        except (DipsError, OSError) as error:
            failed(str(error))
        except Exception as error:
            _logger.exception("a transfer broke")
            failed(f"{type(error).__name__}: {error}")
