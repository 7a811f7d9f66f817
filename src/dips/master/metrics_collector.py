"""Collects the master's metrics at a scrape: a snapshot on the event loop that owns the state, converted elsewhere.

The snapshot is a few hundred values, about a millisecond of the loop. It is converted, and the files' sizes are read,
on the scrape's own thread. Must be called by scrapes only, and never change the state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dips.core.ids import Version
from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.core.net.keys import certificate_left_s
from dips.core.net.security import INSECURE, Security
from dips.core.observe.counting import Rising
from dips.core.observe.metrics import CERTIFICATE, Families, flag
from dips.core.release import VERSION
from dips.master.archive import FOLDER
from dips.master.journal import FILE_NAME
from dips.master.metrics import METRICS, PREFIX
from dips.master.metrics_counts import Counted, Counts
from dips.master.metrics_reasons import REASONS, WAITING, waiting_word
from dips.master.state.alarms import KINDS as ALARMS
from dips.master.state.leases import TokenState
from dips.master.state.penalty_detect import threshold
from dips.master.state.run_view import RunView, look
from dips.master.state.shared import SharedState
from dips.master.state.tables import RoundPhase, SlavePhase

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
    waiting: str
    threshold: float
    staleness_limit: int
    slaves_expected: int
    recovery_active: bool
    reshard_active: bool
    max_clusters: int
    draining: frozenset[str]
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
        waiting_word(shared),
        threshold(shared.ledger.detector, shared.config.penalty),
        shared.s_max(),
        len(shared.slaves_expected()) if shared.ledger.placement else shared.config.n_slaves,
        shared.recovery.active,
        shared.ledger.reshard is not None or shared.reshard.moving,
        shared.config.max_clusters,
        frozenset(shared.ledger.draining) & frozenset(shared.members),
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
    families.one_of("waiting", now.waiting, WAITING)
    families.set("alarms_total", events.get("alarm", 0))
    names = {cluster.cluster_id for cluster in shown} | {"none"}
    about = {(alarm.kind, name) for alarm in status.alarms for name in alarm.clusters or ("none",)}
    standing = sorted((kind, name) for kind, name in about if name in names)
    for kind, name in standing:
        families.set("alarm", 1, kind, name)
    for kind in set(ALARMS) - {kind for kind, _ in standing}:
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
        "draining": len(now.draining),
        "quarantined": sum(cluster.quarantined for cluster in live),
        "away": len(status.clusters) - len(live),
    }
    families.each("clusters", states)
    families.set("clusters_limit", now.max_clusters)
    for cluster in shown:
        name = cluster.cluster_id
        families.set("cluster_up", flag(cluster.alive), name)
        families.set("cluster_draining", flag(name in now.draining), name)
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
