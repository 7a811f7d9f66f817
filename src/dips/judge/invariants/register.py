"""Registers the invariants and the facts that each one judges."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from dips.judge.facts import HELD, PULLED, SENT, Fact, History, Sentences
from dips.judge.invariants import fencing, judging, numbers, publishing, pushes, versions

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
    Invariant("I3", publishing.never_torn, _PULLED),
    Invariant("I4", publishing.committed_everywhere, (("master", "publish"),)),
    Invariant("I5", publishing.completable, (_COMMIT, _ROLLBACK, _RESHARD, _END)),
    Invariant("I6", pushes.one_verdict, (_COMMIT, _VOID, _ROLLBACK, *_VERDICTS)),
    Invariant("I7", versions.one_line, (_COMMIT, _ROLLBACK, _RESHARD, *_VERDICTS)),
    Invariant(
        "I8",
        fencing.nothing_old,
        (
            *(("journal", kind) for kind in ("EPOCH", "JOIN", "LEAVE", "EVICT", "LEASE", "RETURN")),
            *(_COMMIT, _VOID, _ROLLBACK, _ADOPT, _RESHARD),
            *(("slave", kind) for kind in ("promised", "measured", "prepared")),
            ("master", "ticket"),
        ),
    ),
    Invariant("I9", pushes.complete_or_absent, (_COMMIT, _ROLLBACK, *_SENT)),
    Invariant("I10", pushes.bounded_staleness, (_COMMIT, _VOID)),
    Invariant("I11", numbers.tokens_add_up, (_COMMIT, _ROLLBACK, _RESHARD)),
    Invariant("I12", numbers.one_state_for_each_token, (_MANIFEST, ("journal", "snapshot"))),
    Invariant("I13", numbers.all_finite, (("slave", "prepared"), _COMMIT, ("file", "snapshot"))),
    Invariant("I14", versions.same_bits, (("slave", "prepared"), *_STANDS)),
    Invariant("I18", judging.recomputed, (_COMMIT, _VOID, _MANIFEST, ("journal", "snapshot"))),
)
