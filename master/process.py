"""One master from its journal to its end: bind, begin an epoch, serve, stop cleanly.

It must never serve before its epoch is durable, and never leave without writing down what it decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError
from dips.core.net import format_address, parse_address
from dips.core.telemetry import Tape
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME, MasterAddress, remove_address, write_address
from dips.master.executor import Executor, Outcome, StateMachine
from dips.master.journal import Journal
from dips.master.server import MasterServer
from dips.master.state.run_config import RunConfig

TICKS_PER_HEARTBEAT = 4
"""The state notices a pause of this process when a tick is late by half a heartbeat: two ticks."""

MakeMachine = Callable[[RunConfig, int, str | None, float], StateMachine]
"""(settings, epoch, newest snapshot, Unix time minus monotonic time) -> the state machine of this epoch."""

Started = Callable[[MasterAddress, Executor], None]

_logger = logging.getLogger(__name__)


async def serve(
    config: MasterConfig,
    make_machine: MakeMachine,
    clock: Clock | None = None,
    started: Started | None = None,
) -> Outcome:
    """Run one master in the running event loop; `started` is told once it answers.

    Ends upon Halt, an error of the state machine, SIGTERM or SIGINT (signals in the main thread only). Raises
    ConfigError (a directory, run id or port that cannot be used) and FatalError (a damaged journal) before
    anything is served.
    """
    clock = clock or SystemClock()
    journal = Journal.open(config.directory, config.run_id)
    try:
        with Tape(config.directory / TAPE_NAME, "master", config.run_id, clock) as tape:
            return await _Master(config, journal, tape, clock).serve(make_machine, started)
    finally:
        journal.close()


@dataclass(frozen=True)
class _Master:
    """What a master has before its epoch begins."""

    config: MasterConfig
    journal: Journal
    tape: Tape
    clock: Clock

    async def serve(self, make_machine: MakeMachine, started: Started | None) -> Outcome:
        server = MasterServer(self.config.max_message_bytes, self.config.max_clusters + self.config.slaves)
        try:
            address = self._bind(server)
            epoch = self.journal.begin_epoch()
            here = MasterAddress(address, self.config.run_id, os.getpid(), epoch)
            executor = self._executor(make_machine, epoch)
            with _signals_stop(executor):
                outcome = await self._serve(server, executor, here, started)
        finally:
            await server.stop()
        self.tape.write("master-ended", "-", exit_code=outcome.exit_code, sentence=outcome.sentence)
        return outcome

    def _bind(self, server: MasterServer) -> str:
        """Take the port: of port 0, the one of the last start if it is free, so that peers find us again."""
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

    def _executor(self, make_machine: MakeMachine, epoch: int) -> Executor:
        wall_offset_s = self.clock.wall_s() - self.clock.monotonic_s()
        snapshot_json = self.journal.latest_snapshot()
        return Executor(
            make_machine(self.config.to_run_config(), epoch, snapshot_json, wall_offset_s),
            lambda entries: self.journal.append_all(epoch, entries),
            self.tape,
            self.clock,
            self.config.heartbeat_s / TICKS_PER_HEARTBEAT,
        )

    async def _serve(
        self, server: MasterServer, executor: Executor, here: MasterAddress, started: Started | None
    ) -> Outcome:
        try:
            executor.start()
            await server.start(executor)
            with self._announced(here):
                if started is not None:
                    started(here, executor)
                return await executor.outcome
        finally:
            executor.stop(Outcome(1, "the master could not be started"))
            await server.stop()
            await executor.close()

    @contextlib.contextmanager
    def _announced(self, here: MasterAddress) -> Iterator[None]:
        """Tell people and other processes where the master is, for as long as it answers."""
        write_address(self.config.directory, here)
        self.tape.write("master-started", "-", address=here.address, epoch=here.epoch, pid=here.pid)
        _logger.info(
            "serving run %s at %s (epoch %d, directory %s); loopback only, as peers are not authenticated",
            *(here.run_id, here.address, here.epoch, self.config.directory),
        )
        try:
            yield
        finally:
            remove_address(self.config.directory)


@contextlib.contextmanager
def _signals_stop(executor: Executor) -> Iterator[None]:
    """While this lasts, SIGTERM and SIGINT end the master with exit code 0."""
    loop = asyncio.get_running_loop()
    added: list[signal.Signals] = []

    def stop(name: str) -> None:
        _logger.info("%s: the master ends", name)
        executor.stop(Outcome(0, f"stopped by {name}"))

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may; elsewhere (tests, embedding) nobody signals this loop.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, stop, number.name)
                added.append(number)
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)
