"""The real master, state machines included, as the process that `dips master` starts."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.master_process import MasterProcess
from support.scripted_master_state import HELLO
from support.waiting import NO_LIMIT_S, until

from dips.core import messages
from dips.core.errors import TERMINATED, RefusalCode, Refused
from dips.core.layout import Layout, Parameter
from dips.core.net.codec_protobuf import decode, encode, from_message, to_message
from dips.core.net.grpc_calls import channel_options, refused_from
from dips.core.observe.tape import read_tape
from dips.master.directory import TAPE_NAME
from dips.protos import clusters_pb2_grpc, operator_pb2_grpc

LAYOUT = Layout((Parameter("w", (8, 4), "float32", "l0"),), 16)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    process = MasterProcess(tmp_path / "run", "slaves=1", "linger_s=2", "sync_every=16")
    yield process
    process.popen.kill()
    process.popen.wait()


class Client:
    def __init__(self, channel: grpc.Channel) -> None:
        self.clusters: Any = clusters_pb2_grpc.ClustersStub(channel)
        self.operator: Any = operator_pb2_grpc.OperatorStub(channel)

    def join(self, name: str) -> messages.JoinReply:
        """Once the slave's promise, which comes over another connection, is here."""
        plan = messages.DataPlan(messages.DataMode.OWN)
        request = messages.JoinRequest(messages.Caller("demo", 0, name), HELLO, LAYOUT, LAYOUT.layout_hash, plan)
        answers: list[messages.JoinReply] = []

        def is_let_in() -> bool:
            try:
                reply = self.clusters.Join(to_message(request), timeout=NO_LIMIT_S)
            except grpc.RpcError as error:
                refused = refused_from(error)
                assert isinstance(refused, Refused)
                assert refused.code is RefusalCode.BUSY, refused
                return False
            answers.append(from_message(reply, messages.JoinReply))
            return True

        until(is_let_in, "the master lets the cluster in")
        return answers[0]

    def status(self) -> messages.StatusReply:
        return from_message(
            self.operator.Status(to_message(messages.StatusRequest()), timeout=NO_LIMIT_S), messages.StatusReply
        )


@contextlib.contextmanager
def attached(address: str) -> Iterator[None]:
    """While this lasts, slave s0 is attached and has promised the master's epoch."""
    up: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address, options=channel_options(1 << 20)) as channel:
        attach: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/dips.v1.Slaves/Attach")
        down = attach(iter(up.get, None), timeout=NO_LIMIT_S)
        hello = messages.SlaveHello(HELLO, "tcp://127.0.0.1:5000", 1 << 30, 0)
        up.put(encode(messages.SlaveMessage(messages.Caller("demo", 0, "s0"), hello)))
        command = decode(next(down), messages.SlaveCommand)
        assert isinstance(command.body, messages.Welcome)
        me = messages.Caller("demo", command.epoch, "s0", command.incarnation)
        up.put(encode(messages.SlaveMessage(me, messages.Promised(command.epoch))))
        try:
            yield
        finally:
            up.put(None)


@pytest.fixture
def client(master: MasterProcess) -> Iterator[Client]:
    address = master.started().address
    with attached(address), grpc.insecure_channel(address, options=channel_options(1 << 20)) as channel:
        yield Client(channel)


def test_a_cluster_joins_and_is_seen(master: MasterProcess, client: Client) -> None:
    reply = client.join("a")
    assert reply.settings.sync_every_steps == 16
    assert (reply.run_id, reply.epoch, reply.published) == ("demo", 1, None)
    status = client.status()
    assert [cluster.cluster_id for cluster in status.clusters if cluster.alive] == ["a"]
    assert [(slave.slave_id, slave.alive) for slave in status.slaves] == [("s0", True)]
    assert master.signal(signal.SIGTERM) == TERMINATED


def test_an_operators_stop_ends_the_process_with_0(master: MasterProcess, client: Client) -> None:
    joined = client.join("a")
    client.operator.Stop(to_message(messages.OperatorRequest("demo", "enough")), timeout=NO_LIMIT_S)
    caller = messages.Caller("demo", joined.epoch, "a", joined.incarnation)
    client.clusters.Leave(to_message(messages.LeaveRequest(caller, "told to")), timeout=NO_LIMIT_S)
    assert master.popen.wait() == 0
    assert "enough" in master.log
    assert "Traceback" not in master.log


def test_the_settings_are_logged_with_their_sources(master: MasterProcess) -> None:
    master.started()
    assert master.signal(signal.SIGTERM) == TERMINATED
    lines = {" ".join(line.split()) for line in master.log.splitlines()}
    assert "sync_every = 16 (command line)" in lines
    assert "heartbeat_s = 2.0 (default)" in lines


def test_a_master_that_was_paused_evicts_nobody_for_its_own_silence(tmp_path: Path) -> None:
    beat_s, pause_s = 2.0, 11.0
    knobs = ("slaves=1", f"heartbeat_s={beat_s}", "evict_after_beats=5")
    master = MasterProcess(tmp_path / "run", *knobs)
    try:
        address = master.started().address
        with attached(address), grpc.insecure_channel(address, options=channel_options(1 << 20)) as channel:
            client = Client(channel)
            client.join("a")
            master.popen.send_signal(signal.SIGSTOP)
            time.sleep(pause_s)  # longer than the 10 s after which a silent peer is evicted
            master.popen.send_signal(signal.SIGCONT)
            status = client.status()
        assert [(cluster.cluster_id, cluster.alive) for cluster in status.clusters] == [("a", True)]
        assert [(slave.slave_id, slave.alive) for slave in status.slaves] == [("s0", True)]
        gaps_s = [line["gap_s"] for line in read_tape(tmp_path / "run" / TAPE_NAME) if line["kind"] == "stood_still"]
        assert max(gaps_s) >= pause_s - 1
    finally:
        master.popen.kill()
        master.popen.wait()
