"""Checks every promise about state against all that a run's processes recorded (`dips verify`).

A promise is "ok" when records were judged and none breaks it, "violated" when two records contradict each other,
"unproven" when no record is about it or a tape does not cover a part of the run, and "not applicable" when the run's
own configuration rules it out. docs/evidence.md lists each promise's evidence, and what it
cannot see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from dips.core.errors import DipsError
from dips.judge.coverage import SPANS, Coverage, drop_lost
from dips.judge.evidence import NAME, PROMISE, SPEAKS, ended_without_a_word, judge_evidence, put_back
from dips.judge.facts import REMEMBERED, Fact, Fields, journaled
from dips.judge.invariants import INVARIANTS, Checker, Violation
from dips.judge.judgement import Judging
from dips.judge.records import RunRecords, read_run
from dips.judge.replay import Replayed, replay_run

OK, VIOLATED, UNPROVEN, NOT_APPLICABLE = "ok", "violated", "unproven", "not applicable"

EXIT_UNREADABLE = 1
EXIT_BROKEN = 7

BEFORE_THE_JOURNAL = frozenset({"promised", "staged", "measured", "prepared"})
"""Lines that slaves write before the COMMIT; the other lines of their tapes are about what the journal already has."""

_OWN_DATA = "clusters bring their own data, so no token is leased"


@dataclass(frozen=True)
class PromiseRow:
    """The result for one promise."""

    name: str  # of the invariant
    promise: str
    records: int  # how many facts were judged
    result: str
    why: str = ""

    @property
    def holds(self) -> bool:
        return self.result in (OK, NOT_APPLICABLE)


@dataclass
class VerifyReport:
    """The result of a verification."""

    run_dir: Path
    run_id: str
    rows: list[PromiseRow]
    violations: list[Violation]
    problems: list[str] = field(default_factory=list)  # what cannot be read
    unproven: list[str] = field(default_factory=list)  # what is missing, or what nothing confirms
    notes: list[str] = field(default_factory=list)  # what else a reader should know
    replayed: Replayed | None = None

    @property
    def exit_code(self) -> int:
        """0 when every promise holds; 7 when one is violated; else 1 when a record cannot be read: it may be what would
        prove the rest; else 7 when one is unproven."""
        if any(row.result == VIOLATED for row in self.rows):
            return EXIT_BROKEN
        if self.problems:
            return EXIT_UNREADABLE
        return 0 if all(row.holds for row in self.rows) else EXIT_BROKEN

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def verdict(self) -> str:
        """ "ok", or what is not."""
        if self.ok:
            return OK
        broken = [f"{row.name} {row.result}" for row in self.rows if not row.holds]
        return "; ".join([*broken, *self.problems])

    def counts(self) -> dict[str, int]:
        """Invariant -> number of records judged, for the invariants that apply."""
        return {row.name: row.records for row in self.rows if row.result != NOT_APPLICABLE}

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "run_dir": str(self.run_dir),
            "run_id": self.run_id,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "invariants": [asdict(row) for row in self.rows],
            "violations": [{"invariant": v.invariant, "sentence": v.sentence, "fact": v.fact} for v in self.violations],
            "problems": self.problems,
            "unproven": self.unproven,
            "notes": self.notes,
            "replayed": None if self.replayed is None else self.replayed.to_json(),
        }


def verify_run(
    run_dir: Path, replay: bool = False, *, allow_skipped: bool = False, without: Collection[str] = ()
) -> VerifyReport:
    """Check all that a run recorded; `replay` also computes every version again from the recorded pushes.

    allow_skipped: versions that cannot be computed again because a recorded push is missing are only reported. without:
    names of processes of which there never was a tape, or no more of one than is in the directory.
    Raises ConfigError when there is no run or (with replay) no recorded push, FatalError when its journal is damaged.
    """
    records = read_run(run_dir, keep=_wanted)
    checker = check_records(records)
    replayed = replay_run(run_dir, records) if replay else None
    evidence = judge_evidence(records, checker.history, without)
    if replayed is not None:
        records.unproven += replayed.unproven
        if replayed.missing and not allow_skipped:
            records.unproven.append(
                f"{len(replayed.missing)} shards were not computed again, the first because: {replayed.missing[0]} "
                "(--allow-skipped accepts that)"
            )
    violations = [*checker.violations, *evidence.violations]
    if replayed is not None:
        violations += [Violation("I14", said, "replay") for said in replayed.wrong]
        violations += [Violation("I18", said, "replay") for said in replayed.misjudged]
    records.notes += _not_recomputed(checker.history.judging) + ended_without_a_word(records)
    # The row below the promises: whether the records are complete and agree.
    result, why = OK, ""
    if evidence.violations:
        result, why = VIOLATED, f"{len(evidence.violations)} times"
    elif records.unproven:
        result, why = UNPROVEN, f"{len(records.unproven)} times, see below"
    return VerifyReport(
        run_dir=run_dir,
        run_id=records.run_id,
        rows=[*_rows(checker, records, replayed, without), PromiseRow(NAME, PROMISE, evidence.judged, result, why)],
        violations=violations,
        problems=records.problems,
        unproven=records.unproven,
        notes=records.notes,
        replayed=replayed,
    )


def check_records(records: RunRecords) -> Checker:
    """Feed all records to a checker, source by source: each source covers what the next one says."""
    # The weaker one, if the master's incarnations had both.
    master = records.lines["master"]
    said = {line.fields["durability"] for line in master if line.kind == "epoch" and "durability" in line.fields}
    durability = "async" if "async" in said else "sync" if said else None
    lost = _lost_journal(records)
    lost = drop_lost(records) or lost
    whole = records.whole and not lost
    checker = Checker(live=False, durability=durability, coverage=Coverage(records), whole=whole)
    if lost:
        checker.lost_journal()
        records.notes.append(lost)
    for about, fact in _facts(records):
        try:
            checker.feed(fact if isinstance(fact, Fact) else journaled(fact))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # It lacks fields, or has others than its kind.
            records.problems.append(f"{about} cannot be read ({error!r})")
    checker.finish()
    return checker


def _facts(records: RunRecords) -> Iterator[tuple[str, Fact | Fields]]:
    """What is fed in this order, each with what it is in a sentence; a record of the journal before it is parsed."""
    slaves = records.lines["slave"]
    yield from _lines(line for line in slaves if line.kind in BEFORE_THE_JOURNAL)
    yield from ((f"the journal's {record['kind']}", record) for record in records.journal)
    yield from _lines(line for line in slaves if line.kind not in BEFORE_THE_JOURNAL)
    for stored in records.manifests:
        about = f"the record in {stored.path}"
        yield about, Fact("manifest", stored.slave, "manifest", stored.body)
        for what, count in stored.non_finite.items():
            counted = {"file": str(stored.body["file"]), "what": what, "non_finite": count}
            yield about, Fact("file", stored.slave, "snapshot", counted)
    if records.ledger is not None:
        yield "the journal's newest state", Fact("journal", "", "snapshot", {"ledger": records.ledger})
    yield from _lines([*records.lines["master"], *records.lines["worker"]])


def _lines(lines: Iterable[Fact]) -> Iterator[tuple[str, Fact]]:
    return ((f"a line {line.kind!r} of {line}", line) for line in lines)


_USED = REMEMBERED.union(*(item.listens for item in INVARIANTS), SPEAKS, SPANS)


def _wanted(role: str, kind: str) -> bool:
    return (role, kind) in _USED


def _lost_journal(records: RunRecords) -> str:
    """A sentence when the run had another journal before this one; empty when not.

    Epochs are counted one by one, unless slaves have promised ones that the journal does not know. A lost journal may
    have begun at 1 as well, as the master's tape says."""
    epochs = [int(record["epoch"]) for record in records.journal if record["kind"] == "EPOCH"]
    expected = range(epochs[0] if not records.whole else 1, epochs[-1] + 1) if epochs else ()
    missing = sorted(set(expected) - set(epochs))
    if missing:
        what = f"epoch {missing[0]}" if len(missing) == 1 else f"{len(missing)} epochs, {missing[0]} the first,"
        return (
            f"the journal has no record of {what}: it was lost or restored once, and what only the lost records said "
            "is not judged"
        )
    if any(record["kind"] == "ADOPT" for record in records.journal):
        return "the journal was lost or restored once: it adopted a version from the slaves, and has none before it"
    begun = Counter(str(line.fields.get("epoch")) for line in records.lines["master"] if line.kind == "epoch")
    twice = [epoch for epoch, times in begun.items() if times > 1]
    if twice:
        return (
            f"epoch {twice[0]} was begun twice: the journal was lost once, and what only the lost records said is not "
            "judged"
        )
    return put_back(records)


def _rows(
    checker: Checker, records: RunRecords, replayed: Replayed | None, without: Collection[str]
) -> list[PromiseRow]:
    counts, broken, gaps = checker.counts, checker.broken, checker.history.gaps
    if replayed is not None:
        counts["I14"] += replayed.shards
        broken["I14"] += len(replayed.wrong)
        counts["I18"] += replayed.judged
        broken["I18"] += len(replayed.misjudged)
    rows = []
    for item in INVARIANTS:
        count, result, why = counts[item.name], OK, ""
        if broken[item.name]:
            result, why = VIOLATED, f"{broken[item.name]} times"
        elif count == 0:
            result, why = _why_none(item.name, records, without)
        elif short := sorted(
            name for (_, name), gap in gaps.items() if item.name in gap.invariants and name not in without
        ):
            result, why = UNPROVEN, f"the tape of {', '.join(short)} does not cover all of the run, see below"
        elif item.name == "I18" and (holes := checker.history.judging.holes):
            result, why = UNPROVEN, f"{holes} records lack the inputs of their judgement, though earlier ones have them"
        rows.append(PromiseRow(item.name, item.promise, count, result, why))
    return rows


TOLD_BY = {"I3": "worker", "I4": "master", "I5": "slave", "I9": "slave", "I14": "slave"}
"""Promises that only the tapes of one role prove."""


def _why_none(name: str, records: RunRecords, without: Collection[str]) -> tuple[str, str]:
    """The result and its reason for a promise without a judged record: not applicable, or unproven."""
    ledger = records.ledger
    role = TOLD_BY.get(name)
    if role is not None and role in _never_recorded(records, without):
        return NOT_APPLICABLE, "none of the processes that prove it wrote a tape, as --without-tape says"
    if name == "I12" and ledger is not None and ledger.get("data_plan") and ledger.get("leases") is None:
        return NOT_APPLICABLE, _OWN_DATA
    return UNPROVEN, "no record is about it"


def _never_recorded(records: RunRecords, without: Collection[str]) -> set[str]:
    """Roles of which no process wrote a tape, as the caller says."""
    named = {("master", "master")}
    for record in records.journal:
        named |= {("slave", str(slave)) for slave in record.get("digests") or ()}
        if record["kind"] == "JOIN":
            named.add(("worker", str(record["cluster"])))
    roles = {role for role, _ in named} - {role for role, _ in records.tapes}
    return {role for role in roles if all(name in without for one, name in named if one == role)}


def _not_recomputed(judging: Judging) -> list[str]:
    """Notes about judgements that I18 does not check, or not completely."""
    notes = []
    if judging.old:
        notes.append(f"{judging.old} judgements are not computed again: their records lack the inputs")
    if judging.blind:
        notes.append(
            f"of {judging.blind} judgements the accepted set is not computed again: the detector's state at that time "
            "is in none of the records"
        )
    return notes


class Summary(TypedDict):
    """What a run's report says: "ok" or what is not, and how many records were judged for each invariant."""

    verify: str
    verified: dict[str, int]


def verify_or_say(run_dir: Path, *, replay: bool = False) -> Summary:
    """Verify a run and return the summary, also when its records cannot be read. replay: as in verify_run()."""
    try:
        report = verify_run(run_dir, replay)
    except DipsError as error:
        return {"verify": f"unreadable: {error}", "verified": {}}
    return {"verify": report.verdict, "verified": report.counts()}
