"""A replica of the journal on another host: this master sends it to a standby, and waits until it is on its disk too.

The standby dials, as all peers do, and says what it holds; records are read from the journal's file, so that one that
was away for a week and one that misses the newest record are served alike. A decision counts once it is durable here.
Where the settings ask for it, it counts only once the standby has it as well, as long as the standby keeps up: one that
is away, or late for the time of an eviction, is an alarm, and never holds the run up for longer. Never trusts a standby
with a decision: which master may publish is decided by the epochs that slaves promise (docs/protocol.md, fencing).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from dips.core.clock import Clock
from dips.core.errors import FatalError, RefusalCode, Refused, RetryLater
from dips.core.messages import JournalBatch, ReplicaMessage
from dips.core.net.codec_protobuf import encode
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger
from dips.core.protocol import OWN_HELLO, agree
from dips.master.archive import FILE_NAME, record_of
from dips.master.journal import JournalReader
from dips.master.rpc import Context, refuse, service, understood
from dips.master.shell import MasterShell
from dips.master.state.effects import Halt, ReplicaNews
from dips.master.state.replication import Replication
from dips.master.state.slaves import NEWER_EPOCH_EXIT

PROCESS_ID = secrets.token_bytes(8)

MAX_BATCH_BYTES = 1 << 20

SIGN_S = 0.5
"""A standby to which nothing was sent for so long gets a sign that this master lives: a batch without records."""

_logger = logging.getLogger(__name__)


class Replica:
    """The replica of one master's journal. Make it in the event loop. `wrote` is for the journal's thread."""

    def __init__(
        self, directory: Path, run_id: str, *, wanted: bool, limit_s: float, most_bytes: int, clock: Clock
    ) -> None:
        """wanted: whether decisions wait for it, each at most limit_s. most_bytes: of a message."""
        self._directory, self._run_id = directory, run_id
        self._wanted, self._limit_s, self._clock = wanted, limit_s, clock
        self._batch_bytes = min(MAX_BATCH_BYTES, most_bytes // 4)
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._shell: MasterShell | None = None
        self._epoch = 0
        self._follower = b""  # the process that follows now, and the end of its stream
        self._superseded: asyncio.Future[None] | None = None
        self._told: str | None = None
        self._revoked = b""
        self._changes = ChangeLogger(_logger)
        self.replaced_by = ""
        """The standby that has taken over, for people; empty: none."""
        # What follows is also read on the journal's thread.
        self._changed = threading.Condition()
        self._standby = Replication(0, wanted=wanted, limit_s=limit_s)

    # ---- the journal's thread ----

    def wrote(self, number: int) -> None:
        """Records up to this one are durable here. Returns once they are on the replica's disk, if decisions wait for
        it and it keeps up, at the latest as its stream ends."""
        with self._changed:
            standby = self._standby
            was_in_step = standby.in_step
            until_s = standby.wrote(number, self._clock.monotonic_s())
            self._loop.call_soon_threadsafe(self._more.set)
            while left_s := standby.left_s(number, until_s, self._clock.monotonic_s()):
                self._changed.wait(left_s)
            if was_in_step and not standby.in_step:
                self._loop.call_soon_threadsafe(self._tell)

    # ---- the event loop ----

    def serve(self, shell: MasterShell, epoch: int, number: int) -> grpc.GenericRpcHandler:
        """The handler of dips.v1.Replicas for this epoch, at whose begin the newest record is `number`."""
        self._shell, self._epoch, self._told = shell, epoch, None
        with self._changed:
            self._standby = Replication(number, wanted=self._wanted, limit_s=self._limit_s)
        self._tell()

        async def follow(messages: AsyncIterator[bytes], context: Context) -> None:
            try:
                await self._follow(shell, messages, context)
            except Refused as refused:
                await refuse(shell, "Follow", context, refused)

        return service("Replicas", {"Follow": grpc.stream_stream_rpc_method_handler(follow)})

    def revoke(self, revoked_list: bytes) -> None:
        """The standby is to have this list of revoked certificates, too."""
        if revoked_list != self._revoked:
            self._revoked = revoked_list
            self._more.set()

    async def _follow(self, shell: MasterShell, messages: AsyncIterator[bytes], context: Context) -> None:
        data = await anext(messages, None)
        if data is None:
            return
        first = understood(shell, "Follow", data, ReplicaMessage)
        self._check_run(first)
        if first.epoch:
            if first.process_id != PROCESS_ID:
                await self._overtaken(shell, first)
            return
        self._check_standby(first)
        superseded: asyncio.Future[None] = self._loop.create_future()
        if self._superseded is not None:
            self._superseded.set_result(None)
        self._follower, self._superseded = first.process_id, superseded
        thread = ThreadPoolExecutor(1, "dips-replica")
        why = "it hung up"
        try:
            reader = await self._loop.run_in_executor(thread, JournalReader, self._directory, self._run_id)
            try:
                await self._loop.run_in_executor(thread, reader.check_place, first.number, first.digest)
                # Without the port, which is another one at each connection.
                self._changes.report("standby", f"a standby at {context.peer().rpartition(':')[0]} follows the journal")
                with self._changed:
                    self._standby.follows(first.number)
                self._tell()
                work = [
                    asyncio.ensure_future(self._hear(shell, messages)),
                    asyncio.ensure_future(self._send(reader, thread, first, context)),
                ]
                try:
                    ends_with: list[asyncio.Future[Any]] = [*work, superseded, shell.outcome]
                    await asyncio.wait(ends_with, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in work:
                        each.cancel()
                    ends = await asyncio.gather(*work, return_exceptions=True)
                for error in ends:
                    if isinstance(error, Refused | RetryLater | FatalError):
                        raise error
                    if isinstance(error, Exception):
                        why = f"{type(error).__name__}: {error}"
            finally:
                thread.submit(reader.close)
        except (FatalError, RetryLater) as error:
            why = str(error)
            raise Refused(RefusalCode.BUSY, f"the journal cannot be read now: {error}", retry_after_s=1.0) from error
        except Refused as refused:
            why = refused.sentence
            raise
        finally:
            thread.shutdown(wait=False)
            if self._superseded is superseded:
                self._lost(shell, why)

    def _check_run(self, first: ReplicaMessage) -> None:
        """Raises Refused for a process of another run, or of a release that no one here understands."""
        if first.run_id != self._run_id:
            raise Refused(
                RefusalCode.RUN_ID,
                f"the standby keeps a replica of run {first.run_id!r}, and this master serves {self._run_id!r}: check "
                "the master's address, or give the run's id",
            )
        agree(first.hello.protocol_min, first.hello.protocol_max, first.hello.capabilities, "the standby")

    def _check_standby(self, first: ReplicaMessage) -> None:
        """Raises Refused unless it may follow."""
        if first.hello.software != OWN_HELLO.software:
            raise Refused(
                RefusalCode.CONFIG,
                f"the standby runs {first.hello.software!r:.80} and this master {OWN_HELLO.software!r}: install the "
                "same release of dips on both",
            )
        if self._follower and self._follower != first.process_id:
            raise Refused(
                RefusalCode.NAME_TAKEN,
                "another standby follows this master's journal: stop one of the two; one that is dead is noticed "
                "within 20 s",
                retry_after_s=5.0,
            )

    async def _overtaken(self, shell: MasterShell, first: ReplicaMessage) -> None:
        """Ends this master where a standby has taken over, unless this one has taken over later. Raises Refused."""
        is_later = await asyncio.to_thread(self._holds, first.number, first.digest)
        if is_later or first.epoch < self._epoch:
            since = "has taken over since" if is_later else "is newer"
            raise Refused(
                RefusalCode.FENCED,
                f"the master here, in epoch {self._epoch}, {since}: one that took over in epoch {first.epoch} must end",
            )
        sentence = (
            f"a standby has taken over: it serves this run in epoch {first.epoch}, this master's was {self._epoch}, so "
            "this one ends"
        )
        self.replaced_by = f"the standby that serves the run in epoch {first.epoch}"
        shell.stop(Halt(NEWER_EPOCH_EXIT, sentence))
        _logger.critical("%s", sentence)
        raise Refused(RefusalCode.STOPPING, "the master here ends, as a standby has taken over")

    def _holds(self, number: int, digest: str) -> bool:
        with contextlib.closing(JournalReader(self._directory, self._run_id)) as reader:
            return reader.holds(number, digest)

    async def _hear(self, shell: MasterShell, messages: AsyncIterator[bytes]) -> None:
        failpoint("master.replica.before_hear")
        async for data in messages:
            self._heard(understood(shell, "Follow", data, ReplicaMessage).number)

    def _heard(self, number: int) -> None:
        with self._changed:
            self._standby.heard(number)
            self._changed.notify_all()
        self._tell()

    async def _send(
        self, reader: JournalReader, thread: ThreadPoolExecutor, first: ReplicaMessage, context: Context
    ) -> None:
        number, digest = first.number, first.digest
        is_first = True  # which tells the standby that it has all, also where nothing is new
        revoked = b""
        while True:
            self._more.clear()
            batch = await self._loop.run_in_executor(thread, reader.after, number, digest, self._batch_bytes)
            if self._revoked != revoked:
                revoked = self._revoked
                batch = replace(batch, revoked=revoked)
            if batch.records or is_first or batch.revoked:
                is_first = False
                failpoint("master.replica.before_send")
                number = batch.after + len(batch.records)
                if batch.records:
                    digest = record_of(self._directory / FILE_NAME, batch.records[-1]).digest
                with self._changed:
                    self._standby.sent(number, is_whole=batch.is_whole)
                await context.write(encode(batch))
            while batch.is_whole and not self._more.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), SIGN_S)
                    continue
                await context.write(encode(JournalBatch(number, digest, (), False, "", "", b"")))

    def _lost(self, shell: MasterShell, why: str) -> None:
        self._follower, self._superseded = b"", None
        with self._changed:
            self._standby.lost()
            self._changed.notify_all()
        if not shell.outcome.done():
            self._changes.report("standby", f"no standby follows the journal: {why}", logging.WARNING)
        self._tell()

    def _tell(self) -> None:
        """Reports to the state what is wrong with a replica that decisions are to wait for."""
        trouble = self._standby.trouble
        if self._shell is not None and trouble != self._told:
            self._told = trouble
            self._shell.dispatch(ReplicaNews(trouble))
