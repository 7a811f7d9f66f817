"""Reasons as values: a code that programs decide on, and a sentence for people.

The codes are the labels of the metrics (docs/metrics.md) and fields of tape and status, so their texts never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dips.core.ids import SlaveId


class VerdictCode(StrEnum):
    """Why a push has its verdict."""

    MERGED = "merged"
    # EXCLUDED, by the detector (penalty) or because the whole round is void:
    NOT_FINITE = "not_finite"
    NORM = "norm"
    SCORE = "score"
    TOKENS = "tokens"
    ZERO = "zero"
    VOID = "void"
    # ABORTED; TOKENS too:
    RUN_END = "run_end"
    TICKET = "ticket"
    TIMEOUT = "timeout"
    REJOINED = "rejoined"
    GONE = "gone"
    DIGEST = "digest"
    REFUSED = "refused"
    SLAVE_LOST = "slave_lost"
    STALE = "stale"
    RANGES = "ranges"
    RECOVERY = "recovery"
    RESHARD = "reshard"
    ROLLBACK = "rollback"
    OTHER = "other"


@dataclass(frozen=True)
class Reason:
    """Why a push or a round ends as it does."""

    code: VerdictCode
    sentence: str


class AlarmKind(StrEnum):
    """What an alarm is about: all values of Alarm.kind, and of `code` of an alarm on the tape."""

    NOTHING_MERGED = "nothing_merged"
    SAME_DATA = "same_data"
    TOKEN_COUNTS = "token_counts"
    NOT_RECORDED = "not_recorded"
    NO_REPLICA = "no_replica"
    # Reported once, when it happens:
    DIRECTION = "direction"
    QUARANTINE = "quarantine"
    STATISTICS_RESTARTED = "statistics_restarted"
    HISTORIES_CLEARED = "histories_cleared"
    ROLLBACK = "rollback"
    NEW_TIMELINE = "new_timeline"
    ADOPTED = "adopted"


STANDING = (
    AlarmKind.NOTHING_MERGED,
    AlarmKind.SAME_DATA,
    AlarmKind.TOKEN_COUNTS,
    AlarmKind.NOT_RECORDED,
    AlarmKind.NO_REPLICA,
)
"""Alarms that the status lists until they are over: all values of the label `kind` of dips_master_alarm."""


class WaitingCode(StrEnum):
    """All values of StatusReply.waiting_code, and of the label of dips_master_waiting."""

    NONE = "none"
    ENDED = "ended"
    RECOVERY = "recovery"
    SLAVES = "slaves"
    RESHARD = "reshard"
    PAUSED = "paused"
    REPLICA = "replica"
    DISKS = "disks"
    NO_CLUSTERS = "no_clusters"
    FIRST_PUSH = "first_push"
    ABORTED_ROUND = "aborted_round"
    MIN_CLUSTERS = "min_clusters"
    FEW_PUSHES = "few_pushes"
    MEASURE = "measure"
    PREPARE = "prepare"
    COMMIT = "commit"


@dataclass(frozen=True)
class Waiting:
    """What the run waits for."""

    code: WaitingCode
    sentence: str
    slaves: tuple[SlaveId, ...] = ()  # those that the open round waits for, or that are not ready
    since_s: float | None = None  # where people are to hear for how long
    until_s: float | None = None  # where they are to hear when it ends at the latest
