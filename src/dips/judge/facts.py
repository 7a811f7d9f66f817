"""The facts that the invariants judge, and the history that is built from them.

A fact is a record of the master's journal, a line of a process's tape, or a slave's manifest, as the role wrote it. The
history is what all facts before said, in dictionaries, so that judging one fact never reads the others again. It must
never judge: that is the invariants' work. Pure: no files, no clock.

Names are tuples here, because they are compared and looked up more often than they are shown: a version (timeline, v),
a round (epoch, n), an incarnation (epoch, n), a push (cluster, epoch, n, seq).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from dips.judge.judgement import Judging

Pair = tuple[int, int]
PushKey = tuple[str, int, int, int]
Fields = Mapping[str, Any]
Sentences = list[str] | None
"""An invariant's result for a fact: what is wrong, an empty list when nothing is, None when it does not judge it."""

MERGES = frozenset({"COMMIT", "ROLLBACK", "ADOPT", "RESHARD"})
"""Kinds of journal records that make a version."""

DECISIONS = MERGES | {"VOID"}


# ---- names ----


def pair(raw: Any) -> Pair | None:
    """Parse a version, round or incarnation from a list of two numbers or from its text; None for none."""
    if raw is None or raw == "None":
        return None
    if isinstance(raw, str):
        return _pair_of_text(raw)
    first, second = raw
    return int(first), int(second)


@lru_cache(maxsize=4096)
def _pair_of_text(text: str) -> Pair:
    first, _, second = text.removeprefix("r").replace(":", ".").partition(".")
    return int(first), int(second)


def push_of(raw: Any) -> PushKey:
    """Parse a push from a list of four values or from its text."""
    if isinstance(raw, str):
        return _push_of_text(raw)
    cluster, epoch, n, seq = raw
    return str(cluster), int(epoch), int(n), int(seq)


@lru_cache(maxsize=4096)
def _push_of_text(text: str) -> PushKey:
    cluster, _, rest = text.rpartition("/")
    incarnation, _, seq = rest.partition("#")
    epoch, n = _pair_of_text(incarnation)
    return cluster, epoch, n, int(seq)


def hex_of(raw: Any) -> str:
    """A digest as hexadecimal text, from bytes or from that text."""
    return raw.hex() if isinstance(raw, bytes | bytearray) else str(raw)


def say_version(version: Pair | None) -> str:
    return "none" if version is None else f"{version[0]}:{version[1]}"


def say_round(round_id: Pair | None) -> str:
    return "none" if round_id is None else f"r{round_id[0]}.{round_id[1]}"


def say_push(push: PushKey) -> str:
    return f"{push[0]}/{push[1]}.{push[2]}#{push[3]}"


def short(digest: str) -> str:
    """The first 12 characters of a digest, enough to tell it from another one."""
    return digest[:12]


# ---- facts ----


@dataclass(frozen=True)
class RecordedParticipant:
    """One push of a decided round, as its record has it."""

    push: PushKey
    attempt: int
    verdict: str
    base: Pair | None
    fence: int
    tokens: int
    ranges: tuple[tuple[int, int, int, int], ...]  # (pass, chunk, begin, end)


@dataclass(frozen=True)
class Decision:
    """A COMMIT, VOID, ROLLBACK, ADOPT or RESHARD record of the journal."""

    kind: str
    epoch: int
    round: Pair | None
    version: Pair | None
    from_version: Pair | None
    digests: Mapping[str, str]
    tokens: int | None
    s_max: int | None
    participants: tuple[RecordedParticipant, ...]
    judgement: Fields | None
    origin: Pair | None
    donor: str | None
    lost_tokens: int
    rolled_back: tuple[PushKey, ...]

    @property
    def accepted(self) -> list[RecordedParticipant]:
        return [item for item in self.participants if item.verdict == "APPLIED"]

    def __str__(self) -> str:
        what = f"{self.kind} of version {say_version(self.version)}" if self.version else self.kind
        return f"the {what} (round {say_round(self.round)})"


def decision_of(record: Fields) -> Decision:
    """Parse a decision's record. Raises KeyError, ValueError or TypeError when it is not one."""
    kind = str(record["kind"])
    tokens, s_max = record.get("tokens"), record.get("s_max")
    return Decision(
        kind=kind,
        epoch=int(record.get("epoch", 0)),
        round=pair(record.get("round")),
        version=pair(record.get("version")),
        from_version=pair(record.get("from_version")),
        digests={str(name): hex_of(digest) for name, digest in record.get("digests", {}).items()},
        tokens=None if tokens is None else int(tokens),
        s_max=None if s_max is None else int(s_max),
        participants=tuple(
            RecordedParticipant(
                push_of(item["push"]),
                int(item["attempt"]),
                str(item["verdict"]),
                pair(item["base"]),
                int(item["fence"]),
                int(item["tokens"]),
                tuple((int(r[1]), int(r[2]), int(r[3]), int(r[4])) for r in item["ranges"]),
            )
            for item in record.get("participants", ())
        ),
        judgement=record.get("judgement"),
        origin=pair(record.get("origin")),
        donor=record.get("donor"),
        lost_tokens=int(record.get("lost_tokens") or 0),
        rolled_back=tuple(push_of(item) for item in record.get("rolled_back", ())),
    )


@dataclass(slots=True)
class Fact:
    """One thing that was recorded."""

    source: str  # "journal", the role whose tape it is a line of, "manifest", "file" or "end"
    who: str
    kind: str
    fields: Fields
    at_s: float = 0.0  # seconds since 1970 by its process's clock
    cause: str = "-"
    decision: Decision | None = None

    def version(self, name: str = "version") -> Pair | None:
        return pair(self.fields.get(name))

    def round(self) -> Pair | None:
        return pair(self.fields.get("round"))

    def push(self) -> PushKey:
        return push_of(self.fields["push"])

    def digest(self) -> str:
        return hex_of(self.fields.get("digest", ""))

    @property
    def made(self) -> Decision:
        assert self.decision is not None, "only facts with a decision are asked for it"
        return self.decision

    def __str__(self) -> str:
        return f"{self.source} {self.who}" if self.who else self.source


def journaled(record: Fields) -> Fact:
    """A durable record of the master's journal. Raises KeyError, ValueError or TypeError if it is none."""
    kind = str(record["kind"])
    decision = decision_of(record) if kind in DECISIONS else None
    return Fact("journal", "", kind, record, float(record.get("wall_s") or 0.0), decision=decision)


# ---- the history ----


class TapeCoverage(Protocol):
    """Where on a slave's tape a line belongs (dips.judge.coverage); empty where the tape covers that place."""

    def of_slave(self, name: str, round_id: Pair, ended: bool) -> str: ...


@dataclass
class Gap:
    """What a tape does not say because it does not cover it (dips.judge.coverage): which invariants it leaves unproven.

    places: where on the tape that would be, as pieces of a sentence. things: what it would be about.
    """

    places: dict[str, None] = field(default_factory=dict)
    things: dict[str, None] = field(default_factory=dict)
    invariants: set[str] = field(default_factory=set)


@dataclass
class History:
    """What the facts so far say, indexed for the invariants."""

    durability: str | None = "sync"  # "sync" or "async", None when it is not known
    live: bool = True  # facts come in the order in which they happened; else source by source
    coverage: TapeCoverage | None = None  # of the tapes; None: each covers the whole run
    whole: bool = True  # the journal's beginning is there
    lossy: bool = False  # a journal was lost, or another history was adopted, so that what it decided may be unknown

    epoch: int = 0
    head: Decision | None = None
    newest_round: Pair | None = None
    commits: dict[Pair, Decision] = field(default_factory=dict)
    tokens_at: dict[Pair, int] = field(default_factory=dict)
    decided: dict[PushKey, tuple[str, Pair | None]] = field(default_factory=dict)
    taken_back: set[PushKey] = field(default_factory=set)
    applied_ranges: dict[tuple[int, int], list[tuple[int, int, Pair, PushKey]]] = field(default_factory=dict)
    last_decided: dict[str, tuple[PushKey, int, bool]] = field(default_factory=dict)
    joined: dict[str, Pair] = field(default_factory=dict)

    digests: dict[tuple[Pair, str], tuple[str, str]] = field(default_factory=dict)
    rounds: dict[Pair, tuple[Pair, str]] = field(default_factory=dict)
    hashes: dict[Pair, tuple[str, str]] = field(default_factory=dict)
    # a slave's tape says that it holds the version, and whether on disk
    held: dict[tuple[str, Pair], bool | None] = field(default_factory=dict)
    on_disk: set[tuple[str, Pair]] = field(default_factory=set)  # it has a manifest
    prepared: dict[tuple[str, Pair], Fact] = field(default_factory=dict)  # by slave and round
    staged: dict[tuple[PushKey, str], dict[int, str]] = field(default_factory=dict)
    sent: dict[PushKey, Mapping[str, str]] = field(default_factory=dict)
    promised: Counter[str] = field(default_factory=Counter)  # 0: nothing
    promised_at_s: dict[str, float] = field(default_factory=dict)
    directories: dict[str, str] = field(default_factory=dict)  # the identity of each slave's, where the tape says it
    ticketed: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    reported: dict[PushKey, str] = field(default_factory=dict)
    said: dict[PushKey, str] = field(default_factory=dict)
    """Verdicts that this incarnation of the master recorded; one that it did not send may be decided differently."""
    published: set[Pair] = field(default_factory=set)
    unproven: list[tuple[Decision, int]] = field(default_factory=list)
    """Records that some tape does not cover, and how many rollbacks and adoptions the run had by then."""
    went_back: int = 0
    gaps: dict[tuple[str, str], Gap] = field(default_factory=dict)
    """By role and name of the process whose tape lacks a line without contradicting the record that asks for it."""
    judging: Judging = field(default_factory=Judging)

    def __post_init__(self) -> None:
        self.judging = Judging(self.whole)

    @property
    def is_sync(self) -> bool:
        return self.durability == "sync"

    def may_lack(self, slave: str, made: Decision, invariant: str, ended: bool = False) -> bool:
        """Whether the slave's tape may lack a line about the record without contradicting it; such a gap is noted.

        ended: a line that follows the record.
        """
        if self.coverage is None or made.round is None:
            return False
        place = self.coverage.of_slave(slave, made.round, ended)
        if place:
            self.lacks("slave", slave, place, f"version {say_version(made.version)}", invariant)
        return bool(place)

    def lacks(self, role: str, name: str, place: str, thing: str, invariant: str) -> None:
        gap = self.gaps.setdefault((role, name), Gap())
        gap.places[place] = gap.things[thing] = None
        gap.invariants.add(invariant)

    def lost_journal(self, kept: Collection[Pair] = ()) -> None:
        """Note that the master's disk was lost or restored: what was decided may be decided again, differently.

        kept: versions whose records the copy holds.
        """
        self.lossy = True
        self.judging.lost_journal()
        stay = self.published | set(kept)
        # Versions that only the lost journal had, that no slave committed and that were never published: their names
        # may be used again.
        seen = {version for _, version in self.held} | stay
        unseen = {version for version in self.commits if version not in seen}
        for version in unseen:
            self._forget(version, adopted=True)
        for line in self.applied_ranges.values():
            line[:] = [piece for piece in line if piece[2] not in unseen]
        self.decided = {p: known for p, known in self.decided.items() if p in self.reported or known[1] in stay}
        self.epoch = 0
        self.head = self.newest_round = None
        self.last_decided.clear()
        self.joined.clear()
        self.ticketed.clear()

    # ---- adding a fact, after it was judged ----

    def add(self, fact: Fact) -> None:
        """Add the fact to the history."""
        handler = _ADD.get((fact.source, fact.kind))
        if handler is not None:
            handler(self, fact)
        if fact.source == "journal":
            self.epoch = max(self.epoch, int(fact.fields.get("epoch", 0)))

    def add_decision(self, fact: Fact) -> None:
        made = fact.made
        origin_round = pair(fact.fields.get("origin_round"))
        origin = (made.origin, origin_round) if made.origin is not None and origin_round is not None else None
        now = (made.version, made.round) if made.version is not None and made.round is not None else None
        self.judging.moved(made.kind, now, origin)
        if made.kind == "ADOPT":
            self.lossy = True
        if made.kind in ("ADOPT", "ROLLBACK"):
            self.went_back += 1
            # Versions newer than the one that the run goes on from are no longer part of its history.
            kept = made.origin if made.kind == "ROLLBACK" else made.version
            assert kept is not None, "a ROLLBACK names its origin, an ADOPT its version"
            self.taken_back.update(made.rolled_back)
            dropped = {version for version in self.commits if version > kept}
            fork = self.commits.get(kept)
            if made.kind == "ADOPT" and fork is not None and fork.round != made.round:
                dropped.add(kept)
            for version in dropped:
                self._forget(version, made.kind == "ADOPT")
            for line in self.applied_ranges.values():
                line[:] = [piece for piece in line if piece[2] not in dropped]
        for item in made.participants:
            self._decide(made, item)
        if made.version is not None:
            self.commits[made.version] = self.head = made
            if made.tokens is not None:
                self.tokens_at[made.version] = made.tokens
            if made.round is not None:
                self.rounds.setdefault(made.version, (made.round, "the journal"))
            for slave, digest in made.digests.items():
                self.digests.setdefault((made.version, slave), (digest, "the journal"))
        if made.kind != "ADOPT" and made.round is not None:
            self.newest_round = made.round

    def _decide(self, made: Decision, item: RecordedParticipant) -> None:
        donated = made.kind == "ROLLBACK"
        self.decided[item.push] = (item.verdict, made.version)
        if not donated:
            self.last_decided[item.push[0]] = (item.push, item.fence, item.base is None)
        if item.verdict == "APPLIED" and made.version is not None:
            for pass_index, chunk, begin, end in item.ranges:
                piece = (begin, end, made.version, item.push)
                self.applied_ranges.setdefault((pass_index, chunk), []).append(piece)

    def _forget(self, version: Pair, adopted: bool) -> None:
        for item in self.commits[version].participants:
            if item.verdict == "APPLIED":
                self.taken_back.add(item.push)
        if adopted and version not in self.published:
            # Another history was adopted before this version was published: its name may be given to another content,
            # and its pushes may be merged there.
            for item in self.commits[version].participants:
                if item.push not in self.reported:
                    self.decided.pop(item.push, None)
            del self.commits[version]
            for slave in [slave for known, slave in self.digests if known == version]:
                if (slave, version) not in self.held:
                    del self.digests[version, slave]
            if not any(known == version for _, known in self.held):
                self.rounds.pop(version, None)

    def add_join(self, fact: Fact) -> None:
        incarnation = pair(fact.fields.get("incarnation"))
        if incarnation is not None:
            self.joined[str(fact.fields["cluster"])] = incarnation

    # ---- slaves ----

    def add_attached(self, fact: Fact) -> None:
        """A promise is in the slave's directory: under its name with another one, a slave has promised nothing."""
        slave, directory = str(fact.fields["slave"]), str(fact.fields.get("directory") or "")
        if directory and self.directories.setdefault(slave, directory) != directory:
            self.directories[slave] = directory
            self.promised.pop(slave, None)

    def add_promised(self, fact: Fact) -> None:
        epoch = int(fact.fields["epoch"])
        if epoch > self.promised[fact.who]:
            self.promised[fact.who], self.promised_at_s[fact.who] = epoch, fact.at_s

    def add_staged(self, fact: Fact) -> None:
        key = (fact.push(), fact.who)
        self.staged.setdefault(key, {})[int(fact.fields.get("attempt", 1))] = fact.digest()

    def add_measured(self, fact: Fact) -> None:
        round_id, gram = fact.round(), fact.fields.get("gram")
        if round_id is not None and gram is not None:
            self.judging.measured(
                fact.who, round_id, gram, fact.fields["nonfinite_elems"], fact.fields.get("all_zero") or ()
            )

    def add_prepared(self, fact: Fact) -> None:
        round_id = fact.round()
        if round_id is not None:
            self.prepared[fact.who, round_id] = fact

    def add_held(self, fact: Fact) -> None:
        """Note that a slave holds a version, by a line of a kind in HELD or by a manifest."""
        version, round_id, where = fact.version(), fact.round(), str(fact)
        if version is None:
            return
        if fact.fields.get("digest"):
            self.digests.setdefault((version, fact.who), (fact.digest(), where))
        if round_id is not None:
            self.rounds.setdefault(version, (round_id, where))
        if fact.fields.get("commit_hash"):
            self.hashes.setdefault(version, (hex_of(fact.fields["commit_hash"]), where))
        if fact.source == "manifest":
            self.on_disk.add((fact.who, version))
            return
        durable = fact.fields.get("durable") if fact.kind == "committed" else True
        known = self.held.get((fact.who, version))
        self.held[fact.who, version] = True if known else durable

    # ---- master and workers ----

    def add_ticket(self, fact: Fact) -> None:
        cluster, epoch, n, seq = fact.push()
        self.ticketed[cluster] = max(self.ticketed.get(cluster, (0, 0, 0)), (epoch, n, seq))

    def add_publish(self, fact: Fact) -> None:
        version = fact.version()
        if version is not None:
            self.published.add(version)

    def add_sent(self, fact: Fact) -> None:
        digests = fact.fields.get("digest_of_slave") or {}
        self.sent.setdefault(fact.push(), {name: hex_of(digest) for name, digest in digests.items()})

    def add_start(self, fact: Fact) -> None:
        self.said.clear()

    def add_said(self, fact: Fact) -> None:
        self.said[fact.push()] = verdict_of(fact)

    def add_reported(self, fact: Fact) -> None:
        self.reported[fact.push()] = verdict_of(fact)


def verdict_of(fact: Fact) -> str:
    """The kind of the verdict in a tape's line."""
    raw = fact.fields.get("verdict", fact.fields.get("kind"))
    return str(getattr(raw, "name", raw))


HELD = ("committed", "configured", "persisted", "rolled_back")
"""Kinds of slaves' tape lines after which the slave holds a version."""

SENT = ("push_sent", "sent")
PULLED = ("installed", "pulled")

_ADD = {
    **{("journal", kind): History.add_decision for kind in DECISIONS},
    ("journal", "JOIN"): History.add_join,
    ("master", "slave_attached"): History.add_attached,
    ("slave", "promised"): History.add_promised,
    ("slave", "staged"): History.add_staged,
    ("slave", "measured"): History.add_measured,
    ("slave", "prepared"): History.add_prepared,
    **{("slave", kind): History.add_held for kind in HELD},
    ("manifest", "manifest"): History.add_held,
    ("master", "ticket"): History.add_ticket,
    ("master", "publish"): History.add_publish,
    ("master", "epoch"): History.add_start,
    ("master", "verdict"): History.add_said,
    **{("worker", kind): History.add_sent for kind in SENT},
    ("worker", "verdict"): History.add_reported,
}

REMEMBERED = frozenset(_ADD)
"""Source and kind of the facts that the history keeps, whether or not an invariant judges them, too."""


@lru_cache(maxsize=256)
def ledger_of_record(text: str) -> Fields | None:
    """The ledger that a COMMIT record carries; None when it is none. Every slave's manifest holds the same text."""
    try:
        ledger = json.loads(text)["ledger"]
    except (ValueError, KeyError, TypeError):
        return None
    return ledger if isinstance(ledger, dict) else None


def names_of(items: Iterable[str]) -> str:
    return ", ".join(sorted(items)) or "none"
