"""Counts events since the start of the master's process, from the lines of its tape and its answers to calls.

The state machine does not count for metrics: the shell reports here what it carries out, one dictionary entry for
each. All on the event loop, except journal_s. Must never hold more than a bounded number of keys.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dips.core.observe.counting import Durations, Observed, Recent
from dips.master.state.effects import Record, WriteJournal
from dips.master.state.pulls import READER

# ---- metrics reasons -------------------------------------------------------------------------------------------------
#
# Maps sentences of the state machine to words of a fixed set, so that they can be labels: bounded and constant.
#
# People read the sentences; these words only classify them. A sentence that matches no rule is "other", so a new kind
# of reason is counted there until it has its own word.


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


def reason_word(verdict: str, sentence: str) -> str:
    """The word for a verdict's reason. verdict: in capitals, as on the tape."""
    return next((word for rule, word in _RULES.get(verdict, ()) if re.match(rule, sentence)), OTHER)


# ---- metrics counts --------------------------------------------------------------------------------------------------


IDLE = "IDLE"

WORDS_FOR_EACH_CLUSTER = 32
"""More than the number of verdicts with reasons."""


@dataclass(frozen=True)
class LastJudged:
    """Numbers of the last judged round; NaN where nothing was accepted."""

    kappa: float
    rho: float
    merged_norm: float


@dataclass(frozen=True)
class Counted:
    """All counts at one moment."""

    verdicts: Mapping[tuple[str, str, str], int]
    departures: Mapping[tuple[str, str], int]
    attempts: Mapping[tuple[str, str], int]
    slave_losses: Mapping[str, int]
    pulls: Mapping[str, int]
    events: Mapping[str, int]
    rolled_back_tokens: int
    phases: Mapping[str, Observed]
    rounds: Observed
    calls: Mapping[str, int]
    refused: Mapping[tuple[str, str], int]
    journal_s: Observed
    journal_entries: int
    judged: LastJudged | None


@dataclass
class Counts:
    """Counts of one process; `most_clusters` bounds the labels."""

    most_clusters: int = 8
    most_slaves: int = 64
    _phase: tuple[str, float] = (IDLE, 0.0)
    _opened_s: float | None = None
    _judged: LastJudged | None = None
    _rolled_back_tokens: int = 0
    _journal_entries: int = 0
    _events: Counter[str] = field(default_factory=Counter)
    _pulls: Counter[str] = field(default_factory=Counter)
    _calls: Counter[str] = field(default_factory=Counter)
    _refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    _phases: dict[str, Durations] = field(default_factory=dict)
    _rounds: Durations = field(default_factory=Durations)
    _journal_s: Durations = field(default_factory=Durations)

    def __post_init__(self) -> None:
        self._verdicts: Recent[tuple[str, str, str]] = Recent(WORDS_FOR_EACH_CLUSTER * self.most_clusters)
        self._departures: Recent[tuple[str, str]] = Recent(2 * self.most_clusters)
        self._attempts: Recent[tuple[str, str]] = Recent(2 * self.most_clusters)
        self._losses: Recent[str] = Recent(self.most_slaves)

    # ---- called by the shell ----

    def note(self, record: Record, now_s: float) -> None:
        """Counts a line of the tape, when the journal entries that it depends on are durable."""
        fields = record.fields
        match record.kind:
            case "round":
                self._moved(str(fields.get("phase")), now_s)
            case "verdict":
                verdict, sentence = str(fields.get("verdict")), str(fields.get("reason"))
                self._verdicts.add((_cluster_of(record), verdict.lower(), reason_word(verdict, sentence)))
            case "judged":
                self._judged = LastJudged(*(_number(fields.get(name)) for name in ("kappa", "rho", "merged_norm")))
            case "ticket":
                self._attempts.add((_cluster_of(record), "first" if fields.get("attempt") == 1 else "again"))
            case "evict" | "leave":
                if "cluster" in fields:  # otherwise it is an operator's request, whose effect is recorded too
                    self._departures.add((str(fields["cluster"]), record.kind))
            case "slave_lost":
                self._losses.add(str(fields.get("slave")))
            case "pull":
                self._pulls["reader" if str(fields.get("by")).startswith(READER) else "cluster"] += 1
            case "rolled_back":
                self._events["rollback"] += 1
                self._rolled_back_tokens += int(_number(fields.get("lost_tokens"), 0.0))
            case "alarm" | "stood_still" | "resharded":
                self._events[record.kind] += 1
            case "epoch":
                self._phase, self._opened_s = (IDLE, now_s), None

    def called(self, method: str) -> None:
        self._calls[method] += 1

    def refused(self, method: str, code: str) -> None:
        """Counts a refused call; method and code come from the protocol, not from the caller."""
        self._refused[method, code] += 1

    def timed(self, append: Callable[[Sequence[WriteJournal]], None]) -> Callable[[Sequence[WriteJournal]], None]:
        """Wraps `append` to measure its time, on the journal's thread."""

        def append_and_count(entries: Sequence[WriteJournal]) -> None:
            began_s = time.monotonic()
            append(entries)
            self._journal_s.observe(time.monotonic() - began_s)
            self._journal_entries += len(entries)

        return append_and_count

    def counted(self) -> Counted:
        return Counted(
            self._verdicts.counted(),
            self._departures.counted(),
            self._attempts.counted(),
            self._losses.counted(),
            dict(self._pulls),
            dict(self._events),
            self._rolled_back_tokens,
            {phase: durations.observed() for phase, durations in self._phases.items()},
            self._rounds.observed(),
            dict(self._calls),
            dict(self._refused),
            self._journal_s.observed(),
            self._journal_entries,
            self._judged,
        )

    def _moved(self, to: str, now_s: float) -> None:
        before, since_s = self._phase
        if before != IDLE:
            self._phases.setdefault(before.lower(), Durations()).observe(now_s - since_s)
        elif self._opened_s is None:
            self._opened_s = now_s
        if to == "PUBLISH" and self._opened_s is not None:
            self._rounds.observe(now_s - self._opened_s)
        if to == IDLE:
            self._opened_s = None
        self._phase = (to, now_s)


def _cluster_of(record: Record) -> str:
    """The cluster of a PushId in its text form; names contain no slash."""
    return str(record.fields.get("push")).partition("/")[0]


def _number(value: object, unknown: float = math.nan) -> float:
    return float(value) if isinstance(value, int | float) else unknown
