"""Derives a cluster's waiting times from the run's heartbeat interval and the time-out of a round's step.

None of them must be set. A time that is set is kept, and the others follow it, so that the order of
core/assumptions.py holds for all settings of the master.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dips.core.messages import Settings
from dips.core.protocol import FINISH_HOLD_S

ANSWER_S = 1.0
"""Allowance for the travel of a held call and of its answer."""


class GivenTimes(Protocol):
    """Times that were set, in seconds; None: not set."""

    @property
    def call_deadline_s(self) -> float | None: ...

    @property
    def retry_max_s(self) -> float | None: ...

    @property
    def leave_wait_s(self) -> float | None: ...

    @property
    def data_silence_s(self) -> float | None: ...

    @property
    def data_stall_s(self) -> float | None: ...


@dataclass(frozen=True)
class Times:
    """Waiting times in seconds, named as in ClientConfig. put_off_max_s: the longest retry_after_s that is obeyed."""

    call_deadline_s: float
    retry_max_s: float
    leave_wait_s: float
    data_silence_s: float
    data_stall_s: float
    put_off_max_s: float


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
