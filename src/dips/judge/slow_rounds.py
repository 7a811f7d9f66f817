"""Which rounds of a run took longest, and what each of them waited for, from the tapes. Reads only.

A round is what happens from the opening of its window to the publishing of its version. Its master notes every step
with its time; a slave notes when it was done with its part of a step, and how long it worked for it. So the one that
was done last is known, and whether it worked or stood still. Times are those of each process's own clock: between
machines the order holds only as far as their clocks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dips.core.units import format_seconds
from dips.judge.records import TapeLine, read_run

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

    moves: list[TapeLine]
    pushes: list[TapeLine]  # that came into its window, the one that opened it first
    troubles: list[TapeLine] = field(default_factory=list)

    def slowest_step(self) -> tuple[str, float, float, str]:
        """Name, begin and end of the step that took longest, and why the step ended."""
        pairs = zip(self.moves, self.moves[1:], strict=False)
        longest = max(pairs, key=lambda pair: pair[1].wall_s - pair[0].wall_s)
        return str(longest[0].fields["phase"]), longest[0].wall_s, longest[1].wall_s, str(longest[1].fields["why"])


def slow_rounds(run_dir: Path, most: int) -> list[SlowRound]:
    """Those that took longest, the longest first. Raises ConfigError as read_run does."""
    records = read_run(run_dir, keep=lambda role, kind: role in ("master", "slave") and kind in NOTED, files=False)
    done: dict[tuple[str, str], list[TapeLine]] = {}
    for line in records.lines["slave"]:
        if line.kind in NOTED:
            of = line.fields["push" if line.kind == STAGED else "round"]
            done.setdefault((line.kind, str(of)), []).append(line)
    found = [_slow_round(course, done) for course in _courses(records.lines["master"])]
    return sorted(found, key=lambda one: one.took_s, reverse=True)[:most]


def _courses(lines: Iterable[TapeLine]) -> Iterator[_Course]:
    """Each round that the master ended. One that was open when the master was killed has no end, and is left out."""
    course: _Course | None = None
    waiting: list[TapeLine] = []
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


def _slow_round(course: _Course, done: Mapping[tuple[str, str], Sequence[TapeLine]]) -> SlowRound:
    step, began_s, ended_s, why = course.slowest_step()
    name, step_s = str(course.moves[0].fields["round"]), ended_s - began_s
    if step == OPENS:
        cause = _of_pushes(course.pushes, ended_s, why, done)
    elif step in STEPS:
        cause = _of_slaves(done.get((STEPS[step], name), ()), began_s, step_s)
    else:
        cause = "the master's own work, or its journal's disk"
    for line in course.troubles:
        if line.kind == "stood_still" and float(line.fields["gap_s"]) > step_s / 2:
            cause = f"the master itself stood still for {_said(float(line.fields['gap_s']))}"
        elif line.kind == "slave_lost":
            cause += f"; slave {line.fields['slave']} was lost: {line.fields['reason']}"
    first, last = course.moves[0].wall_s, course.moves[-1].wall_s
    return SlowRound(name, first, last - first, step, step_s, cause)


def _of_pushes(
    pushes: Sequence[TapeLine], closed_s: float, why: str, done: Mapping[tuple[str, str], Sequence[TapeLine]]
) -> str:
    """What a window waited for: a push, and of that the slave that had all of it last, where that made it late."""
    if not pushes:
        return why
    first, last = pushes[0], max(pushes, key=lambda line: line.wall_s)
    came_s, rest_s = last.wall_s - first.wall_s, closed_s - last.wall_s
    if came_s < rest_s:
        return f"for {_said(rest_s)} no further push came" + (f": {why}" if why else "")
    push = str(last.fields["push"])
    cause = f"the push of cluster {push.rpartition('/')[0]} came {_said(came_s)} after the first"
    *others, latest = sorted(done.get((STAGED, push), [last]), key=lambda line: line.wall_s)
    if others and (late_s := latest.wall_s - others[-1].wall_s) > came_s / 2:
        cause += f"; slave {latest.name} had all of it {_said(late_s)} after the others"
    return cause


def _of_slaves(lines: Sequence[TapeLine], began_s: float, step_s: float) -> str:
    """Which slave was done last, how long after the others, and how long it worked."""
    if not lines:
        return "a slave; the tapes of the slaves are not here"
    *others, last = sorted(lines, key=lambda line: line.wall_s)
    late_s = last.wall_s - (others[-1].wall_s if others else began_s)
    worked_s = float(last.fields["took_s"])
    if others and late_s < step_s / 2:
        return f"all slaves took as long; the last one, {last.name}, worked {_said(worked_s)}"
    after = "the others" if others else "the step began"
    stood = ": it stood still, or was not reached" if worked_s < late_s / 2 else ""
    return f"slave {last.name} was done {_said(late_s)} after {after}, with {_said(worked_s)} of work{stood}"


def _said(seconds_s: float) -> str:
    return format_seconds(round(seconds_s, 1 if seconds_s >= 1 else 3))


def render_slow_rounds(rounds: Sequence[SlowRound]) -> Iterator[str]:
    """A line for each: name, seconds, its longest step, and the cause."""
    width = max((len(one.name) for one in rounds), default=0)
    for one in rounds:
        yield f"{one.name:<{width}}  {one.took_s:8.3f} s  {one.step:<7} {one.step_s:8.3f} s  {one.cause}"
