"""The metrics of a master; docs/metrics.md is made from this list. Labels: cluster and slave ids, fixed words.

Of the clusters that are gone only the last ones are shown, so that there are never more than max_clusters.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dips.core.clock import Clock
from dips.core.messages import ClusterStatus, StatusReply
from dips.core.net.security import INSECURE, METRICS_FILE, Security
from dips.core.observe.metrics import CERTIFICATE, Families, Instruments, Recent, Spec, disk_free_bytes, flag
from dips.core.observe.metrics_server import LoopSnapshots, NotNow, serve_metrics, served
from dips.core.release import VERSION
from dips.master.archive import FILE_NAME, FOLDER
from dips.master.config import MasterConfig
from dips.master.state import tape
from dips.master.state.effects import Record, WriteJournal
from dips.master.state.pulls import READER
from dips.master.state.reasons import STANDING, VerdictCode, WaitingCode
from dips.master.state.records import RoundPhase, SlavePhase
from dips.master.state.shared import SharedState
from dips.master.state.status import RunView, look

PREFIX = "dips_master_"

_CLUSTER, _SLAVE = ("cluster",), ("slave",)
_REPORTED = "the cluster has reported it in a heartbeat"
_JUDGED = "the cluster has a judged push"
_ROUND_JUDGED = "a round was judged since the master started, and the last one accepted a push"
_PUBLISHED = "a version is published"

METRICS: tuple[Spec, ...] = (
    # ---- the run ----
    Spec("info", "gauge", "1; the labels say which run and which release of dips", "1", ("run", "version")),
    Spec("epoch", "gauge", "Epoch of the master: rises by one at each start", "changes only when it is restarted"),
    Spec("paused", "gauge", "1 while an operator has paused the rounds", "0"),
    Spec("stopping", "gauge", "1 once the run is ending", "0 until tk_max or `dips stop`"),
    Spec("waiting", "gauge", "1 for the one thing that the run waits for (reason none: for nothing)",
         "none; first_push and min_clusters at the beginning, few_pushes where a round has a minimum", ("reason",)),
    Spec("alarms_total", "counter", "Alarms of the master: sentences that a person should read", "no increase"),
    Spec("alarm", "gauge", "1 for each active alarm, by kind and by each cluster that it is about (none: the run)",
         "0 for each kind", ("kind", "cluster")),
    Spec("stalls_total", "counter", "Pauses of the master itself for more than half a heartbeat",
         "no increase"),
    Spec("evict_after_seconds", "gauge", "Silence after which a peer is evicted", "as configured (10)", unit="s"),
    CERTIFICATE,
    # ---- members ----
    Spec("clusters", "gauge", "Clusters by state: live, and of these draining and quarantined; away",
         "live as many as you started; quarantined 0", ("state",)),
    Spec("slaves", "gauge", "Slaves by state: ready, attached (not ready yet), away", "all ready", ("state",)),
    Spec("slaves_expected", "gauge", "Slaves that rounds need", "equal to slaves{state=\"ready\"}"),
    Spec("cluster_up", "gauge", "1 while the cluster is a member (joined, beating)", "1", _CLUSTER),
    Spec("cluster_ranks", "gauge", "Ranks of the cluster, each of which pushes and pulls its share",
         "constant while the cluster is live", _CLUSTER, "", "the cluster is live"),
    Spec("cluster_late_ranks", "gauge", "Ranks that the cluster's others wait for, in a transfer or between two steps",
         "0", _CLUSTER, "", "the cluster is live"),
    Spec("cluster_draining", "gauge", "1 while the cluster is asked to finish and leave", "0", _CLUSTER),
    Spec("cluster_quarantined", "gauge", "1 while the cluster's pushes were rejected several times in a row", "0",
         _CLUSTER),
    Spec("cluster_beat_age_seconds", "gauge", "Time since the cluster's last heartbeat", "below two heartbeats (4)",
         _CLUSTER, "s", "the cluster is live"),
    Spec("cluster_incarnations_total", "counter", "Incarnations of the cluster: joins, also after evictions",
         "no increase while training", _CLUSTER),
    Spec("departures_total", "counter",
         "Clusters that are gone: how leave, or evict (silent, not back after the master's restart, by an operator, or "
         "all when the master takes over the slaves' history)",
         "no evict", ("cluster", "how")),
    Spec("slave_up", "gauge",
         "1 while the slave is attached and ready for rounds, or waits for its first blocks or for other slaves", "1",
         _SLAVE, "", "blocks are placed on it, or it is attached"),
    Spec("slave_beat_age_seconds", "gauge", "Time since the slave's last heartbeat", "below two heartbeats (4)",
         _SLAVE, "s", "the slave is attached"),
    Spec("slave_losses_total", "counter", "Times that the slave was lost", "no increase", _SLAVE),
    Spec("slave_durable_version", "gauge", "Newest version on the slave's disk",
         "equal to version; with durability async at most async_lag_versions less", _SLAVE, "", "it holds one"),
    # ---- rounds and versions ----
    Spec("version", "gauge", "Published version", "rises by one a round", (), "", _PUBLISHED),
    Spec("timeline", "gauge", "Timeline of the published version: another one after a ROLLBACK", "constant", (), "",
         _PUBLISHED),
    Spec("durable_version", "gauge", "Newest version that is on every slave's disk", "equal to version", (), "",
         _PUBLISHED),
    Spec("published_age_seconds", "gauge", "Time since a version was published", "below three publish intervals", (),
         "s", "a version was published since the master started"),
    Spec("publish_interval_seconds", "gauge", "Time between two versions, smoothed",
         "about one round of the fastest cluster", (), "s", "two were published since the master started"),
    Spec("round_phase", "gauge", "1 for the phase that the round is in", "not one phase but idle for long",
         ("phase",)),
    Spec("rounds_total", "counter", "Rounds by result: commit, void (nothing was accepted), abort (tried again)",
         "commit rises; void and abort hardly ever", ("result",)),
    Spec("merged_rounds_total", "counter", "Committed rounds that merged pushes of two or more clusters",
         "most of rounds_total{result=\"commit\"}"),
    Spec("round_phase_seconds", "histogram", "How long the phases of rounds took; commit begins when it is durable",
         "window: grace_s; the others below a second, or what the disk needs", ("phase",), "s"),
    Spec("round_seconds", "histogram", "From the window's opening to the published version, of committed rounds",
         "the window and a few seconds", (), "s"),
    Spec("rollbacks_total", "counter", "ROLLBACKs: the run continued from an older version", "0"),
    Spec("rolled_back_tokens_total", "counter", "Tokens that ROLLBACKs took back", "0", (), "tokens"),
    Spec("recovery_active", "gauge", "1 while the master determines the version that the slaves continue from",
         "0, but for seconds after a restart"),
    Spec("reshard_active", "gauge", "1 while a RESHARD is asked for or under way", "0"),
    # ---- judgement ----
    Spec("verdicts_total", "counter", "Verdicts by cluster, verdict and reason (fixed words, docs/metrics.md)",
         "applied rises alike for all clusters; excluded and aborted hardly ever", ("cluster", "verdict", "reason")),
    Spec("cluster_norm", "gauge", "Norm of the cluster's last pseudo-gradient, for an average number of tokens",
         "within a factor of 2 of the others'", _CLUSTER, "", _JUDGED),
    Spec("cluster_score", "gauge", "z-score of that norm in the cluster's own history", "-3 to 3", _CLUSTER, "",
         "the cluster has warm_up_pushes accepted pushes"),
    Spec("cluster_cosine", "gauge", "Cosine of the cluster's last update with that of the others", "above 0",
          _CLUSTER, "", "others moved the model since the base of its last judged push"),
    Spec("cluster_usual_cosine", "gauge", "Median of the cluster's last cosines", "above -0.1", _CLUSTER, "",
         "it ever had a cosine"),
    Spec("cluster_direction_alarm", "gauge", "1 while the cluster's updates are usually against the others'", "0",
     _CLUSTER),
    Spec("threshold", "gauge", "Score above which a push is excluded (tau)", "3 to 9", (), "",
         "rounds are judged by scores"),
    Spec("merged_norm", "gauge", "Norm of the last merged update, before the clip", "steady; falls slowly", (), "",
         _ROUND_JUDGED),
    Spec("clip_factor", "gauge", "Factor that the clip scaled the last merge with (kappa)", "0.2 to 1", (), "",
         _ROUND_JUDGED),
    Spec("clip_active_ratio", "gauge", "Share of the last committed rounds (at most 32) whose merge was clipped",
         "below a half; with a fixed bound any", (), "", "a round was committed since the master started"),
    Spec("participation", "gauge", "Share of a full round that took part in the last merge (rho)",
         "near 1 with clusters of equal speed", (), "", _ROUND_JUDGED),
    # ---- progress ----
    Spec("tokens", "gauge", "Tokens that the newest version was trained on; goes back at a ROLLBACK", "rises", (),
         "tokens"),
    Spec("tokens_limit", "gauge", "tk_max: tokens at which the run ends; 0: never", "as configured", (), "tokens"),
    Spec("tokens_applied_total", "counter", "Tokens that were applied; never goes back", "rises steadily", (),
         "tokens"),
    Spec("cluster_tokens_applied_total", "counter", "The same by cluster", "rises by the cluster's speed", _CLUSTER,
         "tokens"),
    Spec("tokens_per_second", "gauge", "Speed of all live clusters together, of computing alone", "steady", (),
         "tokens/s"),
    Spec("cluster_tokens_per_second", "gauge", "The cluster's speed, of computing alone", "steady", _CLUSTER,
         "tokens/s"),
    Spec("cluster_local_steps", "gauge", "Inner steps that the cluster is to make between two pushes (H_j)",
         "sync_every, less for slow clusters with dynamic steps", _CLUSTER, "", "the cluster is live"),
    Spec("cluster_loss", "gauge", "Mean training loss of the cluster's last steps", "falls, alike on all clusters",
         _CLUSTER, "nats/token", _REPORTED),
    Spec("cluster_staleness_versions", "gauge", "Versions that the cluster's base is behind the published one",
         "0 to 2", _CLUSTER, "versions", "the cluster has pulled on this timeline"),
    Spec("staleness_limit_versions", "gauge", "Versions behind at which a push is refused as stale (s_max)",
         "as configured", (), "versions"),
    # ---- transfers, as the master knows them ----
    Spec("cluster_push_seconds", "gauge", "Time of the cluster's last push, from its beginning to all being sent",
         "below a tenth of a round", _CLUSTER, "s", _REPORTED),
    Spec("cluster_pull_seconds", "gauge", "Time of the cluster's last pull", "below a tenth of a round", _CLUSTER, "s",
         _REPORTED),
    Spec("open_pushes", "gauge", "Undecided pushes", "at most one for each live cluster"),
    Spec("push_attempts_total", "counter", "Tickets for pushes: first, or again (what is missing is sent)",
         "first alone", ("cluster", "attempt")),
    Spec("push_landed_bytes", "gauge", "Bytes of the cluster's open push that each slave has received", "rises",
         ("cluster", "slave"), "bytes", "a push is open"),
    Spec("link_push_bytes_per_second", "gauge", "Mean rate of the cluster's last whole push to the slave",
         "near the link's; a share of it when transfers share one", ("cluster", "slave"), "bytes/s", "there was one"),
    Spec("link_pull_bytes_per_second", "gauge", "Mean rate of the cluster's last whole pull from the slave",
         "near the link's; a share of it when transfers share one", ("cluster", "slave"), "bytes/s", "there was one"),
    Spec("pulls_total", "counter", "Pulls begun: by clusters, and by readers such as `dips export`",
         "one a round and cluster", ("by",)),
    Spec("pinned_versions", "gauge", "Versions that open pulls read, the newest included",
         "0 or 1; more while slow pulls read older ones"),
    # ---- data ----
    Spec("data_tokens", "gauge", "Tokens of the corpus in all passes begun: free, leased, applied, excluded",
         "applied rises; excluded stays small", ("state",), "tokens", "the run leases data"),
    Spec("cluster_leased_tokens", "gauge", "Tokens leased to the cluster", "a round or two of its tokens", _CLUSTER,
         "tokens", "the run leases data"),
    # ---- durable state and calls ----
    Spec("journal_bytes", "gauge", "Size of the master's durable state: journal, its write-ahead log, archive",
         "journal and wal bounded; archive below archive_bytes", ("part",), "bytes"),
    Spec("journal_append_seconds", "histogram", "Time to make entries durable, one fsync each time", "below 0.1", (),
         "s"),
    Spec("journal_entries_total", "counter", "Entries that were made durable", "rises"),
    Spec("disk_free_bytes", "gauge", "Free space on the disk of the master's directory", "above 1 GB", (), "bytes"),
    Spec("calls_total", "counter", "gRPC calls and stream messages by method", "rises", ("method",)),
    Spec("refused_calls_total", "counter", "gRPC calls that were refused, by method and code (docs/protocol.md)",
         "FENCED and STALE_EPOCH after restarts alone; IDENTITY never", ("method", "code")),
)  # fmt: skip


# ---- metrics counts --------------------------------------------------------------------------------------------------
#
# Counts events since the start of the process, from the lines of its tape and its answers to calls.
#
# The state machine does not count for metrics: the shell reports here what it carries out. All on the event loop, but
# for the time of the journal. What is counted by cluster or slave has a bound.


IDLE = "IDLE"

MOST_SLAVES = 64

WORDS_FOR_EACH_CLUSTER = 32
"""More than the number of verdicts with reasons."""

_OF_KIND = {
    "alarm": "alarms_total",
    "stood_still": "stalls_total",
    "rolled_back": "rollbacks_total",
}
"""Kinds of tape lines that are counted, and in which metric."""


@dataclass(frozen=True)
class MetricsMoment:
    """A master at one moment. What is counted of clusters is by (cluster, further labels), slave_losses by slave."""

    view: RunView
    verdicts: Mapping[tuple[str, ...], int]
    departures: Mapping[tuple[str, ...], int]
    attempts: Mapping[tuple[str, ...], int]
    slave_losses: Mapping[str, int]
    # clip factor, participation and merged norm of the last judged round, NaN where nothing was accepted
    judged: tuple[float, float, float]


class Counts(Instruments):
    """Counts of one process; `most_clusters` bounds the labels."""

    def __init__(self, most_clusters: int = 8) -> None:
        super().__init__(PREFIX, METRICS, _OF_KIND)
        self._rolled_back_tokens = self.counter("rolled_back_tokens_total")
        self._pulls = self.counter("pulls_total", "cluster", "reader")
        self._calls = self.counter("calls_total")
        self._refused = self.counter("refused_calls_total")
        self._phases = self.histogram("round_phase_seconds")
        self._rounds = self.histogram("round_seconds")
        self._journal_s = self.histogram("journal_append_seconds")
        self._journal_entries = self.counter("journal_entries_total")
        self._verdicts: Recent[tuple[str, ...]] = Recent(WORDS_FOR_EACH_CLUSTER * most_clusters)
        self._departures: Recent[tuple[str, ...]] = Recent(2 * most_clusters)
        self._attempts: Recent[tuple[str, ...]] = Recent(2 * most_clusters)
        self._losses: Recent[str] = Recent(MOST_SLAVES)
        self._judged = (math.nan, math.nan, math.nan)
        self._phase: tuple[str, float] = (IDLE, 0.0)
        self._opened_s: float | None = None

    # ---- called by the shell ----

    def note(self, record: Record, now_s: float) -> None:
        """Counts a line of the tape, when the journal entries that it depends on are durable."""
        self.count_kind(record.kind)
        match record:
            case tape.RoundMoved(phase=phase):
                before, since_s = self._phase
                if before != IDLE:
                    self._phases.labels(before.lower()).observe(now_s - since_s)
                elif self._opened_s is None:
                    self._opened_s = now_s
                if phase == "PUBLISH" and self._opened_s is not None:
                    self._rounds.observe(now_s - self._opened_s)
                if phase == IDLE:
                    self._opened_s = None
                self._phase = (phase, now_s)
            case tape.PushDecided(push=push, verdict=verdict, code=code):
                self._verdicts.add((push.cluster, verdict.lower(), code))
            case tape.RoundJudged():
                self._judged = (record.kappa, record.rho, record.merged_norm)
            case tape.TicketIssued(push=push, attempt=attempt):
                self._attempts.add((push.cluster, "first" if attempt == 1 else "again"))
            case tape.ClusterEvicted(cluster=cluster) | tape.ClusterLeft(cluster=cluster):
                self._departures.add((cluster, record.kind))
            case tape.SlaveLost(slave=slave):
                self._losses.add(slave)
            case tape.PullGranted(by=by):
                self._pulls.labels("reader" if by.startswith(READER) else "cluster").inc()
            case tape.RolledBack(lost_tokens=lost_tokens):
                self._rolled_back_tokens.inc(lost_tokens)
            case tape.EpochBegun():
                self._phase, self._opened_s = (IDLE, now_s), None

    def called(self, method: str) -> None:
        self._calls.labels(method).inc()

    def refused(self, method: str, code: str) -> None:
        """Counts a refused call; method and code come from the protocol, not from the caller."""
        self._refused.labels(method, code).inc()

    def timed(self, append: Callable[[Sequence[WriteJournal]], None]) -> Callable[[Sequence[WriteJournal]], None]:
        """Wraps `append` to measure its time, on the journal's thread."""

        def append_and_count(entries: Sequence[WriteJournal]) -> None:
            began_s = time.monotonic()
            append(entries)
            self._journal_s.observe(time.monotonic() - began_s)
            self._journal_entries.inc(len(entries))

        return append_and_count

    def moment(self, view: RunView) -> MetricsMoment:
        """What is counted now, with this view of the run."""
        return MetricsMoment(
            view,
            self._verdicts.counted(),
            self._departures.counted(),
            self._attempts.counted(),
            self._losses.counted(),
            self._judged,
        )


# ---- metrics collector -----------------------------------------------------------------------------------------------
#
# Renders the master's metrics at a scrape: the view and the counts are taken on the event loop that owns the state,
# everything else, and the sizes of files, on the scrape's own thread. Must be called by scrapes only.


PHASES = tuple(phase.value.lower() for phase in RoundPhase)

READY = SlavePhase.READY.value

REASONS: dict[str, tuple[VerdictCode, ...]] = {
    "applied": (VerdictCode.MERGED, VerdictCode.OTHER),
    "excluded": (
        *(VerdictCode.NOT_FINITE, VerdictCode.NORM, VerdictCode.SCORE, VerdictCode.TOKENS, VerdictCode.ZERO),
        *(VerdictCode.VOID, VerdictCode.OTHER),
    ),
    "aborted": (
        *(VerdictCode.RUN_END, VerdictCode.TICKET, VerdictCode.TIMEOUT, VerdictCode.REJOINED, VerdictCode.GONE),
        *(VerdictCode.DIGEST, VerdictCode.REFUSED, VerdictCode.SLAVE_LOST, VerdictCode.STALE, VerdictCode.RANGES),
        *(VerdictCode.TOKENS, VerdictCode.RECOVERY, VerdictCode.RESHARD, VerdictCode.OTHER),
    ),
    "rolled_back": (VerdictCode.ROLLBACK, VerdictCode.OTHER),
}
"""All values of the label `reason`, by verdict."""

VERDICTS_FROM_0 = (("applied", "merged"), *(("excluded", reason) for reason in REASONS["excluded"]))
"""Verdicts that are shown before the first one, so that a rate includes it; the first ABORTED of a kind is no alarm."""


class Rising:
    """Makes counters of numbers that may fall (a ROLLBACK takes tokens back): what they rose by, since the first look.

    A key that is not looked at is forgotten. Begins with the number itself, so that a restart continues the count.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def look(self, values: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
        """The counters of these (metric, label), none of which ever falls."""
        seen: dict[tuple[str, str], tuple[int, int]] = {}
        for key, value in values.items():
            last, counter = self._seen.get(key, (value, value))
            seen[key] = (value, counter + max(0, value - last))
        self._seen = seen
        return {key: counter for key, (_, counter) in seen.items()}


def clusters_shown(clusters: Iterable[ClusterStatus], most: int) -> list[ClusterStatus]:
    """The clusters that are here, and of the others the last ones to join, `most` in all; in cluster-id order."""

    def newest_first(cluster: ClusterStatus) -> tuple[bool, int, int]:
        newest = cluster.incarnation
        return not cluster.alive, -newest.epoch if newest else 0, -newest.n if newest else 0

    return sorted(sorted(clusters, key=newest_first)[:most], key=lambda cluster: cluster.cluster_id)


# ---- parts ----


def _run(families: Families, now: MetricsMoment) -> None:
    view, status = now.view, now.view.status
    families.set("info", 1, status.run_id, VERSION)
    families.set("epoch", status.epoch)
    families.set("paused", flag(status.paused))
    families.set("stopping", flag(status.stopping))
    families.one_of("waiting", status.waiting_code, WaitingCode)
    families.set("evict_after_seconds", view.evict_after_s)
    families.set("recovery_active", flag(view.recovers))
    families.set("reshard_active", flag(view.reshards))
    families.set("tokens", status.tokens)
    families.set("tokens_limit", status.tk_max_tokens)
    families.set("staleness_limit_versions", view.staleness_limit)
    families.set("pinned_versions", view.pinned_versions)
    families.each("data_tokens", view.data_tokens)
    live = [cluster for cluster in status.clusters if cluster.alive]
    states = {
        "live": len(live),
        "draining": sum(cluster.draining for cluster in live),
        "quarantined": sum(cluster.quarantined for cluster in live),
        "away": len(status.clusters) - len(live),
    }
    families.each("clusters", states)
    families.set("tokens_per_second", sum(cluster.tokens_per_s for cluster in live))
    families.set("open_pushes", len(view.pushes))
    for push in sorted(view.pushes, key=lambda push: push.cluster):
        for slave, n_bytes in sorted(push.landed_bytes.items()):
            families.set("push_landed_bytes", n_bytes, push.cluster, slave)
    for link in view.links:
        families.set("link_push_bytes_per_second", link.push_bytes_per_s, link.cluster, link.slave)
        families.set("link_pull_bytes_per_second", link.pull_bytes_per_s, link.cluster, link.slave)


def _alarms(families: Families, status: StatusReply, shown: set[str]) -> None:
    about = {(alarm.kind, name) for alarm in status.alarms for name in alarm.clusters or ("none",)}
    standing = sorted((kind, name) for kind, name in about if name in shown or name == "none")
    for kind, name in standing:
        families.set("alarm", 1, kind, name)
    for kind in set(STANDING) - {kind for kind, _ in standing}:
        families.set("alarm", 0, kind, "none")  # an existing series shows that a rule uses the right name


def _cluster(families: Families, now: MetricsMoment, cluster: ClusterStatus) -> None:
    name, alive = cluster.cluster_id, cluster.alive
    push_s, pull_s = now.view.transfer_s.get(name, (0.0, 0.0))
    behind = cluster.base.behind(now.view.status.published) if cluster.base is not None else None
    for metric, value in (
        ("cluster_up", flag(alive)),
        ("cluster_ranks", cluster.ranks if alive else None),
        ("cluster_late_ranks", len(cluster.late_ranks) if alive else None),
        ("cluster_draining", flag(cluster.draining)),
        ("cluster_quarantined", flag(cluster.quarantined)),
        ("cluster_beat_age_seconds", cluster.beat_age_s if alive else None),
        ("cluster_norm", cluster.last_norm),
        ("cluster_score", cluster.last_z),
        ("cluster_cosine", cluster.last_cosine),
        ("cluster_usual_cosine", cluster.cosine_usual),
        ("cluster_direction_alarm", flag(cluster.direction_alarm)),
        ("cluster_tokens_per_second", cluster.tokens_per_s if alive else 0.0),
        ("cluster_local_steps", cluster.local_steps if alive else None),
        ("cluster_loss", cluster.loss if math.isfinite(cluster.loss) else None),
        ("cluster_staleness_versions", behind),
        ("cluster_push_seconds", push_s or None),
        ("cluster_pull_seconds", pull_s or None),
        ("cluster_leased_tokens", cluster.leased_tokens if now.view.data_tokens else None),
    ):
        families.set(metric, value, name)


def _by_cluster(
    families: Families,
    metric: str,
    shown: set[str],
    from_0: Iterable[tuple[str, ...]],
    counts: Mapping[tuple[str, ...], int],
) -> None:
    """Counts by cluster and further labels. from_0: those that each cluster has before the first one."""
    zeros = dict.fromkeys(((name, *labels) for name, labels in itertools.product(shown, from_0)), 0)
    for labels, count in sorted({**zeros, **counts}.items()):
        if labels[0] in shown:
            families.set(metric, count, *labels)


def _slaves(families: Families, now: MetricsMoment) -> None:
    states = dict.fromkeys(("ready", "attached", "away"), 0)
    for slave in now.view.status.slaves:
        name, ready = slave.slave_id, slave.alive and slave.phase == READY
        states["ready" if ready else "attached" if slave.alive else "away"] += 1
        idle = name in now.view.without_blocks  # rounds need it only once it holds blocks
        if slave.alive or not idle:
            # In a recovery a slave that is here waits for the others: the alarm is for those that are away.
            families.set("slave_up", flag(ready or idle or (slave.alive and now.view.recovers)), name)
        families.set("slave_beat_age_seconds", slave.beat_age_s if slave.alive else None, name)
        families.set("slave_losses_total", now.slave_losses.get(name, 0), name)
        families.set("slave_durable_version", slave.durable.v if slave.durable else None, name)
    families.each("slaves", states)
    families.set("slaves_expected", now.view.slaves_expected)


def _rounds(families: Families, now: MetricsMoment) -> None:
    view, status = now.view, now.view.status
    families.set("version", status.published.v if status.published else None)
    families.set("timeline", status.published.timeline if status.published else None)
    families.set("durable_version", status.durable.v if status.durable else None)
    families.set("published_age_seconds", view.since_publish_s)
    families.set("publish_interval_seconds", view.publish_interval_s or None)
    families.one_of("round_phase", status.phase.lower(), PHASES)
    families.set("threshold", view.threshold if math.isfinite(view.threshold) else None)
    kappa, rho, merged_norm = now.judged
    families.set("clip_factor", kappa)
    families.set("participation", rho)
    families.set("merged_norm", merged_norm)
    kappas = [summary.kappa for summary in status.recent_rounds if summary.outcome == "commit"]
    known = [kappa for kappa in kappas if not math.isnan(kappa)]
    families.set("clip_active_ratio", sum(kappa < 1.0 for kappa in known) / len(known) if known else None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # it was moved or removed in the meantime


# ---- metrics serving -------------------------------------------------------------------------------------------------
#
# Connects a master's counts and its state to a metrics server while the process serves.
#
# Scrapes run on the server's threads; the state is read on the event loop, between two events.


class Metrics:
    """The metrics of one process, over all epochs that it serves. most_clusters bounds the labels."""

    def __init__(self, most_clusters: int = 8) -> None:
        self.counts = Counts(most_clusters)
        self._most_clusters = most_clusters
        self.shared: SharedState | None = None
        """The state of the epoch that is served; None before the first."""
        self._rising = Rising()

    def snapshot(self, now_s: float) -> MetricsMoment:
        """Takes a snapshot, on the event loop. Raises NotNow before there is a state."""
        if self.shared is None:
            raise NotNow("the master has not begun its epoch yet")
        return self.counts.moment(look(self.shared, now_s))

    def families(self, now: MetricsMoment | None, directory: Path, security: Security = INSECURE) -> Families:
        """The families of one moment, with the sizes of the files in the directory at the time of this call; without a
        moment, of a standby, those of the process and its files.
        """
        families = self.counts.families(security)
        if now is not None:
            self._of_run(families, now)
        parts = {"journal": [directory / FILE_NAME], "wal": [directory / f"{FILE_NAME}-wal"]}
        parts["archive"] = list((directory / FOLDER).glob("*")) if (directory / FOLDER).is_dir() else []
        families.each("journal_bytes", {part: sum(map(_size, files)) for part, files in parts.items()})
        # None and no sample where the disk does not answer: an alert on the absence reports it.
        families.set("disk_free_bytes", disk_free_bytes(directory))
        return families

    def _of_run(self, families: Families, now: MetricsMoment) -> None:
        shown = clusters_shown(now.view.status.clusters, self._most_clusters)
        names = {cluster.cluster_id for cluster in shown}
        _run(families, now)
        _alarms(families, now.view.status, names)
        _slaves(families, now)
        _rounds(families, now)
        for cluster in shown:
            _cluster(families, now, cluster)
        for name, labels, counts in (
            ("departures_total", itertools.product(("evict", "leave")), now.departures),
            ("verdicts_total", VERDICTS_FROM_0, now.verdicts),
            ("push_attempts_total", (), now.attempts),
        ):
            _by_cluster(families, name, names, labels, counts)
        # Counters of the ledger's numbers that a ROLLBACK lowers.
        status = now.view.status
        values = {
            ("tokens_applied_total", ""): status.tokens,
            ("rounds_total", "commit"): status.rounds_committed,
            ("rounds_total", "void"): status.rounds_void,
            ("rounds_total", "abort"): status.rounds_aborted,
            ("merged_rounds_total", ""): status.rounds_merged,
        }
        for cluster in shown:
            name = cluster.cluster_id
            values["cluster_tokens_applied_total", name] = cluster.tokens_applied
            values["cluster_incarnations_total", name] = cluster.incarnations
        for (metric, label), counter in self._rising.look(values).items():
            families.set(metric, counter, *([label] if label else []))

    @contextlib.contextmanager
    def served(self, config: MasterConfig, security: Security, clock: Clock, follows: bool = False) -> Iterator[None]:
        """A context in which scrapes are answered, if the settings ask for it. Raises ConfigError as MetricsServer.

        follows: a standby's, which has no state of the run.
        """

        def moment() -> MetricsMoment | None:
            return None if follows else self.snapshot(clock.monotonic_s())

        snapshots = LoopSnapshots(asyncio.get_running_loop(), moment)
        server = serve_metrics(
            config,
            security,
            lambda: self.families(snapshots.take(), config.directory, security),
            role="master",
            name="standby" if config.standby else "master",
            run=config.run_id,
            file=config.directory / METRICS_FILE,
            revoked=config.revoked,
        )
        with served(server):
            yield
