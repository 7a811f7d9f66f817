"""The worker over real sockets: each chunk once, nothing lost, training while a version lands, and differences."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
from support.run_for_workers import LAYOUT as SMALL
from support.vectors_held import vectors_held
from support.waiting import NO_LIMIT_S

from dips.core.clock import SystemClock
from dips.core.errors import ConfigError, RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Chunk, Layout, Parameter, chunks_of, digest_of_array
from dips.core.math import wire_numpy
from dips.core.messages import DataMode, DataPlan, PlacementSpec, Refusal, SlaveAddress, Ticket
from dips.core.net import addresses, carriers
from dips.core.net.carriers import Common, carry_push
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.security import INSECURE
from dips.core.net.transfer import TransferSettings, digests_of
from dips.core.wire import WIRE_DTYPES, Codec, encoded_bytes
from dips.worker.config import ClientConfig
from dips.worker.parameters import ChunkSums
from dips.worker.reader import fetch_version
from dips.worker.shell import ClusterShell
from dips.worker.vectors import F32, chunk_spans

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


def shell(run: RunForWorkers, model: FlatModel, **knobs: Any) -> ClusterShell:
    given = {"master": run.address, "cluster_id": "a", "data_silence_s": 5.0, "data_stall_s": 60.0, "insecure": True}
    return ClusterShell(ClientConfig(**given | knobs), model, model.layout(), DataPlan(DataMode.OWN))


def steps(client: ClusterShell, model: FlatModel, number: int) -> None:
    for _ in range(number):
        model.theta += 1
        client.step(100)


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    run.settings = replace(run.settings, verdict_wait_s=60.0)
    yield run
    run.close()


class HashedModel(LiveModel):
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
    with shell(run, model) as client:
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
@pytest.mark.parametrize("wait_ends", ["by ctrl-C, which the loop catches", "with its time"])
def test_a_push_is_sent_from_the_parameters_while_training_waits_and_then_goes_on_from_a_copy(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch, wait_ends: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def hook(header: DataHeader) -> Refusal | None:
        late = header.op is DataOp.PUT_CHUNK and header.block % 3 == 1
        return Refusal(RefusalCode.BUSY, "not now", 0.05) if late and not released.is_set() else None

    model, released, by_time = LiveModel(1), threading.Event(), wait_ends == "with its time"
    run.settings = replace(run.settings, verdict_wait_s=0.5 if by_time else 60.0)
    with shell(run, model) as client:
        if not by_time:
            for number in (1, 2):
                steps(client, model, 4)
                assert client.version == Version(1, number)
                assert run.theta_of(list(run.verdicts)[-1]).tobytes() == model.theta.tobytes()
            assert (model.copies, vectors_held(part_of(client).vectors)) == (0, 2)
        for slave in run.slaves:
            slave.hook = hook
        steps(client, model, 3)
        with monkeypatch.context() as patch, nullcontext() if by_time else pytest.raises(KeyboardInterrupt):
            if not by_time:
                patch.setattr(client, "_wait", interrupted)
            steps(client, model, 1)
        pushed = model.theta.copy()
        assert model.copies == 1, "training goes on, and the push is not there yet"
        model.theta += 3
        moved = model.theta.copy()
        if by_time:
            client.step(100)
        released.set()
        until_version_changes(client)
        assert run.theta_of(list(run.verdicts)[0 if by_time else 2]).tobytes() == pushed.tobytes()
        assert model.theta.tobytes() == (pushed + (moved - pushed)).tobytes()


DTYPES = ("bfloat16", "int8", "int4")
SPANS = chunk_spans(SMALL, CHUNK_BYTES)


def train(client: ClusterShell, model: FlatModel, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        model.theta += rng.normal(size=model.theta.size).astype(np.float32) * np.float32(0.01)
        pushed: F32 = model.theta.copy()
        client.step(100)
    return pushed


def rounded(codec: Codec, now: F32, base: F32, residual: F32 | None) -> F32:
    out = np.empty_like(now)
    for start, stop in SPANS:
        payload = np.empty(encoded_bytes(codec, stop - start), np.uint8)
        part = None if residual is None else residual[start:stop]
        wire_numpy.encode(codec, now[start:stop], base[start:stop], part, payload)
        wire_numpy.decode(codec, base[start:stop], payload, out[start:stop])
    return out


def keep(codec: Codec, now: F32, base: F32, residual: F32) -> None:
    for start, stop in SPANS:
        wire_numpy.keep_residual(codec, now[start:stop], base[start:stop], residual[start:stop])


@pytest.mark.parametrize("wire_dtype", DTYPES)
def test_rounds_in_fewer_bits_with_error_feedback(run: RunForWorkers, wire_dtype: str) -> None:
    codec, model = WIRE_DTYPES[wire_dtype], FlatModel(1)
    residual: F32 | None = None
    with shell(run, model, wire_dtype=wire_dtype) as client:
        for number in (1, 2, 3):
            base = model.theta.copy()
            pushed = train(client, model, number)
            assert client.version == Version(1, number)
            push = list(run.verdicts)[-1]
            assert all(slave.codecs[push] is codec for slave in run.slaves)
            assert run.theta_of(push).tobytes() == rounded(codec, pushed, base, residual).tobytes()
            residual = np.zeros_like(base) if residual is None else residual
            keep(codec, pushed, base, residual)
            kept = part_of(client).vectors.residual
            assert kept is not None
            assert kept.tobytes() == residual.tobytes()
        assert vectors_held(part_of(client).vectors) == 3, "theta_base, the push that becomes the pull, the residual"
    payload_bytes = sum(len(p) for slave in run.slaves for p in slave.landed[push].values())
    assert payload_bytes == sum(encoded_bytes(codec, stop - start) for start, stop in SPANS)


def quick(run: RunForWorkers, model: FlatModel, leave_wait_s: float = 5.0) -> ClusterShell:
    waits = {"data_silence_s": 0.3, "call_deadline_s": 2.0, "retry_max_s": 0.3, "connect_wait_s": 10.0}
    return shell(run, model, **waits, leave_wait_s=leave_wait_s)


def test_no_step_is_counted_while_the_exchanges_thread_looks_at_the_last_ones(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does for a heartbeat, under the lock, while the training thread goes on to its next step."""
    model, alone = FlatModel(1), list[bool]()
    with quick(run, model) as client, ThreadPoolExecutor(1) as exchange:
        counted = client._pace.stepped

        def may_look() -> bool:
            taken = client._lock.acquire(blocking=False)
            if taken:
                client._lock.release()
            return taken

        def stepped(tokens: int, loss: float, now_s: float, steps: int) -> None:
            alone.append(not exchange.submit(may_look).result())
            counted(tokens, loss, now_s, steps)

        monkeypatch.setattr(client._pace, "stepped", stepped)
        steps(client, model, 2)
    assert alone == [True, True]


def test_a_cluster_that_is_sent_to_its_own_loopback_ends_and_leaves(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "is_elsewhere", lambda address: address == run.address)
    first = FlatModel(1)
    with pytest.raises(ConfigError, match="which only its own machine reaches"), quick(run, first):
        pass
    assert len(run.leaves) == 1
    with pytest.raises(ConfigError, match="which only its own machine reaches"):
        fetch_version(run.address, None, "reader", INSECURE, deadline_s=NO_LIMIT_S)
