"""Decides when to start an ended process again, and when to stop trying. It has no clock and no process.

A failure of a process that ran for long is forgiven: only failures that follow each other quickly count towards giving
up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Delays double from first_delay_s to max_delay_s over failures that each came within quick_s of the
    start. After a run that lasted longer there is none."""

    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    quick_s: float = 20.0
    quick_failures_max: int = 5

    def longest_s(self) -> float:
        """An upper bound of the time that a process which never lasts is tried for."""
        return self.quick_failures_max * (self.quick_s + self.max_delay_s)


class FailureCount:
    """The failures of one process in a row."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.quick = 0

    def failed(self, ran_s: float) -> float | None:
        """Count a failure of a process that ran for `ran_s`; the delay in seconds before the next start, None to
        give up."""
        lasted = ran_s >= self._policy.quick_s
        self.quick = 1 if lasted else self.quick + 1
        if self.quick >= self._policy.quick_failures_max:
            return None
        if lasted:
            return 0.0
        delay_s = self._policy.first_delay_s * 2.0 ** (self.quick - 1)
        return min(delay_s, self._policy.max_delay_s)
