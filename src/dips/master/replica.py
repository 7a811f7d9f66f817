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
import os
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from dips.core.clock import Clock
from dips.core.errors import INTERRUPTED, TERMINATED, ConfigError, FatalError, RefusalCode, Refused, RetryLater
from dips.core.files import is_locked
from dips.core.messages import JournalBatch, ReplicaMessage
from dips.core.net.grpc_calls import encode, from_message, open_channel_aio, refused_from, to_message
from dips.core.net.keys import UsedKeys, parse_certificate, security_of
from dips.core.net.security import Identity, Security
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger
from dips.core.protocol import OWN_HELLO, agree
from dips.master.archive import FILE_NAME, record_of
from dips.master.config import MasterConfig
from dips.master.directory import LOCK_NAME, read_address
from dips.master.journal import Journal, JournalReader, Retention, TookOver, replica_of
from dips.master.rpc import Context, refuse, service, understood
from dips.master.shell import MasterShell
from dips.master.state.effects import Halt, ReplicaNews
from dips.master.state.slaves import NEWER_EPOCH_EXIT
from dips.protos import replicas_pb2_grpc

PROCESS_ID = secrets.token_bytes(8)

MAX_BATCH_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


class Replica:
    """The replica of one master's journal. Make it in the event loop. `wrote` is for the journal's thread."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        wanted: bool,
        limit_s: float,
        most_bytes: int,
        clock: Clock,
        process_id: bytes = PROCESS_ID,
    ) -> None:
        """wanted: whether decisions wait for it, each at most limit_s. most_bytes: of a message. process_id: of the
        master, which may have been a standby."""
        self._directory, self._run_id, self._process_id = directory, run_id, process_id
        self._wanted, self._limit_s, self._clock = wanted, limit_s, clock
        self._batch_bytes = min(MAX_BATCH_BYTES, most_bytes // 4)
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._shell: MasterShell | None = None
        self._epoch = 0
        self._follower = b""  # the process that follows now, and the end of its stream
        self._superseded: asyncio.Future[None] | None = None
        self._told: str | None = None
        self._changes = ChangeLogger(_logger)
        self.replaced_by = ""
        """The standby that has taken over, for people; empty: none."""
        # What follows is also read on the journal's thread.
        self._changed = threading.Condition()
        self._in_step = False
        self._written = self._acknowledged = self._whole = 0
        self._time_outs = 0  # in a row

    # ---- the journal's thread ----

    def wrote(self, number: int) -> None:
        """Records up to this one are durable here. Returns once they are on the replica's disk, if decisions wait for
        it and it keeps up, at the latest as its stream ends. Each time-out in a row halves the wait: a slow replica is
        not to slow each decision.
        """
        with self._changed:
            until_s = self._clock.monotonic_s() + self._limit_s / 2 ** min(self._time_outs, 10)
            self._written = max(self._written, number)
            self._loop.call_soon_threadsafe(self._more.set)
            while self._wanted and self._in_step and self._acknowledged < number:
                left_s = until_s - self._clock.monotonic_s()
                if left_s <= 0:
                    self._in_step, self._time_outs = False, self._time_outs + 1
                    self._loop.call_soon_threadsafe(self._tell)
                    return
                self._changed.wait(left_s)
            if self._acknowledged >= number:
                self._time_outs = 0

    # ---- the event loop ----

    def serve(self, shell: MasterShell, epoch: int, number: int) -> grpc.GenericRpcHandler:
        """The handler of dips.v1.Replicas for this epoch, at whose begin the newest record is `number`."""
        self._shell, self._epoch, self._told = shell, epoch, None
        with self._changed:
            self._written = number
        self._tell()

        async def follow(messages: AsyncIterator[bytes], context: Context) -> None:
            try:
                await self._follow(shell, messages, context)
            except Refused as refused:
                await refuse(shell, "Follow", context, refused)

        return service("Replicas", {"Follow": grpc.stream_stream_rpc_method_handler(follow)})

    async def _follow(self, shell: MasterShell, messages: AsyncIterator[bytes], context: Context) -> None:
        data = await anext(messages, None)
        if data is None:
            return
        first = understood(shell, "Follow", data, ReplicaMessage)
        self._check_run(first)
        if first.epoch:
            if first.process_id != self._process_id:
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
                    # The reader may see a record before wrote() is called.
                    self._whole = self._written = max(self._written, first.number)
                self._heard(first.number)
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
            if number > self._written:
                raise Refused(
                    RefusalCode.MALFORMED,
                    f"the standby acknowledges record {number}, and the newest is {self._written}",
                )
            self._acknowledged = number
            self._in_step = self._in_step or number >= self._whole
            self._changed.notify_all()
        self._tell()

    async def _send(
        self, reader: JournalReader, thread: ThreadPoolExecutor, first: ReplicaMessage, context: Context
    ) -> None:
        number, digest = first.number, first.digest
        while True:
            self._more.clear()
            batch = await self._loop.run_in_executor(thread, reader.after, number, digest, self._batch_bytes)
            if batch.records:
                failpoint("master.replica.before_send")
                number = batch.after + len(batch.records)
                digest = record_of(self._directory / FILE_NAME, batch.records[-1]).digest
                with self._changed:
                    self._written = max(self._written, number)
                    self._whole = number if batch.is_whole else self._whole
                await context.write(encode(batch))
            if batch.is_whole:
                await self._more.wait()

    def _lost(self, shell: MasterShell, why: str) -> None:
        self._follower, self._superseded = b"", None
        with self._changed:
            self._in_step = False
            self._changed.notify_all()
        if not shell.outcome.done():
            self._changes.report("standby", f"no standby follows the journal: {why}", logging.WARNING)
        self._tell()

    def _tell(self) -> None:
        """Reports to the state what is wrong with a replica that decisions are to wait for."""
        if not self._wanted or self._in_step:
            trouble = ""
        elif self._follower:
            trouble = "the standby has not all decisions yet: the newest are in this master's journal alone"
        else:
            trouble = "no standby follows: decisions are in this master's journal alone"
        if self._shell is not None and trouble != self._told:
            self._told = trouble
            self._shell.dispatch(ReplicaNews(trouble))


# ---- the standby -----------------------------------------------------------------------------------------------------
#
# A standby: keeps a replica of a master's journal on another host, and takes over when a person asks it to.
#
# Taking over is a start of the master on the replica's directory: it begins a newer epoch, which slaves promise, so
# that the other master can publish nothing more, whether it hears of this or not. A standby serves nothing before that,
# and must never take over by itself: it cannot know whether the master is dead or only out of its reach.


TAKE_OVER = signal.SIGUSR1

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 1.0
"""Pause between two tries to reach the master."""

REPLACED_PAUSE_S = 5.0
"""Likewise, to reach one that was taken over from: it may come back after days."""

ASKED_S = 60.0
"""A standby that has not taken over so long after it was asked to will hardly do so."""

FOR_GOOD = frozenset({RefusalCode.PROTOCOL_VERSION, RefusalCode.RUN_ID, RefusalCode.CONFIG, RefusalCode.IDENTITY})
"""Refusals that another try cannot cure."""

_changes = ChangeLogger(_logger)


def check_may_serve(config: MasterConfig, journal: Journal) -> None:
    """Raises ConfigError when no master may be started with this journal: a replica is for one that takes over, and one
    that was taken over from serves no more."""
    if config.take_over and not (journal.replica_of or journal.took_over):
        raise ConfigError(
            f"{config.directory} holds no replica of a journal: give --take-over with the directory of a standby that "
            "has followed the master, or leave it out"
        )
    if journal.replica_of and not config.take_over:
        raise ConfigError(
            f"{config.directory} holds a replica of the journal of the master at {journal.replica_of}: give --standby "
            f"{journal.replica_of} to go on following it, or --take-over to let this one serve the run instead"
        )
    if journal.replaced and not config.rebuild:
        raise ConfigError(
            f"the master of {config.directory} was replaced by {journal.replaced}: start a standby of that one here, "
            "with an empty directory; should that one be lost, --rebuild takes the run from the slaves"
        )


def ask_standby(directory: Path) -> bool:
    """Asks the standby that keeps the replica in this directory to take over, and waits until it serves.

    False: no process has the directory. Raises ConfigError when it cannot be asked, or does not take over.
    """
    if not (directory / LOCK_NAME).exists() or not is_locked(directory, LOCK_NAME) or not replica_of(directory):
        return False
    try:
        pid = int((directory / LOCK_NAME).read_text())
        if b"--standby" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            raise ProcessLookupError
        os.kill(pid, TAKE_OVER)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the standby that has {directory} cannot be asked from here: type this where it runs (on its host, in its "
            "container), as its user; or end it first"
        ) from error
    _logger.info("the standby, process %d, was asked to take over", pid)
    until_s = time.monotonic() + ASKED_S
    while time.monotonic() < until_s and _lives(pid):
        found = read_address(directory)
        if found is not None and found.pid == pid:
            _logger.info("it serves run %s at %s, epoch %d", found.run_id, found.address, found.epoch)
            return True
        time.sleep(0.05)
    raise ConfigError(
        f"the standby, process {pid}, has not taken over: its log says why; once it has ended, the same command "
        "starts a master with its replica"
    )


def _lives(pid: int) -> bool:
    """Not: whether it has the directory, which is free for a moment while it becomes a master."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def stand_by(config: MasterConfig, master: str) -> int | None:
    """Follows the journal of the master at this address until this process is asked to take over (None), or to end (the
    exit code).

    Raises ConfigError when the directory cannot be used for this, Refused when the master never lets this standby
    follow, FatalError when the disk fails.
    """
    security = security_of(config, "the master")
    if isinstance(security, Identity) and not parse_certificate(security.cert_pem, "the certificate").dials:
        raise ConfigError(
            f"the keys in {security.directory} were made by an earlier release, for masters that dial no one: make new "
            "ones with `dips keys renew KEYS`, and give the standby a copy of the folder of the master's"
        )
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
    # Before the lock is taken: who finds it held may ask.
    for number in (TAKE_OVER, signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    journal: Journal | None = None
    try:
        journal = Journal.open(config.directory, config.run_id, Retention(config.journal_records, config.archive_bytes))
        if journal.took_over is not None and not journal.replaced:
            _logger.info("%s has taken over from %s: it goes on as the run's master", config.directory, master)
            return None
        if not journal.replica_of and journal.newest()[0]:
            raise ConfigError(
                f"{config.directory} holds a master's own journal, which no other one may replace: move it away and "
                "keep it for `dips verify`, and give the standby an empty directory"
            )
        return await _Standby(config, master, security, journal).run(asked)
    finally:
        for number in (TAKE_OVER, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        signal.signal(TAKE_OVER, signal.SIG_IGN)  # one that was sent twice
        if journal is not None:
            journal.close()


class _Standby:
    def __init__(self, config: MasterConfig, master: str, security: Security, journal: Journal) -> None:
        self._config, self._master, self._security, self._journal = config, master, security, journal
        self._has_some, self._whole_at = bool(journal.replica_of), ""

    async def run(self, asked: asyncio.Queue[signal.Signals]) -> int | None:
        following = asyncio.create_task(self._follow(), name="standby")
        try:
            while True:
                waiting = asyncio.create_task(asked.get())
                await asyncio.wait([waiting, following], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    following.result()  # raises
                number = waiting.result()
                if number is not TAKE_OVER:
                    _logger.info("%s: the standby ends", number.name)
                    return INTERRUPTED if number is signal.SIGINT else TERMINATED
                if self._has_some:
                    when = f"at {self._whole_at}" if self._whole_at else "before this start"
                    _logger.warning("takes over from %s; its last record came %s", self._master, when)
                    return None
                _logger.error("asked to take over, but nothing has come from the master at %s yet", self._master)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        """Follows, and follows again. Raises Refused for a refusal that another try cannot cure."""
        pause_s = FIRST_PAUSE_S
        while True:
            got_some = False
            used = UsedKeys(self._security)
            try:
                failpoint("master.replica.before_connect")
                async with open_channel_aio(self._master, self._security) as channel:
                    async for number in self._stream(channel):
                        got_some = True
                        _changes.report("master", f"follows the master at {self._master}")
                        _logger.debug("record %d is durable", number)
                why = "the master ended the stream"
            except grpc.RpcError as error:
                meaning = refused_from(error)
                renewed = used.renewed and isinstance(meaning, Refused) and meaning.code is RefusalCode.IDENTITY
                if isinstance(meaning, Refused) and meaning.code in FOR_GOOD and not (meaning.retry_after_s or renewed):
                    raise meaning from error
                why = str(meaning)
            except (OSError, asyncio.InvalidStateError) as error:  # the latter: it ended before the hello
                why = f"the stream failed on this side: {error}"
            finally:
                self._journal.forget_part()
            _changes.report("master", f"does not follow the master at {self._master}: {why}", logging.WARNING)
            pause_s = FIRST_PAUSE_S if got_some else min(MAX_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _stream(self, channel: grpc.aio.Channel) -> AsyncIterator[int]:
        """The number of the newest record, each time that the replica is whole on disk."""
        journal = self._journal
        call = replicas_pb2_grpc.ReplicasStub(channel).Follow()
        number, digest = journal.newest()
        await call.write(to_message(self._holds(number, digest)))
        while (message := await call.read()) is not grpc.aio.EOF:
            batch = from_message(message, JournalBatch)
            if await _to_its_end(journal.receive, batch, self._master):
                number, digest = journal.newest()
                self._has_some, self._whole_at = True, time.strftime("%Y-%m-%d %H:%M:%S %z")
                failpoint("master.replica.before_acknowledge")
                with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended: the next read says why
                    await call.write(to_message(self._holds(number, digest)))
                yield number
                await _to_its_end(journal.tidy)

    def _holds(self, number: int, digest: str) -> ReplicaMessage:
        return ReplicaMessage(OWN_HELLO, self._config.run_id, 0, PROCESS_ID, number, digest)


async def _to_its_end(work: Callable[..., bool], *arguments: object) -> bool:
    """Runs this on another thread. Who cancels the wait goes on once it has ended, too: the journal is for one thread
    at a time."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def tell_replaced(took_over: TookOver, run_id: str, security: Security, shell: MasterShell, epoch: int) -> None:
    """Tells the master that this one took over from to end, for as long as this one serves: the other may come back at
    any time. Ends this one where a later master answers."""
    master = took_over.master
    hello = to_message(ReplicaMessage(OWN_HELLO, run_id, epoch, PROCESS_ID, took_over.number, took_over.digest))
    while True:
        failpoint("master.replica.before_tell")
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            async with open_channel_aio(master, security) as channel:
                call = replicas_pb2_grpc.ReplicasStub(channel).Follow()
                try:
                    await call.write(hello)
                    await call.read()
                except grpc.RpcError as error:
                    meaning = refused_from(error)
                    if isinstance(meaning, Refused):
                        said = f"the master at {master}, from which this one took over: {meaning.sentence}"
                        _changes.report("replaced", said, logging.WARNING)
                        if meaning.code is RefusalCode.FENCED:
                            shell.stop(Halt(NEWER_EPOCH_EXIT, said))
        await asyncio.sleep(REPLACED_PAUSE_S)
