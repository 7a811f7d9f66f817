"""Refusals over a real connection, to callers of both kinds of gRPC."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from support.waiting import NO_LIMIT_S

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.net.grpc_calls import abort, channel_options, refused_from
from dips.protos import operator_pb2, operator_pb2_grpc

MAX_MESSAGE_BYTES = 10_000
SENTENCE = "no cluster is called 'ä': `dips status` lists them; " + "x" * 3000


class Refusing(operator_pb2_grpc.OperatorServicer):
    """Refuses to evict, answers Status, and knows nothing else."""

    async def Evict(
        self,
        request: operator_pb2.EvictRequest,
        context: grpc.aio.ServicerContext[operator_pb2.EvictRequest, operator_pb2.OperatorReply],
    ) -> operator_pb2.OperatorReply:
        await abort(context, Refused(RefusalCode.UNKNOWN_NAME, SENTENCE, retry_after_s=1.5))

    async def Status(
        self,
        request: operator_pb2.StatusRequest,
        context: grpc.aio.ServicerContext[operator_pb2.StatusRequest, operator_pb2.StatusReply],
    ) -> operator_pb2.StatusReply:
        if request.run_id == "hang":
            await asyncio.Event().wait()
        return operator_pb2.StatusReply(run_id="r")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server(options=channel_options(MAX_MESSAGE_BYTES))
    operator_pb2_grpc.add_OperatorServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[operator_pb2_grpc.OperatorStub]:
    async with grpc.aio.insecure_channel(address, options=channel_options(1 << 20)) as channel:
        yield operator_pb2_grpc.OperatorStub(channel)


async def test_a_refusal_arrives_whole(stub: operator_pb2_grpc.OperatorStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Evict(operator_pb2.EvictRequest(run_id="r", cluster_id="ä"), timeout=NO_LIMIT_S)
    got = refused_from(caught.value)
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_s) == (RefusalCode.UNKNOWN_NAME, 1.5)
    assert SENTENCE.startswith(got.sentence)
    assert len(got.sentence) > 1000
    # A tool that knows only gRPC sees the same.
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == got.sentence


async def test_a_blocking_caller_gets_the_same(address: str) -> None:
    def call() -> grpc.RpcError:
        with grpc.insecure_channel(address, options=channel_options(1 << 20)) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                operator_pb2_grpc.OperatorStub(channel).Evict(operator_pb2.EvictRequest(), timeout=NO_LIMIT_S)
            return caught.value

    got = refused_from(await asyncio.to_thread(call))
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_s) == (RefusalCode.UNKNOWN_NAME, 1.5)


async def test_an_oversized_message_is_refused_and_the_next_call_served(
    stub: operator_pb2_grpc.OperatorStub,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Evict(operator_pb2.EvictRequest(reason="x" * MAX_MESSAGE_BYTES), timeout=NO_LIMIT_S)
    got = refused_from(caught.value)
    assert isinstance(got, Refused)
    assert got.code is RefusalCode.MALFORMED
    assert (await stub.Status(operator_pb2.StatusRequest(), timeout=NO_LIMIT_S)).run_id == "r"


async def test_a_call_that_the_peer_lacks_is_another_protocol(
    stub: operator_pb2_grpc.OperatorStub,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Pause(operator_pb2.OperatorRequest(), timeout=NO_LIMIT_S)
    got = refused_from(caught.value)
    assert isinstance(got, Refused)
    assert got.code is RefusalCode.PROTOCOL_VERSION


async def test_a_deadline_that_passes_is_tried_again(stub: operator_pb2_grpc.OperatorStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Status(operator_pb2.StatusRequest(run_id="hang"), timeout=0.2)
    assert isinstance(refused_from(caught.value), RetryLater)


async def test_nobody_there_is_tried_again() -> None:
    with socket.socket() as taken:
        # Bound but not listening: no other process can take the port, and none answers.
        taken.bind(("127.0.0.1", 0))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{taken.getsockname()[1]}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await operator_pb2_grpc.OperatorStub(channel).Status(operator_pb2.StatusRequest(), timeout=NO_LIMIT_S)
    assert isinstance(refused_from(caught.value), RetryLater)


async def test_two_servers_cannot_share_a_port(address: str) -> None:
    second = grpc.aio.server(options=channel_options(MAX_MESSAGE_BYTES))
    with pytest.raises(RuntimeError, match="Failed to bind"):
        second.add_insecure_port(address)
    await second.stop(None)
