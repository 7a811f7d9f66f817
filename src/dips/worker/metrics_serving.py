"""Connects a cluster's session to a metrics server: the driver's reports go into views, and scrapes read those."""

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
    """Metrics of one cluster's process; made only if the settings ask for it. For the training thread only."""

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
        """Answer scrapes from now on. answered_s: called on their threads. Raises ConfigError as MetricsServer does."""
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
        """Count an event that the session took and the effects that it returned."""
        self.counts.took(event)
        for effect in effects:
            self.counts.gave(effect)

    def show(self) -> None:
        """Make a new view for scrapes."""
        self._view = self.counts.view(self._session, self._pace)

    def waits(self, what: str) -> None:
        """The training loop waits."""
        self.counts.waits(what, self._clock.monotonic_s())
        self.show()

    def goes_on(self) -> None:
        """The training loop does not wait, or no longer."""
        self.counts.goes_on(self._clock.monotonic_s())
        self.show()

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None
