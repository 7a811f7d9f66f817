"""Whether what the processes recorded is whole, and whether records of one thing agree, whoever wrote them.

The invariants judge what a record says; this judges whether it may be believed. A digest shows that a file changed;
here the same fact is looked up in every other place that has it, so that one record that was changed together with its
digest stands alone against the others. It must never judge a promise about state: that is the invariants' work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.master.journal_file import EPOCH
from dips.sim.invariants import Violation
from dips.sim.verify_records import Line, RunRecords

NAME = "records"
PROMISE = "What the processes recorded is whole, and agrees."


@dataclass
class Evidence:
    """What became of it. judged: how many records were compared; unproven: what is missing that others speak of."""

    judged: int = 0
    violations: list[Violation] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def differs(self, sentence: str, where: str) -> None:
        """Two records do not agree."""
        self.violations.append(Violation(NAME, sentence, where))


def judge_evidence(records: RunRecords) -> Evidence:
    """Compare everything with everything that speaks of the same."""
    found = Evidence(unproven=list(records.unproven))
    _journal_against_tape(records, found)
    return found


# ---- the journal, as the master's tape saw it grow ----


def put_back(records: RunRecords) -> str:
    """A sentence when the journal lost its end before a later master went on from it; empty when it did not."""
    lines, wrong = _other_rows(records)
    if not wrong or _at_the_end(records, lines, wrong):
        return ""
    number = lines[wrong[0]].fields["number"]
    return (
        f"the journal was put back, or lost its end, once: record {number} and what followed is not in it, though the "
        "master's tape says that it was written; what only it knew is not judged"
    )


def _journal_against_tape(records: RunRecords, found: Evidence) -> None:
    lines, wrong = _other_rows(records)
    found.judged += len(lines)
    if not lines and records.rows and records.rows[-1].digest and any(role == "master" for role, _ in records.tapes):
        found.unproven.append("the master's tape does not say how far the journal goes: an older release wrote it")
    if not wrong or not _at_the_end(records, lines, wrong):
        return
    number = int(lines[wrong[0]].fields["number"])
    newest = records.rows[-1].number if records.rows else 0
    if number > newest:
        found.differs(
            f"the journal ends at record {newest}, but the master's tape says that record {number} was written: the "
            "journal's end is lost",
            "master journaled",
        )
        return
    found.differs(
        f"record {number} of the journal, or one before it, is not the one that was written: the master's tape has "
        "another digest for it",
        "master journaled",
    )


def _other_rows(records: RunRecords) -> tuple[list[Line], list[int]]:
    """What the master's tape says of the journal, and which of these lines (by index) the journal contradicts."""
    digests = {row.number: row.digest for row in records.rows}
    oldest = records.rows[0].number if records.rows else 1
    if records.rows and not records.rows[-1].digest:
        return [], []  # of an older release
    lines = [line for line in records.lines["master"] if line.kind == "journaled"]
    lines = [line for line in lines if int(line.fields["number"]) >= oldest]
    wrong = [at for at, line in enumerate(lines) if digests.get(line.fields["number"]) != line.fields["digest"]]
    return lines, wrong


def _at_the_end(records: RunRecords, lines: list[Line], wrong: list[int]) -> bool:
    """Whether no later master went on from the journal as it is now."""
    after = wrong[-1] + 1
    if after == len(lines):
        return True
    kinds = {row.number: row.kind for row in records.rows}
    return kinds[lines[after].fields["number"]] != EPOCH
