"""The metrics of a master; docs/metrics.md is made from this list. Labels: cluster and slave ids, fixed words.

Of the clusters that are gone only the last ones are shown, so that there are never more than max_clusters.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dips.core.clock import Clock
from dips.core.ids import Version
from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.core.net.keys import certificate_left_s
from dips.core.net.security import INSECURE, Security
from dips.core.observe.counting import Rising
from dips.core.observe.metrics import CERTIFICATE, Families, Spec, flag
from dips.core.observe.metrics_knobs import METRICS_FILE
from dips.core.observe.metrics_server import LoopSnapshots, NotNow, serve_metrics, served
from dips.core.release import VERSION
from dips.master.archive import FILE_NAME, FOLDER
from dips.master.config import MasterConfig
from dips.master.metrics_counts import REASONS, Counted, Counts
from dips.master.state.leases import TokenState
from dips.master.state.penalty_detect import threshold
from dips.master.state.reasons import WaitingCode
from dips.master.state.records import RoundPhase, SlavePhase
from dips.master.state.shared import SharedState
from dips.master.state.status import AlarmKind, RunView, look

PREFIX = "dips_master_"

_CLUSTER, _SLAVE = ("cluster",), ("slave",)
_REPORTED = "the cluster has reported it in a heartbeat"
_JUDGED = "the cluster has a judged push"
_ROUND_JUDGED = "a round was judged since the master started"
_PUBLISHED = "a version is published"

METRICS: tuple[Spec, ...] = (
    # ---- the run ----
    Spec("info", "gauge", "1; the labels say which run and which release of dips", "1", ("run", "version")),
    Spec("epoch", "gauge", "Epoch of the master: rises by one at each start", "changes only when it is restarted"),
    Spec("paused", "gauge", "1 while an operator has paused the rounds", "0"),
    Spec("stopping", "gauge", "1 once the run is ending", "0 until tk_max or `dips stop`"),
    Spec("waiting", "gauge", "1 for the one thing that the run waits for (reason none: for nothing)",
         "none, with first_push and min_clusters at the beginning", ("reason",)),
    Spec("alarms_total", "counter", "Alarms of the master: sentences that a person should read", "no increase"),
    Spec("alarm", "gauge", "1 for each active alarm, by kind and by each cluster that it is about (none: the run)",
         "0 for each kind", ("kind", "cluster")),
    Spec("stalls_total", "counter", "Pauses of the master itself for more than half a heartbeat",
         "no increase"),
    Spec("heartbeat_seconds", "gauge", "The run's heartbeat_s", "as configured (2)", unit="s"),
    Spec("evict_after_seconds", "gauge", "Silence after which a peer is evicted", "as configured (10)", unit="s"),
    CERTIFICATE,
    # ---- members ----
    Spec("clusters", "gauge", "Clusters by state: live, and of these draining and quarantined; away",
         "live as many as you started; quarantined 0", ("state",)),
    Spec("clusters_limit", "gauge", "max_clusters: how many may take part", "above the live ones"),
    Spec("slaves", "gauge", "Slaves by state: ready, attached (not ready yet), away", "all ready", ("state",)),
    Spec("slaves_expected", "gauge", "Slaves that rounds need", "equal to slaves{state=\"ready\"}"),
    Spec("cluster_up", "gauge", "1 while the cluster is a member (joined, beating)", "1", _CLUSTER),
    Spec("cluster_draining", "gauge", "1 while the cluster is asked to finish and leave", "0", _CLUSTER),
    Spec("cluster_quarantined", "gauge", "1 while the cluster's pushes were rejected several times in a row", "0",
         _CLUSTER),
    Spec("cluster_beat_age_seconds", "gauge", "Time since the cluster's last heartbeat", "below two heartbeats (4)",
         _CLUSTER, "s", "the cluster is live"),
    Spec("cluster_incarnations_total", "counter", "Incarnations of the cluster: joins, also after evictions",
         "no increase while training", _CLUSTER),
    Spec("departures_total", "counter", "Clusters that are gone: how evict (silent, or by an operator) or leave",
         "no evict", ("cluster", "how")),
    Spec("slave_up", "gauge", "1 while the slave is attached and ready for rounds", "1", _SLAVE),
    Spec("slave_beat_age_seconds", "gauge", "Time since the slave's last heartbeat", "below two heartbeats (4)",
         _SLAVE, "s", "the slave is attached"),
    Spec("slave_incarnations_total", "counter", "Incarnations of the slave since the master started", "no increase",
     _SLAVE),
    Spec("slave_losses_total", "counter", "Times that the slave was lost", "no increase", _SLAVE),
    Spec("slave_version", "gauge", "Version that the slave holds", "equal to version", _SLAVE, "", "it holds one"),
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
    Spec("round_phase_age_seconds", "gauge", "Time in that phase", "idle: below a round; others: seconds", unit="s"),
    Spec("window_closes_seconds", "gauge", "Time until the grace window closes; 0 outside of one",
         "below grace_s (three times that if it slides)", unit="s"),
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
    Spec("reshards_total", "counter", "RESHARDs that were completed", "what operators asked for"),
    # ---- judgement ----
    Spec("verdicts_total", "counter", "Verdicts by cluster, verdict and reason (fixed words, docs/metrics.md)",
         "applied rises alike for all clusters; excluded and aborted hardly ever", ("cluster", "verdict", "reason")),
    Spec("cluster_norm", "gauge", "Norm of the cluster's last pseudo-gradient, for an average number of tokens",
         "within a factor of 2 of the others'", _CLUSTER, "", _JUDGED),
    Spec("cluster_score", "gauge", "z-score of that norm in the cluster's own history", "-3 to 3", _CLUSTER, "",
         "the cluster has warm_up_pushes accepted pushes"),
    Spec("cluster_cosine", "gauge", "Cosine of the cluster's last update with that of the others", "above 0",
          _CLUSTER, "", "its last round had two clusters"),
    Spec("cluster_usual_cosine", "gauge", "Median of the cluster's last cosines", "above -0.1", _CLUSTER, "",
         "its last round had two clusters"),
    Spec("cluster_direction_alarm", "gauge", "1 while the cluster's updates are usually against the others'", "0",
     _CLUSTER),
    Spec("threshold", "gauge", "Score above which a push is excluded (tau)", "3 to 9", (), "",
         "rounds are judged by scores"),
    Spec("merged_norm", "gauge", "Norm of the last merged update, before the clip", "steady; falls slowly", (), "",
         _ROUND_JUDGED),
    Spec("clip_factor", "gauge", "Factor that the clip scaled the last merge with (kappa)", "0.2 to 1", (), "",
         _ROUND_JUDGED),
    Spec("clip_active_ratio", "gauge", "Share of the last committed rounds (at most 32) whose merge was clipped",
         "any; always 1 on big models", (), "", _ROUND_JUDGED),
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
    Spec("cluster_steps_total", "counter", "Inner steps of the cluster, over all its incarnations", "rises", _CLUSTER),
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
    Spec("slave_staged_bytes_total", "counter", "Bytes of pushes that the slave received since it started",
         "rises with each push", _SLAVE, "bytes"),
    Spec("slave_served_bytes_total", "counter", "Bytes of versions that the slave sent since it started",
         "rises with each pull", _SLAVE, "bytes"),
    Spec("slave_resident_bytes", "gauge", "Memory of the slave's process", "below its budget (docs/budgets.md)",
         _SLAVE, "bytes"),
    Spec("slave_refused_messages_total", "counter", "Data messages that the slave refused (busy ones too)",
         "hardly rises", _SLAVE),
    Spec("slave_refused_connections_total", "counter", "Connections that the slave's data port refused",
         "no increase", _SLAVE),
    Spec("pulls_total", "counter", "Pulls begun: by clusters, and by readers such as `dips export`",
         "one a round and cluster", ("by",)),
    Spec("pinned_versions", "gauge", "Older versions that are kept for readers", "0 to pinned_versions"),
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


# ---- metrics collector -----------------------------------------------------------------------------------------------
#
# Collects the master's metrics at a scrape: a snapshot on the event loop that owns the state, converted elsewhere.
#
# The snapshot is a few hundred values, about a millisecond of the loop. It is converted, and the files' sizes are read,
# on the scrape's own thread. Must be called by scrapes only, and never change the state.


PHASES = tuple(phase.value.lower() for phase in RoundPhase)

READY = SlavePhase.READY.value

VERDICTS_FROM_0 = (("applied", "merged"), *(("excluded", reason) for reason in REASONS["excluded"]))
"""Verdicts that are shown before the first one, so that a rate includes it; the first ABORTED of a kind is no alarm."""


@dataclass(frozen=True)
class MetricsMoment:
    """A master at one moment. late_s: since the state's last event, from which the view's ages are counted.

    landed: bytes by (cluster, slave) of open pushes. transfer_s: a cluster's last push and pull, 0 where not known.
    """

    view: RunView
    counted: Counted
    late_s: float
    threshold: float
    staleness_limit: int
    slaves_expected: int
    recovery_active: bool
    reshard_active: bool
    max_clusters: int
    pinned_versions: int
    landed: Mapping[tuple[str, str], int]
    transfer_s: Mapping[str, tuple[float, float]]
    data_tokens: Mapping[str, int]


def snapshot(shared: SharedState, counts: Counts, now_s: float) -> MetricsMoment:
    """Takes a snapshot; call it on the thread that owns the state, between two events. now_s: by the state's clock."""
    leases = shared.ledger.leases
    totals = leases.totals() if leases is not None else {}
    if leases is not None:
        totals.setdefault(TokenState.FREE, 0)
    return MetricsMoment(
        look(shared),
        counts.counted(),
        max(0.0, now_s - shared.now_s),
        threshold(shared.ledger.detector, shared.config.penalty),
        shared.s_max(),
        len(shared.slaves_expected()) if shared.ledger.placement else shared.config.n_slaves,
        shared.recovery.active,
        shared.ledger.reshard is not None or shared.reshard.moving,
        shared.config.max_clusters,
        len({pin.version for pin in shared.pins.values()}),
        {(push.cluster, slave): n for push in shared.pushes() for slave, n in push.landed_bytes.items()},
        {member.cluster: (member.beat.push_s, member.beat.pull_s) for member in shared.live() if member.beat},
        {state.value: tokens for state, tokens in totals.items()},
    )


class Collector:
    """Makes the families of each scrape. Remembers only the counters made from numbers that may fall."""

    def __init__(self, directory: Path, security: Security = INSECURE) -> None:
        self._directory = directory
        self._security = security
        self._rising: Rising[tuple[str, str]] = Rising()

    def families(self, now: MetricsMoment) -> Families:
        """The families of one snapshot, with the files' sizes at the time of this call."""
        families = Families(PREFIX, METRICS)
        shown = clusters_shown(now.view.status.clusters, now.max_clusters)
        _run(families, now, shown)
        families.set(CERTIFICATE.name, certificate_left_s(self._security))
        _members(families, now, shown)
        _rounds(families, now)
        _judgement(families, now, shown)
        _progress(families, now, shown)
        self._counters(families, now, shown)
        _transfers(families, now, {cluster.cluster_id for cluster in shown})
        _data(families, now, shown)
        _calls(families, now.counted)
        _disk(families, self._directory)
        return families

    def _counters(self, families: Families, now: MetricsMoment, shown: Iterable[ClusterStatus]) -> None:
        """Adds counters of the ledger's numbers that a ROLLBACK lowers."""
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
            values["cluster_steps_total", name] = cluster.steps_total
            values["cluster_incarnations_total", name] = cluster.incarnations
        for (metric, label), counter in self._rising.look(values).items():
            families.set(metric, counter, *([label] if label else []))


def clusters_shown(clusters: Iterable[ClusterStatus], most: int) -> list[ClusterStatus]:
    """The clusters that are here, and of the others the last ones to join, `most` in all; in cluster-id order."""

    def newest_first(cluster: ClusterStatus) -> tuple[bool, int, int]:
        newest = cluster.incarnation
        return not cluster.alive, -newest.epoch if newest else 0, -newest.n if newest else 0

    return sorted(sorted(clusters, key=newest_first)[:most], key=lambda cluster: cluster.cluster_id)


# ---- parts ----


def _run(families: Families, now: MetricsMoment, shown: Iterable[ClusterStatus]) -> None:
    status, events = now.view.status, now.counted.events
    settings = status.settings
    families.set("info", 1, status.run_id, VERSION)
    families.set("epoch", status.epoch)
    families.set("paused", flag(status.paused))
    families.set("stopping", flag(status.stopping))
    families.one_of("waiting", status.waiting_code, WaitingCode)
    families.set("alarms_total", events.get("alarm", 0))
    names = {cluster.cluster_id for cluster in shown} | {"none"}
    about = {(alarm.kind, name) for alarm in status.alarms for name in alarm.clusters or ("none",)}
    standing = sorted((kind, name) for kind, name in about if name in names)
    for kind, name in standing:
        families.set("alarm", 1, kind, name)
    for kind in set(AlarmKind) - {kind for kind, _ in standing}:
        families.set("alarm", 0, kind, "none")  # an existing series shows that a rule uses the right name
    families.set("stalls_total", events.get("stood_still", 0))
    families.set("heartbeat_seconds", settings.heartbeat_s)
    families.set("evict_after_seconds", now.view.evict_after_s)
    families.set("recovery_active", flag(now.recovery_active))
    families.set("reshard_active", flag(now.reshard_active))
    families.set("reshards_total", events.get("resharded", 0))
    families.set("rollbacks_total", events.get("rollback", 0))
    families.set("rolled_back_tokens_total", now.counted.rolled_back_tokens)
    families.set("tokens_limit", status.tk_max_tokens)
    families.set("staleness_limit_versions", now.staleness_limit)


def _members(families: Families, now: MetricsMoment, shown: Iterable[ClusterStatus]) -> None:
    status = now.view.status
    live = [cluster for cluster in status.clusters if cluster.alive]
    states = {
        "live": len(live),
        "draining": sum(cluster.draining for cluster in live),
        "quarantined": sum(cluster.quarantined for cluster in live),
        "away": len(status.clusters) - len(live),
    }
    families.each("clusters", states)
    families.set("clusters_limit", now.max_clusters)
    for cluster in shown:
        name = cluster.cluster_id
        families.set("cluster_up", flag(cluster.alive), name)
        families.set("cluster_draining", flag(cluster.draining), name)
        families.set("cluster_quarantined", flag(cluster.quarantined), name)
        families.set("cluster_beat_age_seconds", cluster.beat_age_s + now.late_s if cluster.alive else None, name)
    _slaves(families, now, status.slaves)
    for cluster in shown:
        for how in ("evict", "leave"):
            count = now.counted.departures.get((cluster.cluster_id, how), 0)
            families.set("departures_total", count, cluster.cluster_id, how)


def _slaves(families: Families, now: MetricsMoment, slaves: Iterable[SlaveStatus]) -> None:
    states = dict.fromkeys(("ready", "attached", "away"), 0)
    for slave in slaves:
        name, ready = slave.slave_id, slave.alive and slave.phase == READY
        states["ready" if ready else "attached" if slave.alive else "away"] += 1
        families.set("slave_up", flag(ready), name)
        families.set("slave_beat_age_seconds", slave.beat_age_s + now.late_s if slave.alive else None, name)
        families.set("slave_incarnations_total", slave.incarnations, name)
        families.set("slave_losses_total", now.counted.slave_losses.get(name, 0), name)
        families.set("slave_version", _v(slave.version), name)
        families.set("slave_durable_version", _v(slave.durable), name)
        families.set("slave_staged_bytes_total", slave.staging_bytes, name)
        families.set("slave_served_bytes_total", slave.served_bytes, name)
        families.set("slave_resident_bytes", slave.resident_bytes, name)
        families.set("slave_refused_messages_total", slave.refused_chunks, name)
        families.set("slave_refused_connections_total", slave.refused_connections, name)
    families.each("slaves", states)
    families.set("slaves_expected", now.slaves_expected)


def _rounds(families: Families, now: MetricsMoment) -> None:
    view, status, counted = now.view, now.view.status, now.counted
    families.set("version", _v(status.published))
    families.set("timeline", status.published.timeline if status.published else None)
    families.set("durable_version", _v(status.durable))
    if view.since_publish_s is not None:
        families.set("published_age_seconds", view.since_publish_s + now.late_s)
    families.set("publish_interval_seconds", view.publish_interval_s or None)
    families.one_of("round_phase", status.phase.lower(), PHASES)
    families.set("round_phase_age_seconds", status.phase_age_s + now.late_s)
    families.set("window_closes_seconds", max(0.0, status.window_closes_in_s - now.late_s))
    for phase, observed in sorted(counted.phases.items()):
        families.observed("round_phase_seconds", observed, phase)
    families.observed("round_seconds", counted.rounds)


def _judgement(families: Families, now: MetricsMoment, shown: Iterable[ClusterStatus]) -> None:
    nothing = dict.fromkeys(((cluster.cluster_id, *words) for cluster in shown for words in VERDICTS_FROM_0), 0)
    names = {cluster.cluster_id for cluster in shown}
    for (name, verdict, reason), count in sorted({**nothing, **now.counted.verdicts}.items()):
        if name in names:
            families.set("verdicts_total", count, name, verdict, reason)
    for cluster in shown:
        name = cluster.cluster_id
        families.set("cluster_norm", cluster.last_norm, name)
        families.set("cluster_score", cluster.last_z, name)
        families.set("cluster_cosine", cluster.last_cosine, name)
        families.set("cluster_usual_cosine", cluster.cosine_usual, name)
        families.set("cluster_direction_alarm", flag(cluster.direction_alarm), name)
    families.set("threshold", now.threshold if math.isfinite(now.threshold) else None)
    judged = now.counted.judged
    if judged is not None:
        families.set("merged_norm", judged.merged_norm)
        families.set("clip_factor", judged.kappa)
        families.set("participation", judged.rho)
    families.set("clip_active_ratio", _clip_active_ratio(now.view.status))


def _clip_active_ratio(status: StatusReply) -> float | None:
    kappas = [summary.kappa for summary in status.recent_rounds if summary.outcome == "commit"]
    known = [kappa for kappa in kappas if not math.isnan(kappa)]
    return sum(kappa < 1.0 for kappa in known) / len(known) if known else None


def _progress(families: Families, now: MetricsMoment, shown: Iterable[ClusterStatus]) -> None:
    status = now.view.status
    families.set("tokens", status.tokens)
    families.set("tokens_per_second", sum(cluster.tokens_per_s for cluster in status.clusters if cluster.alive))
    for cluster in shown:
        name = cluster.cluster_id
        families.set("cluster_tokens_per_second", cluster.tokens_per_s if cluster.alive else 0.0, name)
        families.set("cluster_local_steps", cluster.local_steps if cluster.alive else None, name)
        families.set("cluster_loss", cluster.loss if math.isfinite(cluster.loss) else None, name)
        families.set("cluster_staleness_versions", _staleness(status.published, cluster.base), name)
        push_s, pull_s = now.transfer_s.get(name, (0.0, 0.0))
        families.set("cluster_push_seconds", push_s or None, name)
        families.set("cluster_pull_seconds", pull_s or None, name)


def _staleness(published: Version | None, base: Version | None) -> int | None:
    if published is None or base is None or base.timeline != published.timeline:
        return None
    return max(0, published.v - base.v)


def _transfers(families: Families, now: MetricsMoment, names: set[str]) -> None:
    families.set("open_pushes", len(now.view.pushes))
    for (name, attempt), count in sorted(now.counted.attempts.items()):
        if name in names:
            families.set("push_attempts_total", count, name, attempt)
    for (name, slave), n_bytes in sorted(now.landed.items()):
        families.set("push_landed_bytes", n_bytes, name, slave)
    for link in now.view.links:
        families.set("link_push_bytes_per_second", link.push_bytes_per_s, link.cluster, link.slave)
        families.set("link_pull_bytes_per_second", link.pull_bytes_per_s, link.cluster, link.slave)
    families.each("pulls_total", {by: now.counted.pulls.get(by, 0) for by in ("cluster", "reader")})
    families.set("pinned_versions", now.pinned_versions)


def _data(families: Families, now: MetricsMoment, shown: Iterable[ClusterStatus]) -> None:
    families.each("data_tokens", now.data_tokens)
    if now.data_tokens:
        families.each("cluster_leased_tokens", {cluster.cluster_id: cluster.leased_tokens for cluster in shown})


def _calls(families: Families, counted: Counted) -> None:
    families.each("calls_total", dict(sorted(counted.calls.items())))
    for (method, code), count in sorted(counted.refused.items()):
        families.set("refused_calls_total", count, method, code)
    families.observed("journal_append_seconds", counted.journal_s)
    families.set("journal_entries_total", counted.journal_entries)


def _disk(families: Families, directory: Path) -> None:
    parts = {"journal": [directory / FILE_NAME], "wal": [directory / f"{FILE_NAME}-wal"]}
    parts["archive"] = list((directory / FOLDER).glob("*")) if (directory / FOLDER).is_dir() else []
    families.each("journal_bytes", {part: sum(map(_size, files)) for part, files in parts.items()})
    try:
        room = os.statvfs(directory)
        families.set("disk_free_bytes", room.f_bavail * room.f_frsize)
    except OSError:
        pass  # no sample: the disk does not answer, and an alert on the absence reports it


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # it was moved or removed in the meantime


def _v(version: Version | None) -> int | None:
    return version.v if version is not None else None


# ---- metrics serving -------------------------------------------------------------------------------------------------
#
# Connects a master's counts and its state to a metrics server while the process serves.
#
# Scrapes run on the server's threads; the state is read on the event loop, between two events.


class Metrics:
    """The metrics of one process, over all epochs that it serves. most_clusters bounds the labels."""

    def __init__(self, most_clusters: int = 8) -> None:
        self.counts = Counts(most_clusters)
        self._shared: SharedState | None = None

    def watch(self, machine: object) -> None:
        """Serves this state machine from now on. One without shared state, as in tests, has no metrics."""
        shared = getattr(machine, "shared", None)
        self._shared = shared if isinstance(shared, SharedState) else None

    def snapshot(self, now_s: float) -> MetricsMoment:
        """Takes a snapshot, on the event loop. Raises NotNow before there is a state."""
        if self._shared is None:
            raise NotNow("the master has not begun its epoch yet")
        return snapshot(self._shared, self.counts, now_s)

    @contextlib.contextmanager
    def served(self, config: MasterConfig, security: Security, clock: Clock) -> Iterator[None]:
        """A context in which scrapes are answered, if the settings ask for it. Raises ConfigError as MetricsServer."""
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
