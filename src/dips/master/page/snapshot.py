"""Makes the messages for all open pages: the JSON of each sample of the run, made once for any number of pages.

Text from outside is cut and passed on as text, never as markup; numbers that are not known are null.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from dips.core.messages import ClusterStatus, RoundSummary, SlaveStatus, StatusReply, VerdictKind
from dips.core.units import format_seconds
from dips.master.page.history import (
    MAX_ROUNDS,
    STAYED,
    Departure,
    Departures,
    EventTimeline,
    ProgressHistory,
    TapeEvent,
    TapeTail,
    TimelineEvent,
    cut,
    heldout_point,
)
from dips.master.state.reasons import AlarmKind, WaitingCode
from dips.master.state.schedule import LinkRate
from dips.master.state.status import OpenPushView, RunView

# ---- sentence --------------------------------------------------------------------------------------------------------
#
# Describes the run in one sentence: what happens now, or what the run waits for; and what else a person should know.
#
# The words are the state machine's (master/state/status.py): answers, logs and the page give the same reason.


ROUND_STEPS = frozenset({"SEALED", "MEASURE", "JUDGE", "PREPARE", "COMMIT", "PUBLISH"})
STEP_S = 3.0
"""The run waits for a step of a round that takes longer than this."""

LATE_FACTOR = 4.0
LATE_AT_LEAST_S = 30.0
"""A run that publishes nothing for LATE_FACTOR of its usual intervals, and for this long, is reported as late."""


def sentence(view: RunView, departures: Departures) -> dict[str, Any]:
    """{"level": good | wait | warn | bad | off, "text": ..., "more": [...]}."""
    level, text = _first(view, departures)
    return {"level": level, "text": cut(text), "more": [cut(line) for line in _more(view)]}


def _first(view: RunView, departures: Departures) -> tuple[str, str]:
    status = view.status
    if status.stopped:
        return "off", f"The run has ended with {status.tokens:,} tokens; no cluster is left."
    if status.recovery:
        return "bad", f"Recovering: {status.recovery}."
    # A step of a round that does not last longer than usual is nothing to wait for.
    passes = status.phase in ROUND_STEPS and status.phase_age_s < STEP_S
    if status.waiting_for and not passes:
        return _waits(status), _capital(f"{status.waiting_for}.")
    if status.reshard:
        return "wait", f"Blocks are about to move: {status.reshard}."
    if nothing := [alarm for alarm in status.alarms if alarm.kind == AlarmKind.NOTHING_MERGED]:
        return "bad", _capital(f"{nothing[0].sentence}.")
    if late := _late(view):
        return "wait", late
    if away := _away(status, departures):
        return "warn", f"{_busy(view)}; {away}."
    if status.alarms or any(c.alive and (c.direction_alarm or c.quarantined) for c in status.clusters):
        return "warn", _capital(f"{_busy(view)}; something needs a look:")
    return "good", f"All is well: {_busy(view)}."


def _away(status: StatusReply, departures: Departures) -> str:
    """The clusters that are away and did not leave by themselves, in words."""
    of = {c.cluster_id: departures.get(c.cluster_id, STAYED) for c in status.clusters if not c.alive}
    gone = [name for name, departure in of.items() if departure.kind != "leave"]
    if not gone:
        return ""
    why = of[gone[0]].why
    names = f"cluster {gone[0]} is" if len(gone) == 1 else f"clusters {', '.join(gone[:6])} are"
    return f"{names} away{f' ({why})' if why and len(gone) == 1 else ''}"


def _waits(status: StatusReply) -> str:
    """The level of a wait: an operator's pause and a step of a round are normal; a slave that is away is a problem."""
    away = any(not slave.alive for slave in status.slaves) or not any(c.alive for c in status.clusters)
    return "bad" if away and status.published is not None and not status.paused else "wait"


def _busy(view: RunView) -> str:
    """What the run does, in words that do not change while it does so."""
    status = view.status
    live = sum(cluster.alive for cluster in status.clusters)
    train = f"{live} {'cluster trains' if live == 1 else 'clusters train'}"
    if status.stopping:
        return f"the run ends, {live} {'cluster has' if live == 1 else 'clusters have'} yet to leave"
    if view.publish_interval_s > 0:
        every_s = round(view.publish_interval_s, 1 if view.publish_interval_s < 10 else 0)
        return f"{train}, with a version about every {format_seconds(every_s)}"
    return f"{train}, and no version was merged yet"


def _late(view: RunView) -> str:
    since_s, usual_s = view.since_publish_s, view.publish_interval_s
    if since_s is None or usual_s <= 0 or since_s < max(LATE_AT_LEAST_S, LATE_FACTOR * usual_s):
        return ""
    return (
        f"No version was published for {format_seconds(round(since_s))}, usually one comes every "
        f"{format_seconds(max(1, round(usual_s)))}: clusters train, and none has finished a push."
    )


def _more(view: RunView) -> list[str]:
    """The sentences after the first one, the most urgent first."""
    status = view.status
    lines = []
    alarmed = [c.cluster_id for c in status.clusters if c.alive and c.direction_alarm]
    if alarmed:
        lines.append(
            f"Direction alarm: {', '.join(alarmed)} pushes in another direction than the others; it is still merged."
        )
    lines += [_capital(f"{alarm.sentence}.") for alarm in status.alarms if alarm.kind != AlarmKind.NOTHING_MERGED]
    quarantined = [c.cluster_id for c in status.clusters if c.alive and c.quarantined]
    if quarantined:
        lines.append(f"In quarantine after pushes that were excluded in a row: {', '.join(quarantined)}.")
    lines += [f"Slave {slave.slave_id}: {slave.trouble}." for slave in status.slaves if slave.trouble]
    if status.paused and status.waiting_code != WaitingCode.PAUSED:
        lines.append("Rounds are paused by the operator; clusters train on.")
    if status.stopping and not status.stopped:
        lines.append("The run is ending.")
    if status.reshard and (status.recovery or status.waiting_for):
        lines.append(f"A reshard waits: {status.reshard}.")
    if hint := no_loss_sentence(status):
        lines.append(f"{_capital(hint)}.")
    return lines


def no_loss_sentence(status: StatusReply) -> str:
    """Advice on reporting a loss, if every live cluster has been merged and none has reported a loss; else empty."""
    training = [c for c in status.clusters if c.alive and c.pushes_applied and c.steps_per_s > 0]
    if not training or any(math.isfinite(cluster.loss) for cluster in status.clusters):
        return ""
    return "no cluster reports a loss: write sync.report(loss) before optimizer.step() in the training loop"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- snapshot --------------------------------------------------------------------------------------------------------


SILENT_BEATS = 2.0
"""A peer that missed this many heartbeats is shown as silent, before it is evicted."""

RANKS_NAMED = 8
"""Late ranks of a cluster that the page names."""

STALE_SHARE = 0.5
"""The share of s_max from which a base that is behind is marked."""


def snapshot(
    view: RunView,
    wall_s: float,
    rate_tokens_per_s: float,
    departures: Departures,
    charted: Iterable[str] = (),
) -> dict[str, Any]:
    """The sample as JSON. departures: as in the timeline."""
    status = view.status
    pushes = {push.cluster: push for push in view.pushes}
    left = status.tk_max_tokens - status.tokens
    goes_on = status.tk_max_tokens and left > 0 and rate_tokens_per_s > 0
    return {
        "run": _run(view),
        "say": sentence(view, departures),
        "round": _round(view),
        "version": _text(status.published),
        "decided": _text(status.decided),
        "durable": _text(status.durable),
        "since_publish_s": _seconds(view.since_publish_s),
        "tokens": status.tokens,
        "goal": status.tk_max_tokens or None,
        "rate": round(rate_tokens_per_s, 1),
        "left_s": round(left / rate_tokens_per_s, 1) if goes_on else None,
        "rounds": {
            "committed": status.rounds_committed,
            "merged": status.rounds_merged,
            "void": status.rounds_void,
            "aborted": status.rounds_aborted,
        },
        "clusters": [
            _cluster(view, one, pushes.get(one.cluster_id), departures.get(one.cluster_id, STAYED), wall_s)
            for one in status.clusters
        ],
        "slaves": [_slave(view, one) for one in status.slaves],
        "links": [_link(link) for link in view.links],
        "recent_rounds": [round_json(entry) for entry in status.recent_rounds],
        "charted": list(charted),
    }


def _run(view: RunView) -> dict[str, Any]:
    status, settings = view.status, view.status.settings
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
        "s_max": view.staleness_limit,
    }


def _round(view: RunView) -> dict[str, Any]:
    status = view.status
    live = [cluster for cluster in status.clusters if cluster.alive]
    in_window = status.phase == "WINDOW"
    planned_s = view.planned_window_in_s
    return {
        "id": _text(status.round),
        "phase": status.phase,
        "age_s": round(status.phase_age_s, 2),
        "closes_in_s": round(status.window_closes_in_s, 2) if in_window else None,
        "planned_in_s": round(planned_s, 2) if planned_s is not None and planned_s > 0 else None,
        "pushed": sum(push.phase in ("ADMITTED", "SEALED") for push in view.pushes),
        "of": len(live),
    }


def _cluster(
    view: RunView, cluster: ClusterStatus, push: OpenPushView | None, departure: Departure, wall_s: float
) -> dict[str, Any]:
    level, sign, why = _cluster_sign(view, cluster, departure)
    behind = cluster.base.behind(view.status.published) if cluster.base is not None else None
    return {
        "id": cut(cluster.cluster_id),
        "level": level,
        "sign": sign,
        "why": why,
        "alive": cluster.alive,
        "away_s": None if cluster.alive or departure is STAYED else round(max(0.0, wall_s - departure.wall_s), 1),
        "phase": cut(cluster.phase).lower(),
        "ranks": cluster.ranks,
        "late_ranks": list(cluster.late_ranks[:RANKS_NAMED]),
        "incarnation": _text(cluster.incarnation),
        "lives": cluster.incarnations,
        "beat_age_s": round(cluster.beat_age_s, 2) if cluster.alive else None,
        "steps_per_s": _number(cluster.steps_per_s) if cluster.alive else None,
        "tokens_per_s": _number(cluster.tokens_per_s) if cluster.alive else None,
        "steps": cluster.steps_total,
        "local_steps": cluster.local_steps or None,
        "loss": _number(cluster.loss),
        "base": _text(cluster.base),
        "behind": behind,
        "stale": behind is not None and behind > STALE_SHARE * view.staleness_limit,
        "tokens": cluster.tokens_applied,
        "applied": cluster.pushes_applied,
        "excluded": cluster.pushes_excluded,
        "aborted": cluster.pushes_aborted,
        "verdict": cut(cluster.last_verdict).lower().replace("_", " "),
        "reason": "" if cluster.last_verdict == VerdictKind.APPLIED.name else cut(cluster.last_reason),
        "norm": _number(cluster.last_norm),
        "z": _number(cluster.last_z),
        "cosine": _number(cluster.last_cosine),
        "leased": cluster.leased_tokens,
        "note": cut(cluster.note),
        "push": {"phase": push.phase, "landed": round(push.landed, 3)} if push is not None else None,
    }


def _cluster_sign(view: RunView, cluster: ClusterStatus, departure: Departure) -> tuple[str, str, str]:
    """(level, word, why): the most important state of this cluster."""
    if not cluster.alive:
        left = departure.kind == "leave" or view.status.stopped
        return ("off", "left", departure.why) if left else ("bad", "away", departure.why)
    if cluster.beat_age_s > SILENT_BEATS * view.status.settings.heartbeat_s:
        return "warn", "silent", f"no heartbeat for {cluster.beat_age_s:.0f} s"
    if cluster.quarantined:
        return "warn", "in quarantine", "its last pushes were excluded"
    if cluster.direction_alarm:
        return "warn", "direction alarm", "its pushes have another direction than the others'"
    alarms = [alarm for alarm in view.status.alarms if cluster.cluster_id in alarm.clusters]
    if alarms:
        return "warn", f"alarm: {alarms[0].kind.replace('_', ' ')}", cut(alarms[0].sentence)
    if cluster.draining:
        return "warn", "draining", ""
    return "good", cut(cluster.phase).lower() or "here", ""


def _slave(view: RunView, slave: SlaveStatus) -> dict[str, Any]:
    level, sign = _slave_sign(view, slave)
    return {
        "id": cut(slave.slave_id),
        "level": level,
        "sign": sign,
        "alive": slave.alive,
        "phase": cut(slave.phase).lower(),
        "incarnation": _text(slave.incarnation),
        "lives": slave.incarnations,
        "beat_age_s": round(slave.beat_age_s, 2) if slave.alive else None,
        "version": _text(slave.version),
        "durable": _text(slave.durable),
        "memory_bytes": slave.resident_bytes,
        "staging_bytes": slave.staging_bytes,
        "served_bytes": slave.served_bytes,
        "refused_chunks": slave.refused_chunks,
        "refused_connections": slave.refused_connections,
        "endpoint": cut(slave.data_endpoint),
    }


def _slave_sign(view: RunView, slave: SlaveStatus) -> tuple[str, str]:
    if not slave.alive:
        return ("off", "ended") if view.status.stopped else ("bad", "away")
    if slave.trouble:
        return "bad", cut(slave.trouble)
    if slave.beat_age_s > SILENT_BEATS * view.status.settings.heartbeat_s:
        return "warn", f"silent for {slave.beat_age_s:.0f} s"
    return ("good", "ready") if slave.phase == "READY" else ("warn", cut(slave.phase).lower())


def _link(link: LinkRate) -> dict[str, Any]:
    return {
        "cluster": cut(link.cluster),
        "slave": cut(link.slave),
        "push": _number(link.push_bytes_per_s),
        "push_age_s": _seconds(link.push_age_s),
        "pull": _number(link.pull_bytes_per_s),
        "pull_age_s": _seconds(link.pull_age_s),
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


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _number(value: float | None) -> float | None:
    return round(value, 5) if value is not None and math.isfinite(value) else None


def _seconds(value: float | None) -> float | None:
    return round(value, 2) if value is not None else None


# ---- hub -------------------------------------------------------------------------------------------------------------
#
# Keeps the newest message. Runs on the page's thread. A page that keeps up gets the changes; a new page, or one that
# fell behind, gets everything.


class Hub:
    """The newest message and the data for the next one. Make it where the page's event loop runs."""

    def __init__(
        self, events: deque[TapeEvent], heldout: TapeTail | None = None, earlier: Iterable[TapeEvent] = ()
    ) -> None:
        """events: those that wait, and are taken from it. heldout: the evaluator's tape. earlier: events that were on
        the tape before this process began."""
        self._events, self._heldout = events, heldout
        self.history, self.timeline = ProgressHistory(), EventTimeline()
        self._rounds: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._news = asyncio.Event()
        self._state: dict[str, Any] = {}
        self._wall_s = 0.0
        self._delta = ""
        self.number = 0
        """The number of the newest message; 0 before the first."""
        self.steers = False
        """Whether the page may pause and resume rounds."""
        self.ended = ""
        """Why there will be no more messages; empty before the end."""
        for event in earlier:
            self.timeline.note(*event)

    def take(self, view: RunView, wall_s: float) -> None:
        """Takes one sample of the run."""
        events, sample, generation = self.timeline.seq, self.history.seq, self.history.generation
        while self._events:
            self.timeline.note(*self._events.popleft())
        status = view.status
        self.history.add(wall_s, status.tokens, view.publish_interval_s, status.clusters)
        for event in self._heldout.events() if self._heldout is not None else ():
            if (point := heldout_point(*event)) is not None:
                self.history.add_heldout(point)
        rate = self.history.rate_tokens_per_s
        self._state = snapshot(view, wall_s, rate, self.timeline.departures, self.history.charted)
        last = self.history.heldout[-1][1] if self.history.heldout else None
        self._state["heldout"] = (
            {"loss": round(last.loss, 5), "version": str(last.version), "tokens": last.tokens} if last else None
        )
        self._state["steers"] = self.steers
        self._wall_s = wall_s
        self.number += 1
        # Stores the rounds that were not known and returns them, oldest first.
        fresh = [entry for entry in view.status.recent_rounds if str(entry.round) not in self._rounds]
        for entry in fresh:
            self._rounds[str(entry.round)] = round_json(entry)
        while len(self._rounds) > MAX_ROUNDS:
            self._rounds.popitem(last=False)
        new_rounds = [self._rounds[str(entry.round)] for entry in fresh]
        whole = generation != self.history.generation
        curves = self.history.full() if whole else self.history.since(sample)
        self._delta = self._message({**curves, "replace": whole}, self.timeline.since(events), new_rounds, full=False)
        self._wake()

    def end(self, why: str) -> None:
        """Tells the pages that the master ends."""
        self.ended = why
        self._wake()

    def full(self) -> str:
        """The message with everything, for a new page."""
        curves = {**self.history.full(), "replace": True}
        return self._message(curves, self.timeline.since(0), list(self._rounds.values()), full=True)

    def message_after(self, number: int) -> str:
        """The next message for a page that has the message with this number."""
        return self._delta if number == self.number - 1 and number > 0 else self.full()

    async def after(self, number: int) -> None:
        """Waits until there is a message newer than this one, or the end."""
        while self.number <= number and not self.ended:
            await self._news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _message(
        self, curves: dict[str, Any], events: list[TimelineEvent], rounds: list[dict[str, Any]], full: bool
    ) -> str:
        message = {
            "number": self.number,
            "full": full,
            "now": round(self._wall_s, 3),
            "state": self._state,
            "history": curves,
            "events": [vars(event) for event in events],
            "rounds": rounds,
        }
        return json.dumps(message, separators=(",", ":"), allow_nan=False)
