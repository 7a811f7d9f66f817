"""Simulates the asking side of the data flow: the real transfer machines (dips.core.net.transfer) over lossy datagrams.

Does what dips.core.net.carriers does on its thread: sends the machine's messages, gives it the answers, opens a
new connection when it asks for one. Answers to an old connection are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dips.core.ids import PushId, Version
from dips.core.layout import FLOAT32_BYTES, Chunk, Layout, Share
from dips.core.messages import (
    BeginPullReply,
    BeginPullRequest,
    Caller,
    FinishPullRequest,
    PlacementSpec,
    PullGrant,
    Ticket,
)
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.transfer import (
    PullTransfer,
    PushTransfer,
    Reconnect,
    SlaveRequest,
    Transfer,
    TransferSettings,
    chunks_by_slave,
    digests_of,
)
from dips.core.wire import Codec, encoded_bytes
from dips.lab.sim.arithmetic import Arithmetic, Key, ModelVector, Value
from dips.lab.sim.content import key_of
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.world import Call, Host, World

Ended = Callable[[Any], None]


class CarriedShare(NamedTuple):
    """What one rank of a cluster carries of each transfer, as dips.worker.data.RankShare says."""

    share: Share
    rank: int


class Carrier:
    """Carries one transfer. `ended` is called once: with the digests (push; of a share the checksums of its chunks),
    the values (pull), or the failed transfer."""

    def __init__(
        self, world: World, owner: SimulatedProcess, transfer: Transfer, placement: PlacementSpec, run_id: str, epoch:
        int, ended: Ended,
    ) -> None:  # fmt: skip
        self.world = world
        self.owner = owner
        self.transfer = transfer
        self.run_id = run_id
        self.epoch = epoch
        self.over = False
        self.began_s = world.kernel.now_s
        self._addresses = {address.slave_id: address for address in placement.slaves}
        self._connections: dict[str, int] = {}
        self._ready_s: dict[tuple[str, int, str], float] = {}
        """By (slave, number of the connection, ""): when it is made; by (..., sender): when its window is open for what
        that one sends."""

        self._ended = ended
        self._timer_s = -1.0

    def pump(self) -> None:
        """Send due messages, and schedule the check for missing answers."""
        now_s = self.world.kernel.now_s
        if self.over:
            return
        for action in self.transfer.actions(now_s):
            match action:
                case Reconnect(slave):
                    self._connections[slave] = self._connections.get(slave, 0) + 1
                case SlaveRequest() as ask:
                    self._send(ask)
        if self.transfer.done or self.transfer.failure:
            self.over = True
            self._ended(self.result() if self.transfer.done else self.transfer)
            self.release()
            return
        due_s = self.transfer.next_deadline_s()
        if due_s < self._timer_s or self._timer_s <= now_s:
            self._timer_s = due_s
            self.world.kernel.at(due_s + 1e-6, self.owner, self._rang)

    def stop(self) -> None:
        """End before the transfer is over; `ended` is not called."""
        self.over = True
        self.release()

    def result(self) -> Any:
        raise LookupError("only pushes and pulls have a result")

    def release(self) -> None:
        """Let go of all content: a timer may hold this object for long."""
        raise LookupError("only pushes and pulls hold content")

    def message(self, ask: SlaveRequest) -> tuple[DataHeader, Value]:
        raise LookupError("only pushes and pulls send")

    def take(self, slave: str, header: DataHeader, value: Value) -> None:
        raise LookupError("only pushes and pulls listen")

    def _rang(self) -> None:
        self._timer_s = -1.0
        self.pump()

    def _send(self, ask: SlaveRequest) -> None:
        world, owner = self.world, self.owner
        address = self._addresses.get(ask.slave)
        slave = world.slave_at(address.data_endpoint if address is not None else "")
        if slave is None or address is None:
            return  # no process listens on that port
        if address.curve_key != world.key_of(slave):
            world.violated(f"the master names another data key for {ask.slave} than the slave at that port has")
            return
        header, value = self.message(ask)
        if header.op is DataOp.PUT_CHUNK and world.net.damages():
            value = world.plan.arithmetic.damaged(value)
        connection, name = self._connections.get(ask.slave, 0), ask.slave

        def answer(reply: DataHeader, chunk: Value) -> None:
            if reply.op is DataOp.CHUNK and world.net.damages():
                damaged = world.plan.arithmetic.damaged
                chunk = damaged(chunk) if reply.base is None else (damaged(chunk[0]), *chunk[1:])
            send = partial(world.net.datagram, name, owner.name, owner, self._hear, name, connection, reply, chunk)
            self._on_connection(name, connection, slave, owner, send, _payload_bytes(reply))

        def away(why: str) -> None:
            world.net.datagram(name, owner.name, owner, self._turned_away, name, connection, why)

        args = (header, value, answer, world.key_of(owner), away)
        send = partial(world.net.datagram, owner.name, name, slave, slave.asked, *args)
        self._on_connection(name, connection, owner, slave, send, _payload_bytes(header))

    def _on_connection(
        self, slave: str, connection: int, source: SimulatedProcess, target: SimulatedProcess, send:
        Callable[..., None], n_bytes: int,
    ) -> None:  # fmt: skip
        """Send once the connection is made, and payload once its window is open."""
        world, ready_s = self.world, self._ready_s
        leaves_s = ready_s.get((slave, connection, ""))
        if leaves_s is None:
            leaves_s = ready_s[slave, connection, ""] = world.kernel.now_s + world.connect_s(self.owner.name, slave)
        leaves_s = max(world.kernel.now_s, leaves_s)
        if n_bytes:
            opens_s = ready_s.get((slave, connection, source.name))
            if opens_s is None:
                opens_s = leaves_s + world.ramp_s(source.name, target.name)
                ready_s[slave, connection, source.name] = opens_s
            leaves_s = max(leaves_s, opens_s)
        if leaves_s <= world.kernel.now_s:
            send(size_bytes=n_bytes)
        else:
            world.kernel.at(leaves_s, source, partial(send, size_bytes=n_bytes))

    def _turned_away(self, slave: str, connection: int, why: str) -> None:
        if not self.over and connection == self._connections.get(slave, 0):
            self.transfer.turned_away(slave, why, self.world.kernel.now_s)
            self.pump()

    def _hear(self, slave: str, connection: int, header: DataHeader, value: Value) -> None:
        if self.over or connection != self._connections.get(slave, 0):
            return
        if header.op is DataOp.REFUSED:
            assert header.refusal is not None, "a refusal says why"
            self.transfer.refused(slave, header.request, header.refusal, self.world.kernel.now_s)
        else:
            self.take(slave, header, value)
        self.pump()


def _payload_bytes(header: DataHeader) -> int:
    if header.op not in (DataOp.PUT_CHUNK, DataOp.CHUNK):
        return 0
    n = 1
    if header.base is not None and header.version is not None:
        n = header.version.v - header.base.v
    return n * encoded_bytes(header.codec, header.length_bytes // FLOAT32_BYTES)


class PushCarrier(Carrier):
    """Sends `vector`, which is written as the ticket says."""

    def __init__(
        self, world: World, owner: SimulatedProcess, layout: Layout, settings: TransferSettings, push: PushId, ticket:
        Ticket, vector: ModelVector, run_id: str, epoch: int, ended: Ended, part: CarriedShare | None = None,
    ) -> None:  # fmt: skip
        """part: None: the whole model."""
        shares = chunks_by_slave(layout, ticket.placement, ticket.block_order, settings.chunk_bytes, *(part or ()))
        self._layout, self._ticket, self._chunk_bytes, self._part = layout, ticket, settings.chunk_bytes, part
        self._machine = PushTransfer(shares, settings, world.kernel.now_s, is_share=part is not None)
        super().__init__(world, owner, self._machine, ticket.placement, run_id, epoch, ended)
        self._push, self._attempt, self._wire = push, ticket.attempt, ticket.wire
        self._values = {chunk: vector.value(chunk) for chunks in shares.values() for chunk in chunks}
        checksum = world.plan.arithmetic.checksum
        self._checksums = {chunk: checksum(value) for chunk, value in self._values.items()}

    def message(self, ask: SlaveRequest) -> tuple[DataHeader, Value]:
        chunk = ask.chunk
        if chunk is None:
            block, offset_bytes = self._machine.query_from(ask.slave)
            header = DataHeader(
                self.run_id, self.epoch, DataOp.QUERY_MISSING, ask.request, self._push, self._attempt, block=block,
                offset_bytes=offset_bytes,
            )  # fmt: skip
            return header, None
        value = self._values[chunk]
        if self._part is not None:
            self.world.chunk_sent(self._push, self._attempt, self._part.rank, chunk)
        header = DataHeader(
            self.run_id, self.epoch, DataOp.PUT_CHUNK, ask.request, self._push, self._attempt, None, chunk.block_id,
            chunk.offset_bytes, chunk.length_bytes, self._wire, self._checksums[chunk],
        )  # fmt: skip
        return header, value

    def take(self, slave: str, header: DataHeader, value: Value) -> None:
        now_s = self.world.kernel.now_s
        if header.op is DataOp.ACK:
            self._machine.acked(slave, header.request, header.complete, now_s)
        elif header.op is DataOp.MISSING:
            self._machine.missing(slave, header.request, header.missing, header.complete, now_s)

    def result(self) -> tuple[tuple[str, bytes], ...] | dict[Chunk, int]:
        if self._part is not None:
            return self._checksums
        ticket = self._ticket
        return digests_of(self._layout, ticket.placement, self._chunk_bytes, self._checksums, ticket.block_order)

    def release(self) -> None:
        self._values = {}


@dataclass(frozen=True)
class FromBase:
    """What a pull of differences begins from."""

    codec: Codec
    base: Version
    installed: ModelVector

    def applied(self, chunk: Chunk, written: Iterable[Value], arithmetic: Arithmetic) -> Value:
        """The chunk that these differences lead to."""
        value = self.installed.value(chunk)
        for each in written:
            value = arithmetic.decoded(self.codec, value, each)
        return value


class PullCarrier(Carrier):
    """Fetches chunks of a version. momentum: of that instead of its parameters. differences: fetch these."""

    def __init__(
        self, world: World, owner: SimulatedProcess, transfer: PullTransfer, placement: PlacementSpec, run_id: str,
        epoch: int, version: Version, ended: Ended, *, momentum: bool = False, differences: FromBase | None = None,
    ) -> None:  # fmt: skip
        super().__init__(world, owner, transfer, placement, run_id, epoch, ended)
        self._machine = transfer
        self._version = version
        self._momentum = momentum
        self._differences = differences
        self._codec = Codec.F32 if differences is None else differences.codec
        self._base = None if differences is None else differences.base
        self._values: dict[Key, Value] = {}

    @classmethod
    def of_grant(
        cls, world: World, owner: SimulatedProcess, layout: Layout, settings: TransferSettings, grant: PullGrant, ended:
        Ended, installed: Callable[[], ModelVector] | None = None, part: CarriedShare | None = None,
    ) -> PullCarrier:  # fmt: skip
        """Fetches the version of a grant, or of a share of it, whose digests the caller compares. installed: the base
        of differences; None: of who asks for none."""
        shares = chunks_by_slave(layout, grant.placement, grant.block_order, settings.chunk_bytes, *(part or ()))
        digests = dict(grant.digest_of_slave) if part is None else None
        transfer = PullTransfer(shares, digests, settings, world.kernel.now_s)
        differences = None
        if grant.wire.is_difference:
            assert grant.base is not None, "differences are to a base"
            assert installed is not None, "only who has it asks for them"
            differences = FromBase(grant.wire, grant.base, installed())
        return cls(
            world, owner, transfer, grant.placement, grant.run_id, grant.epoch, grant.version, ended,
            differences=differences,
        )  # fmt: skip

    def message(self, ask: SlaveRequest) -> tuple[DataHeader, Value]:
        chunk = ask.chunk
        assert chunk is not None, "a pull asks for chunks only"
        header = DataHeader(
            self.run_id, self.epoch, DataOp.GET_CHUNK, ask.request, None, 0, self._version, chunk.block_id,
            chunk.offset_bytes, chunk.length_bytes, self._codec, momentum=self._momentum, base=self._base,
        )  # fmt: skip
        return header, None

    def take(self, slave: str, header: DataHeader, value: Value) -> None:
        now_s = self.world.kernel.now_s
        chunk = self._machine.wants(slave, header.request)
        if header.op is not DataOp.CHUNK or chunk is None:
            return
        named = (header.block, header.offset_bytes, header.length_bytes, header.version, header.momentum, header.base)
        if named != (*chunk, self._version, self._momentum, self._base):
            self._machine.damaged(slave, header.request, f"slave {slave} answered with another chunk", now_s)
            return
        if self._differences is not None:
            value = self._differences.applied(chunk, value, self.world.plan.arithmetic)
            if self.world.plan.arithmetic.checksum(value) != header.checksum:
                why = f"slave {slave}: the differences of {chunk} lead to other parameters"
                self._machine.misfit(slave, header.request, why, now_s)
                return
        if self.world.plan.arithmetic.checksum(value) != header.checksum:
            self._machine.damaged(slave, header.request, f"slave {slave}: the checksum of {chunk} is wrong", now_s)
        else:
            self._values[key_of(chunk)] = value
            self._machine.landed(slave, header.request, header.checksum, now_s)

    def result(self) -> Mapping[Key, Value]:
        return self._values

    def release(self) -> None:
        self._values = {}


# ---- reader ----------------------------------------------------------------------------------------------------------


READS_EVERY_S = 6.0
READER_DEADLINE_S = 4.0
READER_WINDOW_CHUNKS = 4


class ReaderHost(Host):
    """An evaluator: it pulls the newest version from time to time, and may omit to report the end of the pull."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "reader")
        self.pulled = 0

    def boot(self) -> None:
        self.begin_process()
        self._ask()

    def _ask(self) -> None:
        self.kernel.after(self.kernel.jitter(READS_EVERY_S), self, self._ask)
        request = BeginPullRequest(self._caller(), True, curve_key=self.world.key_of(self))
        Call(self.world, self, request, READER_DEADLINE_S, self._granted)

    def _caller(self) -> Caller:
        return Caller(self.world.run_id, 0, self.name, None, "read")

    def _granted(self, result: Any) -> None:
        if not isinstance(result, BeginPullReply) or not isinstance(result.answer, PullGrant):
            return
        grant, plan = result.answer, self.world.plan
        settings = TransferSettings(grant.chunk_bytes, READER_WINDOW_CHUNKS, plan.data_silence_s, plan.data_stall_s)
        PullCarrier.of_grant(
            self.world, self, plan.layout, settings, grant, lambda values: self._read(grant, values)
        ).pump()

    def _read(self, grant: PullGrant, values: Any) -> None:
        if not isinstance(values, Transfer):
            self.pulled += 1
            self.world.pulled(self.name, grant.version, values)
        if self.kernel.rng.random() < 0.8:
            Call(
                self.world,
                self,
                FinishPullRequest(self._caller(), grant.pin_id, True),
                READER_DEADLINE_S,
                lambda _: None,
            )
