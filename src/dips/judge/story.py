"""The event history of one round, version, push, cluster or slave: what every process recorded of it, in time order.

Follows a round to its pushes and its version, and a version to its round, so that one look shows why. Times are those
of each process's own clock. It must never write, and never guess: what no process recorded is not shown.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.judge.facts import Decision, decision_of, pair, push_of, say_push, say_round, say_version, short
from dips.judge.invariants.checker import DECISIONS
from dips.judge.records import RunRecords, read_run

_ROUND = re.compile(r"r\d+\.\d+\Z")
_VERSION = re.compile(r"\d+:\d+\Z")
_PUSH = re.compile(r".+/\d+\.\d+#\d+\Z")
_DIGEST = re.compile(r"[0-9a-f]{24,}\Z")

_EMPTY: tuple[object, ...] = (None, "", "None", [], {})
"""Values of fields that are not shown; tapes have "None" where there is no version or round."""

QUIET = frozenset({"step", "heartbeat", "beat", "journaled"})
"""Kinds of frequent routine events, which are left out: they would hide the others."""


@dataclass(frozen=True)
class StoryLine:
    """One line of an event history."""

    at_s: float  # seconds since 1970 by its process's clock
    who: str
    kind: str
    cause: str
    fields: Mapping[str, Any]


@dataclass
class Story:
    """The event history of one thing."""

    what: str  # "round", "version", "push", "cluster" or "slave"
    name: str
    lines: list[StoryLine] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        lines = []
        for entry in self.lines:
            heads = {"at_s": entry.at_s, "who": entry.who, "kind": entry.kind, "cause": entry.cause}
            lines.append({**heads, **entry.fields, **heads})  # a field of one of these names does not hide them
        return {"what": self.what, "name": self.name, "lines": lines}


def tell_story(run_dir: Path, name: str) -> Story:
    """Collect all that was recorded of `name`. Raises ConfigError, with similar names, when the run has no such one."""
    records = read_run(run_dir, keep=lambda _, kind: kind not in QUIET, files=False)
    decisions = [decision_of(record) for record in records.journal if record["kind"] in DECISIONS]
    what = _what(name, records)
    wanted = _targets(what, name, decisions)
    story = Story(what, name, [entry for entry in _all(records) if _concerns(entry, what, name, wanted)])
    if not story.lines:
        raise ConfigError(f"{run_dir} has no record of {what} {name!r}. {_hint(name, records, decisions)}")
    return story


# ---- what is asked for ----


def _what(name: str, records: RunRecords) -> str:
    for pattern, what in ((_ROUND, "round"), (_VERSION, "version"), (_PUSH, "push")):
        if pattern.match(name):
            return what
    if name in _slaves(records):
        return "slave"
    if name in _clusters(records):
        return "cluster"
    decisions = [decision_of(record) for record in records.journal if record["kind"] in DECISIONS]
    raise ConfigError(
        f"{records.run_dir} has no {name!r}: give a round (r1.7), a version (1:6), a push (a/1.1#3), a cluster or a "
        f"slave. {_hint(name, records, decisions)}"
    )


def _slaves(records: RunRecords) -> set[str]:
    known = {line.name for line in records.lines["slave"]}
    return known | {str(slave) for record in records.journal for slave in record.get("digests", {})}


def _clusters(records: RunRecords) -> set[str]:
    known = {line.name for line in records.lines["worker"]}
    return known | {str(record["cluster"]) for record in records.journal if "cluster" in record}


def _hint(name: str, records: RunRecords, decisions: Iterable[Decision]) -> str:
    known = _clusters(records) | _slaves(records)
    for made in decisions:
        known |= {say_push(item.push) for item in made.participants}
        known |= {say_round(made.round)} if made.round else set()
        known |= {say_version(made.version)} if made.version else set()
    close = difflib.get_close_matches(name, sorted(known), n=4, cutoff=0.4)
    if close:
        return f"Did you mean {', '.join(close)}?"
    names = sorted(_clusters(records) | _slaves(records))
    return f"The run has {', '.join(names[:20]) or 'no cluster and no slave'}."


@dataclass(frozen=True)
class _Targets:
    """The rounds, versions and pushes whose lines are part of the event history."""

    rounds: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    pushes: frozenset[str] = frozenset()


def _targets(what: str, name: str, decisions: Iterable[Decision]) -> _Targets:
    match what:
        case "push":
            return _Targets(pushes=frozenset({name}))
        case "cluster" | "slave":
            return _Targets()
    mine = [made for made in decisions if name in (say_round(made.round), say_version(made.version))]
    rounds = {say_round(made.round) for made in mine if made.round is not None}
    versions = {say_version(made.version) for made in mine if made.version is not None}
    pushes = {say_push(item.push) for made in mine for item in made.participants}
    own = {name}
    return _Targets(
        frozenset(rounds | (own if what == "round" else set())),
        frozenset(versions | (own if what == "version" else set())),
        frozenset(pushes),
    )


def _concerns(entry: StoryLine, what: str, name: str, wanted: _Targets) -> bool:
    fields = entry.fields
    if what == "slave":
        return entry.who == f"slave {name}" or fields.get("slave") == name or name in fields.get("digests", {})
    if what == "cluster":
        return _of_cluster(entry, name)
    if fields.get("round") in wanted.rounds or entry.cause in wanted.rounds:
        return True
    if fields.get("push") in wanted.pushes or wanted.pushes.intersection(fields.get("participants", ())):
        return True
    return fields.get("version") in wanted.versions and entry.kind not in ("base", "join", "joined")


def _of_cluster(entry: StoryLine, name: str) -> bool:
    fields = entry.fields
    if entry.who == f"worker {name}" or name in (fields.get("cluster"), fields.get("by")):
        return True
    pushes = [fields.get("push"), *fields.get("participants", ())]
    return any(isinstance(push, str) and push.startswith(f"{name}/") for push in pushes)


# ---- all that was recorded, in time order ----


def _all(records: RunRecords) -> list[StoryLine]:
    lines = []
    for line in itertools.chain.from_iterable(records.lines.values()):
        who = line.role if line.role == "master" else f"{line.role} {line.name}"
        lines.append(StoryLine(line.wall_s, who, line.kind, line.cause, line.fields))
    return sorted([*lines, *_journal(records)], key=lambda entry: entry.at_s)


def _journal(records: RunRecords) -> Iterator[StoryLine]:
    """The journal's records as lines. One without a time gets the previous one's, the first one the tape's first."""
    began = [line.wall_s for line in records.lines["master"][:1]]
    at_s = began[0] if began else 0.0
    for record in records.journal:
        at_s = max(at_s, float(record.get("wall_s") or 0.0))
        named = {key: _named(key, value) for key, value in record.items() if key not in ("kind", "ledger", "wall_s")}
        yield StoryLine(at_s, "journal", str(record["kind"]), "-", named)


def _named(key: str, value: Any) -> Any:
    """A value of a record in the text form that tapes have."""
    if value is None:
        return None
    match key:
        case "round" | "origin_round":
            return say_round(pair(value))
        case "version" | "from_version" | "origin":
            return say_version(pair(value))
        case "rolled_back":
            return [say_push(push_of(item)) for item in value]
        case "participants":
            return {say_push(push_of(item["push"])): item["verdict"] for item in value}
    return value


# ---- for people ----


def render(story: Story) -> Iterator[str]:
    """Format the event history: seconds since its first line, process, kind and fields."""
    began_s = story.lines[0].at_s if story.lines else 0.0
    width = max((len(entry.who) for entry in story.lines), default=0)
    kinds = max((len(entry.kind) for entry in story.lines), default=0)
    for entry in story.lines:
        known = ((name, value) for name, value in entry.fields.items() if value not in _EMPTY)
        said = " ".join(f"{name}={_short(value)}" for name, value in known)
        yield f"+{entry.at_s - began_s:9.3f} s  {entry.who:<{width}}  {entry.kind:<{kinds}}  {said}".rstrip()


def _short(value: Any) -> str:
    """A value in short: of a digest its beginning, of a long list its length."""
    if isinstance(value, str):
        return short(value) if _DIGEST.match(value) else value if " " not in value else repr(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        long = len(value) > 6 or any(isinstance(item, Mapping) for item in value)
        return f"({len(value)} items)" if long else "[" + ", ".join(map(_short, value)) + "]"
    return str(value)
