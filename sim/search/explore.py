"""Breadth first through all states, and the shortest story to one that must not be."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from dips.core.errors import LocalProtocolError
from dips.sim.search.bounds import Bounds
from dips.sim.search.state import State
from dips.sim.search.system import System
from dips.sim.search.violation import Violation
from dips.sim.search.wiring import Label


@dataclass
class Result:
    """What a search found. exhausted: every state within the bounds was seen. ends: states where all is done."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    ends: int = 0
    exhausted: bool = False
    stopped_at: str = ""
    seconds: float = 0.0
    violation: Violation | None = None
    story: list[Label] = field(default_factory=list)

    @property
    def words(self) -> str:
        if self.violation is not None:
            return f"VIOLATED {self.violation}"
        return "EXHAUSTED" if self.exhausted else f"STOPPED AT {self.stopped_at}"


class Search:
    """One breadth-first search. max_states, max_seconds: where it stops if it is not exhausted before."""

    def __init__(self, bounds: Bounds, max_states: int = 10**9, max_seconds: float = 1e9) -> None:
        self.system = System(bounds)
        self._max_states, self._max_seconds = max_states, max_seconds
        self._from: dict[State, tuple[State | None, Label]] = {}
        self._before: dict[State, list[State]] = {}
        self.ends: list[State] = []

    def run(self, forward: bool = True) -> Result:
        """forward: also demand that every state can still reach an end where nothing is left to do."""
        result = Result()
        began = time.perf_counter()
        try:
            first = self._first()
            self._from[first] = (None, ("the beginning",))
            self.ends = self._explore(first, result, began)
            if result.exhausted and forward:
                self._demand_a_way_out(self.ends)
        except _Found as found:
            result.violation, result.exhausted = found.violation, False
            result.story = self.system.beginning if found.state is None else self.path(found.state)[1]
        result.seconds = time.perf_counter() - began
        return result

    def path(self, state: State) -> tuple[list[State], list[Label]]:
        """The shortest way from the beginning."""
        states, labels = [state], []
        before, label = self._from[state]
        while before is not None:
            states.append(before)
            labels.append(label)
            before, label = self._from[before]
        return states[::-1], labels[::-1]

    def _explore(self, first: State, result: Result, began: float) -> list[State]:
        system, known = self.system, self._from
        queue: deque[tuple[State, int]] = deque([(first, 0)])
        ends: list[State] = []
        while queue:
            state, depth = queue.popleft()
            result.depth = max(result.depth, depth)
            if len(known) >= self._max_states or time.perf_counter() - began > self._max_seconds:
                result.states = len(known)
                result.stopped_at = f"{len(known)} states, depth {depth}"
                return ends
            following = self._following(state)
            result.steps += len(following)
            for label, after in following:
                self._before.setdefault(after, []).append(state)
                if after not in known:
                    known[after] = (state, label)
                    self._judge(after)
                    queue.append((after, depth + 1))
            if system.is_settled(state):
                ends.append(state)
            elif not following:
                raise _Found(Violation("DEADLOCK", "nothing can happen any more, and not all is done"), state)
        result.states, result.ends, result.exhausted = len(known), len(ends), True
        return ends

    def _first(self) -> State:
        try:
            return self.system.initial()
        except Violation as violation:
            raise _Found(violation, None) from violation

    def _following(self, state: State) -> list[tuple[Label, State]]:
        try:
            return self.system.successors(state)
        except Violation as violation:
            raise _Found(violation, state) from violation
        except LocalProtocolError as error:
            raise _Found(Violation("ILLEGAL", str(error).partition(";")[0]), state) from error

    def _judge(self, state: State) -> None:
        try:
            self.system.check(state)
        except Violation as violation:
            raise _Found(violation, state) from violation

    def _demand_a_way_out(self, ends: list[State]) -> None:
        """Walk backwards from the ends: what is not met can never end."""
        good = set(ends)
        todo = list(ends)
        while todo:
            for state in self._before.get(todo.pop(), ()):
                if state not in good:
                    good.add(state)
                    todo.append(state)
        lost = next((state for state in self._from if state not in good), None)
        if lost is not None:
            raise _Found(Violation("DEADLOCK", "from here no way leads to an end where all is done"), lost)


class _Found(Exception):
    """A violation, in or right after this state; None: on the way to the first one."""

    def __init__(self, violation: Violation, state: State | None) -> None:
        super().__init__(str(violation))
        self.violation, self.state = violation, state
