"""The event history of one round, version, push, cluster or slave: what every process recorded of it, in time order.

Follows a round to its pushes and its version, and a version to its round, so that one look shows why. Times are those
of each process's own clock. It must never write, and never guess: what no process recorded is not shown.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.judge.facts import (
    DECISIONS,
    Decision,
    Fact,
    decision_of,
    pair,
    push_of,
    say_push,
    say_round,
    say_version,
    short,
)
from dips.judge.records import RunRecords, read_run

_ROUND = re.compile(r"r\d+\.\d+\Z")
_VERSION = re.compile(r"\d+:\d+\Z")
_PUSH = re.compile(r".+/\d+\.\d+#\d+\Z")
_DIGEST = re.compile(r"[0-9a-f]{24,}\Z")

_EMPTY: tuple[object, ...] = (None, "", "None", [], {})
"""Values of fields that are not shown; tapes have "None" where there is no version or round."""

QUIET = frozenset({"step", "heartbeat", "beat", "journaled"})
"""Kinds of frequent routine events, which are left out: they would hide the others."""


@dataclass
class Story:
    """The event history of one thing."""

    what: str  # "round", "version", "push", "cluster" or "slave"
    name: str
    lines: list[Fact] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        lines = []
        for entry in self.lines:
            heads = {"at_s": entry.at_s, "who": str(entry), "kind": entry.kind, "cause": entry.cause}
            lines.append({**heads, **entry.fields, **heads})  # a field of one of these names does not hide them
        return {"what": self.what, "name": self.name, "lines": lines}


def tell_story(run_dir: Path, name: str) -> Story:
    """Collect all that was recorded of `name`. Raises ConfigError, with similar names, when the run has no such one."""
    records = read_run(run_dir, keep=lambda _, kind: kind not in QUIET, files=False)
    decisions = [decision_of(record) for record in records.journal if record["kind"] in DECISIONS]
    what = _what(name, records, decisions)
    wanted = _targets(what, name, decisions)
    story = Story(what, name, [entry for entry in _all(records) if _concerns(entry, what, name, wanted)])
    if not story.lines:
        raise ConfigError(f"{run_dir} has no record of {what} {name!r}. {_hint(name, records, decisions)}")
    return story


# ---- what is asked for ----


def _what(name: str, records: RunRecords, decisions: Sequence[Decision]) -> str:
    for pattern, what in ((_ROUND, "round"), (_VERSION, "version"), (_PUSH, "push")):
        if pattern.match(name):
            return what
    if name in _slaves(records):
        return "slave"
    if name in _clusters(records):
        return "cluster"
    raise ConfigError(
        f"{records.run_dir} has no {name!r}: give a round (r1.7), a version (1:6), a push (a/1.1#3), a cluster or a "
        f"slave. {_hint(name, records, decisions)}"
    )


def _slaves(records: RunRecords) -> set[str]:
    known = {line.who for line in records.lines["slave"]}
    return known | {str(slave) for record in records.journal for slave in record.get("digests", {})}


def _clusters(records: RunRecords) -> set[str]:
    known = {line.who for line in records.lines["worker"]}
    return known | {str(record["cluster"]) for record in records.journal if "cluster" in record}


def _hint(name: str, records: RunRecords, decisions: Iterable[Decision]) -> str:
    known = _clusters(records) | _slaves(records)
    known = known.union(*map(_names, decisions))
    close = difflib.get_close_matches(name, sorted(known), cutoff=0.4)
    if close:
        return f"Did you mean {', '.join(close)}?"
    names = sorted(_clusters(records) | _slaves(records))
    return f"The run has {', '.join(names[:20]) or 'no cluster and no slave'}."


def _names(made: Decision) -> set[str]:
    """A decision's round, version and pushes."""
    names = {say_push(item.push) for item in made.participants}
    names |= {say_round(made.round)} if made.round else set()
    return names | ({say_version(made.version)} if made.version else set())


def _targets(what: str, name: str, decisions: Iterable[Decision]) -> set[str]:
    """The rounds, versions and pushes whose lines are part of the event history."""
    if what in ("cluster", "slave"):
        return set()
    made_it = (_names(made) for made in decisions if what != "push" and name in _names(made))
    return {name}.union(*made_it)


def _concerns(entry: Fact, what: str, name: str, wanted: Set[str]) -> bool:
    fields = entry.fields
    if what == "slave":
        return str(entry) == f"slave {name}" or fields.get("slave") == name or name in fields.get("digests", {})
    if what == "cluster":
        if str(entry) == f"worker {name}" or name in (fields.get("cluster"), fields.get("by")):
            return True
        pushes = [fields.get("push"), *fields.get("participants", ())]
        return any(isinstance(push, str) and push.startswith(f"{name}/") for push in pushes)
    if fields.get("round") in wanted or (entry.cause in wanted and _ROUND.match(entry.cause)):
        return True
    if fields.get("push") in wanted or not wanted.isdisjoint(fields.get("participants", ())):
        return True
    return fields.get("version") in wanted and entry.kind not in ("base", "join", "joined")


# ---- all that was recorded, in time order ----


def _all(records: RunRecords) -> list[Fact]:
    for line in records.lines["master"]:
        line.who = ""  # there is one
    return sorted([*itertools.chain(*records.lines.values()), *_journal(records)], key=lambda entry: entry.at_s)


def _journal(records: RunRecords) -> Iterator[Fact]:
    """The journal's records as lines. One without a time gets the previous one's, the first one the tape's first."""
    began = [line.at_s for line in records.lines["master"][:1]]
    at_s = began[0] if began else 0.0
    for record in records.journal:
        at_s = max(at_s, float(record.get("wall_s") or 0.0))
        named = {key: _named(key, value) for key, value in record.items() if key not in ("kind", "ledger", "wall_s")}
        yield Fact("journal", "", str(record["kind"]), named, at_s)


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
    width = max((len(str(entry)) for entry in story.lines), default=0)
    kinds = max((len(entry.kind) for entry in story.lines), default=0)
    for entry in story.lines:
        known = ((name, value) for name, value in entry.fields.items() if value not in _EMPTY)
        said = " ".join(f"{name}={_short(value)}" for name, value in known)
        yield f"+{entry.at_s - began_s:9.3f} s  {entry!s:<{width}}  {entry.kind:<{kinds}}  {said}".rstrip()


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


# ---- slow rounds -----------------------------------------------------------------------------------------------------
#
# Which rounds of a run took longest, and what each of them waited for, from the tapes. Reads only.
#
# A round is what happens from the opening of its window to the publishing of its version. Its master notes every step
# with its time; a slave notes when it was done with its part of a step, and how long it worked for it. So the one that
# was done last is known, and whether it worked or stood still. Times are those of each process's own clock: between
# machines the order holds only as far as their clocks agree.


STEPS = {"MEASURE": "measured", "PREPARE": "prepared", "COMMIT": "committed"}
"""The steps for which all slaves are waited for, and what a slave notes when it is done."""

STAGED = "staged"
NOTED = frozenset({"round", "admitted", "stood_still", "slave_lost", "epoch", STAGED, *STEPS.values()})
OPENS, CLOSES = "WINDOW", "IDLE"


@dataclass(frozen=True)
class SlowRound:
    """A round, the step of it that took longest, and why."""

    name: str
    began_s: float  # seconds since 1970
    took_s: float
    step: str
    step_s: float
    cause: str


@dataclass
class _Course:
    """What the master noted of one round."""

    moves: list[Fact]
    pushes: list[Fact]  # that came into its window, the one that opened it first
    troubles: list[Fact] = field(default_factory=list)


def slow_rounds(run_dir: Path, most: int) -> list[SlowRound]:
    """Those that took longest, the longest first. Raises ConfigError as read_run does."""
    records = read_run(run_dir, keep=lambda role, kind: role in ("master", "slave") and kind in NOTED, files=False)
    done: dict[tuple[str, str], list[Fact]] = {}
    for line in records.lines["slave"]:
        if line.kind in NOTED:
            of = line.fields["push" if line.kind == STAGED else "round"]
            done.setdefault((line.kind, str(of)), []).append(line)
    found = [_slow_round(course, done) for course in _courses(records.lines["master"])]
    return sorted(found, key=lambda one: one.took_s, reverse=True)[:most]


def _courses(lines: Iterable[Fact]) -> Iterator[_Course]:
    """Each round that the master ended. One that was open when the master was killed has no end, and is left out."""
    course: _Course | None = None
    waiting: list[Fact] = []
    for line in lines:
        if line.kind == "epoch":
            course, waiting = None, []
        elif line.kind == "admitted":
            (waiting if course is None or len(course.moves) > 1 else course.pushes).append(line)
        elif line.kind != "round":
            if course is not None:
                course.troubles.append(line)
        elif line.fields["phase"] == OPENS:
            course, waiting = _Course([line], waiting), []
        elif course is not None:
            course.moves.append(line)
            if line.fields["phase"] == CLOSES:
                yield course
                course = None


def _slow_round(course: _Course, done: Mapping[tuple[str, str], Sequence[Fact]]) -> SlowRound:
    begin, end = max(itertools.pairwise(course.moves), key=lambda pair: pair[1].at_s - pair[0].at_s)
    name, step, step_s = str(course.moves[0].fields["round"]), str(begin.fields["phase"]), end.at_s - begin.at_s
    if step == OPENS:
        cause = _of_pushes(course.pushes, end.at_s, str(end.fields["why"]), done)
    elif step in STEPS:
        cause = _of_slaves(done.get((STEPS[step], name), ()), begin.at_s, step_s)
    else:
        cause = "the master's own work, or its journal's disk"
    for line in course.troubles:
        if line.kind == "stood_still" and float(line.fields["gap_s"]) > step_s / 2:
            cause = f"the master itself stood still for {_said(float(line.fields['gap_s']))}"
        elif line.kind == "slave_lost":
            cause += f"; slave {line.fields['slave']} was lost: {line.fields['reason']}"
    first, last = course.moves[0].at_s, course.moves[-1].at_s
    return SlowRound(name, first, last - first, step, step_s, cause)


def _of_pushes(
    pushes: Sequence[Fact], closed_s: float, why: str, done: Mapping[tuple[str, str], Sequence[Fact]]
) -> str:
    """What a window waited for: a push, and of that the slave that had all of it last, where that made it late."""
    if not pushes:
        return why
    first, last = pushes[0], max(pushes, key=lambda line: line.at_s)
    came_s, rest_s = last.at_s - first.at_s, closed_s - last.at_s
    if came_s < rest_s:
        return f"for {_said(rest_s)} no further push came" + (f": {why}" if why else "")
    push = str(last.fields["push"])
    cause = f"the push of cluster {push.rpartition('/')[0]} came {_said(came_s)} after the first"
    *others, latest = sorted(done.get((STAGED, push), [last]), key=lambda line: line.at_s)
    if others and (late_s := latest.at_s - others[-1].at_s) > came_s / 2:
        cause += f"; slave {latest.who} had all of it {_said(late_s)} after the others"
    return cause


def _of_slaves(lines: Sequence[Fact], began_s: float, step_s: float) -> str:
    """Which slave was done last, how long after the others, and how long it worked."""
    if not lines:
        return "a slave; the tapes of the slaves are not here"
    *others, last = sorted(lines, key=lambda line: line.at_s)
    late_s = last.at_s - (others[-1].at_s if others else began_s)
    worked_s = float(last.fields["took_s"])
    if others and late_s < step_s / 2:
        return f"all slaves took as long; the last one, {last.who}, worked {_said(worked_s)}"
    after = "the others" if others else "the step began"
    stood = ": it stood still, or was not reached" if worked_s < late_s / 2 else ""
    return f"slave {last.who} was done {_said(late_s)} after {after}, with {_said(worked_s)} of work{stood}"


def _said(seconds_s: float) -> str:
    return format_seconds(round(seconds_s, 1 if seconds_s >= 1 else 3))


def render_slow_rounds(rounds: Sequence[SlowRound]) -> Iterator[str]:
    """A line for each: name, seconds, its longest step, and the cause."""
    width = max((len(one.name) for one in rounds), default=0)
    for one in rounds:
        yield f"{one.name:<{width}}  {one.took_s:8.3f} s  {one.step:<7} {one.step_s:8.3f} s  {one.cause}"
