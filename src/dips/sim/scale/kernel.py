"""The virtual clock of the simulation at scale, and processes that are generators.

A process yields an Outcome and goes on with its value when it is known. Events at one time happen in the order in
which they were made, so that a seed gives one run. Nothing here reads a real clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any

Life = Generator["Future", Any, Any]


class Timer:
    """A planned call that can be cancelled."""

    __slots__ = ("action", "cancelled")

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualClock:
    """The virtual time in seconds, and the planned calls."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._made = 0

    def at(self, when_s: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        self._made += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._made, timer))
        return timer

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        return self.at(self.now_s + seconds, action)

    def lapse(self, seconds: float) -> Future:
        """A future that is known after so long."""
        outcome = Future(self)
        self.after(seconds, lambda: outcome.set(None))
        return outcome

    def run(self, until_s: float) -> None:
        """Run all calls up to and at `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            when_s, _, timer = heapq.heappop(self._heap)
            if timer.cancelled:
                continue
            self.now_s = when_s
            self.events += 1
            timer.action()
        self.now_s = until_s


class Future:
    """A value that becomes known once; processes that wait for it then go on."""

    __slots__ = ("_clock", "_waiting", "known", "value")

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []
        self.known = False
        self.value: Any = None

    def set(self, value: Any) -> None:
        """Only the first value counts."""
        if self.known:
            return
        self.known, self.value = True, value
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._clock.after(0.0, action)

    def then(self, action: Callable[[], None]) -> None:
        if self.known:
            self._clock.after(0.0, action)
        else:
            self._waiting.append(action)


def first_of(clock: VirtualClock, *outcomes: Future) -> Future:
    """A future that is known when one of these is; the caller asks them which one it was."""
    first = Future(clock)
    for outcome in outcomes:
        outcome.then(lambda: first.set(None))
    return first


class GeneratorProcess:
    """Runs a generator until it ends or is killed."""

    def __init__(self, clock: VirtualClock, life: Life) -> None:
        self._clock = clock
        self._life = life
        self.alive = True
        clock.after(0.0, lambda: self._go_on(None))

    def kill(self) -> None:
        """End the process; it must not call this itself."""
        self.alive = False
        self._life.close()

    def _go_on(self, value: Any) -> None:
        if not self.alive:
            return
        try:
            outcome = self._life.send(value)
        except StopIteration:
            self.alive = False
            return
        outcome.then(lambda: self._go_on(outcome.value))
