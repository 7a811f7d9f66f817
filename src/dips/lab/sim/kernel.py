"""The simulator's kernel: virtual time with one heap of events, one random generator, and processes that may end.

The same seed gives the same run, bit for bit: ties in time are broken by the order of scheduling, and all events
enter a running hash. It must never read a clock, and never use randomness from anywhere except `rng`.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]

MIN_STEP_S = 1e-6
"""The delay of an event that is due "now", so that a cause always precedes its effect."""


class SimulatedProcess:
    """A process with incarnations: events scheduled for one incarnation never reach the next one."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.generation = 0
        self.alive = False
        self.paused = False
        self.dies_after = 0
        """It is killed after so many more effects of steps that have several; 0: not planned."""

        self._backlog: list[tuple[Action, tuple[Any, ...]]] = []

    def begin_process(self) -> None:
        self.generation += 1
        self.alive, self.paused, self.dies_after = True, False, 0
        self._backlog.clear()

    def end_process(self) -> None:
        """kill -9: events scheduled for this incarnation are dropped."""
        self.generation += 1
        self.alive, self.paused = False, False
        self._backlog.clear()

    def pause(self) -> None:
        """SIGSTOP: events wait meanwhile, in their order."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: all waiting events are handled now."""
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.kernel.after(0.0, self, action, *args)

    def dies_here(self) -> bool:
        """Called between two effects of one step: whether the process is killed at this place."""
        if not self.dies_after:
            return False
        self.dies_after -= 1
        return not self.dies_after

    def put_off(self, action: Action, args: tuple[Any, ...]) -> None:
        self._backlog.append((action, args))

    @property
    def running(self) -> bool:
        return self.alive and not self.paused


class Kernel:
    """The event heap. `story`, the event history, is filled only on request; the hash always."""

    def __init__(self, seed: int, tell: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.handled = 0
        self.story: list[str] = []
        self.telling = tell
        self._heap: list[tuple[float, int, SimulatedProcess | None, int, Action, tuple[Any, ...]]] = []
        self._numbers = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def at(self, at_s: float, process: SimulatedProcess | None, action: Action, *args: Any) -> None:
        """Do this at that time, in this incarnation of `process` (None: in any case)."""
        self._numbers += 1
        due_s = max(at_s, self.now_s + MIN_STEP_S)
        heapq.heappush(self._heap, (due_s, self._numbers, process, process.generation if process else 0, action, args))

    def after(self, delay_s: float, process: SimulatedProcess | None, action: Action, *args: Any) -> None:
        self.at(self.now_s + delay_s, process, action, *args)

    @property
    def next_s(self) -> float:
        """The time of the next event; infinity when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> bool:
        """Run the next event; returns whether there was one."""
        if not self._heap:
            return False
        self.now_s, _, process, generation, action, args = heapq.heappop(self._heap)
        if process is not None:
            if process.generation != generation:
                return True
            if process.paused:
                process.put_off(action, args)
                return True
        self.handled += 1
        action(*args)
        return True

    def run(self, until_s: float) -> None:
        """Run all events before `until_s`."""
        while self._heap and self._heap[0][0] < until_s:
            self.step()
        self.now_s = until_s

    def note(self, who: str, what: str) -> None:
        """Note an event: into the hash, and into the event history if it is kept."""
        self._hash.update(f"{self.now_s:.9f} {who} {what}\n".encode())
        if self.telling:
            self.story.append(f"{self.now_s:9.4f}  {who:<9} {what}")

    def aside(self, who: str, what: str) -> None:
        """Note a line only in the event history."""
        if self.telling:
            self.story.append(f"{self.now_s:9.4f}  {who:<9}   {what}")

    @property
    def trace_hash(self) -> str:
        """The hash of all noted events."""
        return self._hash.hexdigest()

    def jitter(self, mean_s: float) -> float:
        """A time around `mean_s`: between half of it and, rarely, several times as much."""
        return mean_s * (0.5 + self.rng.expovariate(2.0))
