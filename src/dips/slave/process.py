"""Starts the slave process's parts, serves, and stops them in an order that loses nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from functools import partial
from typing import Any

from dips.core.allocator import keep_freed_memory
from dips.core.clock import SystemClock
from dips.core.config import Loaded
from dips.core.errors import INTERRUPTED, TERMINATED, ConfigError, DipsError, of_disk
from dips.core.file_limit import raise_file_limit
from dips.core.files import share_with
from dips.core.net.addresses import format_address, is_elsewhere, is_loopback_endpoint, parse_address, split_addresses
from dips.core.net.keys import security_of
from dips.core.net.security import METRICS_FILE, Security
from dips.core.net.zmq_sockets import pair_for
from dips.core.observe import failpoints
from dips.core.observe.logs import configure_logging, say_last
from dips.core.observe.metrics import Families, disk_free_bytes
from dips.core.observe.metrics_server import LoopSnapshots, MetricsServer, serve_metrics
from dips.core.observe.tape import Tape
from dips.slave.config import SlaveConfig
from dips.slave.connections import ConnectionGuard
from dips.slave.control import Control
from dips.slave.data_server import DataServer, resident_bytes
from dips.slave.metrics import completed
from dips.slave.push_evidence import DIRECTORY, PushEvidence
from dips.slave.ring import Ring, SnapshotStore
from dips.slave.shell import SlaveShell
from dips.slave.state.slave import SlaveMachine

# ---- metrics serving -------------------------------------------------------------------------------------------------
#
# Connects a slave's shell, data port and connection guard to a metrics server, for as long as the slave serves.
#
# Scrapes run on the server's threads: the event loop makes its snapshot itself, the data port's thread has stored its
# latest one, and nothing else is shared.


async def serve_slave_metrics(
    config: SlaveConfig, security: Security, shell: SlaveShell, data: DataServer, guard: ConnectionGuard, ring: Ring
) -> MetricsServer | None:
    """Start a metrics server, if the settings ask for one. Raises ConfigError as MetricsServer does."""
    if config.metrics_listen is None:
        return None
    speed = await shell.measure_memory()
    snapshots = LoopSnapshots(asyncio.get_running_loop(), partial(shell.look, security))

    def collect() -> Families:
        gauges = {
            "memory_limit_bytes": config.memory_bytes,
            "resident_bytes": resident_bytes(),
            "budget_bytes": guard.limit_bytes,
            "disk_free_bytes": disk_free_bytes(config.directory),
            "snapshots": sum(info.committed for info in ring.infos()),
        }
        return completed(snapshots.take(), shell.counts, data.figures, gauges, speed)

    return serve_metrics(
        config,
        security,
        collect,
        role="slave",
        name=config.slave_id,
        run=config.run_id,
        file=config.directory / METRICS_FILE,
    )


# ---- process ---------------------------------------------------------------------------------------------------------


SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread holds the interpreter while others wait. The default of 5 ms would add up to 5 ms to each
chunk's answer whenever the event loop is at work; at 1 MiB chunks that would halve a fast link."""

log = logging.getLogger("dips.slave")


def run(config: SlaveConfig, loaded: Loaded[SlaveConfig] | None = None) -> int:
    """Serve until a signal or StopSlave. Returns the process's exit code; prints an error in one sentence on stderr.

    With `loaded` the settings are logged first, each with its source.
    0: the master no longer needs this slave. 143, 130: SIGTERM or SIGINT came before that. Others: DipsError.exit_code
    of the error that ended it.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    raise_file_limit()
    try:
        configure_logging("slave", config.slave_id, config.log_level, config.log_format)
        failpoints.install("slave", enabled=config.failpoints)
        share_with(config.files_group)
        if loaded is not None:
            log.info("settings:\n%s", loaded.describe())
        return asyncio.run(_until_signalled(config))
    except DipsError as error:
        say_last(str(error), f"dips slave {config.slave_id}")
        return error.exit_code


async def _until_signalled(config: SlaveConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    code = TERMINATED

    def on_signal(number: signal.Signals) -> None:
        nonlocal code
        code = INTERRUPTED if number is signal.SIGINT else TERMINATED
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return 0 if await serve(config, stop) else code


async def serve(config: SlaveConfig, stop: asyncio.Event) -> bool:
    """Serve until `stop` is set or the master sends StopSlave. Returns whether the master sent it.

    Raises the DipsError that ends the slave.
    """
    security = security_of(config, f"slave {config.slave_id}")
    clock = SystemClock()
    store = SnapshotStore(config.directory, config.run_id, config.slave_id, config.snapshots_kept)
    try:
        # A tape that was asked for is evidence, without which nothing is done; the one of its own accord is not.
        with Tape(config.tape_used, "slave", config.slave_id, clock, may_lose=config.tape is None) as tape:
            return await _serve(config, security, stop, store, tape, clock)
    finally:
        store.close()


async def _serve(
    config: SlaveConfig,
    security: Security,
    stop: asyncio.Event,
    store: SnapshotStore,
    tape: Tape,
    clock: SystemClock,
) -> bool:
    for problem in await asyncio.to_thread(store.scan):
        log.warning("%s", problem)
        tape.write("snapshot_skipped", "", reason=problem)
    curve, loop = pair_for(security), asyncio.get_running_loop()
    shell: SlaveShell  # made after the data port, whose endpoint it needs; the data thread starts after both
    data = DataServer(
        config.data_host,
        config.data_port,
        config.run_id,
        config.max_chunk_bytes,
        lambda event: loop.call_soon_threadsafe(shell.handle, event),
        lambda error: loop.call_soon_threadsafe(shell.fail, error),
        config.data_threads_used,
        curve=curve,
        cpu=config.data_cpu_used,
    )
    guard = metrics = None
    try:
        endpoint = _advertised(config, data.endpoint)
        state = SlaveMachine(
            config.run_id,
            config.slave_id,
            endpoint,
            config.memory_bytes,
            config.max_chunk_bytes,
            store.promise.epoch,
            store.ring.infos(),
            b"" if curve is None else curve.public,
            store.directory_id,
            config.snapshots_kept,
        )
        shell = SlaveShell(
            state,
            config.slave_id,
            config.memory_bytes,
            store,
            data,
            tape,
            clock,
            _push_evidence(config) if config.record_pushes else None,
            config.compute_threads,
            curve,
        )
        control = Control(config.master, security, shell, data)
        tape.write("started", "", endpoint=endpoint, pid=os.getpid(), snapshots=len(store.ring.infos()))
        log.info("run %s: data port %s, master %s", config.run_id, endpoint, config.master)
        # Before the kernels are compiled, so that the master can say what it waits for. What it commands meanwhile for
        # the data port, such as to load, is done once that runs.
        dialling = asyncio.create_task(control.run())
        try:
            await shell.warm_up()
            data.start()
            guard = ConnectionGuard(data, config.memory_bytes)
            guard.start()
            metrics = await serve_slave_metrics(config, security, shell, data, guard, store.ring)
            return await _until_ended(shell, dialling, stop, tape)
        finally:
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)
            if metrics is not None:
                metrics.stop()
            if guard is not None:
                guard.stop()
            data.stop()  # before the shell, which its thread calls
            await shell.close()
    finally:
        data.stop()


def _advertised(config: SlaveConfig, bound: str) -> str:
    """The endpoint that clusters connect to. Raises ConfigError if they certainly cannot reach it."""
    endpoint = bound
    if config.advertise:
        host, port = parse_address(config.advertise, "advertise")
        endpoint = f"tcp://{format_address(host, port or parse_address(bound)[1])}"
    elsewhere = [master for master in split_addresses(config.master) if is_elsewhere(master)]
    if is_loopback_endpoint(endpoint) and elsewhere:
        raise ConfigError(
            f"clusters would connect to this slave at {endpoint}, which only this machine reaches, and the master at "
            f"{elsewhere[0]} is another machine: give data_host an address of this machine that they reach, or give "
            "advertise"
        )
    return endpoint


def _push_evidence(config: SlaveConfig) -> PushEvidence:
    try:
        return PushEvidence(config.directory, config.run_id, config.slave_id)
    except OSError as error:
        where = config.directory / DIRECTORY
        raise of_disk(error, f"{where} cannot be made: {error.strerror}; or leave record_pushes off") from error


async def _until_ended(shell: SlaveShell, dialling: asyncio.Task[None], stop: asyncio.Event, tape: Tape) -> bool:
    """Serve until the end. Returns whether the master no longer needs this slave."""
    stopped = asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[Any]] = [shell.ended, stopped, dialling]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if dialling.done():
            dialling.result()
        reason = shell.ended.result() if shell.ended.done() else "a signal"
        tape.write("stopped", "", reason=reason)
        log.info("stopped: %s", reason)
        return shell.ended.done()
    finally:
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
