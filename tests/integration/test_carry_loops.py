"""What happens to a transfer beside its usual messages, on the Python loop and on the compiled one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq
from support import keyed_port
from support.manual_clock import ManualClock
from support.run_for_workers import CHUNK_BYTES, RUN, DataSlave

from dips.core.clock import SystemClock
from dips.core.errors import ConfigError, RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Block, Layout, Parameter, chunks_of, digest_of_array
from dips.core.math import wire_numpy
from dips.core.messages import PlacementSpec, PullGrant, Refusal, SlaveAddress, Ticket
from dips.core.net import carriers, carry_numba, zmq_numba
from dips.core.net.carriers import Common, LoopChoice, carry_pull, carry_push
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.payloads import Difference, SnapshotReady
from dips.core.net.transfer import PullTransfer, PushTransfer, TransferSettings, digests_of
from dips.core.net.zmq_sockets import CurvePair
from dips.core.observe import failpoints
from dips.core.wire import Codec, encoded_bytes
from dips.slave.data_server import LoopName

N_CHUNKS = 60
SIZE_ELEMS = N_CHUNKS * CHUNK_BYTES // 4
LAYOUT = Layout(
    (Parameter("a", (SIZE_ELEMS,), "float32", "a"), Parameter("b", (SIZE_ELEMS - 3,), "float32", "b")),
    20 * CHUNK_BYTES // 4,
)
ORDER = tuple(range(len(LAYOUT.blocks)))
HALF = len(ORDER) // 2
PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
VERSION = Version(1, 3)
QUIET = TransferSettings(CHUNK_BYTES, 8, silence_s=60.0, stall_s=120.0)
BRIEF = replace(QUIET, silence_s=0.3)

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["python", "compiled"])
def common(request: pytest.FixtureRequest) -> Common:
    return Common(RUN, 1, "a/1", LAYOUT, QUIET, loop=request.param)


class Slave(DataSlave):
    """May spoil what it answers: `spoil` takes the frames of an answer and gives those that are sent."""

    def __init__(self, slave_id: str, blocks: list[Block]) -> None:
        self.spoil: Callable[[list[bytes]], list[list[bytes]]] = lambda frames: [frames]
        super().__init__(slave_id, blocks)

    def _answer(self, header: DataHeader, payload: bytes) -> list[list[bytes]]:
        return [spoilt for frames in super()._answer(header, payload) for spoilt in self.spoil(frames)]


@pytest.fixture
def slaves() -> Iterator[list[Slave]]:
    halves = [list(LAYOUT.blocks[:HALF]), list(LAYOUT.blocks[HALF:])]
    slaves = [Slave(f"s{number}", blocks) for number, blocks in enumerate(halves)]
    yield slaves
    for slave in slaves:
        slave.close()


def placement(slaves: list[Slave], *, away: bool = False) -> PlacementSpec:
    addresses = [SlaveAddress(slave.slave_id, slave.endpoint) for slave in slaves]
    if away:
        addresses[1] = replace(addresses[1], data_endpoint="")
    return PlacementSpec(tuple(addresses), (0,) * HALF + (1,) * (len(ORDER) - HALF), b"")


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=LAYOUT.n_elems).astype(np.float32)


def part(flat: np.ndarray, slave: Slave) -> np.ndarray:
    return np.concatenate([flat[block.start_elem : block.stop_elem] for block in slave.blocks])


Push = Callable[..., PushTransfer]
Pull = Callable[..., PullTransfer]


@pytest.fixture
def push(context: Context, slaves: list[Slave]) -> Push:
    def push(
        common: Common, flat: np.ndarray, *, away: bool = False, wire: Codec = Codec.F32, attempt: int = 1,
        cancelled: threading.Event | None = None, difference: Difference | None = None, ready: SnapshotReady | None =
        None,
    ) -> PushTransfer:  # fmt: skip
        ticket = Ticket(attempt, placement(slaves, away=away), ORDER, wire=wire)
        cancelled = cancelled or threading.Event()
        return carry_push(
            context, common, flat, PUSH, ticket, SystemClock(), cancelled, difference=difference, ready=ready
        )

    return push


@pytest.fixture
def pull(context: Context, slaves: list[Slave]) -> Pull:
    def pull(common: Common, flat: np.ndarray, into: np.ndarray, *, momentum: bool = False) -> PullTransfer:
        for slave in slaves:
            slave.versions[VERSION] = part(flat, slave)
        digests = tuple((s.slave_id, digest_of_array(part(flat, s), s.blocks, CHUNK_BYTES)) for s in slaves)
        grant = PullGrant(VERSION, 0, 1, placement(slaves), ORDER, digests, 0, 1, None, CHUNK_BYTES, 1, RUN)
        return carry_pull(context, common, into, grant, SystemClock(), threading.Event(), momentum=momentum)

    return pull


def assert_pushed(flat: np.ndarray, slaves: list[Slave], transfer: PushTransfer) -> None:
    for slave in slaves:
        assert slave.share(PUSH).tobytes() == part(flat, slave).tobytes()
    assert dict(digests_of(LAYOUT, placement(slaves), CHUNK_BYTES, transfer.known())) == {
        slave.slave_id: digest_of_array(part(flat, slave), slave.blocks, CHUNK_BYTES) for slave in slaves
    }


def once(*indices: int) -> Callable[[], bool]:
    """True at these calls, counted from 0."""
    calls = iter(range(1 << 30))
    return lambda: next(calls) in indices


def test_a_push_survives_a_silence_and_sends_only_the_rest(common: Common, slaves: list[Slave], push: Push) -> None:
    flat, heard = vector(2), threading.Event()

    def fall_silent(header: DataHeader) -> None:
        if header.op is DataOp.PUT_CHUNK and not heard.is_set() and len(slaves[1].heard) > 20:
            heard.set()
            slaves[1].mute = True
            threading.Timer(0.2, setattr, (slaves[1], "mute", False)).start()

    slaves[1].hook = fall_silent
    transfer = push(replace(common, settings=BRIEF), flat)
    assert heard.is_set()
    assert transfer.done, transfer.failure
    assert transfer.reconnects >= 1
    assert_pushed(flat, slaves, transfer)
    assert sum(header.op is DataOp.QUERY_MISSING for header in slaves[1].heard) >= 2


def test_a_pull_survives_a_slave_that_comes_back(common: Common, slaves: list[Slave], pull: Pull) -> None:
    flat, gone = vector(3), threading.Event()
    into = np.zeros_like(flat)

    def leave(header: DataHeader) -> None:
        if not gone.is_set() and len(slaves[0].heard) > 20:
            gone.set()
            slaves[0].mute = True
            threading.Thread(target=come_back).start()

    def come_back() -> None:
        slaves[0].hang_up()
        slaves[0].mute = False
        slaves[0].listen()

    slaves[0].hook = leave
    transfer = pull(common, flat, into)
    assert gone.is_set()
    assert transfer.done, transfer.failure
    assert into.tobytes() == flat.tobytes()


def test_a_transfer_from_a_slave_that_died_is_given_up(common: Common, slaves: list[Slave], push: Push) -> None:
    """Its connection says so: the silence after which it would be taken for dead is longer than a test may take."""

    def die(header: DataHeader) -> None:
        slaves[0].mute = True
        threading.Thread(target=slaves[0].hang_up).start()

    slaves[0].hook = die
    transfer = push(common, vector(4))
    assert not transfer.done
    assert "has ended" in transfer.failure


def _flip(frames: list[bytes]) -> list[list[bytes]]:
    payload = bytearray(frames[1])
    payload[len(payload) // 2] ^= 1
    return [[frames[0], bytes(payload)]]


def _shorten(frames: list[bytes]) -> list[list[bytes]]:
    return [[frames[0], frames[1][:-4]]]


def _another(frames: list[bytes]) -> list[list[bytes]]:
    """The header names another place, and is right otherwise."""
    header = DataHeader.decode(frames[0])
    return [[replace(header, offset_bytes=header.offset_bytes + 4).encode(), frames[1]]]


def _of_momentum(frames: list[bytes]) -> list[list[bytes]]:
    return [[replace(DataHeader.decode(frames[0]), momentum=True).encode(), frames[1]]]


@pytest.mark.parametrize("spoil", [_flip, _shorten, _another, _of_momentum])
def test_a_chunk_that_is_not_what_was_asked_for_is_asked_for_again(
    common: Common, slaves: list[Slave], pull: Pull, spoil: Callable[[list[bytes]], list[list[bytes]]]
) -> None:
    flat, spoils = vector(5), once(3, 9, 10)
    into = np.zeros_like(flat)
    slaves[1].spoil = lambda frames: spoil(frames) if spoils() else [frames]
    transfer = pull(common, flat, into)
    assert transfer.done
    assert into.tobytes() == flat.tobytes()
    assert sum(header.op is DataOp.GET_CHUNK for header in slaves[1].heard) == N_CHUNKS + 3


class Snapshot:
    """A snapshot of `source` that is written only as far as a reader waits for it."""

    def __init__(self, source: np.ndarray) -> None:
        self.vector, self._source = np.zeros_like(source), source

    def wait(self, start_elem: int, stop_elem: int) -> None:
        self.vector[start_elem:stop_elem] = self._source[start_elem:stop_elem]


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("with_residual", [False, True])
def test_differences_to_a_snapshot_that_is_still_written_are_those_of_the_reference(
    common: Common, slaves: list[Slave], push: Push, codec: Codec, with_residual: bool
) -> None:
    now, base = vector(17), vector(18)
    residual = vector(19) * np.float32(0.01) if with_residual else None
    snapshot, refuses = Snapshot(now), once(5, 30)
    damaged = Refusal(RefusalCode.CHUNK, "the checksum is wrong")
    slaves[0].hook = lambda header: damaged if header.op is DataOp.PUT_CHUNK and refuses() else None
    transfer = push(common, snapshot.vector, wire=codec, difference=Difference(base, residual), ready=snapshot)
    assert transfer.done
    assert len(transfer.known()) == len(transfer.chunks)
    assert is_compiled(transfer) is (common.loop == "compiled")
    assert transfer.moved()["s0"].refusals["CHUNK"] >= 1
    for slave in slaves:
        assert slave.codecs[PUSH] is codec
        for chunk in chunks_of(slave.blocks, CHUNK_BYTES):
            start = LAYOUT.blocks[chunk.block_id].start_elem + chunk.offset_bytes // 4
            here = slice(start, start + chunk.length_bytes // 4)
            expected = np.empty(encoded_bytes(codec, chunk.length_bytes // 4), np.uint8)
            lost = None if residual is None else residual[here]
            wire_numpy.encode(codec, now[here], base[here], lost, expected)
            assert slave.landed[PUSH][chunk.block_id, chunk.offset_bytes] == expected.tobytes()


def test_a_cancelled_push_ends_though_nobody_answers(common: Common, slaves: list[Slave], push: Push) -> None:
    cancelled = threading.Event()

    def never_answer(header: DataHeader) -> None:
        if header.op is DataOp.PUT_CHUNK:
            slaves[0].mute = slaves[1].mute = True
            cancelled.set()

    slaves[0].hook = slaves[1].hook = never_answer
    transfer = push(common, vector(11), cancelled=cancelled)
    assert not transfer.done
    assert not transfer.failure


def test_a_slave_that_is_away_ends_the_push_and_keeps_what_went_elsewhere(
    common: Common, slaves: list[Slave], push: Push
) -> None:
    flat = vector(12)
    transfer = push(replace(common, settings=BRIEF), flat, away=True)
    assert "s1 answered nothing" in transfer.failure
    assert transfer.moved()["s0"].carried_bytes == part(flat, slaves[0]).nbytes
    again = push(common, flat, attempt=2)
    assert again.done
    assert again.moved()["s0"].carried_bytes == 0
    assert_pushed(flat, slaves, again)


def test_a_pull_of_momentum_asks_for_it(common: Common, slaves: list[Slave], pull: Pull) -> None:
    flat = vector(13)
    into = np.zeros_like(flat)
    for slave in slaves:
        slave.spoil = _of_momentum
    transfer = pull(common, flat, into, momentum=True)
    assert transfer.done
    assert into.tobytes() == flat.tobytes()
    assert all(header.momentum for slave in slaves for header in slave.heard)


def test_loops_are_ready_after_a_warm_up() -> None:
    carry_numba.warm_up()
    loops: list[Any] = [carry_numba.push, carry_numba.pull]
    compiled = [len(loop.signatures) for loop in loops]
    assert compiled == [1, 1], "and transfers of every kind run what was compiled then"


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("of_slave", ["python", "compiled"])
def test_each_loop_of_a_worker_speaks_with_each_of_a_slave(common: Common, of_slave: LoopName, with_keys: bool) -> None:
    """With a real data port, which measures and verifies what it lands."""
    own, other = (CurvePair.new() if with_keys else None for _ in range(2))
    with keyed_port.KeyedPort(own, loop=of_slave) as port:
        cluster = keyed_port.Cluster("a", other, port, loop=common.loop)
        if with_keys:
            port.allow(cluster)
        port.open("a")
        assert cluster.push().done
        keyed_port.settle(port.server)
        flat, layout = keyed_port.pushed("a"), keyed_port.LAYOUT
        assert port.staged == {keyed_port.push_id("a"): digest_of_array(flat, layout.blocks, keyed_port.CHUNK_BYTES)}
        transfer, fetched = cluster.pull()
        assert transfer.done
        assert is_compiled(transfer) is (common.loop == "compiled")
        assert fetched.tobytes() == keyed_port.THETA.tobytes()


def is_compiled(transfer: PushTransfer | PullTransfer) -> bool:
    return isinstance(transfer.columns.chunks.moved, np.ndarray)


@pytest.mark.parametrize(("worth_bytes", "expected"), [(LAYOUT.n_bytes, True), (LAYOUT.n_bytes + 1, False)])
def test_large_transfers_are_compiled(
    slaves: list[Slave], push: Push, pull: Pull, monkeypatch: pytest.MonkeyPatch, worth_bytes: int, expected: bool
) -> None:
    monkeypatch.setattr(carriers, "WORTH_COMPILING_BYTES", worth_bytes)
    common, flat = Common(RUN, 1, "a/1", LAYOUT, QUIET), vector(14)
    assert is_compiled(push(common, flat)) is expected
    assert is_compiled(pull(common, flat, np.zeros_like(flat))) is expected
    with failpoints.armed("worker.push.before_chunk=off"):
        assert not is_compiled(push(common, flat, attempt=2))
    with failpoints.armed("worker.pull.before_chunk=off"):
        assert not is_compiled(pull(common, flat, np.zeros_like(flat)))


def test_what_only_python_can_carry_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "WORTH_COMPILING_BYTES", 0)
    common, place = Common(RUN, 1, "a/1", LAYOUT, QUIET), "worker.push.before_chunk"
    assert carriers._is_compiled(common, SystemClock(), 1, place)
    assert not carriers._is_compiled(common, ManualClock(), 1, place)
    assert not carriers._is_compiled(replace(common, checksum=lambda payload: 0), SystemClock(), 1, place)
    assert not carriers._is_compiled(replace(common, loop="python"), SystemClock(), 1, place)


def test_without_libzmq_s_functions_python_carries_and_a_compiled_loop_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carriers, "WORTH_COMPILING_BYTES", 0)
    monkeypatch.setattr(zmq_numba, "why_not", lambda: "zmq_msg_init is missing")
    loop: LoopChoice = "compiled"
    carried = partial(carriers._is_compiled, clock=SystemClock(), wire_bytes=1, place="worker.push.before_chunk")
    assert not carried(Common(RUN, 1, "a/1", LAYOUT, QUIET))
    with pytest.raises(ConfigError, match="no compiled loop for this transfer: zmq_msg_init is missing"):
        carried(Common(RUN, 1, "a/1", LAYOUT, QUIET, loop=loop))


def test_memory_of_payloads_is_kept_until_libzmq_gave_it_back_and_another_transfer_begins(pull: Pull) -> None:
    out, back = np.array([[3, 2]], np.int64), np.array([[4, 4]], np.int64)
    kept = len(carry_numba._parked)
    carry_numba._park(out, "memory")
    carry_numba._park(back, "other memory")
    assert len(carry_numba._parked) == kept + 1
    out[0, carry_numba.BACK] += 1
    pull(Common(RUN, 1, "a/1", LAYOUT, QUIET, loop="compiled"), vector(15), vector(16))
    assert not [memory for _, memory in carry_numba._parked if memory == "memory"]
