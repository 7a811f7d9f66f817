"""When to start a dead process again, and when to stop trying. Decides only: no clock, no process.

A life that lasted is forgiven: only failures that follow each other quickly count towards giving up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Delays double from first_delay_s to max_delay_s over failures that each came within quick_s of the
    start. After a life that lasted there is none: nothing speaks for waiting."""

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

    def failed(self, lived_s: float) -> float | None:
        """Count a failure after a life of `lived_s`; the delay in seconds before the next life, None to
        give up."""
        lasted = lived_s >= self._policy.quick_s
        self.quick = 1 if lasted else self.quick + 1
        if self.quick >= self._policy.quick_failures_max:
            return None
        if lasted:
            return 0.0
        delay_s = self._policy.first_delay_s * 2.0 ** (self.quick - 1)
        return min(delay_s, self._policy.max_delay_s)
