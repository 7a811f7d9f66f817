"""Makes the JSON of one sample of the run: everything that the page shows except curves and timeline.

A pure function. Text from outside is cut and passed on as text, never as markup; numbers that are not known are null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dips.core.ids import Version
from dips.core.messages import ClusterStatus, RoundSummary, SlaveStatus, StatusReply
from dips.master.page.sentence import sentence
from dips.master.page.timeline import cut
from dips.master.state.shared import LinkRate
from dips.master.state.status import OpenPushView, RunView

SILENT_BEATS = 2.0
"""A peer that missed this many heartbeats is shown as silent, before it is evicted."""

MERGED = "merged"
"""The reason of every verdict APPLIED, which is not shown because it adds nothing."""

STALE_SHARE = 0.5
"""The share of s_max from which a base that is behind is marked."""


def snapshot(
    view: RunView,
    lag_s: float,
    rate_tokens_per_s: float,
    departures: Mapping[str, tuple[str, str]],
    charted: Iterable[str] = (),
) -> dict[str, Any]:
    """The sample as JSON. lag_s: the time since the state's last event; departures: as in the timeline."""
    status = view.status
    pushes = {push.cluster: push for push in view.pushes}
    return {
        "run": _run(status),
        "say": sentence(view, lag_s, departures),
        "round": _round(view, lag_s),
        "version": _text(status.published),
        "durable": _text(status.durable),
        "since_publish_s": _known(view.since_publish_s, lag_s),
        "tokens": status.tokens,
        "goal": status.tk_max_tokens or None,
        "rate": round(rate_tokens_per_s, 1),
        "left_s": _left_s(status, rate_tokens_per_s),
        "rounds": {
            "committed": status.rounds_committed,
            "merged": status.rounds_merged,
            "void": status.rounds_void,
            "aborted": status.rounds_aborted,
        },
        "clusters": [_cluster(view, one, pushes.get(one.cluster_id), lag_s, departures) for one in status.clusters],
        "slaves": [_slave(view, one, lag_s) for one in status.slaves],
        "links": [_link(link, lag_s) for link in view.links],
        "recent_rounds": [round_json(entry) for entry in status.recent_rounds],
        "charted": list(charted),
    }


def _run(status: StatusReply) -> dict[str, Any]:
    settings = status.settings
    return {
        "id": cut(status.run_id),
        "epoch": status.epoch,
        "paused": status.paused,
        "stopping": status.stopping,
        "stopped": status.stopped,
        "preset": cut(settings.preset),
        "durability": cut(settings.durability),
        "sync_every": settings.sync_every_steps,
        "heartbeat_s": settings.heartbeat_s,
        "s_max": s_max(status),
    }


def _round(view: RunView, lag_s: float) -> dict[str, Any]:
    status = view.status
    live = [cluster for cluster in status.clusters if cluster.alive]
    in_window = status.phase == "WINDOW"
    planned_s = view.planned_window_in_s
    return {
        "id": _text(status.round),
        "phase": status.phase,
        "age_s": round(status.phase_age_s + lag_s, 2),
        "closes_in_s": round(max(0.0, status.window_closes_in_s - lag_s), 2) if in_window else None,
        "planned_in_s": round(planned_s - lag_s, 2) if planned_s is not None and planned_s > lag_s else None,
        "pushed": sum(push.phase in ("ADMITTED", "SEALED") for push in view.pushes),
        "of": len(live),
    }


def _cluster(
    view: RunView,
    cluster: ClusterStatus,
    push: OpenPushView | None,
    lag_s: float,
    departures: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    level, sign, why = cluster_sign(view, cluster, lag_s, departures)
    behind = _behind(view.status.published, cluster.base)
    return {
        "id": cut(cluster.cluster_id),
        "level": level,
        "sign": sign,
        "why": why,
        "alive": cluster.alive,
        "phase": cut(cluster.phase).lower(),
        "incarnation": _text(cluster.incarnation),
        "lives": cluster.incarnations,
        "beat_age_s": round(cluster.beat_age_s + lag_s, 2) if cluster.alive else None,
        "steps_per_s": _number(cluster.steps_per_s) if cluster.alive else None,
        "tokens_per_s": _number(cluster.tokens_per_s) if cluster.alive else None,
        "steps": cluster.steps_total,
        "local_steps": cluster.local_steps or None,
        "loss": _number(cluster.loss),
        "base": _text(cluster.base),
        "behind": behind,
        "stale": behind is not None and behind > STALE_SHARE * s_max(view.status),
        "tokens": cluster.tokens_applied,
        "applied": cluster.pushes_applied,
        "excluded": cluster.pushes_excluded,
        "aborted": cluster.pushes_aborted,
        "verdict": cut(cluster.last_verdict).lower().replace("_", " "),
        "reason": "" if cluster.last_reason == MERGED else cut(cluster.last_reason),
        "norm": _number(cluster.last_norm),
        "z": _number(cluster.last_z),
        "cosine": _number(cluster.last_cosine),
        "leased": cluster.leased_tokens,
        "note": cut(cluster.note),
        "push": {"phase": push.phase, "landed": round(push.landed, 3)} if push is not None else None,
    }


def cluster_sign(
    view: RunView, cluster: ClusterStatus, lag_s: float, departures: Mapping[str, tuple[str, str]]
) -> tuple[str, str, str]:
    """(level, word, why): the most important state of this cluster."""
    if not cluster.alive:
        kind, reason = departures.get(cluster.cluster_id, ("", ""))
        return ("off", "left", reason) if kind == "leave" or view.status.stopped else ("bad", "away", reason)
    silent_s = cluster.beat_age_s + lag_s
    if silent_s > SILENT_BEATS * view.status.settings.heartbeat_s:
        return "warn", "silent", f"no heartbeat for {silent_s:.0f} s"
    if cluster.quarantined:
        return "warn", "in quarantine", "its last pushes were excluded"
    if cluster.direction_alarm:
        return "warn", "direction alarm", "its pushes have another direction than the others'"
    alarms = [alarm for alarm in view.status.alarms if cluster.cluster_id in alarm.clusters]
    if alarms:
        return "warn", f"alarm: {alarms[0].kind.replace('_', ' ')}", cut(alarms[0].sentence)
    if cluster.note.startswith("draining"):
        return "warn", "draining", ""
    return "good", cut(cluster.phase).lower() or "here", ""


def _slave(view: RunView, slave: SlaveStatus, lag_s: float) -> dict[str, Any]:
    level, sign = _slave_sign(view, slave, lag_s)
    return {
        "id": cut(slave.slave_id),
        "level": level,
        "sign": sign,
        "alive": slave.alive,
        "phase": cut(slave.phase).lower(),
        "incarnation": _text(slave.incarnation),
        "lives": slave.incarnations,
        "beat_age_s": round(slave.beat_age_s + lag_s, 2) if slave.alive else None,
        "version": _text(slave.version),
        "durable": _text(slave.durable),
        "memory_bytes": slave.resident_bytes,
        "staging_bytes": slave.staging_bytes,
        "served_bytes": slave.served_bytes,
        "refused_chunks": slave.refused_chunks,
        "refused_connections": slave.refused_connections,
        "endpoint": cut(slave.data_endpoint),
    }


def _slave_sign(view: RunView, slave: SlaveStatus, lag_s: float) -> tuple[str, str]:
    trouble = view.slave_troubles.get(slave.slave_id, "")
    if not slave.alive:
        return ("off", "ended") if view.status.stopped else ("bad", "away")
    if trouble:
        return "bad", cut(trouble)
    silent_s = slave.beat_age_s + lag_s
    if silent_s > SILENT_BEATS * view.status.settings.heartbeat_s:
        return "warn", f"silent for {silent_s:.0f} s"
    return ("good", "ready") if slave.phase == "READY" else ("warn", cut(slave.phase).lower())


def _link(link: LinkRate, lag_s: float) -> dict[str, Any]:
    return {
        "cluster": cut(link.cluster),
        "slave": cut(link.slave),
        "push": _number(link.push_bytes_per_s),
        "push_age_s": _known(link.push_age_s, lag_s),
        "pull": _number(link.pull_bytes_per_s),
        "pull_age_s": _known(link.pull_age_s, lag_s),
    }


def round_json(entry: RoundSummary) -> dict[str, Any]:
    return {
        "id": str(entry.round),
        "outcome": cut(entry.outcome),
        "reason": cut(entry.reason),
        "version": _text(entry.version),
        "accepted": [cut(name) for name in entry.accepted[:64]],
        "excluded": [cut(name) for name in entry.excluded[:64]],
        "kappa": _number(entry.kappa),
        "rho": _number(entry.rho),
        "norm": _number(entry.merged_norm),
        "tokens": entry.tokens,
        "at": round(entry.wall_time_s, 2) if entry.wall_time_s > 0 else None,
    }


def s_max(status: StatusReply) -> int:
    """Versions that a push's base may be behind."""
    return status.settings.max_staleness_versions or max(8, 4 * sum(cluster.alive for cluster in status.clusters))


def _behind(published: Version | None, base: Version | None) -> int | None:
    """Versions between the published one and what a cluster trains on; None when they cannot be compared."""
    if published is None or base is None or published.timeline != base.timeline:
        return None
    return max(0, published.v - base.v)


def _left_s(status: StatusReply, rate_tokens_per_s: float) -> float | None:
    left = status.tk_max_tokens - status.tokens
    return round(left / rate_tokens_per_s, 1) if status.tk_max_tokens and left > 0 and rate_tokens_per_s > 0 else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _number(value: float | None) -> float | None:
    return round(value, 5) if value is not None and math.isfinite(value) else None


def _known(value: float | None, lag_s: float) -> float | None:
    return round(value + lag_s, 2) if value is not None else None
