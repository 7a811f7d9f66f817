"""The slave's stream to the master: connects, sends hello and heartbeats, receives commands, and connects again.

Runs on the event loop and does no arithmetic and no disk work, so that a beat is never late because of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.messages import SlaveCommand, SlaveMessage
from dips.core.net.addresses import MasterAddresses
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import LOOK_S, newer_master, open_channel_aio, refused_from
from dips.core.net.keys import UsedKeys
from dips.core.net.security import Security
from dips.core.net.tls_probe import check_let_in, why_not_let_in
from dips.core.observe.failpoints import copies, failpoint
from dips.core.observe.logs import ChangeLogger
from dips.protos import slaves_pb2, slaves_pb2_grpc
from dips.slave.data_server import DataServer, resident_bytes
from dips.slave.shell import SlaveShell
from dips.slave.state import effects

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 0.5
"""Longest pause between two connects. A restarted master is found within it; a thousand slaves do not overload it."""

FIRST_COMMAND_S = 10.0
"""When the master sends no command for so long after hello, the slave connects again."""

NEWS_S = 0.5
"""Shortest interval between two beats that tell of refused connections, however many there are."""

RENEWED = "its keys were renewed: it attaches again with the new ones"
"""Before the master refuses the old ones, and while no push and no round would have to begin again."""

FOR_GOOD = frozenset(
    {
        RefusalCode.PROTOCOL_VERSION,
        RefusalCode.RUN_ID,
        RefusalCode.NOT_LOOPBACK,
        RefusalCode.IDENTITY,
        RefusalCode.KEY,
        RefusalCode.CONFIG,
        RefusalCode.UNKNOWN_NAME,
        RefusalCode.NAME_TAKEN,
    }
)
"""Refusals that connecting again cannot cure, unless they name a time to retry: the slave ends with the sentence for
the operator."""

log = logging.getLogger("dips.slave")

Attachment = grpc.aio.StreamStreamCall[slaves_pb2.SlaveMessage, slaves_pb2.SlaveCommand]


class Control:
    """Keeps the stream to the master ("host:port", or several with commas). run() never returns; it raises Refused when
    the master refuses this slave permanently."""

    def __init__(self, master: str, security: Security, shell: SlaveShell, data: DataServer) -> None:
        self._addresses = MasterAddresses(master)
        self._security = security
        self._used = UsedKeys(security)
        self._shell = shell
        self._data = data
        self._changes = ChangeLogger(log)
        self._up: asyncio.Queue[SlaveMessage] = asyncio.Queue()
        self._call: Attachment | None = None
        self._welcomed = self._attached = False
        self._reported_refused = 0
        self._saved = asyncio.Event()
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        shell.send = self._send
        shell.close_link = self._close_link
        shell.saved = self._saved.set

    async def run(self) -> None:
        """Attach, and attach again, until cancelled."""
        await asyncio.to_thread(check_let_in, self._addresses.now, self._security)
        wait_s = FIRST_WAIT_S
        while True:
            master = self._addresses.now
            # A new channel for each stream: keys that were renewed meanwhile are used from the next one on.
            async with open_channel_aio(master, self._security) as channel:
                why = await self._attach(slaves_pb2_grpc.SlavesStub(channel))
            if not self._welcomed:
                why = await asyncio.to_thread(why_not_let_in, master, self._security) or why
            level = "INFO" if why == RENEWED else "WARNING"
            if self._attached:
                self._addresses.answered()
            if self._attached or not self._addresses.leave(master, why):
                self._changes.report("link", f"no stream to the master at {master}: {why}", level)
            wait_s = FIRST_WAIT_S if self._welcomed else min(LONGEST_WAIT_S, wait_s * 2)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _attach(self, stub: slaves_pb2_grpc.SlavesStub) -> str:
        """One stream, from hello to its end. Returns why it ended."""
        self._up = asyncio.Queue()
        self._welcomed, self._closing = False, asyncio.get_running_loop().create_future()
        self._used = UsedKeys(self._security)
        self._call = call = stub.Attach()
        self._shell.handle(effects.Linked())
        work = [self._write(call), self._beat(), *([self._look()] if self._addresses.several else [])]
        helpers = [asyncio.create_task(each) for each in work]
        for helper in helpers:
            helper.add_done_callback(self._shell.reap)  # without them the slave would seem well, or dead
        why = "the master ended it"
        try:
            failpoint("slave.link.before_attach")
            async with asyncio.timeout(FIRST_COMMAND_S):
                message = await self._next(call)
            while isinstance(message, slaves_pb2.SlaveCommand):
                self._welcomed = True
                for _ in range(copies(failpoint("slave.link.after_receive"))):
                    self._shell.handle(from_message(message, SlaveCommand))
                if self._shell.state.link.attached:
                    self._changes.report("link", f"attached to the master at {self._addresses.now}")
                message = await self._next(call)
        except grpc.RpcError as error:
            why = self._judge(error)
        except (Refused, RetryLater) as refused:
            why = str(refused)
        except TimeoutError:
            why = f"no command was received for {FIRST_COMMAND_S:g} s after hello"
        except OSError as error:
            why = f"the stream failed on this side: {error.strerror}"
        finally:
            self._call = None
            self._attached = self._shell.state.link.attached
            for helper in helpers:
                helper.cancel()
            call.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            self._shell.handle(effects.Unlinked(why))
        return why

    def _judge(self, error: grpc.RpcError) -> str:
        """Why a stream ended. Raises Refused when connecting again is useless."""
        meaning = refused_from(error)
        if isinstance(meaning, RetryLater):
            return str(meaning)
        if meaning.code is RefusalCode.IDENTITY and self._used.renewed:
            return f"{meaning.sentence} (they were renewed meanwhile)"
        if meaning.code in FOR_GOOD and not meaning.retry_after_s > 0:
            raise meaning
        if meaning.code is RefusalCode.FENCED:
            self._shell.handle(effects.Fenced())
        return meaning.sentence

    async def _next(self, call: Attachment) -> object:
        """The next command, or the end. Raises RetryLater when the state machine closes this stream."""
        if self._closing.done():
            raise RetryLater(self._closing.result())
        failpoint("slave.link.before_receive")
        reading = asyncio.ensure_future(call.read())
        try:
            either: list[asyncio.Future[Any]] = [reading, self._closing]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.done():
                raise RetryLater(self._closing.result())
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _write(self, call: Attachment) -> None:
        while True:
            message = await self._up.get()
            try:
                for _ in range(copies(failpoint("slave.link.before_send"))):
                    await call.write(to_message(message))  # type: ignore[arg-type]
                failpoint("slave.link.after_send")
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the reader gets the reason
            except OSError as error:
                self._close_link(f"nothing can be sent: {error.strerror}")
                return

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            welcome = self._shell.state.link.welcome
            due_s = loop.time() + (welcome.settings.heartbeat_s if welcome is not None else FIRST_WAIT_S)
            # Early when the data port refused a connection, so that the master's log has it within a second, and when a
            # version is on the disk: with durability async the next rounds may wait for that.
            while (left_s := due_s - loop.time()) > 0 and not self._saved.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._saved.wait(), min(NEWS_S, left_s))
                if self._used.renewed and self._shell.state.between_rounds:
                    self._close_link(RENEWED)
                if self._data.figures.beat.refused_connections != self._reported_refused:
                    break
            self._saved.clear()
            self._shell.note_refusals()
            if self._shell.state.link.attached:
                durable, note = self._shell.state.shard.saving.durable, self._shell.starts
                beat = replace(
                    self._data.figures.beat, resident_bytes=resident_bytes(), durable=durable, note=note
                )  # fmt: skip
                self._reported_refused = beat.refused_connections
                self._send(SlaveMessage(self._shell.state.caller(), beat))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            caller = self._shell.state.caller()
            if await asyncio.to_thread(newer_master, self._addresses, self._security, caller):
                self._close_link("a standby has taken over")

    def _send(self, message: SlaveMessage) -> None:
        if self._call is not None:
            self._up.put_nowait(message)

    def _close_link(self, sentence: str) -> None:
        """End this stream, for the state machine."""
        if not self._closing.done():
            self._closing.set_result(sentence)
