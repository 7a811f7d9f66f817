"""Shows a run while it goes: a table that renews itself on a terminal, a line every few seconds elsewhere.

It must never delay the run, and never write to standard output, which belongs to the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dips.core.clock import Clock
from dips.core.errors import DISK_ERRORS
from dips.core.messages import StatusReply
from dips.core.units import format_seconds
from dips.local.report import Fault
from dips.local.view import plain_line, status_view
from dips.master.page.history import HeldoutPoint, TokenRate

PLAIN_EVERY_S = 5.0
SEEN_ENOUGH_S = 15.0
"""The first rounds of a run say little about the next ones: for so long an expectation says more."""

_NARROW_LINES = 45


class Progress(ABC):
    """Shows a run's progress. Use as a context manager."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._begin_s = clock.monotonic_s()
        self._rate = TokenRate()
        self._expected_per_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    @abstractmethod
    def say(self, sentence: str) -> None:
        """Something happened; it stays on the screen."""

    @abstractmethod
    def show(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, faults: Sequence[Fault]) -> None:
        """The present state; it replaces the one before. heldout: None when no process measures it."""

    def expect(self, tokens_per_s: float) -> None:
        """What was measured before the run; it counts until the run itself has been seen for long enough."""
        self._expected_per_s = tokens_per_s

    def _remember(self, status: StatusReply) -> None:
        """Before the first version the processes only start, which says nothing about their speed."""
        if status.published is not None:
            self._rate.add(self._clock.monotonic_s(), status.tokens)

    def _left(self, status: StatusReply) -> str:
        return left_sentence(status, self._rate, self._expected_per_s)

    def _stamped(self, sentence: str) -> str:
        return f"{self._clock.monotonic_s() - self._begin_s:6.1f} s  {sentence}"


def loss_sentence(heldout: Sequence[HeldoutPoint] | None) -> str:
    """Empty when no process measures it."""
    if heldout is None:
        return ""
    if not heldout:
        return "held-out loss: not yet"
    last = heldout[-1]
    return f"held-out loss {last.loss:.3f} at version {last.version}"


def left_sentence(status: StatusReply, rate: TokenRate, expected_per_s: float = 0.0) -> str:
    """How long it will still take, in words; empty when the run has no end or nothing is known."""
    left = status.tk_max_tokens - status.tokens
    if left <= 0 or status.published is None or status.paused:
        return ""
    left_s = rate.left_s(left)
    if expected_per_s > 0 and rate.seen_s() < SEEN_ENOUGH_S:
        left_s = left / expected_per_s
    return f"about {format_seconds(round(left_s))} left" if left_s is not None else ""


def fault_sentence(fault: Fault) -> str:
    back = f"back at {fault.back.seconds:.0f} s as {fault.back_as}" if fault.back else "not back yet"
    return f"{fault.what} at {fault.when.seconds:.0f} s, {back}"


class PlainProgress(Progress):
    """Shows progress as lines, for a log."""

    def __init__(self, console: Console, clock: Clock, every_s: float = PLAIN_EVERY_S) -> None:
        super().__init__(console, clock)
        self._every_s = every_s
        self._next_s = self._begin_s
        self._alarms: set[tuple[str, tuple[str, ...]]] = set()
        """Kind and clusters of those whose sentences were printed; the numbers in a sentence change all the time."""

    def say(self, sentence: str) -> None:
        try:
            self._console.print(self._stamped(sentence), markup=False, highlight=False, soft_wrap=True)
        except OSError as error:  # it may go to a file
            if error.errno not in DISK_ERRORS:
                raise

    def show(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, faults: Sequence[Fault]) -> None:
        now_s = self._clock.monotonic_s()
        self._remember(status)
        for alarm in status.alarms:
            if (alarm.kind, alarm.clusters) not in self._alarms:
                self.say(f"alarm: {alarm.sentence}")
        self._alarms = {(alarm.kind, alarm.clusters) for alarm in status.alarms}
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        parts = [plain_line(status), loss_sentence(heldout), self._left(status)]
        self.say(" | ".join(part for part in parts if part))


class LiveProgress(Progress):
    """Shows progress as a table that renews itself, with what happened above it."""

    def __init__(self, console: Console, clock: Clock) -> None:
        super().__init__(console, clock)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        self._live.console.print(Text(self._stamped(sentence), style="dim"))

    def show(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, faults: Sequence[Fault]) -> None:
        self._remember(status)
        parts = [loss_sentence(heldout), f"{self._rate.per_s():.0f} tokens/s", self._left(status)]
        view: list[RenderableType] = [
            status_view(status, width_is_narrow=self._console.height < _NARROW_LINES),
            Text("  ".join(part for part in parts if part), style="bold"),
            *(Text(fault_sentence(fault), style="red" if fault.back is None else "green") for fault in faults),
        ]
        self._live.update(Group(*view), refresh=True)


def progress_for(console: Console, clock: Clock) -> Progress:
    """A live table when the console is a terminal, lines otherwise."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, clock)
    return PlainProgress(console, clock)
