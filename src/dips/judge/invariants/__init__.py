"""The promises about state, one named function each, and the Checker that runs them on every fact.

A function gets the history of all earlier facts and one fact. It returns sentences about what is wrong, an empty list
when nothing is, or None when it does not judge this fact. docs/evidence.md lists the evidence of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dips.judge.facts import (
    HELD,
    PULLED,
    SENT,
    Fact,
    History,
    Pair,
    Sentences,
    TapeCoverage,
    ledger_of_record,
)
from dips.judge.invariants import pushes, versions

# ---- judging ---------------------------------------------------------------------------------------------------------
#
# I18: the judgement is recomputed.


def recomputed(history: History, fact: Fact) -> Sentences:
    """Every judgement follows by the rules from the pushes, the tokens and the state before.

    Evidence: accepted set, scores, weights, merged norm, kappa, T_round, rho and the step's coefficients of each COMMIT
    and VOID, computed again (dips.judge.judgement) from the inputs in the record and from what the detector remembers
    by the records before; the Gram matrix against what the slaves say they measured; the detector's state in every
    ledger; with --replay, the norms of the recorded pushes.
    """
    judging = history.judging
    match fact.source:
        case "journal" if fact.kind == "snapshot":
            detector = fact.fields["ledger"].get("detector")
            return None if detector is None else judging.ledger(detector)
        case "journal":
            before = history.head
            slaves = sorted(before.digests) if before is not None and not history.lossy else None
            try:
                wrong = judging.judge(fact.fields, slaves)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                wrong = [f"the inputs of its judgement cannot be read ({error!r})"]
            return None if wrong is None else [f"{fact.made}: {sentence}" for sentence in wrong]
    version, round_id = fact.version(), fact.round()
    ledger = ledger_of_record(fact.fields["commit_record"]) if fact.fields.get("commit_record") else None
    if ledger is None or version is None or round_id is None or ledger.get("detector") is None:
        return None
    return judging.ledger(ledger["detector"], (version, round_id))


# ---- register --------------------------------------------------------------------------------------------------------
#
# Registers the invariants and the facts that each one judges.


Key = tuple[str, str]
"""Source and kind of a fact."""

_COMMIT, _VOID, _ROLLBACK, _ADOPT, _RESHARD = (
    ("journal", kind) for kind in ("COMMIT", "VOID", "ROLLBACK", "ADOPT", "RESHARD")
)
_STANDS = tuple(("slave", kind) for kind in HELD)
_MANIFEST = ("manifest", "manifest")
_PULLED = tuple(("worker", kind) for kind in PULLED)
_SENT = tuple(("worker", kind) for kind in SENT)
_VERDICTS = (("master", "verdict"), ("worker", "verdict"))
_END = ("end", "end")


@dataclass(frozen=True)
class Invariant:
    """name: I1 to I14, and I18. listens: source and kind of the facts that it judges."""

    name: str
    judge: Callable[[History, Fact], Sentences]
    listens: tuple[Key, ...]

    @property
    def promise(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join(inspect.cleandoc(self.judge.__doc__ or "").split("\n\n")[0].split())


INVARIANTS = (
    Invariant("I1", versions.same_round, (*_STANDS, _MANIFEST, _COMMIT, _ROLLBACK, _RESHARD)),
    Invariant("I2", versions.same_content, (*_STANDS, _MANIFEST, _COMMIT, _ROLLBACK, _ADOPT, _RESHARD, *_PULLED)),
    Invariant("I3", versions.never_torn, _PULLED),
    Invariant("I4", versions.committed_everywhere, (("master", "publish"),)),
    Invariant("I5", versions.completable, (_COMMIT, _ROLLBACK, _RESHARD, _END)),
    Invariant("I6", pushes.one_verdict, (_COMMIT, _VOID, _ROLLBACK, *_VERDICTS)),
    Invariant("I7", versions.one_line, (_COMMIT, _ROLLBACK, _RESHARD, *_VERDICTS)),
    Invariant(
        "I8",
        pushes.nothing_old,
        (
            *(("journal", kind) for kind in ("EPOCH", "JOIN", "LEAVE", "EVICT", "LEASE", "RETURN")),
            *(_COMMIT, _VOID, _ROLLBACK, _ADOPT, _RESHARD),
            *(("slave", kind) for kind in ("promised", "measured", "prepared")),
            ("master", "ticket"),
        ),
    ),
    Invariant("I9", pushes.complete_or_absent, (_COMMIT, _ROLLBACK, *_SENT)),
    Invariant("I10", pushes.bounded_staleness, (_COMMIT, _VOID)),
    Invariant("I11", pushes.tokens_add_up, (_COMMIT, _ROLLBACK, _RESHARD)),
    Invariant("I12", pushes.one_state_for_each_token, (_MANIFEST, ("journal", "snapshot"))),
    Invariant("I13", pushes.all_finite, (("slave", "prepared"), _COMMIT, ("file", "snapshot"))),
    Invariant("I14", versions.same_bits, (("slave", "prepared"), *_STANDS)),
    Invariant("I18", recomputed, (_COMMIT, _VOID, _MANIFEST, ("journal", "snapshot"))),
)


_JUDGES = {key: [item for item in INVARIANTS if key in item.listens] for one in INVARIANTS for key in one.listens}


# ---- checker ---------------------------------------------------------------------------------------------------------


KEPT = 20
"""How many violations of one invariant are kept: the first ones explain the others."""


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
    asks nothing of disks. coverage: of the tapes; None: each covers the whole run.
    """

    def __init__(
        self,
        *,
        live: bool = True,
        durability: str | None = "sync",
        coverage: TapeCoverage | None = None,
        whole: bool = True,
    ) -> None:
        self.history = History(durability=durability, live=live, coverage=coverage, whole=whole)
        self.counts = {item.name: 0 for item in INVARIANTS}  # how many facts each judged
        self.broken = {item.name: 0 for item in INVARIANTS}  # how many violations, also those that were not kept
        self.violations: list[Violation] = []

    def feed(self, fact: Fact) -> list[Violation]:
        """Judge a fact, and add it to the history. Raises KeyError, ValueError or TypeError where fields are missing or
        wrong."""
        found: list[Violation] = []
        for item in _JUDGES.get((fact.source, fact.kind), ()):
            sentences = item.judge(self.history, fact)
            if sentences is None:
                continue
            self.counts[item.name] += 1
            if sentences:
                found += self._report(item, sentences, fact)
        self.history.add(fact)
        return found

    def lost_journal(self, kept: Collection[Pair] = ()) -> None:
        """The master's disk was lost or put back from a copy: what only the lost records said may be decided
        again, and differently.

        kept: versions whose records the copy holds.
        """
        self.history.lost_journal(kept)

    def finish(self) -> list[Violation]:
        """Judge what waited for later facts, after the last one. Returns all violations of the history."""
        self.feed(Fact("end", "", "end", {}))
        return self.violations

    def _report(self, item: Invariant, sentences: list[str], fact: Fact) -> list[Violation]:
        found = []
        for sentence in sentences:
            self.broken[item.name] += 1
            if self.broken[item.name] <= KEPT:
                found.append(Violation(item.name, sentence, f"{fact} {fact.kind}", fact.at_s))
        self.violations += found
        return found
