"""Which part of the run each tape covers: whether a line that is not there contradicts the record that asks for it.

A process appends to its tape from its start on, line by line. The tapes of clusters, and those that slaves write of
their own accord, may lose lines to a full disk, and then say so (core/observe/tape.py). Else a line that is missing
between two lines of one process was taken out: the tape contradicts the record. Everything else is a gap, which proves
nothing and accuses no one: before the first start on the tape, after its last line, and between two processes of which
the second one is not the next that the master saw. Then a process ran without this tape, or the file is a copy that was
made too early.

When a run was restored from a copy, drop_lost() takes out of the tapes what was lost.

Pure, and it never judges. Names are the tuples of dips.judge.facts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dips.judge.facts import Fact, Pair, PushKey, pair, push_of, say_push, say_round
from dips.judge.records import RunRecords
from dips.master.archive import EPOCH

T = TypeVar("T")

WORK = frozenset({"measured", "prepared", "committed"})
"""Kinds of a slave's lines about a round that it takes part in."""

STARTS = frozenset({"started", "starting", "snapshot_skipped"})
"""Kinds of a slave's lines that may be the first ones of its process."""

SPANS = frozenset(
    {
        *(("slave", kind) for kind in (*WORK, *STARTS, "incarnation", "configured", "stopped")),
        *(("worker", kind) for kind in ("joined", "push_begun", "push_sent", "admitted", "verdict", "installed")),
        ("worker", "left"),
        *(("master", kind) for kind in ("epoch", "journaled", "slave_attached", "join", "ticket")),
    }
)
"""Role and kind of the tape lines from which this is known."""

COVERED, ABSENT, KILLED, LOST = "", "is missing", "breaks off", "lost lines to a full disk"
"""Places on a tape: it covers what is asked for; there is no tape; the master was killed as it wrote the record; the
line may be a lost one. All others are gaps, too, each as a piece of a sentence."""


class Coverage:
    """The part of the run that each tape covers."""

    def __init__(self, records: RunRecords) -> None:
        self._tapes = records.tapes
        self.master = _MasterTape(records)
        back = [pair(record.get("round")) for record in records.journal if record["kind"] in ("ROLLBACK", "ADOPT")]
        went_back = tuple(one for one in back if one is not None)
        lines = _by_name(records.all_lines("slave"))
        self._slaves = {name: _SlaveTape(mine, self.master, name, went_back) for name, mine in lines.items()}
        lines = _by_name(records.all_lines("worker"))
        self._clusters = {name: _ClusterTape(mine, self.master, name) for name, mine in lines.items()}

    def of_slave(self, name: str, round_id: Pair, ended: bool) -> str:
        """Where on the slave's tape its lines about a round belong. ended: those after the round's record."""
        tape = self._slaves.get(name)
        return self._of(("slave", name), tape.place(round_id, ended) if tape is not None else "names no round")

    def of_push(self, push: PushKey, version: Pair | None) -> str:
        """Where on its cluster's tape the line about the begin of a push belongs. version: in which it was decided."""
        tape = self._clusters.get(push[0])
        return self._of(("worker", push[0]), tape.place(push, version) if tape is not None else "names no push")

    def _of(self, who: tuple[str, str], place: str) -> str:
        tape = self._tapes.get(who)
        return ABSENT if tape is None else place or (LOST if tape.lost else COVERED)


def _said(line: Fact, name: str, parse: Callable[[Any], T | None]) -> T | None:
    """An incarnation, round or version of a line, or what else is parsed; None also for what is none, which is reported
    where it is judged."""
    try:
        return parse(line.fields[name])
    except (KeyError, TypeError, ValueError):
        return None


def _by_name(lines: Iterable[Fact]) -> dict[str, list[Fact]]:
    found: dict[str, list[Fact]] = {}
    for line in lines:
        found.setdefault(line.who, []).append(line)
    return found


# ---- the master's ----


class _MasterTape:
    """epochs: those that it was written in. attached: of each slave, the incarnations that it was given. process_of: by
    cluster and incarnation."""

    def __init__(self, records: RunRecords) -> None:
        self.epochs: set[int] = set()
        self.attached: dict[str, list[Pair]] = {}
        self.process_of: dict[tuple[str, Pair], str] = {}
        self.begun = [int(record["epoch"]) for record in records.journal if record["kind"] == EPOCH]
        self._newest: dict[int, int] = {}  # the last record of each epoch that it names
        self._epoch_of = {row.number: row.epoch for row in records.rows}
        for line in records.all_lines("master"):
            self._add(line)
        newest = {row.epoch: row.number for row in records.rows}
        self._whole = {one for one in self.epochs if not self._newest or self._newest.get(one, 0) >= newest.get(one, 0)}

    def _add(self, line: Fact) -> None:
        incarnation = _said(line, "incarnation", pair)
        match line.kind:
            case "epoch" if (epoch := _said(line, "epoch", int)) is not None:
                self.epochs.add(epoch)
            case "journaled" if (number := _said(line, "number", int)) in self._epoch_of and number is not None:
                self._newest[self._epoch_of[number]] = number
            case "slave_attached" if incarnation is not None:
                self.attached.setdefault(str(line.fields.get("slave")), []).append(incarnation)
            case "join" if incarnation is not None:
                process = str(line.fields.get("process") or "")
                self.process_of[str(line.fields.get("cluster")), incarnation] = process
            case "ticket" if (push := _said(line, "push", push_of)) is not None:
                self.epochs.add(push[1])

    def place(self, epoch: int, number: int | None) -> str:
        """Where a line of an epoch about the journal's record of this number belongs (None: it is not known). KILLED:
        this process was killed as it wrote the record, perhaps before the line."""
        if not self.epochs:
            return COVERED
        first, last = min(self.epochs), max(self.epochs)
        if epoch not in self.epochs:
            if first < epoch < last:
                return f"has no line of epoch {epoch}"
            return f"begins with epoch {first}" if epoch < first else f"ends with epoch {last}"
        reached = self._newest.get(epoch, 0 if self._newest else math.inf)
        if number is None or number <= reached:
            return COVERED
        return KILLED if epoch < last else f"ends with record {reached} of the journal"

    def may_have_seen(self, slave: str, after: Pair, before: Pair | None) -> bool:
        """Whether the master may have given the slave an incarnation between two others (before None: after one)."""
        if any(after < one and (before is None or one < before) for one in self.attached.get(slave, ())):
            return True
        if before is not None and before[0] == after[0]:
            return after[0] not in self._whole and before[1] > after[1] + 1
        last = before[0] if before is not None else max(self.begun, default=after[0])
        return any(epoch not in self._whole for epoch in range(after[0], last + 1))


# ---- a slave's ----


@dataclass
class _Life:
    """One process of a slave, as its tape has it."""

    starts: bool  # its first line on the tape is that of a start
    first: Pair | None = None  # incarnation
    last: Pair | None = None
    base: Pair | None = None  # round of the version that it loaded first
    oldest: Pair | None = None  # round that it took part in
    newest: Pair | None = None
    configured: bool = False
    ended: bool = False

    def add(self, line: Fact) -> None:
        round_id = _said(line, "round", pair)
        if line.kind not in STARTS:  # of the next process
            self.ended = line.kind == "stopped"
        match line.kind:
            case "incarnation" if (incarnation := _said(line, "incarnation", pair)) is not None:
                self.first, self.last = self.first or incarnation, incarnation
            case "configured" if not self.configured:
                self.base, self.configured = round_id, True
            case kind if kind in WORK and round_id is not None:
                self.oldest = min(self.oldest or round_id, round_id)
                self.newest = max(self.newest or round_id, round_id)

    @property
    def begin(self) -> Pair:
        """It took part in no round up to this one. Every round of an epoch comes after its slaves' first attachment."""
        if not self.starts:
            return 0, 0
        if self.first is not None and self.first[1] == 1:
            return self.first[0], 0
        if self.base is not None:
            return self.base
        return (self.oldest[0], self.oldest[1] - 1) if self.oldest is not None else (0, 0)


class _SlaveTape:
    def __init__(self, lines: Sequence[Fact], master: _MasterTape, name: str, went_back: Sequence[Pair]) -> None:
        self._master, self._name, self._went_back = master, name, went_back
        lives: list[_Life] = []
        for line in lines:
            if line.kind == "started" or not lives:
                lives.append(_Life(line.kind in STARTS))
            lives[-1].add(line)
        self._lives = sorted(
            (life for life in lives if life.first is not None or life.newest is not None),
            key=lambda life: life.first or (0, 0),
        )

    def place(self, round_id: Pair, ended: bool) -> str:
        before: _Life | None = None
        went_back = any(round_id < one for one in self._went_back)
        for life in self._lives:
            if round_id <= life.begin or (went_back and life.oldest is not None and round_id < life.oldest):
                # went_back: the run did later, perhaps because this slave's directory, with its tape, was put back.
                if before is None:
                    return f"begins with incarnation {_say(life.first)}" if life.starts else COVERED
                if before.last is None or life.first is None:
                    return COVERED
                if went_back or self._master.may_have_seen(self._name, before.last, life.first):
                    return f"has no line between incarnations {_say(before.last)} and {_say(life.first)}"
                return COVERED
            if life.newest is not None and (round_id < life.newest or (round_id == life.newest and not ended)):
                return COVERED
            before = life
        return self._after(before) if before is not None else "says of no attachment to the master"

    def _after(self, life: _Life) -> str:
        if life.ended and life.last is not None and not self._master.may_have_seen(self._name, life.last, None):
            return COVERED
        return f"ends with round {say_round(life.newest)}" if life.newest is not None else "ends before the first round"


def _say(incarnation: Pair | None) -> str:
    return "none" if incarnation is None else f"{incarnation[0]}.{incarnation[1]}"


# ---- a cluster's ----


class _ClusterTape:
    def __init__(self, lines: Sequence[Fact], master: _MasterTape, name: str) -> None:
        self._master, self._name = master, name
        self._known: set[Pair] = set()  # incarnations that joined, or of pushes
        self._newest_push: PushKey | None = None
        self._newest_version: Pair = (0, -1)
        self._left = False
        for line in lines:
            self._add(line)

    def _add(self, line: Fact) -> None:
        self._left = line.kind == "left"
        incarnation, version = _said(line, "incarnation", pair), _said(line, "version", pair)
        push = _said(line, "push", push_of)
        if line.kind == "joined" and incarnation is not None:
            self._known.add(incarnation)
        if push is not None:
            self._known.add(push[1:3])
            self._newest_push = max(self._newest_push or push, push)
        if line.kind in ("verdict", "installed") and version is not None:
            self._newest_version = max(self._newest_version, version)

    def place(self, push: PushKey, version: Pair | None) -> str:
        incarnation, known = push[1:3], self._known
        if known and incarnation not in known and not self._same_process(incarnation, known):
            if incarnation < min(known):
                return f"begins with incarnation {_say(min(known))}"
            if incarnation > max(known):
                return f"ends with incarnation {_say(max(known))}"
            return f"has no line of incarnation {_say(incarnation)}"
        reached = self._newest_push is not None and push < self._newest_push
        if reached or self._left or (version is not None and version <= self._newest_version):
            return COVERED
        return "names no push" if self._newest_push is None else f"ends with push {say_push(self._newest_push)}"

    def _same_process(self, incarnation: Pair, known: Iterable[Pair]) -> bool:
        """Whether the process with this incarnation had another one, too, that the tape has: it was written then."""
        process = self._master.process_of.get((self._name, incarnation))
        return bool(process) and any(
            self._master.process_of.get((self._name, one)) == process for one in known if one < incarnation
        )


# ---- what was lost when a copy was put back ----


_NAMES = {
    "master": ("publish", "commit"),
    "slave": ("committed", "persisted", "configured"),
    "worker": ("installed", "verdict"),
}
"""Kinds of lines that say of a version that it was made, by role."""

_GOES_ON = {"epoch": "version", "configured": "version", "installed": "version", "joined": "published"}
"""Kinds of lines in which a process takes over the run's newest version, each with the name of its field."""

_STAY = STARTS | {"incarnation", "joined", "epoch", "journaled"}
"""Kinds of lines that stay: which process wrote the tape, and how the journal grew, which its digests judge."""


def drop_lost(records: RunRecords) -> str:
    """Take the lines out that were lost with the journal when master and slaves were restored from a copy. Returns a
    sentence, empty when nothing was lost.

    Tapes say it themselves: a process knew of newer versions than the one from which it goes on, without a ROLLBACK,
    which would begin a timeline, and the journal made versions of their names only afterwards, or never.
    """
    made = {pair(record["version"]): int(record.get("epoch", 0)) for record in records.journal if record.get("version")}
    found = ""
    for role in _NAMES:
        for name, lines in _by_name(records.lines[role]).items():
            lost = _lost(role, lines, made)
            if lost:
                first = lines[lost[0][0]].fields["version"]
                gone = {id(line) for begin, end in lost for line in lines[begin:end] if line.kind not in _STAY}
                records.lines[role] = [line for line in records.lines[role] if id(line) not in gone]
                found = found or (
                    f"{role} {name} knew of version {first}, and went on from an older one of the same timeline, or "
                    "one that was made later: the run was restored from a copy once; what was recorded after the copy, "
                    "and lost, is not judged"
                )
    return found


def _lost(role: str, lines: Sequence[Fact], made: Mapping[Pair | None, int]) -> list[tuple[int, int]]:
    """The parts of a tape that were lost: from the first line about a lost version to the begin of the epoch or
    incarnation that goes on from an older one."""
    parts, named, epoch, begin = list[tuple[int, int]](), list[tuple[int, Pair]](), 0, 0
    for at, line in enumerate(lines):
        if line.kind in ("incarnation", "joined") and (incarnation := _said(line, "incarnation", pair)) is not None:
            epoch, begin = incarnation[0], at
        if line.kind == "epoch":
            epoch, begin = _said(line, "epoch", int) or epoch, at
        field = _GOES_ON.get(line.kind)
        if field is not None and (now := _said(line, field, pair)) is not None:
            # Versions that the journal has not, or made in this epoch or later, after this process knew of them.
            earlier = [(place, one) for place, one in named if place < begin and one[0] == now[0]]
            lost = [(place, one) for place, one in earlier if made.get(one, epoch) >= epoch]
            if any(one > now for _, one in lost):
                parts.append((lost[0][0], begin))
                named = [(place, one) for place, one in named if not lost[0][0] <= place < begin]
        if line.kind in _NAMES[role] and (version := _said(line, "version", pair)) is not None:
            named.append((at, version))
    return parts
