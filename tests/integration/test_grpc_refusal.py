"""A refusal over a real connection; what else can end a call is in test_master_server.py."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from support.waiting import NO_LIMIT_S

from dips.core.errors import RefusalCode, Refused
from dips.core.net.grpc_calls import abort, channel_options, refused_from
from dips.protos import operator_pb2, operator_pb2_grpc

SENTENCE = "no cluster is called 'ä': `dips status` lists them; " + "x" * 3000


class Refusing(operator_pb2_grpc.OperatorServicer):
    async def Evict(
        self,
        request: operator_pb2.EvictRequest,
        context: grpc.aio.ServicerContext[operator_pb2.EvictRequest, operator_pb2.OperatorReply],
    ) -> operator_pb2.OperatorReply:
        await abort(context, Refused(RefusalCode.UNKNOWN_NAME, SENTENCE, retry_after_s=1.5))


async def test_a_refusal_arrives_whole() -> None:
    server = grpc.aio.server(options=channel_options(10_000))
    operator_pb2_grpc.add_OperatorServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options(1 << 20)) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Evict(operator_pb2.EvictRequest(run_id="r", cluster_id="ä"), timeout=NO_LIMIT_S)
    await server.stop(None)
    got = refused_from(caught.value)
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_s) == (RefusalCode.UNKNOWN_NAME, 1.5)
    assert SENTENCE.startswith(got.sentence)
    assert len(got.sentence) > 1000
    # A tool that knows only gRPC sees the same.
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == got.sentence
