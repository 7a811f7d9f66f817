"""Runs one master: binds the port, begins an epoch in the journal, serves, stops cleanly.

It must never serve before its epoch is durable, and never end without writing what it decided. When the state
machine asks for a later epoch, a new state machine is made from the journal in the same process and on the same port,
as if the process had been started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dips.core.allocator import keep_one_heap
from dips.core.clock import Clock, SystemClock
from dips.core.config import Loaded
from dips.core.errors import INTERRUPTED, TERMINATED, ConfigError
from dips.core.file_limit import raise_file_limit
from dips.core.files import share_with
from dips.core.net.addresses import dialable, format_address, parse_address, shown_listening
from dips.core.net.keys import security_of
from dips.core.net.security import Identity, Role, Security
from dips.core.observe.failpoints import install
from dips.core.observe.logs import configure_logging
from dips.core.observe.tape import Tape
from dips.master.access import LOOK_S, Access
from dips.master.config import MasterConfig
from dips.master.directory import ADDRESS_NAME, TAPE_NAME, MasterAddress, remove_file, write_address
from dips.master.journal import Journal, Retention
from dips.master.lease import Lease
from dips.master.metrics import Metrics
from dips.master.page.history import BufferedTape
from dips.master.replica import Replica
from dips.master.rpc import MasterServer
from dips.master.shell import MasterShell, StateMachine
from dips.master.standby import ask_standby, check_may_serve, stand_by, tell_replaced
from dips.master.state.effects import BeginAgain, Halt, WriteJournal
from dips.master.state.master import MasterMachine
from dips.master.state.shared import RunConfig

if TYPE_CHECKING:
    from dips.master.page.server import Page

TICKS_PER_HEARTBEAT = 4
"""The state notices a pause of this process when a tick is late by half a heartbeat: two ticks."""

MakeMachine = Callable[[RunConfig, int, str | None, float], StateMachine]
"""(settings, epoch, newest snapshot, Unix time minus monotonic time) -> the state machine of this epoch."""

Started = Callable[[MasterAddress, MasterShell], None]

_logger = logging.getLogger(__name__)


async def serve(
    config: MasterConfig,
    make_machine: MakeMachine,
    clock: Clock | None = None,
    started: Started | None = None,
) -> Halt:
    """Runs one master in the running event loop; `started` is called once it answers.

    Ends upon Halt, an error of the state machine, SIGTERM or SIGINT (signals in the main thread only); BeginAgain
    begins another epoch, and `started` is called again. Raises ConfigError (a directory, run id or port that cannot be
    used, settings that do not fit the run) and FatalError (a damaged journal) before anything is served.
    """
    clock = clock or SystemClock()
    security = security_of(config, "the master")
    if isinstance(security, Identity) and security.role is not Role.MASTER:
        raise ConfigError(f"{security.directory} holds the keys of {security}: give the master keys of role master")
    access = Access(security, config.revoked)
    retention = Retention(config.journal_records, config.archive_bytes)
    journal = Journal.open(config.directory, config.run_id, retention)
    try:
        check_may_serve(config, journal)
        lease = Lease.of(config, clock)
        if lease is not None:
            await lease.claim(by_person=config.take_over and bool(journal.replica_of))
        kind = Tape if config.page_listen is None else BufferedTape
        with (
            kind(config.directory / TAPE_NAME, "master", config.run_id, clock) as tape,
            _page(config, security, clock, tape) as page,
        ):
            metrics = Metrics(config.max_clusters)
            replica = Replica(
                config.directory,
                config.run_id,
                wanted=config.journal_replicas > 0,
                limit_s=config.evict_after_beats * config.heartbeat_s,
                most_bytes=config.max_message_bytes,
                clock=clock,
            )
            master = _Master(config, security, access, journal, tape, clock, replica, lease, page, metrics)
            return await master.serve(make_machine, started)
    finally:
        journal.close()


@dataclass(frozen=True)
class _Master:
    """The parts of a master that outlive an epoch."""

    config: MasterConfig
    security: Security
    access: Access
    journal: Journal
    tape: Tape
    clock: Clock
    replica: Replica
    lease: Lease | None
    page: Page | None = None
    metrics: Metrics = field(default_factory=Metrics)

    async def serve(self, make_machine: MakeMachine, started: Started | None) -> Halt:
        peers = self.config.max_clusters + self.config.slaves
        server = MasterServer(self.config.max_message_bytes, peers, self.security, self.access)
        try:
            address = self._bind(server)
            with _signals() as signals, self.metrics.served(self.config, self.security, self.clock):
                outcome: Halt | BeginAgain = BeginAgain(0, "the first epoch begins")
                while isinstance(outcome, BeginAgain):
                    shell, here = self._begin(make_machine, address, outcome.at_least)
                    signals.stop_also(shell)
                    outcome = await self._serve(server, shell, here, started)
                    await asyncio.sleep(0)  # lets signals and hang-ups be handled, however short an epoch was
        finally:
            await server.stop()
            remove_file(self.config.directory / ADDRESS_NAME)
        self.tape.write("master-ended", "-", exit_code=outcome.exit_code, sentence=outcome.sentence)
        return outcome

    def _begin(self, make_machine: MakeMachine, address: str, at_least: int) -> tuple[MasterShell, MasterAddress]:
        """Makes an epoch durable, and its state machine from the journal's newest snapshot."""
        config = replace(self.config.to_run_config(), takes_over=bool(self.journal.replica_of))
        epoch = self.journal.begin_epoch(at_least)
        self._note_journal()
        wall_offset_s = self.clock.wall_s() - self.clock.monotonic_s()
        snapshot_json = self.journal.latest_snapshot()
        machine = make_machine(config, epoch, snapshot_json, wall_offset_s)
        self.metrics.shared = machine.shared

        def append(entries: Sequence[WriteJournal]) -> None:
            self.journal.append_all(epoch, entries)
            self.replica.wrote(self._note_journal())

        shell = MasterShell(
            machine,
            self.metrics.counts.timed(append),
            self.tape,
            self.clock,
            self.config.heartbeat_s / TICKS_PER_HEARTBEAT,
            self.journal.tidy,
            self.metrics.counts,
        )
        return shell, MasterAddress(dialable(address), self.config.run_id, os.getpid(), epoch)

    def _note_journal(self) -> int:
        """Writes the journal's newest record to the tape, so that a lost end or another history is detected; returns
        its number."""
        number, digest = self.journal.newest()
        self.tape.write("journaled", "-", number=number, digest=digest)
        return number

    def _bind(self, server: MasterServer) -> str:
        """Binds the port; for port 0, that of the last start if it is free, so that peers find the master again."""
        host, port = parse_address(self.config.listen)
        last_port = self.journal.last_port()
        if port == 0 and last_port:
            try:
                return server.bind(format_address(host, last_port))
            except ConfigError:
                _logger.warning("port %d of the last start is taken: peers need the new address", last_port)
        address = server.bind(self.config.listen)
        self.journal.remember_port(parse_address(address)[1])
        return address

    async def _serve(
        self, server: MasterServer, shell: MasterShell, here: MasterAddress, started: Started | None
    ) -> Halt | BeginAgain:
        try:
            newest, _ = self.journal.newest()  # before the shell's first entries are written on another thread
            shell.start()
            await server.start(shell, self.replica.serve(shell, here.epoch, newest))
            # Publishes the master's address for people and other processes.
            write_address(self.config.directory, here)
            # Not the configuration's: a run keeps the preset that it was begun with.
            about = {"run_id": here.run_id, "settings": shell.machine.shared.settings()}
            self.tape.write("master-started", "-", address=here.address, epoch=here.epoch, pid=here.pid, **about)
            if isinstance(self.security, Identity):
                callers = f"for those with keys only, as {self.security}"
            else:
                callers = "INSECURE, as configured: no encryption, no authentication, loopback only"
            _logger.info(
                "serving run %s at %s (epoch %d, directory %s); %s",
                here.run_id,
                shown_listening(self.config.listen, here.address),
                here.epoch,
                self.config.directory,
                callers,
            )
            if started is not None:
                started(here, shell)
            with contextlib.ExitStack() as meanwhile:
                if self.page is not None:
                    meanwhile.enter_context(_with_task(self.page.follow(shell), "status page"))
                if (took_over := self.journal.took_over) is not None:
                    told = tell_replaced(took_over, self.config.run_id, self.security, shell, here.epoch)
                    meanwhile.enter_context(_with_task(told, "take-over"))
                if self.lease is not None:
                    meanwhile.enter_context(_with_task(self.lease.keep(shell), "lease"))
                # Waits for the end, and reports revoked certificates to the state until then.
                while not shell.outcome.done():
                    await asyncio.wait([shell.outcome], timeout=LOOK_S if self.access.checks else None)
                    for revoked in self.access.look():
                        shell.dispatch(revoked)
                    self.replica.revoke(self.access.revoked_list)
                outcome = shell.outcome.result()
            if isinstance(outcome, Halt):
                remove_file(self.config.directory / ADDRESS_NAME)
                if self.lease is not None and outcome.exit_code == 0:
                    await self.lease.end()
            return outcome
        finally:
            shell.stop(Halt(1, "the master could not be started"))
            if isinstance(shell.outcome.result(), Halt):
                await server.stop()
            await shell.close()
            if self.replica.replaced_by:
                self.journal.note_replaced(self.replica.replaced_by)


@contextlib.contextmanager
def _with_task(work: Coroutine[Any, Any, None], name: str) -> Iterator[None]:
    """A context in which this goes on."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()


@contextlib.contextmanager
def _page(config: MasterConfig, security: Security, clock: Clock, tape: Tape) -> Iterator[Page | None]:
    """The status page, if one is configured, from before the first epoch to after the last."""
    if config.page_listen is None or not isinstance(tape, BufferedTape):
        yield None
        return
    from dips.master.page.server import Page  # aiohttp comes with the extra [master]

    page = Page(config, config.page_listen, security, tape.waiting, clock)
    try:
        yield page
    finally:
        page.close()


class _Signals:
    """Handles SIGTERM and SIGINT, which end the master in any epoch: with exit code 0 once the run is over, before that
    with 128 + the signal's number, so that a supervisor which did not send it starts the master again."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._shell: MasterShell | None = None

    def stop_also(self, shell: MasterShell) -> None:
        """Makes signals end this shell from now on, at once if one came already."""
        self._shell = shell
        self._stop()

    def rang(self, number: signal.Signals) -> None:
        _logger.info("%s: the master ends", number.name)
        self._signal = number
        self._stop()

    def _stop(self) -> None:
        if self._shell is None or self._signal is None:
            return
        over = self._shell.machine.shared.stopped_s is not None
        code = INTERRUPTED if self._signal is signal.SIGINT else TERMINATED
        self._shell.stop(Halt(0 if over else code, f"stopped by {self._signal.name}"))


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """A context in which signals are handled."""
    loop = asyncio.get_running_loop()
    signals, added = _Signals(), list[signal.Signals]()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may; elsewhere (tests, embedding) this loop gets no signals.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, signals.rang, number)
                added.append(number)
        yield signals
    finally:
        for number in added:
            loop.remove_signal_handler(number)


# ---- main ------------------------------------------------------------------------------------------------------------
#
# The entry point of a master's process. It never returns before all decisions of the master are written.


def run(config: MasterConfig, loaded: Loaded[MasterConfig] | None = None) -> int:
    """Serves the run until it ends or a signal comes; returns the exit code: 0 once the run is over, 143 or 130 for a
    signal before that.

    With `loaded` the settings are logged first, each with its source. Raises ConfigError (a directory, run id
    or port that cannot be used, or a failpoint that does not exist) and FatalError (a damaged journal) before
    anything is served.
    """
    raise_file_limit()
    keep_one_heap()
    configure_logging("master", config.run_id, config.log_level, config.log_format)
    install("master", enabled=config.failpoints)
    share_with(config.files_group)
    if config.take_over and ask_standby(config.directory):
        return 0
    if loaded is not None:
        _logger.info("settings:\n%s", loaded.describe())
    if config.standby is not None and not config.take_over:
        exit_code = asyncio.run(stand_by(config, config.standby))
        if exit_code is not None:
            return exit_code
        config = config.model_copy(update={"take_over": True})
    return asyncio.run(serve(config, MasterMachine)).exit_code
