"""The carriers over real sockets: each chunk once, nothing lost, and training that goes on while a version lands."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from support.run_for_workers import (
    CHUNK_BYTES,
    RUN,
    DataSlave,
    FlatModel,
    RunForWorkers,
    part_of,
    until_version_changes,
)

from dips.core.chunks import Chunk, chunks_of, digest_of_array
from dips.core.clock import SystemClock
from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, PlacementSpec, PullGrant, Refusal, SlaveAddress, Ticket
from dips.core.net import carriers
from dips.core.net.carriers import Common, carry_pull, carry_push
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.transfer import TransferSettings, digests_of
from dips.worker.config import ClientConfig
from dips.worker.parameters import ChunkSums
from dips.worker.shell import ClusterShell

N_CHUNKS = 300
LAYOUT = Layout((Parameter("l.0.w", (N_CHUNKS * CHUNK_BYTES // 4,), "float32", "l.0"),), 16 * CHUNK_BYTES // 4)
ORDER = tuple(range(len(LAYOUT.blocks)))
PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
PATIENT = TransferSettings(CHUNK_BYTES, 64, silence_s=60.0, stall_s=120.0)


@pytest.fixture
def slave() -> Iterator[DataSlave]:
    slave = DataSlave("s0", list(LAYOUT.blocks))
    yield slave
    slave.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["python", "compiled"])
def common(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Common:
    """Of transfers that the given loop carries; those of a ClusterShell as well."""
    monkeypatch.setattr(carriers, "WORTH_COMPILING_BYTES", 0 if request.param == "compiled" else math.inf)
    return Common(RUN, 1, "a/1", LAYOUT, PATIENT, loop=request.param)


def placement(slave: DataSlave) -> PlacementSpec:
    return PlacementSpec((SlaveAddress("s0", slave.endpoint),), (0,) * len(LAYOUT.blocks), b"")


def theta() -> np.ndarray:
    return np.random.default_rng(1).normal(size=LAYOUT.n_elems).astype(np.float32)


def test_a_push_of_many_chunks_sends_each_once(
    slave: DataSlave, context: zmq.Context[zmq.Socket[bytes]], common: Common
) -> None:
    """Found by measuring: with a queue just above the window some sends were refused, and cost a silence each."""
    flat = theta()
    ticket = Ticket(1, placement(slave), ORDER)
    transfer = carry_push(context, common, flat, PUSH, ticket, SystemClock(), threading.Event())
    assert transfer.done
    assert transfer.reconnects == 0
    puts = [(h.block, h.offset_bytes) for h in slave.heard if h.op is DataOp.PUT_CHUNK]
    assert len(puts) == len(set(puts)) == N_CHUNKS
    assert slave.share(PUSH).tobytes() == flat.tobytes()
    digests = digests_of(LAYOUT, placement(slave), CHUNK_BYTES, transfer.known())
    assert digests == (("s0", digest_of_array(flat, LAYOUT.blocks, CHUNK_BYTES)),)


def test_a_later_attempt_reads_no_chunk_that_the_slave_has(
    slave: DataSlave, context: zmq.Context[zmq.Socket[bytes]], common: Common
) -> None:
    flat, known = theta(), dict[object, int]()
    stop = threading.Event()

    def cancel(header: DataHeader) -> None:
        if header.op is DataOp.PUT_CHUNK and len(slave.heard) > N_CHUNKS // 2:
            slave.mute = True
            stop.set()

    slave.hook = cancel
    first = Ticket(1, placement(slave), ORDER)
    transfer = carry_push(context, common, flat, PUSH, first, SystemClock(), stop, checksums=known)  # type: ignore[arg-type]
    assert not transfer.done
    slave.hook, slave.mute = lambda header: None, False
    held = set(slave.landed[PUSH])
    second = Ticket(2, placement(slave), ORDER)
    transfer = carry_push(
        context, common, flat, PUSH, second, SystemClock(), threading.Event(), checksums=known  # type: ignore[arg-type]
    )  # fmt: skip
    assert transfer.done
    sent = {(h.block, h.offset_bytes) for h in slave.heard if h.op is DataOp.PUT_CHUNK and h.attempt == 2}
    assert held
    assert not sent & held
    digests = digests_of(LAYOUT, placement(slave), CHUNK_BYTES, transfer.known())
    assert digests == (("s0", digest_of_array(flat, LAYOUT.blocks, CHUNK_BYTES)),)


def test_a_pull_of_many_chunks_asks_for_each_once(
    slave: DataSlave, context: zmq.Context[zmq.Socket[bytes]], common: Common
) -> None:
    flat, version = theta(), Version(1, 3)
    slave.versions[version] = flat
    digest = digest_of_array(flat, LAYOUT.blocks, CHUNK_BYTES)
    grant = PullGrant(
        version, 0, 1, placement(slave), ORDER, (("s0", digest),), 0, 1, None, CHUNK_BYTES, 1, RUN
    )  # fmt: skip
    into = np.zeros_like(flat)
    transfer = carry_pull(context, common, into, grant, SystemClock(), threading.Event())
    assert transfer.done
    assert transfer.reconnects == 0
    assert into.tobytes() == flat.tobytes()
    assert sum(h.op is DataOp.GET_CHUNK for h in slave.heard) == N_CHUNKS


class Gate:
    """Lets a snapshot be seen part by part, and remembers what was waited for."""

    def __init__(self) -> None:
        self.waited: list[tuple[int, int]] = []

    def wait(self, start_elem: int, stop_elem: int) -> None:
        self.waited.append((start_elem, stop_elem))


def test_a_chunk_is_sent_only_once_its_part_of_the_snapshot_is_there(
    slave: DataSlave, context: zmq.Context[zmq.Socket[bytes]], common: Common
) -> None:
    gate = Gate()
    ticket = Ticket(1, placement(slave), ORDER)
    transfer = carry_push(context, common, theta(), PUSH, ticket, SystemClock(), threading.Event(), ready=gate)
    assert transfer.done
    n = CHUNK_BYTES // 4
    assert gate.waited == [(i * n, (i + 1) * n) for i in range(N_CHUNKS)]


class LiveModel(FlatModel):
    """Its parameters can be read where they are, in two pieces that meet within a chunk."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.copies = 0

    def empty(self, n_elems: int) -> np.ndarray:
        return np.full(n_elems, np.nan, np.float32)

    def begin_snapshot(self, into: np.ndarray, sums: ChunkSums | None = None) -> None:
        self.snapshot(into)
        self.copies += 1

    def live(self) -> Sequence[np.ndarray]:
        return [self.theta[:777], self.theta[777:]]


def config(run: RunForWorkers) -> ClientConfig:
    return ClientConfig(master=run.address, cluster_id="a", data_silence_s=5.0, data_stall_s=60.0, insecure=True)


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    yield run
    run.close()


@pytest.mark.usefixtures("common")
def test_no_copy_is_made_for_a_push_while_training_waits(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, verdict_wait_s=60.0)
    model = LiveModel(1)
    with ClusterShell(config(run), model, model.layout(), DataPlan(DataMode.OWN)) as client:
        for number in (1, 2, 3):
            for _ in range(4):
                model.theta += 1
                before = model.theta.copy()
                client.step(100)
            assert client.version == Version(1, number)
            assert run.theta_of(list(run.verdicts)[-1]).tobytes() == before.tobytes()
            assert model.theta.tobytes() == before.tobytes()
        assert part_of(client).vectors.n_vectors == 2
    assert model.copies == 0


class HashedModel(LiveModel):
    """Its parameters are copied out with checksums."""

    def begin_snapshot(self, into: np.ndarray, sums: ChunkSums | None = None) -> None:
        assert sums is not None, "each copy of this test is a push's"
        for start in range(0, self.theta.size, 777):
            sums.copy(self.theta[start : start + 777], start)


def test_a_copy_that_was_hashed_is_sent_with_its_checksums(run: RunForWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slaves check them against what arrives."""
    monkeypatch.setattr("dips.core.net.payloads.WORTH_COMPILING_BYTES", 0)
    given: list[dict[Chunk, int]] = []

    def carry(*args: Any, checksums: dict[Chunk, int], **more: Any) -> Any:
        given.append(dict(checksums))
        return carry_push(*args, checksums=checksums, **more)

    monkeypatch.setattr("dips.worker.data.carry_push", carry)
    run.settings = replace(run.settings, overlap="push")
    model = HashedModel(1)
    with ClusterShell(config(run), model, model.layout(), DataPlan(DataMode.OWN)) as client:
        for _ in range(4):
            model.theta += 1
            pushed = model.theta.copy()
            client.step(100)
        while not run.verdicts:
            client.step(100)
        assert run.theta_of(next(iter(run.verdicts))).tobytes() == pushed.tobytes()
    chunks = chunks_of(model.layout().blocks, run.settings.chunk_bytes)
    assert list(given[0]) == chunks


@pytest.mark.usefixtures("common")
def test_a_push_that_training_does_not_wait_for_any_more_goes_on_from_a_copy(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, verdict_wait_s=0.5)
    released = threading.Event()
    busy = Refusal(RefusalCode.BUSY, "not now", 0.05)
    model = LiveModel(1)
    with ClusterShell(config(run), model, model.layout(), DataPlan(DataMode.OWN)) as client:

        def hook(header: DataHeader) -> Refusal | None:
            late = header.op is DataOp.PUT_CHUNK and header.block % 3 == 1
            return busy if late and not released.is_set() else None

        for slave in run.slaves:
            slave.hook = hook
        for _ in range(4):
            model.theta += 1
            pushed = model.theta.copy()
            client.step(100)
        assert model.copies == 1, "training goes on, and the push is not there yet"
        model.theta += 3
        client.step(100)
        moved = model.theta.copy()
        released.set()
        until_version_changes(client)
        assert run.theta_of(next(iter(run.verdicts))).tobytes() == pushed.tobytes()
        assert model.theta.tobytes() == (pushed + (moved - pushed)).tobytes()


@pytest.mark.usefixtures("common")
def test_a_loop_that_interrupts_its_wait_and_goes_on_changes_nothing_of_its_push(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the wait, caught by the user's loop."""
    run.settings = replace(run.settings, verdict_wait_s=60.0)
    busy = Refusal(RefusalCode.BUSY, "not now", 0.05)
    released = threading.Event()
    model = LiveModel(1)
    with ClusterShell(config(run), model, model.layout(), DataPlan(DataMode.OWN)) as client:
        for slave in run.slaves:
            slave.hook = lambda header: busy if header.op is DataOp.PUT_CHUNK and not released.is_set() else None
        for _ in range(3):
            model.theta += 1
            client.step(100)

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "_wait", interrupted)
        model.theta += 1
        pushed = model.theta.copy()
        with pytest.raises(KeyboardInterrupt):
            client.step(100)
        monkeypatch.undo()
        model.theta += 3
        moved = model.theta.copy()
        released.set()
        client.step(100)
        assert client.version == Version(1, 1)
        assert run.theta_of(next(iter(run.verdicts))).tobytes() == pushed.tobytes()
        assert model.theta.tobytes() == (pushed + (moved - pushed)).tobytes()
