"""Counts a cluster process's events and effects, on the training thread.

The thread makes an immutable view at each step and each wait, as it does for heartbeats: a scrape must never wait for a
step, which may take minutes, nor a step for a scrape. Costs a few microseconds a step, and nothing where no metrics are
served.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dips.core.ids import Version
from dips.core.observe.counting import Durations, Observed
from dips.worker.pace import StepTimer
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Effect, Record, StartPush
from dips.worker.state.events import (
    CallDone,
    CallFailed,
    CallRefused,
    Event,
    Pulled,
    PullFailed,
    PushFailed,
    PushSent,
    Stepped,
)


@dataclass(frozen=True)
class View:
    """The training thread's state at one moment. waiting_since_s: of the process's clock; None while it trains.

    rates: tokens and steps a second; loss: NaN where not known.
    """

    run_id: str
    phase: str
    waiting: str
    waiting_since_s: float
    steps: int
    tokens: int
    tokens_per_s: float
    steps_per_s: float
    loss: float
    local_steps: int
    pending_tokens: int
    base: Version | None
    published: Version | None
    events: Mapping[tuple[str, str], int]
    waited_s: Mapping[str, float]


EXCHANGE, DATA = "exchange", "data"


class Counts:
    """Counts of one process. All but `transfers` are for the training thread; others use view()."""

    def __init__(self) -> None:
        self.transfers = {"push": Durations(), "pull": Durations()}
        self._events: Counter[tuple[str, str]] = Counter()
        self._waited_s = {EXCHANGE: 0.0, DATA: 0.0}
        self._steps = 0
        self._tokens = 0
        self._waiting = ""
        self._waiting_since_s = math.nan

    def took(self, event: Event) -> None:
        """Count an event that the session takes."""
        match event:
            case Stepped():
                self._steps += 1
                self._tokens += event.tokens
            case CallDone():
                self._add("call", "done")
            case CallFailed():
                self._add("call", "failed")
            case CallRefused():
                self._add("call", "refused")
                self._add("refused", event.refused.code.name)
            case PushSent() | Pulled():
                direction = "push" if isinstance(event, PushSent) else "pull"
                self._add(direction, "done")
                self.transfers[direction].observe(event.seconds)
            case PushFailed():
                self._add("push", "failed")
            case PullFailed():
                self._add("pull", "failed")

    def gave(self, effect: Effect) -> None:
        """Count an effect of the session."""
        match effect:
            case StartPush():
                self._add("attempt", "first" if effect.ticket.attempt == 1 else "again")
            case Record(kind="verdict"):
                self._add("verdict", str(effect.fields.get("verdict")).lower())
            case Record(kind="stale"):
                self._add("stale", str(effect.fields.get("stale_kind")).lower())
            case Record(kind="joined"):
                self._add("joined", "")

    def waits(self, what: str, now_s: float) -> None:
        """The training loop waits from now on, for an exchange or for data; may be called again during the wait."""
        if not self._waiting:
            self._waiting, self._waiting_since_s = what, now_s

    def goes_on(self, now_s: float) -> None:
        if self._waiting:
            self._waited_s[self._waiting] += now_s - self._waiting_since_s
            self._waiting, self._waiting_since_s = "", math.nan

    def view(self, session: ClusterMachine, pace: StepTimer) -> View:
        shared = session.shared
        return View(
            shared.terms.run_id,
            session.phase.value.lower(),
            self._waiting,
            self._waiting_since_s,
            self._steps,
            self._tokens,
            pace.tokens_per_s,
            pace.steps_per_s,
            pace.loss,
            shared.terms.local_steps,
            shared.work.tokens,
            shared.base,
            shared.terms.published,
            self._events.copy(),
            self._waited_s.copy(),
        )

    def _add(self, kind: str, what: str) -> None:
        self._events[kind, what] += 1


@dataclass(frozen=True)
class CheckpointCounts:
    """Counts of checkpoints. written_s: when the last one was written, of the process's clock; NaN: none was."""

    durations: Observed
    written_s: float
