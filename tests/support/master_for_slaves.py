"""A master that a test plays by hand: a real gRPC server of Slaves, one object for each stream that a slave opens.

It checks nothing by itself; every expectation stands in the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio
from support.waiting import NO_LIMIT_S

from dips.core import messages
from dips.core.errors import Refused
from dips.core.ids import Incarnation
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import abort, channel_options
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.protos import slaves_pb2_grpc

B = TypeVar("B")


class SlaveLink:
    def __init__(self, master: MasterForSlaves) -> None:
        self._master = master
        self._in: asyncio.Queue[messages.SlaveMessage | None] = asyncio.Queue()
        self._out: asyncio.Queue[messages.SlaveCommand | Refused | None] = asyncio.Queue()
        self.beats: list[messages.SlaveBeat] = []
        self._beaten = asyncio.Condition()
        self.callers: list[messages.Caller] = []
        self.incarnation: Incarnation | None = None
        self.epoch = 0

    async def hello(self) -> messages.SlaveHello:
        return await self.expect(messages.SlaveHello)

    async def welcome(self, epoch: int = 1, n: int = 1, settings: messages.Settings | None = None) -> None:
        self.epoch, self.incarnation = epoch, Incarnation(epoch, n)
        hello = messages.Hello(PROTOCOL_MIN, PROTOCOL_VERSION)
        self.send(messages.Welcome(hello, settings or self._master.settings))
        assert (await self.expect(messages.Promised)).epoch == epoch

    async def configured(self, configure: messages.Configure, epoch: int = 1) -> messages.SlaveHello:
        """What the slave said first; it has taken its blocks then, and serves."""
        hello = await self.hello()
        await self.welcome(epoch)
        self.send(configure)
        await self.expect(messages.Ready)
        return hello

    async def publish(self, prepare: messages.Prepare, commit_hash: bytes = b"h", record: bytes = b"{}") -> None:
        self.send(prepare)
        await self.expect(messages.Prepared)
        self.send(messages.Commit(prepare.round, prepare.to_version, commit_hash, record))
        await self.expect(messages.Flipped)

    def send(self, body: messages.CommandBody, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "run_id": self._master.run_id,
            "epoch": self.epoch,
            "incarnation": self.incarnation,
            "cause_id": "test",
            "body": body,
        }
        self._out.put_nowait(messages.SlaveCommand(**(fields | changes)))

    def refuse(self, refused: Refused) -> None:
        self._out.put_nowait(refused)

    def close(self) -> None:
        self._out.put_nowait(None)

    async def expect(self, kind: type[B]) -> B:
        body = await self.any()
        assert isinstance(body, kind), f"{kind.__name__} was expected, came {body}"
        return body

    async def any(self) -> messages.SlaveBody:
        message = await self.next()
        assert message is not None, "the stream ended"
        return message.body

    async def next(self) -> messages.SlaveMessage | None:
        while True:
            message = await asyncio.wait_for(self._in.get(), NO_LIMIT_S)
            if message is None or not isinstance(message.body, messages.SlaveBeat):
                return message

    async def beat(self, after: int = 0) -> messages.SlaveBeat:
        async with asyncio.timeout(NO_LIMIT_S), self._beaten:
            await self._beaten.wait_for(lambda: len(self.beats) > after)
        return self.beats[-1]

    async def run(self, requests: AsyncIterator[Any], context: Any) -> None:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (command := await self._next_command(reader)) is not None:
                if isinstance(command, Refused):
                    await abort(context, command)
                await context.write(to_message(command))
        finally:
            reader.cancel()
            self._in.put_nowait(None)

    async def _next_command(self, reader: asyncio.Task[None]) -> messages.SlaveCommand | Refused | None:
        getter = asyncio.create_task(self._out.get())
        await asyncio.wait({getter, reader}, return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            return getter.result()
        getter.cancel()
        return None

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            message = from_message(request, messages.SlaveMessage)
            self.callers.append(message.caller)
            if isinstance(message.body, messages.SlaveBeat):
                async with self._beaten:
                    self.beats.append(message.body)
                    self._beaten.notify_all()
            self._in.put_nowait(message)


class MasterForSlaves(slaves_pb2_grpc.SlavesServicer):
    """`async with MasterForSlaves() as master: link = await master.accept()`."""

    def __init__(self, run_id: str = "run", settings: messages.Settings | None = None) -> None:
        self.run_id = run_id
        self.settings = settings or messages.Settings(heartbeat_s=0.1, chunk_bytes=1024)
        self._links: asyncio.Queue[SlaveLink] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> MasterForSlaves:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=channel_options(self.settings.max_message_bytes))
        slaves_pb2_grpc.add_SlavesServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def accept(self) -> SlaveLink:
        return await asyncio.wait_for(self._links.get(), NO_LIMIT_S)

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        link = SlaveLink(self)
        self._links.put_nowait(link)
        await link.run(request_iterator, context)
