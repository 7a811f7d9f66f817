"""The data of the curves: tokens, rate and losses over time, in bounded memory for runs of any length.

When the rows are full, every second one is dropped and samples are taken half as often. It must never fill a gap: a
loss that was not reported is null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dips.core.clock import Clock
from dips.core.errors import ConfigError
from dips.core.ids import Version, parse_version
from dips.core.messages import ClusterStatus
from dips.core.observe.tape import Tape

# ---- bounds ----------------------------------------------------------------------------------------------------------
#
# All bounds of the status page, with their costs.
#
# The page's costs for the run must never grow: memory, time of the control loop, connections.


SAMPLE_S = 1.0
"""The period of samples of the state: each takes 0.2 ms of the control loop with 8 clusters, about 1 ms with 64."""

MAX_STREAMS = 32
"""The most open pages. Each costs one connection and, for each sample, one write of a few KB."""

MAX_CONNECTIONS = 128
"""The most connections of all kinds; further ones are closed before TLS begins, which takes 0.6 MB for each (asyncio's
buffer alone 256 KiB)."""

MAX_NEWCOMERS, MAX_NEWCOMERS_OF_ADDRESS = 64, 32
"""The most connections, in all and from one address, that have not been shown anything yet. A browser opens six, and an
office may be behind one address."""

SILENT_S = 15.0
"""A connection that has not sent a request which it may make by then is closed."""

WAIT_S = 5.0
"""A stream without a sample for this long sends a sign: the page sees that it is alive, the master that it is open."""

WRITE_S = 20.0
"""A stream whose reader takes nothing for this long is ended; the browser connects again."""

MAX_ROWS = 1200
"""The most samples of the curves. When they are full, every second one is dropped, and from then on samples are taken
half as often: 1200 rows are enough for the first minutes of a run and for its third month."""

CHARTED_CLUSTERS = 24
"""The most clusters whose losses are kept and drawn: 24 x 1200 numbers, 230 KB. The page says when there are more."""

MAX_HELDOUT = 600
"""The most held-out losses, reduced in the same way."""

MAX_EVENTS = 400
"""The most lines of the timeline, 100 KB."""

MAX_ROUNDS = 240
"""The most rounds of the timeline."""

MAX_TEXT = 300
"""The most characters of a text from outside: reasons, notes, names."""

TAPE_TAIL_BYTES = 512 * 1024
"""Bytes at the end of the master's tape, read once at the start, so that the timeline survives a restart."""


# ---- events of the tape ----


MAX_WAITING = 2000
"""The most events between two samples."""

AT_ONCE_BYTES = 1 << 20
"""The most bytes of a tape that are read at once; a longer one is read in several calls."""

TapeEvent = tuple[float, str, Mapping[str, Any]]
"""(Unix time, kind, fields)."""


class BufferedTape(Tape):
    """A tape whose events also go to the page's thread, after they are written."""

    def __init__(self, path: Path, role: str, name: str, clock: Clock) -> None:
        super().__init__(path, role, name, clock)
        self._wall_s = clock.wall_s
        self.waiting: deque[TapeEvent] = deque(maxlen=MAX_WAITING)
        """Those that the page has not taken yet. Neither side ever waits: of a burst that it cannot take, the oldest
        are dropped here, never from the tape."""

    def write(self, kind: str, cause: str, **fields: object) -> None:
        super().write(kind, cause, **fields)
        self.waiting.append((self._wall_s(), kind, fields))


class TapeTail:
    """The lines of a tape as they come; half a one waits for its end. A tape that is not there yet is looked for again,
    and one that became shorter was restored from a copy: it is read from its beginning."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """last_bytes: of what is there already, only so much at its end; None: all."""
        self.path = path
        size = path.stat().st_size if last_bytes is not None and path.is_file() else 0
        self.at_bytes = max(0, size - (last_bytes or 0))

    def lines(self) -> list[bytes]:
        """Those that are new, up to a bound: call again until there is none."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.at_bytes:
                    self.at_bytes = 0
                file.seek(self.at_bytes)
                found = file.read(AT_ONCE_BYTES)
        except OSError:
            return []
        end = found.rfind(b"\n") + 1
        self.at_bytes += end or (len(found) if len(found) == AT_ONCE_BYTES else 0)
        return found[:end].splitlines()

    def events(self) -> Iterator[TapeEvent]:
        """The events of lines(); a line that is none is left out."""
        for line in self.lines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                event = json.loads(line)
                yield float(event["wall_s"]), str(event["kind"]), event


# ---- timeline --------------------------------------------------------------------------------------------------------
#
# The timeline for people: the important events of the master's tape, in sentences.
#
# Bounded; the oldest events are dropped first. It must show only events of the tape.


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

_PRESENCE = {
    **dict.fromkeys(("join", "slave_attached", "slave_ready"), "here"),
    **dict.fromkeys(("evict", "slave_lost"), "gone"),
    **dict.fromkeys(("leave", "slave_dismissed"), "left"),
}
"""What an event of the tape says of its process's presence."""

_OPERATOR = {"pause", "resume", "stop", "evict", "drain", "reshard_asked"}


@dataclass(frozen=True)
class TimelineEvent:
    """One event, as pages get it. seq grows by one with each event and each repetition."""

    seq: int
    at: float  # Unix time of the last repetition
    level: Level
    who: str
    text: str
    # whether `who` is here from now on ("here"), was lost ("gone"), or left in order ("left"); "": no change
    presence: str = ""
    times: int = 1


class Departure(NamedTuple):
    """How a cluster went, and why."""

    kind: str  # evict or leave
    why: str
    wall_s: float  # Unix time


Departures = Mapping[str, Departure]
"""Those of the clusters that are away, by name."""

STAYED = Departure("", "", 0.0)
"""Of a cluster of which no event says that it went."""


class EventTimeline:
    """The newest events, and how clusters departed."""

    def __init__(self) -> None:
        self._events: deque[TimelineEvent] = deque(maxlen=MAX_EVENTS)
        self.seq = 0
        """Of the newest event."""
        self.departures: dict[str, Departure] = {}

    def note(self, wall_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes one line of the tape; most are not shown."""
        if isinstance(cluster := fields.get("cluster"), str):
            if kind == "join":
                self.departures.pop(cluster, None)
            elif kind in ("evict", "leave"):
                self.departures[cluster] = Departure(kind, cut(fields.get("reason")), wall_s)
        text = sentence_of(kind, fields)
        if text is None:
            return
        level, who, sentence = text[0], cut(text[1]), cut(text[2])
        self.seq += 1
        same = next((e for e in self._events if (e.who, e.text) == (who, sentence)), None)
        if same is not None and abs(wall_s - same.at) < SAME_S:
            self._events.remove(same)
            self._events.append(replace(same, seq=self.seq, at=round(wall_s, 2), times=same.times + 1))
        else:
            presence = _PRESENCE.get(kind, "")
            self._events.append(TimelineEvent(self.seq, round(wall_s, 2), level, who, sentence, presence))

    def since(self, seq: int) -> list[TimelineEvent]:
        """Events after this one, oldest first; 0: all that are kept."""
        return [event for event in self._events if event.seq > seq]


def sentence_of(kind: str, fields: Mapping[str, Any]) -> EventText | None:
    """An event's level, its process, and a sentence; None for an event that is not shown."""
    if kind in _OPERATOR and "sentence" in fields:
        return "info", "operator", f"{kind.replace('_', ' ')}: {fields['sentence']}"
    f, cluster, slave = fields, f"cluster {fields.get('cluster')}", f"slave {fields.get('slave')}"
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
        case "few_pushes" if f.get("clusters"):
            return "info" if f.get("left_s") else "warn", "run", str(f.get("sentence"))
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
        case "join":
            return "good", cluster, f"joined as incarnation {f.get('incarnation')}"
        case "evict":
            return "bad", cluster, f"evicted: {f.get('reason')}"
        case "leave":
            return "info", cluster, f"left: {f.get('reason')}"
        case "verdict" if f.get("verdict") != "APPLIED":
            push, verdict = str(f.get("push")), str(f.get("verdict")).lower().replace("_", " ")
            level: Level = "bad" if verdict == "rolled back" else "warn"
            return level, f"cluster {push.partition('/')[0]}", f"push {verdict}: {f.get('reason') or 'no reason given'}"
        case "slave_attached":
            return "info", slave, f"attached as incarnation {f.get('incarnation')}"
        case "slave_ready":
            version = f.get("version")
            return "good", slave, "ready, with no version yet" if version == "None" else f"ready at version {version}"
        case "slave_lost":
            return "bad", slave, f"lost: {f.get('reason')}"
        case "slave_dismissed":
            return "info", slave, f"dismissed: {f.get('reason')}"
        case "refused_connections":
            what = "a connection" if f.get("count") == 1 else f"{f.get('count')} connections"
            return "warn", slave, f"refused {what}: {f.get('last_reason')}"
    return None


def cut(value: object, most: int = MAX_TEXT) -> str:
    """A text of bounded length with only printable characters."""
    text = "" if value is None else str(value)
    text = "".join(character if character.isprintable() else " " for character in text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# ---- heldout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldoutPoint:
    """The held-out loss of a published version, in nats per token of the evaluator (per byte, in the demo)."""

    version: Version
    tokens: int
    loss: float
    wall_s: float = 0.0


def heldout_point(wall_s: float, kind: str, fields: Mapping[str, Any]) -> HeldoutPoint | None:
    """What an event of the evaluator's tape (`dips eval --follow --tape FILE`) says; None when it has no loss."""
    tokens, loss = fields.get("tokens"), fields.get("loss")
    if kind != "heldout" or not isinstance(tokens, int) or not isinstance(loss, int | float):
        return None
    with contextlib.suppress(ConfigError):
        if tokens >= 0 and math.isfinite(loss):
            return HeldoutPoint(parse_version(str(fields.get("version"))), tokens, float(loss), wall_s)
    return None


# ---- history ---------------------------------------------------------------------------------------------------------


RATE_OVER_S = 30.0
"""Tokens a second are measured over this time, and over at least RATE_ROUNDS rounds: tokens come once a round."""

RATE_ROUNDS = 4


@dataclass(frozen=True)
class ProgressRow:
    """One sample."""

    seq: int  # of the sample, growing; losses by cluster, where there is one
    wall_s: float
    tokens: int
    rate_tokens_per_s: float
    losses: dict[str, float] = field(default_factory=dict)


class TokenRate:
    """Tokens a second over the last rounds, and the time that is left at that rate."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, tokens: int, publish_interval_s: float = 0.0) -> None:
        """Takes a sample. publish_interval_s: 0 where it is not known."""
        if self._seen and (tokens < self._seen[-1][1] or now_s < self._seen[-1][0]):
            self._seen.clear()  # after a rollback, or a clock that was set back
        self._seen.append((now_s, tokens))
        over_s = max(RATE_OVER_S, RATE_ROUNDS * publish_interval_s)
        while len(self._seen) > 2 and self._seen[1][0] < now_s - over_s:
            self._seen.popleft()

    def seen_s(self) -> float:
        """How long what is known lasted."""
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    def per_s(self) -> float:
        """0 while nothing is known."""
        if not self._seen:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def left_s(self, tokens_left: int) -> float | None:
        """Seconds until so many more tokens; None while nothing is known."""
        rate = self.per_s()
        return tokens_left / rate if rate > 0 else None


class ProgressHistory:
    """Rows and held-out losses. Not thread-safe: it belongs to the page's thread."""

    def __init__(self, max_rows: int = MAX_ROWS, max_heldout: int = MAX_HELDOUT) -> None:
        self.rows: list[ProgressRow] = []
        self.heldout: list[tuple[int, HeldoutPoint]] = []
        """With the number of the sample that each came with."""
        self.every = 1
        """One of this many samples becomes a row."""
        self.generation = 0
        """Changes when rows were dropped: a page with the old ones then needs all rows again."""
        self._max_rows, self._max_heldout = max_rows, max_heldout
        self.seq = 0
        """The number of the newest sample."""
        self.charted: list[str] = []
        """Clusters whose losses are kept, in the order in which they were first seen."""
        self._rate = TokenRate()
        self.rate_tokens_per_s = 0.0

    def add(self, wall_s: float, tokens: int, publish_interval_s: float, clusters: Sequence[ClusterStatus]) -> None:
        """Adds one sample."""
        self.seq += 1
        self._rate.add(wall_s, tokens, publish_interval_s)
        self.rate_tokens_per_s = self._rate.per_s()
        if (self.seq - 1) % self.every:
            return
        for cluster in clusters:
            if cluster.cluster_id not in self.charted and len(self.charted) < CHARTED_CLUSTERS:
                self.charted.append(cluster.cluster_id)
        losses = {
            cluster.cluster_id: round(cluster.loss, 5)
            for cluster in clusters
            if cluster.alive and math.isfinite(cluster.loss) and cluster.cluster_id in self.charted
        }
        self.rows.append(ProgressRow(self.seq, wall_s, tokens, self.rate_tokens_per_s, losses))
        if len(self.rows) > self._max_rows:
            self.rows = self.rows[::2]
            self.every *= 2
            self.generation += 1

    def add_heldout(self, point: HeldoutPoint) -> None:
        """Adds a held-out loss; a version that was evaluated again replaces its old loss."""
        self.heldout = [(seq, old) for seq, old in self.heldout if old.version != point.version]
        self.heldout.append((self.seq, point))
        if len(self.heldout) > self._max_heldout:
            self.heldout = [*self.heldout[:-1:2], self.heldout[-1]]
            self.generation += 1

    def full(self) -> dict[str, Any]:
        """All rows and losses, column by column."""
        return self._columns(self.rows, self.heldout)

    def since(self, seq: int) -> dict[str, Any]:
        """The rows and losses after the sample with this number."""
        rows = [row for row in self.rows[-16:] if row.seq > seq]
        return self._columns(rows, [point for point in self.heldout[-16:] if point[0] > seq])

    def _columns(self, rows: Sequence[ProgressRow], heldout: Sequence[tuple[int, HeldoutPoint]]) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "at": [round(row.wall_s, 1) for row in rows],
            "tokens": [row.tokens for row in rows],
            "rate": [round(row.rate_tokens_per_s, 1) for row in rows],
            "loss": {name: [row.losses.get(name) for row in rows] for name in self.charted},
            "heldout": [
                {"at": round(p.wall_s, 1), "version": str(p.version), "tokens": p.tokens, "loss": round(p.loss, 5)}
                for _, p in heldout
            ],
        }
