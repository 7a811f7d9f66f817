"""Describes the run in one sentence: what happens now, or what the run waits for; and what else a person should know.

The words are the state machine's (master/state/reasons.py): answers, logs and the page give the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dips.core.messages import StatusReply
from dips.core.units import format_seconds
from dips.master.page.timeline import cut
from dips.master.state.status import NOTHING_MERGED, RunView

Departures = Mapping[str, tuple[str, str]]

ROUND_STEPS = frozenset({"SEALED", "MEASURE", "JUDGE", "PREPARE", "COMMIT", "PUBLISH"})
STEP_S = 3.0
"""The run waits for a step of a round that takes longer than this."""

LATE_FACTOR = 4.0
LATE_AT_LEAST_S = 30.0
"""A run that publishes nothing for LATE_FACTOR of its usual intervals, and for this long, is reported as late."""


def sentence(view: RunView, lag_s: float, departures: Departures) -> dict[str, Any]:
    """{"level": good | wait | warn | bad | off, "text": ..., "more": [...]}. lag_s, departures: as in snapshot.py."""
    level, text = _first(view, lag_s, departures)
    return {"level": level, "text": cut(text), "more": [cut(line) for line in _more(view)]}


def _first(view: RunView, lag_s: float, departures: Departures) -> tuple[str, str]:
    status = view.status
    if status.stopped:
        return "off", f"The run has ended with {status.tokens:,} tokens; no cluster is left."
    if status.recovery:
        return "bad", f"Recovering: {status.recovery}."
    if status.waiting_for and not _passes(view):
        return _waits(status), _capital(f"{status.waiting_for}.")
    if status.reshard:
        return "wait", f"Blocks are about to move: {status.reshard}."
    if nothing := [alarm for alarm in status.alarms if alarm.kind == NOTHING_MERGED]:
        return "bad", _capital(f"{nothing[0].sentence}.")
    if late := _late(view, lag_s):
        return "wait", late
    if away := _away(status, departures):
        return "warn", f"{_busy(view)}; {away}."
    return "good", f"All is well: {_busy(view)}."


def _passes(view: RunView) -> bool:
    """Whether the open step of a round is not longer than usual, so that nothing waits."""
    return view.status.phase in ROUND_STEPS and view.status.phase_age_s < STEP_S


def _away(status: StatusReply, departures: Departures) -> str:
    """The clusters that are away and did not leave by themselves, in words."""
    gone = [c.cluster_id for c in status.clusters if not c.alive and departures.get(c.cluster_id, ("",))[0] != "leave"]
    if not gone:
        return ""
    why = departures.get(gone[0], ("", ""))[1]
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
        return f"{train}, with a version about every {_roughly(view.publish_interval_s)}"
    return f"{train}, and no version was merged yet"


def _roughly(seconds: float) -> str:
    return format_seconds(round(seconds, 1 if seconds < 10 else 0))


def _late(view: RunView, lag_s: float) -> str:
    since_s, usual_s = view.since_publish_s, view.publish_interval_s
    if since_s is None or usual_s <= 0 or since_s + lag_s < max(LATE_AT_LEAST_S, LATE_FACTOR * usual_s):
        return ""
    return (
        f"No version was published for {format_seconds(round(since_s + lag_s))}, usually one comes every "
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
    lines += [_capital(f"{alarm.sentence}.") for alarm in status.alarms if alarm.kind != NOTHING_MERGED]
    quarantined = [c.cluster_id for c in status.clusters if c.alive and c.quarantined]
    if quarantined:
        lines.append(f"In quarantine after pushes that were excluded in a row: {', '.join(quarantined)}.")
    lines += [f"Slave {name}: {trouble}." for name, trouble in sorted(view.slave_troubles.items())]
    if status.paused and not status.waiting_for.startswith("paused"):
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
