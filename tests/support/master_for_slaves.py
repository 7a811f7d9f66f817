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

from dips.core import messages as m
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
        self._in: asyncio.Queue[m.SlaveMessage | None] = asyncio.Queue()
        self._out: asyncio.Queue[m.SlaveCommand | Refused] = asyncio.Queue()
        self.beats: list[m.SlaveBeat] = []
        self._beaten = asyncio.Condition()

    async def hello(self) -> m.SlaveHello:
        return await self.expect(m.SlaveHello)

    async def welcome(self) -> None:
        """Welcome the slave and wait for its promise."""
        self.send(m.Welcome(m.Hello(PROTOCOL_MIN, PROTOCOL_VERSION), self._master.settings))
        assert (await self.expect(m.Promised)).epoch == 1

    async def configured(self, configure: m.Configure) -> m.SlaveHello:
        """What the slave said first; it has taken its blocks then, and serves."""
        hello = await self.hello()
        await self.welcome()
        self.send(configure)
        await self.expect(m.Ready)
        return hello

    async def publish(self, prepare: m.Prepare) -> None:
        """A version, from its prepare to its flip."""
        self.send(prepare)
        await self.expect(m.Prepared)
        self.send(m.Commit(prepare.round, prepare.to_version, b"h", b"{}"))
        await self.expect(m.Flipped)

    def send(self, body: m.CommandBody) -> None:
        self._out.put_nowait(m.SlaveCommand("run", 1, Incarnation(1, 1), "test", body))

    def refuse(self, refused: Refused) -> None:
        self._out.put_nowait(refused)

    async def expect(self, kind: type[B]) -> B:
        body = await self.any()
        assert isinstance(body, kind), f"{kind.__name__} was expected, came {body}"
        return body

    async def any(self) -> m.SlaveBody:
        """The body of the next message that is not a beat."""
        message = await self.next()
        assert message is not None, "the stream ended"
        return message.body

    async def next(self) -> m.SlaveMessage | None:
        """The next message that is not a beat, None at the end of the stream."""
        while True:
            message = await asyncio.wait_for(self._in.get(), NO_LIMIT_S)
            if message is None or not isinstance(message.body, m.SlaveBeat):
                return message

    async def beat(self, after: int = 0) -> m.SlaveBeat:
        """Wait for a beat beyond the first `after` ones."""
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

    async def _next_command(self, reader: asyncio.Task[None]) -> m.SlaveCommand | Refused | None:
        getter = asyncio.create_task(self._out.get())
        await asyncio.wait({getter, reader}, return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            return getter.result()
        getter.cancel()
        return None

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            message = from_message(request, m.SlaveMessage)
            if isinstance(message.body, m.SlaveBeat):
                async with self._beaten:
                    self.beats.append(message.body)
                    self._beaten.notify_all()
            self._in.put_nowait(message)


class MasterForSlaves(slaves_pb2_grpc.SlavesServicer):
    """`async with MasterForSlaves() as master: link = await master.accept()`."""

    def __init__(self, settings: m.Settings | None = None) -> None:
        self.settings = settings or m.Settings(heartbeat_s=0.1, chunk_bytes=1024)
        self._links: asyncio.Queue[SlaveLink] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> MasterForSlaves:
        self._server = grpc.aio.server(options=channel_options(self.settings.max_message_bytes))
        slaves_pb2_grpc.add_SlavesServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def accept(self) -> SlaveLink:
        return await asyncio.wait_for(self._links.get(), NO_LIMIT_S)

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        link = SlaveLink(self)
        self._links.put_nowait(link)
        await link.run(request_iterator, context)
