"""Maps sentences of the state machine to words of a fixed set, so that they can be labels: bounded and constant.

People read the sentences; these words only classify them. A sentence that matches no rule is "other", so a new kind
of reason is counted there until it has its own word.
"""

from __future__ import annotations

import re

from dips.master.state.reasons import lagging, recovery_words, slaves_away
from dips.master.state.shared import SharedState
from dips.master.state.tables import RoundPhase

_EXCLUDED = (
    (r"\d+ elements are not finite|the norm of its pseudo-gradient is", "not_finite"),
    (r"norm .* times the median", "norm"),
    (r"score ", "score"),
    (r"its tokens are", "tokens"),
    (r"its parameters equal", "zero"),
    (r"slave \S+ cannot |no push was accepted", "void"),
)

_ABORTED = (
    (r"the run ends: ", "run_end"),
    (r"nothing arrived for .* the ticket ran out", "ticket"),
    (r"the [A-Z]+ phase ran out of time", "timeout"),
    (r"cluster \S+ joined again", "rejoined"),
    (r"cluster \S+ is gone: ", "gone"),
    (r"what slave \S+ ", "digest"),
    (r"slave \S+ cannot ", "refused"),
    (r"slave \S+ |no heartbeat from slave ", "slave_lost"),
    (r"base \S+ ", "stale"),
    (r"range ", "ranges"),
    (r"\d+ tokens ", "tokens"),
    (r"the run goes back |the master's state is replaced|the slaves lost |a slave's snapshots ", "recovery"),
    (r"the model's blocks |the slaves change ", "reshard"),
)

_RULES = {
    "APPLIED": ((r"", "merged"),),
    "EXCLUDED": _EXCLUDED,
    "ABORTED": _ABORTED,
    "ROLLED_BACK": ((r"", "rollback"),),
}

OTHER = "other"

REASONS: dict[str, tuple[str, ...]] = {
    verdict.lower(): (*dict.fromkeys(word for _, word in rules), OTHER) for verdict, rules in _RULES.items()
}
"""All values of the label `reason`, by verdict."""

WAITING = (
    "none",
    "ended",
    "recovery",
    "slaves",
    "reshard",
    "paused",
    "disks",
    "no_clusters",
    "first_push",
    "aborted_round",
    "min_clusters",
    "measure",
    "prepare",
    "commit",
)
"""All values of the label of dips_master_waiting."""

_SLAVES_WORK = {RoundPhase.MEASURE: "measure", RoundPhase.PREPARE: "prepare", RoundPhase.COMMIT: "commit"}


def reason_word(verdict: str, sentence: str) -> str:
    """The word for a verdict's reason. verdict: in capitals, as on the tape."""
    return next((word for rule, word in _RULES.get(verdict, ()) if re.match(rule, sentence)), OTHER)


def waiting_word(shared: SharedState) -> str:
    """The word for what the run waits for: that of the branch of reasons.waiting_for() that applies, or "none"."""
    if shared.stopped_s is not None:
        return "ended"
    if recovery_words(shared):
        return "recovery"
    away = slaves_away(shared)
    if away and shared.ledger.placement is not None:
        return "slaves"
    if shared.reshard.moving:
        return "reshard"
    if shared.ledger.paused:
        return "paused"
    if lagging(shared):
        return "disks"
    if not shared.members:
        return "slaves" if away else "no_clusters"
    return _round_word(shared)


def _round_word(shared: SharedState) -> str:
    state = shared.round
    match state.phase.now:
        case RoundPhase.IDLE if shared.ledger.version is None:
            return "first_push"
        case RoundPhase.WINDOW if state.last_abort and shared.now_s < state.not_before_s:
            return "aborted_round"
        case RoundPhase.WINDOW if shared.ledger.version is not None and not shared.enough_clusters():
            return "min_clusters"
        case phase:
            return _SLAVES_WORK.get(phase, "none")
