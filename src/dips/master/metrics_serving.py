"""Ties a master's counts and its state to a server of metrics, for as long as the process serves.

Scrapes come on threads of the server's own; the state is looked at on the event loop, between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from dips.core.clock import Clock
from dips.core.net.security import Security
from dips.core.observe.metrics_knobs import METRICS_FILE
from dips.core.observe.metrics_server import LoopSnapshots, NotNow, serve_metrics, served
from dips.master.config import MasterConfig
from dips.master.metrics_collector import Collector, MetricsMoment, snapshot
from dips.master.metrics_counts import Counts
from dips.master.state.shared import SharedState


class Metrics:
    """Of one process, over all epochs that it serves. most_clusters bounds the labels."""

    def __init__(self, most_clusters: int = 8) -> None:
        self.counts = Counts(most_clusters)
        self._shared: SharedState | None = None

    def watch(self, machine: object) -> None:
        """This state machine is served from now on. One without a SharedState, as tests have them, shows nothing."""
        shared = getattr(machine, "shared", None)
        self._shared = shared if isinstance(shared, SharedState) else None

    def snapshot(self, now_s: float) -> MetricsMoment:
        """On the event loop. Raises NotNow before there is a state."""
        if self._shared is None:
            raise NotNow("the master has not begun its epoch yet")
        return snapshot(self._shared, self.counts, now_s)

    @contextlib.contextmanager
    def served(self, config: MasterConfig, security: Security, clock: Clock) -> Iterator[None]:
        """While this lasts scrapes are answered, if the settings ask for it. Raises ConfigError as MetricsServer."""
        collector = Collector(config.directory, security)
        snapshots = LoopSnapshots(asyncio.get_running_loop(), lambda: self.snapshot(clock.monotonic_s()))
        server = serve_metrics(
            config,
            security,
            lambda: collector.families(snapshots.take()),
            role="master",
            name="master",
            run=config.run_id,
            file=config.directory / METRICS_FILE,
            revoked=config.revoked,
        )
        with served(server):
            yield
