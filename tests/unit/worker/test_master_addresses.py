"""Several addresses of the master: a cluster, a reader and heartbeats go to the next one where no master answers, and
stay where one does. A master that another one has replaced lets no cluster take part again."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.failed_call import FailedCall
from support.manual_clock import ManualClock
from support.run_for_workers import FlatModel, RefuseCall
from support.run_in_memory import RunInMemory

from dips.core import messages as m
from dips.core.errors import DipsError, RefusalCode, RetryLater
from dips.core.ids import Incarnation, Version
from dips.core.net.addresses import MasterAddresses
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.security import INSECURE
from dips.protos import clusters_pb2_grpc
from dips.worker import reader
from dips.worker.config import ClientConfig, check
from dips.worker.control import Heartbeat, MasterStubs
from dips.worker.shell import ClusterShell
from dips.worker.state.effects import Beat

FIRST, SECOND = "127.0.0.1:1", "127.0.0.1:2"
BOTH = f"{FIRST},{SECOND}"


@dataclass
class Place:
    """A channel to one address."""

    address: str

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        """Likewise."""


class Places:
    """Who answers at which address: a run in memory, or whoever takes a method's name and its request."""

    def __init__(self, run: RunInMemory, at: str) -> None:
        self.run, self.at = run, at
        self.elsewhere: Callable[[str, Any], Any] | None = None
        self.called: list[tuple[str, str]] = []

    def stub(self, place: Place) -> Any:
        here = self.run.stub(None)

        class Stub:
            def __getattr__(stub, method: str) -> Callable[..., Any]:
                def call(message: Any, timeout: float) -> Any:
                    self.called.append((place.address, method))
                    if place.address == self.at:
                        return getattr(here, method)(message, timeout=timeout)
                    if self.elsewhere is None:
                        raise FailedCall(grpc.StatusCode.UNAVAILABLE, "Connection refused")
                    return self.elsewhere(method, message)

                return call

        return Stub()


@pytest.fixture
def places(run: RunInMemory, monkeypatch: pytest.MonkeyPatch) -> Places:
    made = Places(run, FIRST)
    monkeypatch.setattr("dips.worker.control.channel_to", lambda address, security: Place(address))
    monkeypatch.setattr("dips.worker.control.why_not_let_in", lambda address, security: "")
    monkeypatch.setattr("dips.worker.control.clusters_pb2_grpc", SimpleNamespace(ClustersStub=made.stub))
    return made


def shell_of(model: FlatModel, master: str = BOTH) -> ClusterShell:
    config = ClientConfig.model_validate({"master": master, "cluster_id": "a", "insecure": True})
    return ClusterShell(config, model, model.layout(), m.DataPlan(m.DataMode.OWN))


def train(run: RunInMemory, shell: ClusterShell, model: FlatModel, steps: int) -> None:
    for _ in range(steps):
        run.clock.advance(0.5)
        model.theta += 1
        shell.step(100, loss=2.0)


def restart(run: RunInMemory) -> None:
    run.epoch += 1
    run.n = 0


def test_a_cluster_joins_at_the_second_address_and_follows_its_master_to_the_first(
    run: RunInMemory, places: Places
) -> None:
    places.at, model = SECOND, FlatModel(1)
    with shell_of(model) as shell:
        assert places.called[:2] == [(FIRST, "Join"), (SECOND, "Join")]
        train(run, shell, model, 4)
        assert len(run.verdicts) == 1
        assert {at for at, _ in places.called[1:]} == {SECOND}, "a master that answers is never left"
        places.at = FIRST
        restart(run)
        train(run, shell, model, 12)
        assert shell.incarnation == Incarnation(2, 1)
        assert len(run.verdicts) >= 3
    assert places.called[-1] == (FIRST, "Leave")


def older(method: str, message: Any) -> Any:
    """The master of epoch 1, which does not know that another one has taken over."""
    raise FailedCall.refused(grpc.StatusCode.ABORTED, RefuseCall(RefusalCode.STALE_EPOCH, "epoch 1").refusal)


def test_a_cluster_that_meets_an_older_master_goes_back_to_the_newer_one(run: RunInMemory, places: Places) -> None:
    joined = []

    def elsewhere(method: str, message: Any) -> Any:
        if method != "Join":
            return older(method, message)
        joined.append(method)
        now, run.epoch = (run.epoch, run.n, run.is_up), 1
        run.is_up = True
        try:
            return run.stub(None).Join(message, timeout=1.0)
        finally:
            run.epoch, run.n, run.is_up = now

    restart(run)
    places.at, places.elsewhere, model = SECOND, elsewhere, FlatModel(1)
    with shell_of(model, f"{SECOND},{FIRST}") as shell:
        train(run, shell, model, 4)
        assert shell.incarnation == Incarnation(2, 1)
        run.is_up = False
        train(run, shell, model, 12)
        assert shell.incarnation == Incarnation(2, 1)
        assert joined
        n_joined = len(joined)
        run.is_up = True
        train(run, shell, model, 12)
        assert shell.incarnation == Incarnation(2, 2)
        assert len(run.verdicts) >= 2
        assert len(joined) <= n_joined + 1


def test_an_outage_of_all_addresses_is_a_few_lines_however_long_it_lasts(
    run: RunInMemory, places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    places.at, model = SECOND, FlatModel(1)
    with shell_of(model) as shell:
        train(run, shell, model, 4)
        caplog.clear()
        run.is_up = False
        n_called = len(places.called)
        train(run, shell, model, 100)
        tried = {at for at, _ in places.called[n_called:]}
        assert (tried, len(places.called) - n_called > 20) == ({FIRST, SECOND}, True)
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert sum(line.startswith("no master at") for line in lines) == 2
        assert sum("does not answer" in line for line in lines) <= 4
        run.is_up = True


def test_one_address_takes_whatever_master_is_there(run: RunInMemory, places: Places) -> None:
    run.epoch, model = 5, FlatModel(1)
    with shell_of(model, FIRST) as shell:
        train(run, shell, model, 4)
        run.epoch = 3  # put back from a copy, with its slaves
        train(run, shell, model, 8)
        assert shell.incarnation is not None
        assert shell.incarnation.epoch == 3


class BeatsAt:
    """Answers heartbeats at one address. A silent one answers nothing until the stream is cancelled."""

    def __init__(self, at: str, silent: str = "") -> None:
        self.at, self.silent = at, silent
        self.streams: list[str] = []
        self.cancelled = threading.Event()

    def stub(self, place: Place) -> Any:
        def stream(requests: Iterator[Any], timeout: float) -> Any:
            self.streams.append(place.address)

            class Stream:
                def cancel(stream) -> None:
                    self.cancelled.set()

                def __iter__(stream) -> Iterator[Any]:
                    if place.address == self.silent:
                        self.cancelled.wait()
                        raise FailedCall(grpc.StatusCode.CANCELLED, "cancelled")
                    for message in requests:
                        if place.address != self.at:
                            raise FailedCall(grpc.StatusCode.UNAVAILABLE, "Connection refused")
                        from_message(message, m.HeartbeatRequest)
                        yield to_message(m.HeartbeatReply(1, Version(1, 0), len(self.streams), 4, False, "IDLE"))

            return Stream()

        return SimpleNamespace(Heartbeat=stream)


REQUEST = m.HeartbeatRequest(m.Caller("run", 1, "a", Incarnation(1, 1), "a/1"), phase="TRAINING", steps=1, loss=2.0)


@pytest.fixture
def beating(places: Places, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Heartbeat]:
    for name in ("FIRST_PAUSE_S", "MAX_PAUSE_S", "LOOK_S"):
        monkeypatch.setattr(f"dips.worker.control.{name}", 0.001)

    def begun(beats: BeatsAt, *how: Any) -> Heartbeat:
        monkeypatch.setattr("dips.worker.control.clusters_pb2_grpc", SimpleNamespace(ClustersStub=beats.stub))
        heart = Heartbeat(*how)
        heart.tell(REQUEST, m.Settings(heartbeat_s=2**-10, evict_after_beats=5))
        return heart

    return begun


def test_a_silent_master_is_left_as_soon_as_a_standby_has_taken_over(
    beating: Callable[..., Heartbeat], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, masters, moved = queue.SimpleQueue[Beat](), MasterAddresses(BOTH), queue.SimpleQueue[str]()
    beats, here = BeatsAt(SECOND, silent=FIRST), threading.get_ident()

    def look(masters: MasterAddresses, security: object, caller: m.Caller) -> bool:
        assert (caller, threading.get_ident() != here) == (REQUEST.caller, True)
        if masters.now == SECOND or not beats.streams:
            return False
        masters.take(SECOND, "it has taken over")
        return True

    monkeypatch.setattr("dips.worker.control.newer_master", look)
    clock = ManualClock(50.0)
    with closing(beating(beats, masters, INSECURE, told.put, clock, lambda: moved.put(masters.now))):
        told.get(timeout=60)
        assert (beats.streams[:2], moved.get(timeout=60)) == ([FIRST, SECOND], SECOND)
    assert "do not reach" not in caplog.text


def test_calls_to_a_silent_master_are_cancelled_once_another_one_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as thread:
        masters = MasterAddresses(f"127.0.0.1:{silent.getsockname()[1]},{SECOND}")
        with closing(MasterStubs(masters, INSECURE)) as stubs:
            call = thread.submit(stubs.call, m.LeaveRequest(REQUEST.caller, "done"), 3600.0)
            connection, _ = silent.accept()
            stubs.hang_up()  # the address is in use
            assert not call.done()
            masters.take(SECOND, "it has taken over")
            stubs.hang_up()
            with pytest.raises(RetryLater):
                call.result(60)
            connection.close()
            assert masters.now == SECOND
            masters.leave(SECOND)  # and back, on a new connection
            with pytest.raises(RetryLater):
                stubs.call(m.LeaveRequest(REQUEST.caller, "done"), 0.05)


def test_a_call_is_tried_again_where_its_master_is_left_before_it_is_sent() -> None:
    masters = MasterAddresses(BOTH)

    def overtaken(channel: grpc.Channel) -> SimpleNamespace:
        stub = clusters_pb2_grpc.ClustersStub(channel)

        def leave(message: Any, timeout: float) -> Any:
            masters.take(SECOND, "it has taken over")
            stubs.hang_up()
            return stub.Leave(message, timeout=timeout)

        return SimpleNamespace(Leave=leave)

    with closing(MasterStubs(masters, INSECURE, service=overtaken)) as stubs:
        with pytest.raises(RetryLater, match=f"the master at {FIRST} was left"):
            stubs.call(m.LeaveRequest(REQUEST.caller, "done"), 3600.0)


def test_heartbeats_go_where_the_calls_go(beating: Callable[..., Heartbeat], caplog: pytest.LogCaptureFixture) -> None:
    told, beats, masters = queue.SimpleQueue[Beat](), BeatsAt(SECOND), MasterAddresses(BOTH)
    heart = beating(beats, masters, INSECURE, told.put, ManualClock(50.0))
    try:
        told.get(timeout=60)
        assert beats.streams == [FIRST, SECOND]
        assert masters.now == SECOND
        masters.leave(SECOND)  # a call found no master there
        beats.at = FIRST
        told.get(timeout=60)
        assert (beats.streams[-1], masters.now) == (FIRST, FIRST)
    finally:
        heart.close()
    assert "do not reach" not in caplog.text


def test_a_reader_fetches_at_the_address_that_answers(
    run: RunInMemory, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dips.worker.reader.time", SimpleNamespace(sleep=run.passes))
    places.at = SECOND
    fetched = reader.fetch_version(BOTH, "run", "eval", INSECURE, deadline_s=10.0, clock=run.clock)
    assert fetched.version == run.version
    assert {at for at, _ in places.called[1:]} == {SECOND}


STATUS = m.StatusReply("run", 2, None, 0, 0, "idle", None, 0.0, 0.0, "")


def test_a_follower_takes_no_status_of_an_older_master(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, m.StatusReply | None] = {FIRST: None, SECOND: STATUS}

    class Stub:
        def __init__(self, place: Place) -> None:
            self.place = place

        def Status(self, message: Any, timeout: float) -> Any:
            from_message(message, m.StatusRequest)
            if (answer := answers[self.place.address]) is None:
                raise FailedCall(grpc.StatusCode.UNAVAILABLE, "Connection refused")
            return to_message(answer)

    monkeypatch.setattr(reader, "operator_pb2_grpc", SimpleNamespace(OperatorStub=Stub))
    with reader.RunWatch(MasterAddresses(BOTH), "run", 1.0, INSECURE) as watch:

        def epochs(times: int) -> list[int | None]:
            asked: list[int | None] = []
            for _ in range(times):
                try:
                    asked.append(watch.status().epoch)
                except RetryLater:
                    asked.append(None)
            return asked

        assert epochs(3) == [None, 2, 2]
        answers[FIRST], answers[SECOND] = replace(STATUS, epoch=1), None
        assert epochs(3) == [None, None, None]
        answers[FIRST] = replace(STATUS, epoch=3)
        assert epochs(3)[-2:] == [3, 3]


@pytest.mark.parametrize(
    ("master", "named"), [(f"{FIRST},127.0.0.1", "'127.0.0.1'"), (f"{FIRST},10.0.0.1:5", "'10.0.0.1:5'")]
)
def test_the_setting_names_the_faulty_one(master: str, named: str) -> None:
    with pytest.raises(DipsError, match=named):
        check(ClientConfig(master=master, cluster_id="a", insecure=True))
