"""The worker's driver over real sockets, against a small run that the test controls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from support.ports import own_port
from support.run_for_workers import LAYOUT, FlatModel, RunForWorkers, until_version_changes
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError, RefusalCode, RemoteProtocolError
from dips.core.ids import Incarnation, Version
from dips.core.messages import DataMode, DataPlan, Refusal, VerdictKind
from dips.core.net import addresses
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.security import INSECURE
from dips.worker.config import ClientConfig
from dips.worker.reader import fetch_version
from dips.worker.shell import ClusterShell

OWN = DataPlan(DataMode.OWN)
TOKENS = 100


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    yield run
    run.close()


def driver(run: RunForWorkers, model: FlatModel, plan: DataPlan = OWN, **knobs: object) -> ClusterShell:
    given: dict[str, object] = {
        "master": run.address, "cluster_id": "a", "data_silence_s": 0.3, "call_deadline_s": 2.0, "retry_max_s": 0.3,
        "connect_wait_s": 10.0, "leave_wait_s": 5.0,
        "insecure": True,
    }  # fmt: skip
    return ClusterShell(ClientConfig.model_validate(given | knobs), model, model.layout(), plan)


def train(driver: ClusterShell, model: FlatModel, steps: int) -> None:
    """Each step adds 1 to every parameter, so that rebasing can be checked by counting."""
    for _ in range(steps):
        model.theta += 1
        driver.step(TOKENS, loss=2.0)


def test_no_step_is_counted_while_the_exchanges_thread_looks_at_the_last_ones(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does for a heartbeat, under the lock, while the training thread goes on to its next step."""
    model, alone = FlatModel(1), list[bool]()
    with driver(run, model) as client, ThreadPoolExecutor(1) as exchange:
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
        train(client, model, 2)
    assert alone == [True, True]


def test_pushed_bytes_arrive_bit_exact_and_come_back(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        model.theta[:5] = [np.nan, np.inf, -0.0, 1e-45, 3.4e38]
        before = model.theta.copy()
        for _ in range(4):
            before += 1
        train(client, model, 4)
        push = next(iter(run.verdicts))
        assert run.theta_of(push).tobytes() == before.tobytes()
        assert model.theta.tobytes() == before.tobytes()
        assert client.version == Version(1, 1)
        assert client.last_verdict is not None
        assert client.last_verdict.kind is VerdictKind.APPLIED
        assert (client.tokens_global, client.progress) == (400, 400)


# ---- the data flow fails ----


def test_a_push_survives_a_data_socket_that_is_cut_in_the_middle(run: RunForWorkers) -> None:
    slave = run.slaves[1]
    cut = threading.Event()

    def hook(header: DataHeader) -> None:
        if header.op is DataOp.PUT_CHUNK and len(slave.heard) > 6 and not cut.is_set():
            slave.mute = True
            cut.set()

    slave.hook = hook

    def reconnect() -> None:
        cut.wait()
        slave.hang_up()
        slave.mute = False
        slave.listen()

    helper = threading.Thread(target=reconnect)
    helper.start()
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 4)
        push = next(iter(run.verdicts))
        assert client.version == Version(1, 1)
    helper.join()
    assert np.array_equal(run.theta_of(push), model.theta)
    puts = [(h.block, h.offset_bytes) for h in slave.heard if h.op is DataOp.PUT_CHUNK]
    assert len(puts) - len(set(puts)) <= run.settings.window_chunks, "only what was in flight is sent again"


def test_a_slave_that_comes_back_on_another_port_is_found_through_the_master(run: RunForWorkers) -> None:
    slave = run.slaves[0]
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 3)
        slave.hang_up()
        old = slave.endpoint
        slave._port = own_port()

        def come_back() -> None:
            run.wait_for(lambda: max(run.attempts.values(), default=0) >= 1)
            slave.listen()

        helper = threading.Thread(target=come_back)
        helper.start()
        train(client, model, 1)
        until_version_changes(client)
        helper.join()
        assert slave.endpoint != old


def test_damaged_chunks_are_asked_for_again(run: RunForWorkers) -> None:
    slave = run.slaves[0]
    genuine = slave._chunk
    damaged: list[DataHeader] = []

    def chunk(header: DataHeader) -> list[bytes]:
        answer = genuine(header)
        if len(damaged) < 3:
            damaged.append(header)
            answer[1] = bytes(len(answer[1]))
        return answer

    slave._chunk = chunk  # type: ignore[method-assign]
    model = FlatModel(1)
    with driver(run, model):
        assert np.array_equal(model.theta, FlatModel(7).theta)
    assert len(damaged) == 3


def test_a_version_whose_bytes_contradict_its_digest_is_never_installed(run: RunForWorkers) -> None:
    run.false_digests = True
    first = FlatModel(1)
    client = driver(run, first)
    with pytest.raises(RemoteProtocolError, match="digest"):
        client.start()
    client.close()
    assert np.array_equal(first.theta, FlatModel(1).theta)
    assert first.installs == 0


def test_a_cluster_that_is_sent_to_its_own_loopback_ends_and_leaves(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "is_elsewhere", lambda address: address == run.address)
    first = FlatModel(1)
    with pytest.raises(ConfigError, match="which only its own machine reaches"), driver(run, first):
        pass
    assert len(run.leaves) == 1
    with pytest.raises(ConfigError, match="which only its own machine reaches"):
        fetch_version(run.address, None, "reader", INSECURE, deadline_s=NO_LIMIT_S)


def test_refusals_on_the_data_port_are_waited_out(run: RunForWorkers) -> None:
    refusal, asked = Refusal(RefusalCode.UNKNOWN_PUSH, "no staging is open", 0.2), itertools.count()
    model = FlatModel(1)
    with driver(run, model) as client:
        run.slaves[0].hook = lambda header: refusal if next(asked) < 3 else None
        train(client, model, 4)
        assert next(asked) > 3
        assert client.version == Version(1, 1)


# ---- the control flow fails ----


def rejoined(client: ClusterShell, model: FlatModel) -> None:
    """Train until the cluster has become another incarnation."""
    before = client.incarnation

    def is_another() -> bool:
        train(client, model, 1)
        return client.incarnation != before

    until(is_another, "it joins again", lambda: client.phase)


def test_an_evicted_cluster_joins_again_and_beats_under_its_new_name(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, sync_every_steps=100_000)
    model = FlatModel(1)
    with driver(run, model) as client:
        run.n += 1  # only the heartbeat can notice: there is nothing to push
        rejoined(client, model)
        assert client.incarnation == Incarnation(1, 3)
        run.wait_for(lambda: any(beat.caller.incarnation == Incarnation(1, 3) for beat in run.beats[-1:]))
        assert len(run.joins) == 2


def test_heartbeats_flow_while_the_training_thread_is_busy(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 5)
        before = len(run.beats)
        # The training thread is here, and not in the driver.
        run.wait_for(lambda: len(run.beats) - before >= 5)
        train(client, model, 1)
        run.wait_for(lambda: any(beat.steps == 6 for beat in run.beats[-1:]))
        beat = run.beats[-1]
        assert (beat.base, beat.phase, beat.loss) == (Version(1, 1), "TRAINING", 2.0)
        assert beat.tokens_per_s > 0
        assert beat.push_s > 0
        assert beat.pull_s > 0


def test_a_master_that_hangs_is_hung_up_on_and_beaten_again(run: RunForWorkers) -> None:
    hung, release = threading.Event(), threading.Event()

    def hook(method: str, request: object) -> None:
        if method == "Heartbeat" and not hung.is_set():
            hung.set()
            release.wait(NO_LIMIT_S)

    with driver(run, FlatModel(1)):
        run.hook = hook
        run.wait_for(hung.is_set)
        beats = len(run.beats)
        run.wait_for(lambda: len(run.beats) > beats)
        assert not release.is_set(), "the new stream did not wait for the old one"
        release.set()


def test_close_without_a_master_is_quick(run: RunForWorkers) -> None:
    client = driver(run, FlatModel(1), leave_wait_s=NO_LIMIT_S)
    client.start()
    run.down()
    client.close()  # the first call that fails is the last
    client.close()


# ---- data, tape, reader ----


def test_a_reader_fetches_the_newest_or_a_named_version(run: RunForWorkers) -> None:
    run.publish(FlatModel(8).theta)
    newest = fetch_version(run.address, "run", "eval", INSECURE, deadline_s=NO_LIMIT_S)
    assert newest.version == Version(1, 1)
    assert newest.layout == LAYOUT
    assert newest.flat.tobytes() == FlatModel(8).theta.tobytes()
    named = fetch_version(run.address, None, "eval", INSECURE, version=Version(1, 0), deadline_s=NO_LIMIT_S)
    assert named.flat.tobytes() == FlatModel(7).theta.tobytes()
    run.wait_for(lambda: len(run.released) == 2)
    assert all(request.reader for request in run.released)
