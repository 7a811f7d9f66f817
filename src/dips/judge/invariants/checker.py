"""Runs every invariant on every fact, at the cost of a few dictionary look-ups for each fact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dips.judge.facts import Fact, History, Pair, decision_of
from dips.judge.invariants.register import INVARIANTS, Invariant, Key

KEPT = 20
"""How many violations of one invariant are kept: the first ones explain the others."""

DECISIONS = frozenset({"COMMIT", "VOID", "ROLLBACK", "ADOPT", "RESHARD"})


@dataclass(frozen=True)
class Violation:
    """A broken promise: which one, a sentence, and the fact that broke it."""

    invariant: str
    sentence: str
    fact: str
    at_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.invariant}: {self.sentence}"


class Checker:
    """Judges the facts that it is fed, and reports a violation as soon as it is known.

    live: facts come in the order in which they happened, in all processes together; else source by source, and what a
    source that comes later would prove is judged by finish(). durability: "sync" or "async"; None when unknown, which
    asks nothing of disks. tapes: (role, name) of the processes whose tapes are available; None for all.
    """

    def __init__(
        self,
        *,
        live: bool = True,
        durability: str | None = "sync",
        tapes: frozenset[tuple[str, str]] | None = None,
        whole: bool = True,
    ) -> None:
        self.history = History(durability=durability, live=live, tapes=tapes, whole=whole)
        self._judges = _by_key()
        self._counts = {item.name: 0 for item in INVARIANTS}
        self._broken = {item.name: 0 for item in INVARIANTS}
        self._new: list[Violation] = []
        self.violations: list[Violation] = []

    def feed_journal(self, record: Mapping[str, Any]) -> list[Violation]:
        """A durable record of the master's journal, parsed. Raises KeyError, ValueError or TypeError if it is none."""
        kind = str(record["kind"])
        decision = decision_of(record) if kind in DECISIONS else None
        return self._feed(Fact("journal", "", kind, record, float(record.get("wall_s") or 0.0), decision))

    def feed_tape(
        self, role: str, name: str, kind: str, fields: Mapping[str, Any], at_s: float = 0.0
    ) -> list[Violation]:
        """A line of the tape of a "master", "slave" or "worker". Raises as feed_journal does."""
        return self._feed(Fact(role, name, kind, fields, at_s))

    def feed_manifest(self, slave: str, manifest: Mapping[str, Any]) -> list[Violation]:
        """The body of a manifest: version, round, digest, commit_hash, commit_record."""
        return self._feed(Fact("manifest", slave, "manifest", manifest))

    def feed_ledger(self, ledger: Mapping[str, Any]) -> list[Violation]:
        """The newest state of the master's journal."""
        return self._feed(Fact("journal", "", "snapshot", {"ledger": ledger}))

    def feed_file(self, slave: str, file: str, what: str, non_finite: int) -> list[Violation]:
        """How many elements of a snapshot's file are not finite."""
        return self._feed(Fact("file", slave, "snapshot", {"file": file, "what": what, "non_finite": non_finite}))

    def lost_journal(self, kept: Collection[Pair] = ()) -> None:
        """The master's disk was lost or put back from a copy: what only the lost records said may be decided
        again, and differently.

        kept: versions whose records the copy holds.
        """
        self.history.lost_journal(kept)

    def check(self) -> list[Violation]:
        """The violations that were found since the last call."""
        new, self._new = self._new, []
        return new

    def finish(self) -> list[Violation]:
        """Judge what waited for later facts, after the last one. Returns all violations of the history."""
        self._feed(Fact("end", "", "end", {}))
        return self.violations

    def counts(self) -> dict[str, int]:
        """Invariant -> how many facts it judged."""
        return dict(self._counts)

    def broken(self) -> dict[str, int]:
        """Invariant -> how many violations there are, also of those that were not kept."""
        return dict(self._broken)

    def _feed(self, fact: Fact) -> list[Violation]:
        found: list[Violation] = []
        for item in self._judges.get((fact.source, fact.kind), ()):
            sentences = item.judge(self.history, fact)
            if sentences is None:
                continue
            self._counts[item.name] += 1
            if sentences:
                found += self._report(item, sentences, fact)
        self.history.add(fact)
        return found

    def _report(self, item: Invariant, sentences: list[str], fact: Fact) -> list[Violation]:
        found = []
        for sentence in sentences:
            self._broken[item.name] += 1
            if self._broken[item.name] <= KEPT:
                found.append(Violation(item.name, sentence, f"{fact} {fact.kind}", fact.at_s))
        self._new += found
        self.violations += found
        return found


def _by_key() -> dict[Key, list[Invariant]]:
    judges: dict[Key, list[Invariant]] = {}
    for item in INVARIANTS:
        for key in item.listens:
            judges.setdefault(key, []).append(item)
    return judges
