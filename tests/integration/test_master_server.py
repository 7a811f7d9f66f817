"""The master's services over real gRPC on loopback, with a scripted state behind them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.run_status import run_status
from support.scripted_master_state import (
    MemoryJournal,
    ScriptedMachine,
    caller,
    command,
    leave,
    refusal,
    slave_hello,
    slave_message,
)
from support.waiting import NO_LIMIT_S

from dips.core import messages
from dips.core.clock import SystemClock
from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.net.codec_protobuf import decode, encode, from_message, to_message
from dips.core.net.grpc_calls import channel_options, refused_from
from dips.core.net.security import INSECURE
from dips.core.observe.failpoints import armed, hits
from dips.core.observe.tape import Tape
from dips.local.authority import ensure_keys
from dips.master.access import Access
from dips.master.rpc import MasterServer
from dips.master.shell import MasterShell
from dips.master.state import effects
from dips.master.state.effects import CloseLink, Effect, Halt, Refuse, Reply, ToSlave
from dips.protos import clusters_pb2, clusters_pb2_grpc, operator_pb2, operator_pb2_grpc, slaves_pb2

MAX_MESSAGE_BYTES = 1 << 20
BEAT = messages.HeartbeatReply(1, None, 0, 16, False, "idle")


class Served:
    def __init__(self, directory: Path) -> None:
        self.machine = ScriptedMachine()
        self.tape_path = directory / "tape.jsonl"
        self.tape = Tape(self.tape_path, "master", "demo")
        self.executor = MasterShell(self.machine, MemoryJournal().append_all, self.tape, SystemClock(), tick_s=60.0)
        self.server = MasterServer(MAX_MESSAGE_BYTES, 10, INSECURE, Access(INSECURE))
        self.address = self.server.bind("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(self.address, options=channel_options(64 << 20))

    @property
    def clusters(self) -> Any:
        return clusters_pb2_grpc.ClustersStub(self.channel)

    @property
    def operator(self) -> Any:
        return operator_pb2_grpc.OperatorStub(self.channel)

    def raw_stream(self, path: str) -> grpc.aio.StreamStreamMultiCallable[bytes, bytes]:
        return self.channel.stream_stream(path)

    def attach(self) -> Any:
        return self.channel.stream_stream("/dips.v1.Slaves/Attach")()

    def reacts(self, react: Callable[[effects.Event], Sequence[Effect]]) -> None:
        self.machine.react = react


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    made.executor.start()
    await made.server.start(made.executor)
    yield made
    await made.channel.close()
    made.executor.stop(Halt(0, "the test is over"))
    await made.server.stop()
    await made.executor.close()
    made.tape.close()


def answering(event: effects.Event) -> list[Effect]:
    if isinstance(event, effects.ClusterCall):
        return [
            Reply(event.token, BEAT if isinstance(event.request, messages.HeartbeatRequest) else messages.LeaveReply())
        ]
    return []


async def failed(call: Any) -> Refused | RetryLater:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return refused_from(caught.value)


async def still_serves(served: Served) -> None:
    served.reacts(answering)
    await served.clusters.Leave(to_message(leave("after all that")), timeout=NO_LIMIT_S)
    assert served.machine.of(effects.ClusterCall)[-1].request == leave("after all that")


async def test_the_end_of_a_clusters_beats_is_told_once_no_stream_of_it_is_open(served: Served) -> None:
    served.reacts(answering)
    beat = to_message(messages.HeartbeatRequest(caller()))
    first, second = served.clusters.Heartbeat(timeout=NO_LIMIT_S), served.clusters.Heartbeat(timeout=NO_LIMIT_S)
    for stream in (first, second):
        await stream.write(beat)
        await stream.read()
    first.cancel()
    await served.clusters.Leave(to_message(leave("the cancelling has arrived before this")), timeout=NO_LIMIT_S)
    assert not served.machine.of(effects.BeatsEnded)
    second.cancel()
    assert await served.machine.until(effects.BeatsEnded) == effects.BeatsEnded(caller().name, caller().incarnation)
    assert len(served.machine.of(effects.BeatsEnded)) == 1


async def test_a_message_over_the_limit_is_refused_and_the_master_goes_on(served: Served) -> None:
    error = await failed(served.clusters.Leave(to_message(leave("x" * MAX_MESSAGE_BYTES)), timeout=NO_LIMIT_S))
    assert isinstance(error, Refused)
    assert "larger than max" in error.sentence
    assert served.machine.of(effects.ClusterCall) == []
    await still_serves(served)


async def test_every_method_of_the_protocol_is_served_and_passes_its_failpoint(served: Served) -> None:
    services = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in ((clusters_pb2, "Clusters"), (slaves_pb2, "Slaves"), (operator_pb2, "Operator"))
    ]
    for method in (method for service in services for method in service.methods):
        path = f"/{method.containing_service.full_name}/{method.name}"
        is_unary = not (method.client_streaming or method.server_streaming)
        with armed(f"master.rpc.before_{method.name}=note" if is_unary else ""):
            call = served.raw_stream(path)(timeout=NO_LIMIT_S)
            await call.write(b"\xff\xff")
            error = await failed(call.read())
            assert isinstance(error, Refused)
            assert error.code is RefusalCode.MALFORMED, f"{path}: {error.sentence}"
            assert hits() == ({f"master.rpc.before_{method.name}": 1} if is_unary else {})
    assert served.machine.of(effects.ClusterCall) == []
    await still_serves(served)


async def test_a_caller_that_hangs_up_is_told_to_the_state(served: Served) -> None:
    call = served.clusters.Leave(to_message(leave()), timeout=NO_LIMIT_S)
    held = await served.machine.until(effects.ClusterCall)
    call.cancel()
    assert await served.machine.until(effects.CallGone) == effects.CallGone(held.token)


async def test_a_refused_beat_ends_the_stream_with_its_reason(served: Served) -> None:
    served.reacts(lambda event: [Refuse(event.token, refusal())] if isinstance(event, effects.ClusterCall) else [])
    stream = served.clusters.Heartbeat(timeout=NO_LIMIT_S)
    await stream.write(to_message(messages.HeartbeatRequest(caller())))
    error = await failed(stream.read())
    assert isinstance(error, Refused)
    assert error.code is RefusalCode.FENCED


async def test_a_slave_is_heard_and_commanded_over_one_stream(served: Served) -> None:
    def react(event: effects.Event) -> list[Effect]:
        if isinstance(event, effects.SlaveSaid):
            return [ToSlave(event.link, command(text)) for text in ("one", "two", "three")]
        return []

    served.reacts(react)
    stream = served.attach()
    await stream.write(encode(slave_hello()))
    said = await served.machine.until(effects.SlaveSaid)
    assert said.message == slave_hello()
    got = [decode(await stream.read(), messages.SlaveCommand) for _ in range(3)]
    assert got == [command("one"), command("two"), command("three")]
    await stream.write(encode(slave_message()))
    second = await served.machine.until(effects.SlaveSaid, 2)
    assert (second.link, second.message) == (said.link, slave_message())
    await stream.done_writing()
    assert await served.machine.until(effects.SlaveLinkDown) == effects.SlaveLinkDown(said.link)


async def test_a_link_that_the_state_closes_ends_with_the_reason(served: Served) -> None:
    served.reacts(
        lambda event: (
            [ToSlave(event.link, command("last")), CloseLink(event.link, refusal("another took over"))]
            if isinstance(event, effects.SlaveSaid)
            else []
        )
    )
    stream = served.attach()
    await stream.write(encode(slave_hello()))
    assert decode(await stream.read(), messages.SlaveCommand) == command("last")
    error = await failed(stream.read())
    assert isinstance(error, Refused)
    assert (error.code, error.sentence) == (RefusalCode.FENCED, "another took over")


@pytest.mark.parametrize("garbage", [b"\xff\xff", b""], ids=["garbage", "no body"])
async def test_a_garbled_message_ends_that_link_alone(served: Served, garbage: bytes) -> None:
    good, bad = served.attach(), served.attach()
    await good.write(encode(slave_hello()))
    link = (await served.machine.until(effects.SlaveSaid)).link
    await bad.write(garbage)
    error = await failed(bad.read())
    assert isinstance(error, Refused)
    assert error.code is RefusalCode.MALFORMED
    down = await served.machine.until(effects.SlaveLinkDown)
    assert down.link != link
    await good.write(encode(slave_message()))
    assert (await served.machine.until(effects.SlaveSaid, 2)).link == link
    good.cancel()


async def test_slaves_learn_that_the_master_ends(served: Served) -> None:
    stream = served.attach()
    await stream.write(encode(slave_hello()))
    await served.machine.until(effects.SlaveSaid)
    served.executor.stop(Halt(0, "stopped"))
    error = await failed(stream.read())
    assert isinstance(error, Refused)
    assert error.code is RefusalCode.BUSY


STATUS = messages.StatusReply("demo", 3, None, 1234, 0, "idle", None, 0.5, 0.0, "waiting for slave s1")


def operating(event: effects.Event) -> list[Effect]:
    if isinstance(event, effects.OperatorCall):
        return [
            Reply(
                event.token,
                STATUS if isinstance(event.action, messages.StatusRequest) else messages.OperatorReply("done"),
            )
        ]
    return []


@pytest.mark.parametrize(
    ("method", "request_", "action"),
    [
        ("Pause", messages.OperatorRequest("demo", "r"), effects.Pause(messages.OperatorRequest("demo", "r"))),
        ("Resume", messages.OperatorRequest("demo", "r"), effects.Resume(messages.OperatorRequest("demo", "r"))),
        ("Stop", messages.OperatorRequest("demo", "r"), effects.Stop(messages.OperatorRequest("demo", "r"))),
        ("Evict", messages.EvictRequest("demo", "a", "r"), messages.EvictRequest("demo", "a", "r")),
        ("Drain", messages.DrainRequest("demo", "a", "r"), messages.DrainRequest("demo", "a", "r")),
        ("Extend", messages.ExtendRequest("demo", 7, True, "r"), messages.ExtendRequest("demo", 7, True, "r")),
    ],
)
async def test_each_action_reaches_the_state_as_itself(
    served: Served, method: str, request_: object, action: object
) -> None:
    served.reacts(operating)
    reply = await getattr(served.operator, method)(to_message(request_), timeout=NO_LIMIT_S)
    assert from_message(reply, messages.OperatorReply) == messages.OperatorReply("done")
    assert [call.action for call in served.machine.of(effects.OperatorCall)] == [action]


async def test_watch_ends_at_once_when_the_master_ends(served: Served) -> None:
    served.reacts(operating)
    stream = served.operator.Watch(to_message(messages.WatchRequest("demo", 3600)), timeout=NO_LIMIT_S)
    await stream.read()
    served.executor.stop(Halt(0, "stopped"))
    error = await failed(stream.read())
    assert isinstance(error, Refused)
    assert error.code is RefusalCode.BUSY


@pytest.mark.parametrize("interval_s", [-1.0, 0.001, 1e9, float("nan"), float("inf")])
async def test_a_watch_interval_that_makes_no_sense_is_refused(served: Served, interval_s: float) -> None:
    stream = served.operator.Watch(to_message(messages.WatchRequest("demo", interval_s)), timeout=NO_LIMIT_S)
    error = await failed(stream.read())
    assert isinstance(error, Refused)
    assert error.code is RefusalCode.MALFORMED
    assert "interval_s" in error.sentence


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.1.2.3:4700"])
async def test_an_address_that_others_reach_is_never_bound(address: str) -> None:
    server = MasterServer(MAX_MESSAGE_BYTES, 1, INSECURE, Access(INSECURE))
    with pytest.raises(ConfigError, match="not a loopback address"):
        server.bind(address)
    await server.stop()


async def test_an_answer_can_be_lost_after_the_call_was_decided(served: Served) -> None:
    served.reacts(answering)
    with armed("master.rpc.after_Leave=1*drop"):
        error = await failed(served.clusters.Leave(to_message(leave("lost")), timeout=NO_LIMIT_S))
        assert isinstance(error, RetryLater)
        assert "a failpoint loses the answer of Leave" in str(error)
        await served.clusters.Leave(to_message(leave("not lost")), timeout=NO_LIMIT_S)
    assert [call.request for call in served.machine.of(effects.ClusterCall)] == [leave("lost"), leave("not lost")]


async def test_a_beat_whose_answer_is_lost_ends_its_stream(served: Served) -> None:
    served.reacts(answering)
    beat = to_message(messages.HeartbeatRequest(caller(), "training", 1))
    stream = served.clusters.Heartbeat(timeout=NO_LIMIT_S)
    with armed("master.rpc.after_Heartbeat=1*off->drop"):
        await stream.write(beat)
        assert from_message(await stream.read(), messages.HeartbeatReply) == BEAT
        await stream.write(beat)
        assert "a failpoint loses the answer of Heartbeat" in str(await failed(stream.read()))
    assert len(served.machine.of(effects.ClusterCall)) == 2


async def test_what_a_slave_says_and_hears_can_be_lost_or_doubled(served: Served) -> None:
    served.reacts(
        lambda event: (
            [ToSlave(event.link, command(text)) for text in ("one", "two", "three")]
            if isinstance(event, effects.SlaveSaid) and len(served.machine.of(effects.SlaveSaid)) == 2
            else []
        )
    )
    stream = served.attach()
    with armed("master.slave_stream.before_hear=1*drop->1*dup;master.slave_stream.before_send=1*drop->1*dup"):
        await stream.write(encode(slave_hello()))
        await stream.write(encode(slave_message()))
        await served.machine.until(effects.SlaveSaid, 2)
        got = [decode(await stream.read(), messages.SlaveCommand) for _ in range(3)]
    assert [said.message for said in served.machine.of(effects.SlaveSaid)] == [slave_message(), slave_message()]
    assert got == [command("two"), command("two"), command("three")]
    stream.cancel()


async def test_a_watch_whose_answer_is_lost_ends(served: Served) -> None:
    status = run_status(clusters=())
    served.reacts(lambda event: [Reply(event.token, status)] if isinstance(event, effects.OperatorCall) else [])
    watching = served.operator.Watch(to_message(messages.WatchRequest(interval_s=0.1)), timeout=NO_LIMIT_S)
    with armed("master.rpc.after_Watch=1*off->drop;master.rpc.before_Watch=note"):
        assert from_message(await watching.read(), messages.StatusReply) == status
        assert isinstance(await failed(watching.read()), RetryLater)
        assert hits() == {"master.rpc.after_Watch": 2, "master.rpc.before_Watch": 2}
    assert len(served.machine.of(effects.OperatorCall)) == 2


STRANGER = """
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from dips.master.rpc import grpc
from dips.core.net.keys import load_identity

identity = load_identity(Path("keys/master"))
credentials = grpc.ssl_server_credentials([(identity.key_pem, identity.cert_pem)], identity.ca_pem, True)
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", credentials)
server.start()
with socket.create_connection(("127.0.0.1", port)) as stranger:
    stranger.sendall(b"no handshake")
    while stranger.recv(1000):
        pass
server.stop(None).wait()
"""


def test_grpc_writes_nothing_of_a_stranger(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "keys", [], [])
    done = subprocess.run([sys.executable, "-c", STRANGER], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stderr == ""
