"""Decides how long the training loop waits for an exchange with the run, by the setting `overlap`.

One row for each value of the setting, one word for each stage of an exchange; docs/protocol.md shows the same table.
With `verdict_wait_measured` a full wait ends when recent exchanges did not take so long: a cluster that waits for one
that died trains on, instead of waiting for a time-out that had to be chosen for the slowest case.
Knows only time: ClusterMachine.must_wait ensures that no steps are made which would be dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from dips.core.messages import ClusterRequest, Settings
from dips.core.protocol import FINISH_HOLD_S

# ---- times -----------------------------------------------------------------------------------------------------------
#
# Derives a cluster's waiting times from the run's heartbeat interval and the time-out of a round's step.
#
# None of them must be set. A time that is set is kept, and the others follow it, so that the order of
# core/assumptions.py holds for all settings of the master.


ANSWER_S = 1.0
"""Allowance for the travel of a held call and of its answer."""


@dataclass(frozen=True, kw_only=True)
class GivenTimes:
    """Times that were set, in seconds; None: not set."""

    call_deadline_s: float | None = None
    retry_max_s: float | None = None
    leave_wait_s: float | None = None
    data_silence_s: float | None = None
    data_stall_s: float | None = None


@dataclass(frozen=True)
class Times:
    """Waiting times in seconds, named as in ClientConfig."""

    call_deadline_s: float
    retry_max_s: float
    leave_wait_s: float
    data_silence_s: float
    data_stall_s: float
    put_off_max_s: float  # the longest retry_after_s that is obeyed


def times_of(given: GivenTimes, settings: Settings) -> Times:
    """The times of one cluster. They are in order whenever the given ones are, which ClientConfig checks."""
    beat_s, step_s = settings.heartbeat_s, settings.round_timeout_s
    evict_s = settings.evict_after_beats * beat_s
    longest_s = max(step_s, evict_s)
    # A master that does not answer for as long as it would itself wait for a beat counts as away; but it may hold a
    # call on purpose.
    answered_s = max(evict_s, FINISH_HOLD_S + ANSWER_S)
    call_s = _or(given.call_deadline_s, min(answered_s, _or(given.leave_wait_s, math.inf)))
    # A process that was started again is found within half a beat.
    retry_s = _or(given.retry_max_s, min(beat_s / 2, _or(given.leave_wait_s, math.inf)))
    # For silent connections; a broken one is noticed at once. Adapts upwards to the gaps that it measures.
    silence_s = _or(given.data_silence_s, min(beat_s, _or(given.data_stall_s, math.inf) / 2))
    return Times(
        call_deadline_s=call_s,
        retry_max_s=retry_s,
        # A push that is sealed in a round is decided first, and then a call must be answered.
        leave_wait_s=_or(given.leave_wait_s, max(longest_s, call_s, retry_s)),
        data_silence_s=silence_s,
        data_stall_s=_or(given.data_stall_s, max(longest_s, 2 * silence_s)),
        put_off_max_s=step_s,
    )


def _or(given_s: float | None, derived_s: float) -> float:
    return derived_s if given_s is None else given_s


# ---- repeated call ---------------------------------------------------------------------------------------------------
#
# A call to the master that is repeated after a pause until it is answered, one at a time.
#
# The request is built again for each try, so that a try after a new Join carries the new incarnation. Never gives up
# by itself: the caller cancels.


FIRST_PAUSE_S = 0.2


class RepeatedCall:
    """A repeated call, at most once in flight. failures: tries in a row without an answer."""

    def __init__(self, times: Callable[[], Times]) -> None:
        """times: returns the current ones; they change with a Join."""
        self._times = times
        self._build: Callable[[], ClusterRequest] | None = None
        self.job: int | None = None
        self.due_s = math.inf
        self.failures = 0

    @property
    def idle(self) -> bool:
        return self._build is None

    def ask(self, build: Callable[[], ClusterRequest], at_s: float) -> None:
        """Send this request from at_s on, in place of an earlier one, whose answer will be ignored."""
        self._build, self.job, self.due_s, self.failures = build, None, at_s, 0

    def take(self, job: int, now_s: float) -> ClusterRequest | None:
        """The request, if it is time to send it; from now on `job` is in flight."""
        if self._build is None or now_s < self.due_s:
            return None
        self.job, self.due_s = job, math.inf
        return self._build()

    def answered(self) -> None:
        self._build, self.job, self.due_s, self.failures = None, None, math.inf, 0

    def failed(self, now_s: float) -> None:
        """No answer came: try again after a pause that doubles."""
        pause_s = min(self._times().retry_max_s, FIRST_PAUSE_S * 2 ** min(self.failures, 20))
        self.job, self.due_s, self.failures = None, now_s + pause_s, self.failures + 1

    def put_off(self, now_s: float, retry_after_s: float) -> None:
        """The master asks to try again later."""
        pause_s = min(self._times().put_off_max_s, max(retry_after_s, FIRST_PAUSE_S / 4))
        self.job, self.due_s, self.failures = None, now_s + pause_s, 0

    cancel = answered


# ---- waiting ---------------------------------------------------------------------------------------------------------


BRIEF_SHARE = 0.01
BRIEF_MOST_S = 0.5
"""The loop waits for calls that the master answers at once, whatever overlaps: where an answer that arrives during a
step is taken only at its end, each of the three calls (may I push; it is all there; which version) would cost a whole
step on older parameters. The wait is at most BRIEF_SHARE of the time between two pushes, and at most BRIEF_MOST_S. A
transfer is waited for as long if the last one in its direction did not take longer."""

BRIEF_SHARE_IN_STEPS = 0.001
"""The same where answers are taken during steps, too (SessionConfig.answers_in_steps): an exchange goes on without the
loop, so that waiting only saves the rest of one step. A call is waited for only if the last one was that short."""


REMEMBERED = 32
"""Number of remembered waits, of exchanges that ended by themselves without a disturbance."""

PASSED_OVER = 4
"""One in so many of them may be longer than the bound: rounds that wait for a cluster that died, until its eviction,
do not count, and slower links raise the bound after eight rounds."""

HEADROOM = 1.05


class ExchangeStage(Enum):
    """The stages of an exchange, each with its own wait."""

    BEGIN = "a push is due: is it welcome?"
    SEND = "the push is being sent"
    FINISH = "all of the push is sent: is it complete?"
    VERDICT = "the push waits in a window"
    PULL = "a version is wanted: which?"
    FETCH = "the version is being fetched"


CALLS = (ExchangeStage.BEGIN, ExchangeStage.FINISH, ExchangeStage.PULL)
"""Stages in which the master answers a call; the others last for as long as a transfer or a round."""


class Wait(Enum):
    """How long the training loop waits when a stage begins."""

    FULLY = "wait for as long as it takes, and no longer than the settings say"
    AS_BEFORE = "what the stage before has left of its wait"
    BRIEFLY = "wait for as long as an answer takes"
    IF_SHORT = "briefly, if this stage took no longer the last time; else train on"
    NOT = "train on"


_ROWS: Mapping[str, tuple[Wait, ...]] = {
    #         begin         send            finish          verdict         pull          fetch
    "none": (Wait.FULLY, Wait.AS_BEFORE, Wait.AS_BEFORE, Wait.AS_BEFORE, Wait.FULLY, Wait.AS_BEFORE),
    "push": (Wait.BRIEFLY, Wait.IF_SHORT, Wait.BRIEFLY, Wait.FULLY, Wait.FULLY, Wait.AS_BEFORE),
    "full": (Wait.BRIEFLY, Wait.IF_SHORT, Wait.BRIEFLY, Wait.NOT, Wait.BRIEFLY, Wait.IF_SHORT),
}

RULES: Mapping[str, Mapping[ExchangeStage, Wait]] = {
    overlap: dict(zip(ExchangeStage, row, strict=True)) for overlap, row in _ROWS.items()
}
"""Wait by stage, by the value of the setting."""


class WaitPolicy:
    """Keeps until when the training loop waits."""

    def __init__(self, *, answers_in_steps: bool) -> None:
        self.until_s = -math.inf
        self._in_steps = answers_in_steps
        self._at: tuple[ExchangeStage, float] | None = None
        self._round_s = 0.0
        self._round_began_s: float | None = None
        self._waits_s: deque[float] = deque(maxlen=REMEMBERED)
        self._since_s: float | None = None
        self._disturbed = False
        self._took_s: dict[ExchangeStage, float] = {}

    def transferred(self, stage: ExchangeStage, took_s: float) -> None:
        """The bytes of a push (SEND) or of a version (FETCH) were on their way for so long."""
        self._took_s[stage] = took_s

    def round_begins(self, now_s: float) -> None:
        """A push begins. The time between two pushes is known from the second one on."""
        if self._round_began_s is not None:
            self._round_s = now_s - self._round_began_s
        self._round_began_s = now_s

    def bound_s(self, settings: Settings) -> float:
        """How long one full wait may be."""
        if not (settings.verdict_wait_measured and self._waits_s):
            return settings.verdict_wait_s
        usual_s = sorted(self._waits_s)[-1 - (len(self._waits_s) - 1) // PASSED_OVER]
        return min(settings.verdict_wait_s, HEADROOM * usual_s)

    def over(self, now_s: float) -> None:
        """The exchange ended by itself: remember how long it took, unless something failed on the way."""
        if self._since_s is not None and not self._disturbed:
            self._waits_s.append(now_s - self._since_s)
        self.forget()

    def forget(self) -> None:
        """The exchange is over; do not remember how long it took."""
        self._since_s, self._disturbed = None, False

    def enter(self, stage: ExchangeStage, settings: Settings, now_s: float) -> None:
        """Set the wait for the stage that an exchange reaches."""
        if self._at is not None and self._at[0] in CALLS:
            self._took_s[self._at[0]] = now_s - self._at[1]
        self._at = stage, now_s
        rule = RULES[settings.overlap][stage]
        if rule is Wait.BRIEFLY and self._in_steps:
            rule = Wait.IF_SHORT
        match rule:
            case Wait.FULLY if settings.verdict_wait_measured:
                if self._since_s is None:
                    self._since_s = now_s
                if now_s >= self.until_s:  # else the same wait goes on, and keeps its end
                    self.until_s = now_s + self.bound_s(settings)
            case Wait.FULLY:
                self.until_s = max(self.until_s, now_s + settings.verdict_wait_s)
            case Wait.BRIEFLY:
                self.until_s = now_s + self._brief_s
            case Wait.IF_SHORT if self._took_s.get(stage, math.inf) <= self._brief_s:
                self.until_s = now_s + self._brief_s
            case Wait.NOT | Wait.IF_SHORT:
                self.train_on(now_s)
            case Wait.AS_BEFORE:
                pass

    @property
    def _brief_s(self) -> float:
        share = BRIEF_SHARE_IN_STEPS if self._in_steps else BRIEF_SHARE
        return min(BRIEF_MOST_S, share * self._round_s)

    def train_on(self, now_s: float) -> None:
        """Stop waiting until the next stage."""
        self.until_s = min(self.until_s, now_s)

    def unusual(self) -> None:
        """Something is not as in most rounds: do not remember how long this exchange takes."""
        self._disturbed = True
