"""Carries out the transfers that core/net/transfer.py decides, over ZeroMQ, on one thread.

Parameters are sent directly from the push vector and land directly in the pull vector. Never touches live parameters,
never shares a socket or a thread with the control flow, never lands a byte that was not requested, and counts none as
landed whose checksum is wrong.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import zmq

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError, Refused
from dips.core.ids import PushId, Version
from dips.core.layout import FLOAT32_BYTES, Block, Buffer, Chunk, Layout, Share, checksum, chunks_of
from dips.core.messages import PlacementSpec, PullGrant, Ticket
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.payloads import (
    F32,
    WORTH_COMPILING_BYTES,
    BlockPlaces,
    Difference,
    Differences,
    Gated,
    Memory,
    Parameters,
    ParameterSource,
    Payloads,
    Places,
    PulledDifferences,
    SnapshotReady,
    bytes_of,
    kernels,
)
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.transfer import (
    PullTransfer,
    PushTransfer,
    SlaveProgress,
    SlaveRequest,
    Transfer,
    TransferSettings,
    chunks_by_slave,
)
from dips.core.net.zmq_sockets import CurvePair
from dips.core.observe.failpoints import FailpointAction, FailpointKind, copies, failpoint
from dips.core.observe.failpoints import hits as failpoint_hits
from dips.core.observe.logs import ChangeLogger
from dips.core.release import how_to_install
from dips.core.wire import Codec, encoded_bytes

if TYPE_CHECKING:
    from dips.core.net.carry_numba import PushLoop, TransferLoop

_logger = logging.getLogger("dips.data")

_ways = ChangeLogger(_logger)
"""Logs why slaves cannot be reached, by slave: once, however often a transfer is tried again."""

_loops = ChangeLogger(_logger)
"""Logs why there are no compiled loops, by the choice that was made."""

LONGEST_POLL_S = 0.1
"""Within this time a cancelled transfer stops."""

SAID_AFTER_S = 0.3
"""How long a slave refuses connections before that is logged."""

TELL_S = 0.25
"""Interval of progress reports during a transfer."""

TOGETHER = 4
"""Chunks that are read, and have their checksums taken, before the first of them is sent."""


LoopChoice = Literal["auto", "compiled", "python"]

TellMoved = Callable[[Mapping[str, SlaveProgress], float], None]
"""Called with the progress with each slave, and the time."""


@dataclass(frozen=True)
class Common:
    """The common fields of a transfer's messages, and the places of blocks in the flat vector."""

    run_id: str
    epoch: int
    cause: str
    layout: Layout
    settings: TransferSettings
    checksum: Callable[[Buffer], int] = checksum  # of payloads, xxh3-64; another one only in measurements
    curve: CurvePair | None = None  # this process's keys; None: no encryption
    # called with the transfer's progress, a few times a second and at its end; on the data thread
    tell: TellMoved | None = None
    # compiled: the usual messages by core/net/carry_numba.py; auto: that, where it can be and is worth it
    loop: LoopChoice = "auto"
    # what this rank of a cluster carries, and its number; None: the whole model
    share: Share | None = None
    rank: int = 0

    @property
    def n_elems(self) -> int:
        """Of the vectors that are carried."""
        return self.layout.n_elems if self.share is None else self.share.n_elems

    def chunks_by_slave(self, placement: PlacementSpec, block_order: Sequence[int]) -> dict[str, list[Chunk]]:
        """What this transfer carries, as chunks_by_slave() says. Raises ConfigError for a share of other chunks."""
        chunk_bytes = self.settings.chunk_bytes
        try:
            return chunks_by_slave(self.layout, placement, block_order, chunk_bytes, self.share, self.rank)
        except ValueError as error:
            raise ConfigError(f"this transfer cannot be carried: {error}") from error


def _is_compiled(common: Common, clock: Clock, wire_bytes: int, place: str) -> bool:
    """Whether a transfer of so many bytes is carried by a compiled loop. place: the failpoint of each chunk.

    Raises ConfigError where a compiled loop is asked for and cannot be had.
    """
    if common.loop == "python":
        return False
    if common.loop == "auto":
        is_usual = common.checksum is checksum and isinstance(clock, SystemClock) and place not in failpoint_hits()
        if wire_bytes < WORTH_COMPILING_BYTES or not is_usual:
            return False
    try:
        from dips.core.net import zmq_numba
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        why_not = f"numba is not installed: {how_to_install('worker')}"
    else:
        why_not = zmq_numba.why_not()
    if why_not and common.loop == "compiled":
        raise ConfigError(f"there is no compiled loop for this transfer: {why_not}")
    said = f"the interpreter carries transfers, which takes more processor time: {why_not}" if why_not else ""
    _loops.report(common.loop, said)
    if not why_not:
        _warm_up()
    return not why_not


@lru_cache(maxsize=1)
def _warm_up() -> None:
    """Compile the loops, or load them: once for each process, and said where it takes long."""
    from dips.core.math.compiling import watched, where_kept
    from dips.core.net import carry_numba

    def tell(kernel: str, number: int, n_kernels: int) -> None:
        _logger.info("compiling transfers: %s, %d of %d; %s", kernel, number, n_kernels, where_kept())

    with watched(tell, carry_numba):
        carry_numba.warm_up()


class _Carrier(ABC):
    """Carries out one transfer, until it is done, has failed, or is cancelled.

    With a compiled loop (set by the subclass; the transfer's columns are arrays then) chunks are sent and usual answers
    are taken there. Whatever is unusual is done here, by the code that does everything without one.
    """

    _loop: TransferLoop | None = None

    def __init__(self, common: Common, links: SlaveSockets, transfer: Transfer, clock: Clock) -> None:
        self._common = common
        self._links = links
        self._transfer = transfer
        self._clock = clock
        self._away_since_s = math.inf
        self._said = False
        self._told_s = -math.inf

    def carry(self, cancelled: threading.Event) -> None:
        try:
            self._carry(cancelled)
        finally:
            self._tell(0.0)

    def _carry(self, cancelled: threading.Event) -> None:
        transfer, links, now_s = self._transfer, self._links, self._clock.monotonic_s
        links.open(transfer.slaves)
        while not (transfer.done or transfer.failure or cancelled.is_set()):
            asks = []
            for action in transfer.actions(now_s(), requests=self._loop is None):
                if isinstance(action, SlaveRequest):
                    asks.append(action)
                else:
                    links.reconnect(action.slave)
            self.send(asks)
            pause_s = transfer.next_deadline_s() - now_s()
            for slave, header, payload in self._messages(min(max(pause_s, 0.0), LONGEST_POLL_S)):
                self._receive(slave, header, payload)
            for slave, why in links.turned_away():
                self._turned_away(slave, why)
            if self._common.tell is not None:
                self._tell(TELL_S)
        if transfer.done:
            links.all_answered()
            for slave in transfer.slaves:
                _ways.report(slave, "")

    def _messages(self, pause_s: float) -> Iterator[tuple[str, bytes, memoryview | None]]:
        """The answers that arrive within pause_s and are for Python: (slave, header, payload)."""
        if self._loop is None:
            yield from self._links.receive(pause_s)
            return
        why = self._run(self._loop, self._clock.monotonic_s() + pause_s)
        self._links.look()
        if why == self._loop.UNUSUAL:
            yield self._loop.message()
        elif why == self._loop.FAILED:
            yield from self._links.receive(0.0)  # raises what is wrong

    def _run(self, loop: TransferLoop, until_s: float) -> int:
        """Run the compiled loop; returns why it ended."""
        return loop.run(until_s)

    def _tell(self, every_s: float) -> None:
        """Report the progress, unless the last report was less than every_s ago."""
        now_s = self._clock.monotonic_s()
        if self._common.tell is not None and now_s - self._told_s >= every_s:
            self._told_s = now_s
            self._common.tell(self._transfer.moved(), now_s)

    def _turned_away(self, slave: str, why: str) -> None:
        """Log refused connections only if they last: the master's list may come a moment after its answer to Join."""
        now_s = self._clock.monotonic_s()
        self._transfer.turned_away(slave, why, now_s)
        self._away_since_s = min(self._away_since_s, now_s)
        if not self._said and now_s - self._away_since_s >= SAID_AFTER_S:
            self._said = True
            _ways.report(slave, why, logging.WARNING, self._common.cause)

    @abstractmethod
    def send(self, asks: Sequence[SlaveRequest]) -> None:
        """Send the transfer's requests."""

    @abstractmethod
    def take(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        """Take a slave's answer."""

    def _receive(self, slave: str, frame: bytes, payload: memoryview | None) -> None:
        try:
            header = DataHeader.decode(frame)
            header.check_common(self._common.run_id)
        except Refused as refused:
            _logger.warning("slave %s sent an invalid message: %s", slave, refused)
            return
        if header.op is DataOp.REFUSED:
            assert header.refusal is not None, "decode refuses a REFUSED without refusal"
            self._transfer.refused(slave, header.request, header.refusal, self._clock.monotonic_s())
        else:
            self.take(slave, header, payload)


class _PushCarrier(_Carrier):
    """The checksums of chunks whose payload was seen stand in the transfer's columns."""

    def __init__(
        self, common: Common, links: SlaveSockets, transfer: PushTransfer, clock: Clock, push: PushId, attempt: int,
        payloads: Payloads, loop: PushLoop | None,
    ) -> None:  # fmt: skip
        super().__init__(common, links, transfer, clock)
        self._push_transfer = transfer
        self._push = push
        self._attempt = attempt
        self._payloads = payloads
        self._loop = self._push_loop = loop
        self._memory: Memory | None = None

    def send(self, asks: Sequence[SlaveRequest]) -> None:
        """Send chunks. The payloads of a few are read before the first is sent: reading one evicts the interpreter's
        code and data from the caches."""
        together = TOGETHER if self._payloads.lasting else 1
        for first in range(0, len(asks), together):
            some = asks[first : first + together]
            read = [None if ask.chunk is None else self._read(ask.place) for ask in some]
            for ask, payload in zip(some, read, strict=True):
                if ask.chunk is None or payload is None:
                    self._send_query(ask)
                else:
                    self._send_chunk(ask, ask.chunk, *payload)

    def _send_query(self, ask: SlaveRequest) -> None:
        common, (block, offset_bytes) = self._common, self._push_transfer.query_from(ask.slave)
        query = DataHeader(
            common.run_id, common.epoch, DataOp.QUERY_MISSING, ask.request, self._push, self._attempt, block=block,
            offset_bytes=offset_bytes, cause_id=common.cause,
        )  # fmt: skip
        self._links.send(ask.slave, query.encode())

    def _send_chunk(self, ask: SlaveRequest, chunk: Chunk, payload: memoryview, checksum: int) -> None:
        common = self._common
        header = DataHeader(
            common.run_id, common.epoch, DataOp.PUT_CHUNK, ask.request, self._push, self._attempt,
            block=chunk.block_id, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes,
            codec=self._payloads.codec, checksum=checksum, cause_id=common.cause,
        )  # fmt: skip
        action = failpoint("worker.push.before_chunk")
        for _ in range(copies(action)):
            self._links.send(ask.slave, header.encode(), _spoilt(payload, action), copy=not self._payloads.lasting)

    def take(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        now_s, push = self._clock.monotonic_s(), self._push_transfer
        if header.op is DataOp.ACK:
            push.acked(slave, header.request, header.complete, now_s, credit=header.credit)
        elif header.op is DataOp.MISSING:
            push.missing(slave, header.request, header.missing, header.complete, now_s, credit=header.credit)

    def read_all(self) -> None:
        """Take the checksums that are not known yet: of chunks that an earlier attempt brought."""
        for index, known in enumerate(self._transfer.columns.chunks.known):
            if not known:
                self._read(index)

    def _read(self, index: int) -> tuple[memoryview, int]:
        chunks = self._transfer.columns.chunks
        with self._payloads.lock:
            payload = self._payloads.of(self._transfer.chunks[index])
            if not chunks.known[index]:
                chunks.checksum[index], chunks.known[index] = self._common.checksum(payload), 1
            return payload, int(chunks.checksum[index])

    def _run(self, loop: TransferLoop, until_s: float) -> int:
        assert self._push_loop is not None, "this is called for the loop of a push"
        loop, payloads = self._push_loop, self._payloads
        with payloads.lock:
            self._show_memory(loop, payloads.memory())
            why = loop.run(until_s)
        if why == loop.IDLE:
            why = loop.wait()
        elif why == loop.SEND:
            # Wait for a chunk, which the loop then sends, or send a query.
            request = self._push_transfer.request_in(loop.slot)
            if request.chunk is None:
                loop.sent()
                self._send_query(request)
            else:
                self._payloads.wait(request.chunk)
                loop.ready(request.place)
        return why

    def _show_memory(self, loop: PushLoop, memory: Memory) -> None:
        if memory is self._memory:
            return
        self._memory = memory
        if memory.difference is not None:
            loop.write_differences(memory.parts[0], memory.difference)
        else:
            loop.read_from(memory.parts)


class _PullCarrier(_Carrier):
    """momentum: of the version, instead of its parameters. differences: fetch them. places: of the chunks in `flat`."""

    def __init__(
        self, common: Common, links: SlaveSockets, transfer: PullTransfer, clock: Clock, version: Version, flat: F32,
        places: Places | BlockPlaces, loop: TransferLoop | None, *, momentum: bool,
        differences: PulledDifferences | None = None,
    ) -> None:  # fmt: skip
        super().__init__(common, links, transfer, clock)
        self._loop = loop
        self._pull_transfer = transfer
        self._version = version
        self._momentum = momentum
        self._differences = differences
        self._codec = Codec.F32 if differences is None else differences.codec
        self._base = None if differences is None else differences.base
        self._flat = flat
        self._bytes = bytes_of(flat)
        self._places = places

    def send(self, asks: Sequence[SlaveRequest]) -> None:
        for ask in asks:
            common, chunk = self._common, ask.chunk
            assert chunk is not None, "a pull asks for chunks only"
            header = DataHeader(
                common.run_id, common.epoch, DataOp.GET_CHUNK, ask.request, version=self._version,
                block=chunk.block_id, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes,
                codec=self._codec, cause_id=common.cause, momentum=self._momentum, base=self._base,
            )  # fmt: skip
            self._links.send(ask.slave, header.encode())

    def _run(self, loop: TransferLoop, until_s: float) -> int:
        why = loop.run(until_s)
        if why == loop.WHOLE:
            self._pull_transfer.verify()
        return why

    def take(self, slave: str, header: DataHeader, payload: memoryview | None) -> None:
        now_s = self._clock.monotonic_s()
        chunk = self._pull_transfer.wants(slave, header.request)
        if header.op is not DataOp.CHUNK or chunk is None:
            return
        action = failpoint("worker.pull.before_chunk")
        if copies(action) == 0:
            return
        wrong = self._what_is_wrong(header, payload, chunk, action)
        if wrong:
            self._pull_transfer.damaged(slave, header.request, f"slave {slave}: {wrong}", now_s)
            return
        here = self._places.bytes_at(chunk)
        if self._differences is not None:
            elems = slice(here.start // FLOAT32_BYTES, here.stop // FLOAT32_BYTES)
            self._differences.land(elems, _spoilt(payload or memoryview(b""), action), self._flat)
            if self._common.checksum(self._bytes[here]) != header.checksum:
                sentence = f"slave {slave}: the differences of {chunk} to {self._base} lead to other parameters"
                self._pull_transfer.misfit(slave, header.request, sentence, now_s)
                return
        else:
            # The payload is in the cache since its checksum was taken; the copy releases the interpreter lock.
            np.copyto(self._bytes[here], np.frombuffer(payload or b"", np.uint8))
        self._pull_transfer.landed(slave, header.request, header.checksum, now_s, credit=header.credit)

    def _what_is_wrong(
        self, header: DataHeader, payload: memoryview | None, chunk: Chunk, action: FailpointAction | None
    ) -> str:
        named = Chunk(header.block, header.offset_bytes, header.length_bytes)
        is_asked_for = header.version == self._version and header.momentum == self._momentum
        is_written_so = header.codec is self._codec and header.base == self._base
        if named != chunk or not is_asked_for or not is_written_so:
            return f"it answered with {named} of version {header.version}, asked for was {chunk} of {self._version}"
        differences = self._differences
        expected = chunk.length_bytes if differences is None else differences.payload_bytes(chunk.length_bytes)
        if payload is None or payload.nbytes != expected:
            return f"the payload of {chunk} has another length"
        if differences is not None:
            return ""  # the header's checksum is of what they lead to
        right = self._common.checksum(_spoilt(payload, action)) == header.checksum
        return "" if right else f"the checksum of {chunk} is wrong"


def _spoilt(payload: memoryview, action: FailpointAction | None) -> memoryview:
    """The payload, with one bit flipped when a failpoint says corrupt."""
    if action is None or action.kind is not FailpointKind.CORRUPT:
        return payload
    damaged = bytearray(payload)
    damaged[len(damaged) // 2] ^= 1
    return memoryview(damaged)


def carry_push(
    context: zmq.Context[zmq.Socket[bytes]], common: Common, flat: F32 | ParameterSource, push: PushId, ticket: Ticket,
    clock: Clock, cancelled: threading.Event, *, difference: Difference | None = None, ready: SnapshotReady | None =
    None, checksums: dict[Chunk, int] | None = None,
) -> PushTransfer:  # fmt: skip
    """Send a push; returns the transfer: done, failed or cancelled. One that is done knows the checksums of all of its
    chunks.

    flat: the whole model, or common's share of it; unchanged until this returns, as are the vectors of `difference`,
    which only the ticket's codec may ask for; then flat is a vector. ready: says which part of it is there, by its own
    elements; None: all. checksums: those of earlier attempts of this push in this codec; takes the new ones. Raises
    ConfigError for an endpoint that is not loopback without keys, for keys on one side only, or without numba.
    """
    places, settings = Places(common.layout, common.share), common.settings
    shares = common.chunks_by_slave(ticket.placement, ticket.block_order)
    payloads: Payloads = Parameters(flat, places)
    if ticket.wire.is_difference:
        assert difference is not None, "a ticket for differences answers a push that has a base"
        assert isinstance(flat, np.ndarray), "differences are taken from a snapshot"
        payloads = Differences(ticket.wire, flat, difference, places, settings.chunk_bytes)
    if ready is not None:
        payloads = Gated(payloads, ready, places)
    n_bytes = encoded_bytes(payloads.codec, common.n_elems)
    compiled = _is_compiled(common, clock, n_bytes, "worker.push.before_chunk")
    is_share = common.share is not None
    transfer = PushTransfer(shares, settings, clock.monotonic_s(), is_share=is_share, arrays=compiled)
    if checksums is not None:
        transfer.know(checksums)
    links = SlaveSockets(context, ticket.placement, settings.chunk_bytes, common.curve)
    loop = None
    if compiled:
        from dips.core.net.carry_numba import PushLoop, texts_of

        texts = texts_of(common.run_id, push, common.cause)
        loop = PushLoop(transfer, links, common.epoch, texts, ticket.attempt, places, payloads)
    carrier = _PushCarrier(common, links, transfer, clock, push, ticket.attempt, payloads, loop)
    try:
        carrier.carry(cancelled)
        if transfer.done:
            failpoint("worker.push.after_last_chunk")
            carrier.read_all()
        return transfer
    finally:
        links.close()
        if loop is not None:
            loop.close()
        if checksums is not None:
            checksums.update(transfer.known())


def carry_pull(
    context: zmq.Context[zmq.Socket[bytes]], common: Common, flat: F32, grant: PullGrant, clock: Clock,
    cancelled: threading.Event, *, momentum: bool = False, base: F32 | None = None,
) -> PullTransfer:  # fmt: skip
    """Fetch a version into `flat`; when the transfer is done, every slave's shard has the digest that the grant names.

    With a share, flat is as long as that, and each chunk has the checksum of its header: the digests are for the one
    who has all ranks' checksums. momentum: fetch that instead of the parameters; the digests are of it too. base: the
    parameters of the version that the grant names, where it is fetched as differences; not changed until this returns.
    Raises ConfigError for an endpoint that is not loopback without keys, for keys on one side only, or without numba
    where the loop must be compiled or differences are fetched.
    """
    differences = None
    if grant.wire.is_difference:
        assert base is not None, "the state asks for differences only to what is here"
        assert grant.base is not None, "the state checked the grant"
        kernels()
        differences = PulledDifferences(grant.wire, grant.base, base, grant.version.v - grant.base.v)
    shares = common.chunks_by_slave(grant.placement, grant.block_order)
    digests = dict(grant.digest_of_slave) if common.share is None else None
    places = Places(common.layout, common.share)
    links = SlaveSockets(context, grant.placement, common.settings.chunk_bytes, common.curve)
    try:
        transfer = _pull(
            links, common, flat, shares, digests, places, grant.version, clock, cancelled, momentum=momentum,
            differences=differences,
        )  # fmt: skip
    finally:
        links.close()
    failpoint("worker.pull.after_last_chunk")
    return transfer


def carry_block(
    links: SlaveSockets, common: Common, flat: F32, source: str, block: Block, version: Version, clock: Clock,
    cancelled: threading.Event, *, momentum: bool,
) -> PullTransfer:  # fmt: skip
    """Fetch one block of a version, or of its momentum, from the slave that holds it, into `flat`, which is as long.

    The digest of the shard that it becomes part of is the caller's to compare. links: to the slaves; they stay open.
    Raises ConfigError as carry_pull() does.
    """
    shares = {source: chunks_of([block], common.settings.chunk_bytes)}
    return _pull(links, common, flat, shares, None, BlockPlaces(), version, clock, cancelled, momentum=momentum)


def _pull(
    links: SlaveSockets, common: Common, flat: F32, shares: Mapping[str, Sequence[Chunk]], digests: Mapping[str, bytes]
    | None, places: Places | BlockPlaces, version: Version, clock: Clock, cancelled: threading.Event, *, momentum: bool,
    differences: PulledDifferences | None = None,
) -> PullTransfer:  # fmt: skip
    compiled = _is_compiled(common, clock, flat.nbytes, "worker.pull.before_chunk")
    transfer = PullTransfer(shares, digests, common.settings, clock.monotonic_s(), arrays=compiled)
    loop = None
    if compiled:
        from dips.core.net.carry_numba import PullLoop, texts_of

        texts = texts_of(common.run_id, version, common.cause, None if differences is None else differences.base)
        loop = PullLoop(
            transfer, links, common.epoch, texts, places, bytes_of(flat), momentum=momentum, differences=differences
        )
    carrier = _PullCarrier(
        common, links, transfer, clock, version, flat, places, loop, momentum=momentum, differences=differences
    )
    carrier.carry(cancelled)
    return transfer
