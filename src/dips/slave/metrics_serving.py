"""Connects a slave's shell, data port and connection guard to a metrics server, for as long as the slave serves.

Scrapes run on the server's threads: the event loop makes its snapshot itself, the data port's thread has stored its
latest one, and nothing else is shared.
"""

from __future__ import annotations

import asyncio

from dips.core.net.security import Security
from dips.core.observe.metrics import Families
from dips.core.observe.metrics_knobs import METRICS_FILE
from dips.core.observe.metrics_server import LoopSnapshots, MetricsServer, serve_metrics
from dips.slave.config import SlaveConfig
from dips.slave.connections import ConnectionGuard
from dips.slave.data_server import DataServer
from dips.slave.metrics_collector import Collector, DiskSizes, disk_free_bytes
from dips.slave.ring import Ring
from dips.slave.shell import SlaveShell


async def serve_slave_metrics(
    config: SlaveConfig, security: Security, shell: SlaveShell, data: DataServer, guard: ConnectionGuard, ring: Ring
) -> MetricsServer | None:
    """Start a metrics server, if the settings ask for one. Raises ConfigError as MetricsServer does."""
    if config.metrics_listen is None:
        return None
    speed = await shell.measure_memory()
    collector = Collector(config.slave_id, config.memory_bytes, speed, security)
    snapshots = LoopSnapshots(asyncio.get_running_loop(), shell.look)

    def collect() -> Families:
        infos = ring.infos()
        committed = sum(info.committed for info in infos)
        sizes = DiskSizes(guard.memory_bytes(), guard.limit_bytes, disk_free_bytes(config.directory), committed)
        return collector.families(snapshots.take(), data.figures(), sizes)

    return serve_metrics(
        config,
        security,
        collect,
        role="slave",
        name=config.slave_id,
        run=config.run_id,
        file=config.directory / METRICS_FILE,
    )
