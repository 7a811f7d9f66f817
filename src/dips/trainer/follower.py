"""Follows a run and evaluates its versions, until the run has stopped.

Evaluates every version as long as it can keep up, else the newest; the last one always. An evaluator must never delay a
run: it only reads, and skips a version that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from dips.core.clock import Clock, SystemClock
from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.ids import Version
from dips.core.messages import StatusReply
from dips.core.observe.telemetry import ChangeLogger, Tape, new_cause
from dips.trainer.export import Fetched

_logger = logging.getLogger("dips.trainer")

POLL_S = 0.5


class HasLoss(Protocol):
    """The result of an evaluation; only the loss, in nats per byte, is used here."""

    @property
    def loss(self) -> float: ...


def next_version(published: Version | None, last: Version | None) -> Version | None:
    """The next version after `last` to ask for; None: nothing new."""
    if published is None or published == last:
        return None
    if last is not None and published.timeline == last.timeline and published.v > last.v:
        return last.next()
    return published


class Follower:
    """Asks, fetches, evaluates and records; `run` ends when the run has stopped and its last version is recorded."""

    def __init__(
        self,
        status: Callable[[], StatusReply],
        fetch: Callable[[Version | None], Fetched],
        evaluate: Callable[[Fetched], HasLoss],
        tape: Tape,
        patience_s: float,
        clock: Clock | None = None,
    ) -> None:
        """fetch(version), None for the newest. patience_s: how long the master may be away."""
        self._status = status
        self._fetch = fetch
        self._evaluate = evaluate
        self._tape = tape
        self._patience_s = patience_s
        self._clock: Clock = clock or SystemClock()
        self._last: Version | None = None
        self._answered_s = self._clock.monotonic_s()
        self._changes = ChangeLogger(_logger)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Run until the end, or until wait(seconds) returns true, which is a request to stop.

        Raises RetryLater when no answer came for patience_s, Refused for any refusal except a version that is gone.
        """
        pause_s = 0.0
        while not wait(pause_s):
            try:
                status = self._status()
                self._answered()
                wanted = next_version(status.published, self._last)
                if wanted is None and status.stopped:
                    return
                pause_s = 0.0 if wanted is not None and self._evaluate_one(wanted) else POLL_S
            except RetryLater as error:
                self._away(error)
                pause_s = max(POLL_S, min(error.retry_after_s, self._patience_s / 4))

    def _evaluate_one(self, wanted: Version) -> bool:
        """Evaluate one version. Returns whether there was a new one."""
        fetched = self._fetched(wanted)
        self._answered()
        if fetched.version == self._last:
            return False
        loss = self._evaluate(fetched).loss
        self._last = fetched.version
        self._tape.write("heldout", new_cause(), version=str(fetched.version), tokens=fetched.tokens, loss=loss)
        _logger.info("version %s: held-out loss %.4f after %d tokens", fetched.version, loss, fetched.tokens)
        return True

    def _fetched(self, wanted: Version) -> Fetched:
        try:
            return self._fetch(wanted)
        except Refused as refused:
            if refused.code is not RefusalCode.VERSION_GONE:
                raise
            return self._fetch(None)

    def _answered(self) -> None:
        self._answered_s = self._clock.monotonic_s()
        self._changes.report("master", "")

    def _away(self, error: RetryLater) -> None:
        away_s = self._clock.monotonic_s() - self._answered_s
        if away_s >= self._patience_s:
            raise RetryLater(f"the run could not be read for {away_s:.0f} s: {error}", error.retry_after_s) from error
        self._changes.report("master", f"waiting for the run: {error}", logging.WARNING)
