"""The metrics of a cluster's process; docs/metrics.md is made from this list. Labels: slaves of the run, fixed words.

HELDOUT has the metrics of `dips eval --follow`, which does not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dips.core.clock import Clock
from dips.core.errors import Refused
from dips.core.ids import Version
from dips.core.messages import PullGrant, StaleKind
from dips.core.net.security import Security
from dips.core.observe.metrics import CERTIFICATE, Families, Instruments, Spec
from dips.core.observe.metrics_server import MetricsServer, serve_metrics
from dips.core.release import VERSION
from dips.worker.checkpoint import Checkpoints
from dips.worker.config import ClientConfig
from dips.worker.data import LinkCounts, TransferDirection
from dips.worker.pace import StepTimer
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Cancel, Done, Effect, Event, Failed, PushRecord, Run, SendPush
from dips.worker.state.shared import SessionPhase
from dips.worker.state.tape import BaseStale

# ---- metrics ---------------------------------------------------------------------------------------------------------


PREFIX = "dips_worker_"

_SLAVE = ("slave",)
_LINK = ("slave", "direction")

METRICS: tuple[Spec, ...] = (
    # ---- the session ----
    Spec("info", "gauge", "1; the labels say which cluster of which run", "1", ("run", "cluster", "version")),
    Spec("phase", "gauge", "1 for the phase that the session is in", "training most of the time", ("phase",)),
    Spec("waited_seconds_total", "counter", "Time that the training loop waited: for an exchange, or for data",
         "below a tenth of the time", ("what",), "s"),
    Spec("beat_age_seconds", "gauge", "Time since the master last answered a heartbeat", "below two heartbeats (4)",
         (), "s", "it has answered one"),
    Spec("calls_total", "counter", "Calls to the master by result: done, refused, failed (no answer)",
         "failed and refused only while the master is restarted", ("result",)),
    Spec("refused_calls_total", "counter", "Calls that the master refused, by code (docs/protocol.md)",
         "FENCED after a restart of the master", ("code",)),
    CERTIFICATE,
    # ---- training ----
    Spec("steps_per_second", "gauge", "Inner steps a second, of computing alone, over the last 32 steps", "steady",
         (), "steps/s"),
    Spec("pending_tokens", "gauge", "Tokens trained on that are in no version yet", "below two rounds' worth", (),
         "tokens"),
    Spec("staleness_versions", "gauge", "Versions that the base is behind the published one", "0 to 2", (), "versions",
         "one was pulled on the published timeline"),
    Spec("stale_pushes_total", "counter", "Pushes whose base was too old or replaced: versions, fence, timeline",
         "no increase", ("kind",)),
    # ---- transfers ----
    Spec("transfers_total", "counter", "Transfers that ended, by direction (push, pull) and result: done, failed",
         "done alone", ("direction", "result")),
    Spec("transfer_seconds", "histogram", "Time of transfers that were done", "below a tenth of a round",
         ("direction",), "s"),
    Spec("push_retries_total", "counter", "Attempts of pushes after the first one", "no increase"),
    Spec("link_bytes_total", "counter", "Parameter bytes that were sent (push, once acknowledged) or fetched (pull)",
         "rises with each push and pull", _LINK, "bytes"),
    Spec("link_resumed_bytes_total", "counter", "Bytes that the slave held already when an attempt began",
         "no increase", _SLAVE, "bytes"),
    Spec("link_bytes_per_second", "gauge", "Rate of the transfer under way, or of the last one",
         "near the link's; a share of it when clusters share one", _LINK, "bytes/s", "there was a transfer"),
    Spec("link_round_trip_seconds", "gauge", "Smallest time from a request to its answer in that transfer",
         "the link's delay", _SLAVE, "s", "there was a transfer"),
    Spec("link_reconnects_total", "counter", "New connections after the slave was silent or closed one", "no increase",
         _SLAVE),
    Spec("link_refusals_total", "counter", "Requests that the slave refused, by code (docs/protocol.md)",
         "UNKNOWN_PUSH a few, when a ticket is faster than its opening", ("slave", "code")),
    # ---- checkpoints ----
    Spec("checkpoint_age_seconds", "gauge",
         "Time since this process wrote a checkpoint; before its first, since its first step",
         "below two checkpoint_every_s", (), "s", "the process writes checkpoints, and has made a step"),
    Spec("checkpoint_seconds", "histogram", "Time to write a checkpoint, during training", "below checkpoint_every_s",
         (), "s"),
)  # fmt: skip

HELDOUT: tuple[Spec, ...] = (
    CERTIFICATE,
    Spec("heldout_loss", "gauge", "Held-out loss of the newest version that was evaluated", "falls", (), "nats/byte",
         "one was evaluated"),
    Spec("heldout_version", "gauge", "That version", "follows the published one", (), "", "one was evaluated"),
    Spec("heldout_tokens", "gauge", "Tokens that it was trained on", "rises", (), "tokens", "one was evaluated"),
    Spec("heldout_age_seconds", "gauge", "Time since that evaluation", "below three publish intervals", (), "s",
         "one was evaluated"),
)  # fmt: skip

EXCHANGE, DATA = "exchange", "data"
"""What the training loop waits for."""

PHASES = tuple(phase.value.lower() for phase in SessionPhase)
STALE = tuple(kind.name.lower() for kind in StaleKind)
DIRECTIONS = tuple(direction.value for direction in TransferDirection)


# ---- metrics counts --------------------------------------------------------------------------------------------------
#
# Counts a cluster process's events and effects, on the training thread.
#
# The thread makes an immutable view at each step and each wait, as it does for heartbeats: a scrape must never wait
# for a step, which may take minutes, nor a step for a scrape. Costs a few microseconds a step, and nothing where no
# metrics are served.


@dataclass(frozen=True)
class View:
    """The training thread's state at one moment."""

    run_id: str
    phase: str
    waiting: str
    waiting_since_s: float  # of the process's clock; None while it trains
    steps_per_s: float
    pending_tokens: int
    base: Version | None
    published: Version | None
    waited_s: Mapping[str, float]


class Counts(Instruments):
    """Counts of one process. For the training thread; others use view() and families()."""

    def __init__(self) -> None:
        super().__init__(PREFIX, METRICS)
        self.checkpoints = self.histogram("checkpoint_seconds")
        self._calls = self.counter("calls_total", "done", "refused", "failed")
        self._refused = self.counter("refused_calls_total", "FENCED", "STALE_EPOCH")  # as a restart brings
        self._stale = self.counter("stale_pushes_total", *STALE)
        self._retries = self.counter("push_retries_total")
        self._transfers = self.counter("transfers_total")
        self._transfer_s = self.histogram("transfer_seconds", *DIRECTIONS)
        for direction in DIRECTIONS:
            for result in ("done", "failed"):
                self._transfers.labels(direction, result)
        self._jobs: dict[int, str] = {}
        """The jobs under way: call, push, pull or record."""
        self._waited_s = {EXCHANGE: 0.0, DATA: 0.0}
        self._waiting = ""
        self._waiting_since_s = math.nan

    def took(self, event: Event) -> None:
        """Count an event that the session takes."""
        match event:
            case Failed(job) if job in self._jobs:
                self._ended(self._jobs.pop(job), "failed")
            case Done(job, result) if job in self._jobs:
                what = self._jobs.pop(job)
                self._ended(what, "refused" if isinstance(result, Refused) else "done")
                if isinstance(result, Refused):
                    self._refused.labels(result.code.name).inc()
                if what in DIRECTIONS:
                    self._transfer_s.labels(what).observe(event.seconds)

    def _ended(self, what: str, how: str) -> None:
        if what in DIRECTIONS:
            self._transfers.labels(what, how).inc()
        elif what == "call":
            self._calls.labels(how).inc()

    def gave(self, effect: Effect) -> None:
        """Count an effect of the session."""
        match effect:
            case Run(job, SendPush(_, ticket)):
                self._jobs[job] = "push"
                if ticket.attempt > 1:
                    self._retries.inc()
            case Run(job, command):
                self._jobs[job] = {PullGrant: "pull", PushRecord: "record"}.get(type(command), "call")
            case Cancel(job):
                self._jobs.pop(job, None)
            case BaseStale(stale_kind=kind):
                self._stale.labels(kind.lower()).inc()

    def waits(self, what: str, now_s: float) -> None:
        """The training loop waits from now on, for an exchange or for data; may be called again during the wait."""
        if not self._waiting:
            self._waiting, self._waiting_since_s = what, now_s

    def goes_on(self, now_s: float) -> None:
        if self._waiting:
            self._waited_s[self._waiting] += now_s - self._waiting_since_s
            self._waiting, self._waiting_since_s = "", math.nan

    def view(self, session: ClusterMachine, pace: StepTimer) -> View:
        shared = session.shared
        return View(
            shared.terms.run_id,
            session.phase.value.lower(),
            self._waiting,
            self._waiting_since_s,
            pace.steps_per_s,
            shared.work.tokens,
            shared.base,
            shared.terms.published,
            self._waited_s.copy(),
        )


# ---- metrics collector -----------------------------------------------------------------------------------------------
#
# Collects a cluster process's metrics at a scrape, from the latest views of the training and the data thread.
#
# Must be called only by a scrape, and never wait for a thread of the process.


def cluster_families(
    config: ClientConfig,
    security: Security,
    view: View,
    counts: Counts,
    links: LinkCounts,
    checkpoint_s: float,
    answered_s: float | None,
    now_s: float,
) -> Families:
    """The metric families of a scrape. checkpoint_s: Checkpoints.written_s; NaN where none are written. answered_s:
    when the master last answered a beat. All of the same clock.
    """
    families = counts.families(security)
    families.set("info", 1, view.run_id, config.cluster_id, VERSION)
    families.set("beat_age_seconds", now_s - answered_s if answered_s is not None else None)
    families.set("checkpoint_age_seconds", now_s - checkpoint_s)
    families.one_of("phase", view.phase, PHASES)
    for what, seconds in view.waited_s.items():
        now_waiting_s = now_s - view.waiting_since_s if what == view.waiting else 0.0
        families.set("waited_seconds_total", seconds + now_waiting_s, what)
    families.set("steps_per_second", view.steps_per_s)
    families.set("pending_tokens", view.pending_tokens)
    families.set("staleness_versions", view.base.behind(view.published) if view.base else None)
    for slave, link in sorted(links.view.items()):
        for direction in TransferDirection:
            families.set("link_bytes_total", link.n_bytes.get(direction, 0), slave, direction.value)
            families.set("link_bytes_per_second", link.bytes_per_s.get(direction), slave, direction.value)
        families.set("link_resumed_bytes_total", link.resumed_bytes, slave)
        families.set("link_round_trip_seconds", link.round_trip_s, slave)
        families.set("link_reconnects_total", link.reconnects, slave)
        families.refusals("link_refusals_total", link.refusals, slave)
    return families


# ---- the evaluator ----


@dataclass(frozen=True)
class Evaluated:
    """The newest evaluation."""

    version: Version
    tokens: int
    loss: float
    at_s: float  # of the process's clock


def heldout_families(evaluated: Evaluated | None, security: Security, now_s: float) -> Families:
    """The metric families of `dips eval --follow`."""
    families = Instruments(PREFIX, HELDOUT).families(security)
    if evaluated is not None:
        families.set("heldout_loss", evaluated.loss)
        families.set("heldout_version", evaluated.version.v)
        families.set("heldout_tokens", evaluated.tokens)
        families.set("heldout_age_seconds", now_s - evaluated.at_s)
    return families


# ---- metrics serving -------------------------------------------------------------------------------------------------
#
# Connects a cluster's session to a metrics server: the driver's reports go into views, and scrapes read those.


class Metrics:
    """Metrics of one cluster's process; made only if the settings ask for it. For one thread at a time."""

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
        checkpoints: Checkpoints | None,
        answered_s: Callable[[], float | None],
    ) -> None:
        """Answer scrapes from now on. answered_s: called on their threads. Raises ConfigError as MetricsServer does."""
        if checkpoints is not None:
            checkpoints.on_written = self.counts.checkpoints.observe

        def collect() -> Families:
            written_s = checkpoints.written_s if checkpoints is not None else math.nan
            now_s = self._clock.monotonic_s()
            return cluster_families(
                config, security, self._view, self.counts, self.links, written_s, answered_s(), now_s
            )

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
