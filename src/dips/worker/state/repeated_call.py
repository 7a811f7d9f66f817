"""A call to the master that is repeated after a pause until it is answered, one at a time.

The request is built again for each try, so that a try after a new Join carries the new incarnation. Never gives up
by itself: the caller cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dips.core.messages import ClusterRequest
from dips.worker.state.times import Times

FIRST_PAUSE_S = 0.2


class RepeatedCall:
    """A repeated call, at most once in flight. failures: tries in a row without an answer."""

    def __init__(self, times: Callable[[], Times]) -> None:
        """times: returns the current ones; they change with a Join."""
        self._times = times
        self._build: Callable[[], ClusterRequest] | None = None
        self.call_id: int | None = None
        self.due_s = math.inf
        self.failures = 0

    @property
    def idle(self) -> bool:
        return self._build is None

    def ask(self, build: Callable[[], ClusterRequest], at_s: float) -> None:
        """Send this request from at_s on, in place of an earlier one, whose answer will be ignored."""
        self._build, self.call_id, self.due_s, self.failures = build, None, at_s, 0

    def take(self, call_id: int, now_s: float) -> ClusterRequest | None:
        """The request, if it is time to send it; from now on `call_id` is in flight."""
        if self._build is None or now_s < self.due_s:
            return None
        self.call_id, self.due_s = call_id, math.inf
        return self._build()

    def answered(self) -> None:
        self._build, self.call_id, self.due_s, self.failures = None, None, math.inf, 0

    def failed(self, now_s: float) -> None:
        """No answer came: try again after a pause that doubles."""
        pause_s = min(self._times().retry_max_s, FIRST_PAUSE_S * 2 ** min(self.failures, 20))
        self.call_id, self.due_s, self.failures = None, now_s + pause_s, self.failures + 1

    def put_off(self, now_s: float, retry_after_s: float) -> None:
        """The master asks to try again later."""
        pause_s = min(self._times().put_off_max_s, max(retry_after_s, FIRST_PAUSE_S / 4))
        self.call_id, self.due_s, self.failures = None, now_s + pause_s, 0

    cancel = answered
