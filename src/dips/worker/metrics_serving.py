"""Ties a cluster's session to a server of metrics: what the driver tells goes into views, and scrapes read those."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dips.core.clock import Clock
from dips.core.net.security import Security
from dips.core.observe.metrics import Families
from dips.core.observe.metrics_server import MetricsServer, serve_metrics
from dips.worker.checkpoint import Checkpointing
from dips.worker.config import ClientConfig
from dips.worker.link_counts import LinkCounts
from dips.worker.metrics_collector import Collector
from dips.worker.metrics_counts import CheckpointCounts, Counts, View
from dips.worker.pace import StepTimer
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Effect
from dips.worker.state.events import Event


class Metrics:
    """Of one cluster's process; made only where the settings ask for it. All methods are the training thread's."""

    def __init__(self, session: ClusterMachine, pace: StepTimer, clock: Clock) -> None:
        self.counts = Counts()
        self.links = LinkCounts()
        self._session = session
        self._pace = pace
        self._clock = clock
        self._view: View = self.counts.view(session, pace)
        self._server: MetricsServer | None = None

    def serve(
        self,
        config: ClientConfig,
        security: Security,
        checkpoints: Checkpointing | None,
        answered_s: Callable[[], float | None],
    ) -> None:
        """Answer scrapes from here on. answered_s: asked on their threads. Raises ConfigError as MetricsServer does."""
        collector = Collector(config.cluster_id, security)

        def collect() -> Families:
            taken = None
            if checkpoints is not None:
                taken = CheckpointCounts(checkpoints.durations.observed(), checkpoints.written_s)
            now_s = self._clock.monotonic_s()
            return collector.families(self._view, self.counts, self.links.view, taken, answered_s(), now_s)

        self._server = serve_metrics(
            config, security, collect, role="cluster", name=config.cluster_id, run=config.run_id
        )

    def tell(self, event: Event, effects: Iterable[Effect]) -> None:
        """The session was given this event, and wants these things done."""
        self.counts.took(event)
        for effect in effects:
            self.counts.gave(effect)

    def show(self) -> None:
        """What scrapes see from now on."""
        self._view = self.counts.view(self._session, self._pace)

    def waits(self, what: str) -> None:
        """The training loop stands still."""
        self.counts.waits(what, self._clock.monotonic_s())
        self.show()

    def goes_on(self) -> None:
        """It does not, or not any more."""
        self.counts.goes_on(self._clock.monotonic_s())
        self.show()

    def stop(self) -> None:
        """May be called twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None
