"""A standby: keeps a replica of a master's journal on another host, and takes over when a person asks it to.

Taking over is a start of the master on the replica's directory: it begins a newer epoch, which slaves promise, so that
the other master can publish nothing more, whether it hears of this or not. A standby serves nothing before that. It
takes over by itself only with a lease (lease.py): it cannot know whether the master is dead or only out of its reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import grpc

from dips.core.clock import SystemClock
from dips.core.errors import INTERRUPTED, TERMINATED, ConfigError, RefusalCode, Refused
from dips.core.files import is_locked
from dips.core.messages import JournalBatch, ReplicaMessage
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import open_channel_aio, refused_from
from dips.core.net.keys import REVOKED_FILE, UsedKeys, add_revoked, parse_certificate, security_of
from dips.core.net.security import Identity, Security
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger
from dips.core.protocol import OWN_HELLO
from dips.master.config import MasterConfig
from dips.master.directory import LOCK_NAME, read_address
from dips.master.journal import Journal, Retention, TookOver, replica_of
from dips.master.lease import Lease
from dips.master.metrics import Metrics
from dips.master.replica import PROCESS_ID, SIGN_S
from dips.master.shell import MasterShell
from dips.master.state.effects import Halt
from dips.master.state.replication import REPLACED_PAUSE_S
from dips.master.state.slaves import NEWER_EPOCH_EXIT
from dips.protos import replicas_pb2_grpc

TAKE_OVER = signal.SIGUSR1

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 1.0
"""Pause between two tries to reach the master."""

ASKED_S = 60.0
"""A standby that has not taken over so long after it was asked to will hardly do so."""

FOR_GOOD = frozenset({RefusalCode.PROTOCOL_VERSION, RefusalCode.RUN_ID, RefusalCode.CONFIG, RefusalCode.IDENTITY})
"""Refusals that another try cannot cure."""

_logger = logging.getLogger(__name__)
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
    """Follows the journal of the master at this address until this process is asked to take over or has taken the lease
    (None), or is asked to end (the exit code).

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
        with Metrics(config.max_clusters).served(config, security, SystemClock(), follows=True):
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
        self._lost_s = -math.inf
        self._heard_s = 0.0

    async def run(self, asked: asyncio.Queue[signal.Signals]) -> int | None:
        lease = Lease.of(self._config, SystemClock())
        following = asyncio.create_task(self._follow(), name="standby")
        taking = None if lease is None else asyncio.create_task(lease.take(self._lost), name="lease")
        work = [following, *([] if taking is None else [taking])]
        try:
            while True:
                waiting = asyncio.create_task(asked.get())
                await asyncio.wait([waiting, *work], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    if taking is not None and taking.done():
                        return None if taking.result() else 0
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
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def _lost(self) -> float:
        """As Lease.take() has it. A connection to a host that was cut off lasts for 20 s, so silence counts as well."""
        is_silent = self._lost_s == math.inf and time.monotonic() - self._heard_s > 2 * SIGN_S
        return self._heard_s if is_silent else self._lost_s

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
                _logger.debug("the stream: %s", meaning)
                # Each try finds other words for a master that is away.
                why = str(meaning) if isinstance(meaning, Refused) else "it does not answer"
            except (OSError, asyncio.InvalidStateError) as error:  # the latter: it ended before the hello
                why = f"the stream failed on this side: {error}"
            finally:
                self._journal.forget_part()
                if self._lost_s == math.inf:
                    self._lost_s = time.monotonic()
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
            batch, self._heard_s = from_message(message, JournalBatch), time.monotonic()
            if not (batch.is_whole or batch.records):
                continue  # the master lives
            if not batch.is_whole:
                self._lost_s = -math.inf
            if batch.revoked and isinstance(self._security, Identity):
                await asyncio.to_thread(self._revoke, batch.revoked, self._security)
            if await _to_its_end(journal.receive, batch, self._master):
                number, digest = journal.newest()
                self._lost_s = math.inf
                self._has_some, self._whole_at = True, time.strftime("%Y-%m-%d %H:%M:%S %z")
                failpoint("master.replica.before_acknowledge")
                with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended: the next read says why
                    await call.write(to_message(self._holds(number, digest)))
                yield number
                await _to_its_end(journal.tidy)

    def _revoke(self, revoked_list: bytes, identity: Identity) -> None:
        """Adds the certificates of the master's list to that of this process, which reads it once it serves."""
        file = self._config.revoked or identity.directory / REVOKED_FILE
        try:
            if add_revoked(file, revoked_list, datetime.now(UTC)):
                _logger.info("%s has all certificates that the master's list revokes", file)
        except (ConfigError, OSError) as error:
            said = f"the master's list of revoked certificates is not in {file}: {error}: copy it there"
            _changes.report("revoked", said, logging.WARNING)

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
