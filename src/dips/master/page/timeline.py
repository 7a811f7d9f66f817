"""The timeline for people: the important events of the master's tape, in sentences.

Bounded; the oldest events are dropped first. It must show only events of the tape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dips.master.page.bounds import MAX_EVENTS, MAX_TEXT

Level = Literal["good", "info", "warn", "bad"]
EventText = tuple[Level, str, str]
"""(level, who, sentence)."""

SAME_S = 60.0
"""Within this time, equal sentences about the same process are one event, counted."""

_TOLD_CODES = frozenset(
    {"PROTOCOL_VERSION", "RUN_ID", "LAYOUT", "DATA_PLAN", "STALE_EPOCH", "SEED_EXISTS", "MEMORY", "FROZEN"}
) | {
    *("NONFINITE", "MALFORMED", "NOT_LOOPBACK", "CONFIG", "DISK", "DIGEST", "UNKNOWN_NAME", "KEY", "IDENTITY"),
}
"""Refusals that a person should check; the others are part of normal calls, such as "later" and "join again"."""

STILL_S = 2.0
"""Shorter pauses of the master are no event: they are normal on a busy machine."""

_OPERATOR = {"pause", "resume", "stop", "evict", "drain", "reshard_asked"}


@dataclass(frozen=True)
class TimelineEvent:
    """One event. seq grows by one with each event and each repetition. wall_s: Unix time of the last repetition."""

    seq: int
    wall_s: float
    level: Level
    who: str
    sentence: str
    times: int = 1


class EventTimeline:
    """The newest events, and how clusters departed."""

    def __init__(self) -> None:
        self._events: deque[TimelineEvent] = deque(maxlen=MAX_EVENTS)
        self._seq = 0
        self.departures: dict[str, tuple[str, str]] = {}
        """Cluster -> ("evict" or "leave", why), while it is away."""

    @property
    def seq(self) -> int:
        return self._seq

    def note(self, wall_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes one line of the tape; most are not shown."""
        self._note_departure(kind, fields)
        text = sentence_of(kind, fields)
        if text is None:
            return
        level, who, sentence = text[0], cut(text[1]), cut(text[2])
        self._seq += 1
        same = next((e for e in self._events if (e.who, e.sentence) == (who, sentence)), None)
        if same is not None and 0 <= wall_s - same.wall_s < SAME_S:
            self._events.remove(same)
            self._events.append(replace(same, seq=self._seq, wall_s=wall_s, times=same.times + 1))
        else:
            self._events.append(TimelineEvent(self._seq, wall_s, level, who, sentence))

    def since(self, seq: int) -> list[TimelineEvent]:
        """Events after this one, oldest first; 0: all that are kept."""
        return [event for event in self._events if event.seq > seq]

    def _note_departure(self, kind: str, fields: Mapping[str, Any]) -> None:
        cluster = fields.get("cluster")
        if not isinstance(cluster, str):
            return
        if kind == "join":
            self.departures.pop(cluster, None)
        elif kind in ("evict", "leave"):
            self.departures[cluster] = (kind, cut(fields.get("reason")))


def sentence_of(kind: str, fields: Mapping[str, Any]) -> EventText | None:
    """An event's level, its process, and a sentence; None for an event that is not shown."""
    if kind in _OPERATOR and "sentence" in fields:
        return "info", "operator", f"{kind.replace('_', ' ')}: {fields['sentence']}"
    return next((text for part in (_of_run, _of_clusters, _of_slaves) if (text := part(kind, fields))), None)


def _of_run(kind: str, f: Mapping[str, Any]) -> EventText | None:
    match kind:
        case "epoch" if f.get("version") in (None, "None"):
            return "info", "master", f"the master began epoch {f.get('epoch')}, with no version yet"
        case "epoch":
            return "warn", "master", f"the master started again: epoch {f.get('epoch')}, version {f.get('version')}"
        case "master-ended":
            return "info", "master", f"the master ended: {f.get('sentence')}"
        case "alarm":
            return "bad", "run", str(f.get("sentence"))
        case "adopted":
            return "warn", "run", f"version {f.get('version')} was adopted from the slaves"
        case "stood_still" if _number(f.get("gap_s")) >= STILL_S:
            return "warn", "master", f"the master itself paused for {_number(f.get('gap_s')):.1f} s"
        case "stopped":
            return "info", "run", f"the run has ended: {f.get('reason')}"
        case "revoked":
            return "warn", str(f.get("holder")), "its certificate was revoked"
        case "recovery" if f.get("why"):
            return "warn", "run", f"recovery: {f.get('why')}"
        case "resharded":
            return "good", "run", f"{f.get('blocks')} blocks have moved to other slaves"
        case "refused" if f.get("code") in _TOLD_CODES:
            return "warn", str(f.get("peer") or f.get("method") or "-"), f"refused: {f.get('sentence')}"
    return None


def _of_clusters(kind: str, f: Mapping[str, Any]) -> EventText | None:
    who = f"cluster {f.get('cluster')}"
    match kind:
        case "join":
            return "good", who, f"joined as incarnation {f.get('incarnation')}"
        case "evict":
            return "bad", who, f"evicted: {f.get('reason')}"
        case "leave":
            return "info", who, f"left: {f.get('reason')}"
        case "verdict" if f.get("verdict") != "APPLIED":
            push, verdict = str(f.get("push")), str(f.get("verdict")).lower().replace("_", " ")
            level: Level = "bad" if verdict == "rolled back" else "warn"
            return level, f"cluster {push.partition('/')[0]}", f"push {verdict}: {f.get('reason') or 'no reason given'}"
    return None


def _of_slaves(kind: str, f: Mapping[str, Any]) -> EventText | None:
    who = f"slave {f.get('slave')}"
    match kind:
        case "slave_attached":
            return "info", who, f"attached as incarnation {f.get('incarnation')}"
        case "slave_ready":
            version = f.get("version")
            return "good", who, "ready, with no version yet" if version == "None" else f"ready at version {version}"
        case "slave_lost":
            return "bad", who, f"lost: {f.get('reason')}"
        case "slave_dismissed":
            return "info", who, f"dismissed: {f.get('reason')}"
        case "refused_connections":
            what = "a connection" if f.get("count") == 1 else f"{f.get('count')} connections"
            return "warn", who, f"refused {what}: {f.get('last_reason')}"
    return None


def cut(value: object, most: int = MAX_TEXT) -> str:
    """A text of bounded length with only printable characters."""
    text = "" if value is None else str(value)
    text = "".join(character if character.isprintable() else " " for character in text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def events_json(events: list[TimelineEvent]) -> list[dict[str, Any]]:
    return list(_plain(events))


def _plain(events: list[TimelineEvent]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {
            "seq": event.seq,
            "at": round(event.wall_s, 2),
            "level": event.level,
            "who": event.who,
            "text": event.sentence,
            "times": event.times,
        }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
