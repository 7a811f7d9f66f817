"""Searches all states breadth-first, and finds the shortest path to a state that violates an invariant.

Of a state only 16 bytes are kept, and how it was reached first: the number of the state before, and the index of the
step from it. Whole states are kept only until their steps were taken, and are made again to print a path.
"""

from __future__ import annotations

import resource
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dips.core.errors import LocalProtocolError
from dips.judge.facts import Fact, journaled
from dips.judge.invariants import Checker
from dips.lab.sim.counts import Seen
from search.bounds import Bounds
from search.copying import Out
from search.state import SearchState, SearchViolation
from search.system import System
from search.wiring import StepLabel

NO_STATE = -1

FAULT = "FAULT "
"""The beginning of the label of a fault's step."""


@dataclass
class Result:
    """The result of a search. faults, seen: how often each fault was struck, each transition taken and each refusal
    raised, over all steps."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    ends: int = 0  # states where all is done
    exhausted: bool = False  # every state within the bounds was seen
    stopped_at: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the seconds, those of the processor
    peak_mb: int = 0  # the most memory that the process took, in MiB
    faults: dict[str, int] = field(default_factory=dict)
    violation: SearchViolation | None = None
    story: list[StepLabel] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)

    @property
    def words(self) -> str:
        if self.violation is not None:
            return f"VIOLATED {self.violation}"
        return "EXHAUSTED" if self.exhausted else f"STOPPED AT {self.stopped_at}"


class Search:
    """One breadth-first search. max_states, max_seconds: where it stops if it is not exhausted before.

    ends: numbers of the states where all is done.
    """

    def __init__(self, bounds: Bounds, max_states: int = 10**9, max_seconds: float = 1e9) -> None:
        self.system = System(bounds)
        self._max_states, self._max_seconds = max_states, max_seconds
        self._number_of: dict[bytes, int] = {}
        self._before = array("l")
        self._ordinal = array("H")
        self._edges = (array("l"), array("l"))
        self._first_state: SearchState | None = None
        self.ends: list[int] = []

    def run(self, forward: bool = True) -> Result:
        """forward: also check that every state can still reach an end where nothing is left to do."""
        result = Result()
        began, cpu_began_s = time.perf_counter(), time.process_time()
        try:
            with result.seen.watching():
                self._explore(self._first(), result, began)
            if result.exhausted and forward:
                self._demand_a_way_out()
        except _Found as found:
            result.violation, result.exhausted = found.violation, False
            result.story = self.system.beginning if found.number == NO_STATE else self.path(found.number)[1]
        result.seconds, result.cpu_s = time.perf_counter() - began, time.process_time() - cpu_began_s
        result.states, result.ends = len(self._number_of), len(self.ends)
        result.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return result

    def path(self, number: int) -> tuple[list[SearchState], list[StepLabel]]:
        """The shortest path from the beginning to a state."""
        ordinals: list[int] = []
        while self._before[number] != NO_STATE:
            ordinals.append(self._ordinal[number])
            number = self._before[number]
        state = self._first_state
        assert state is not None, "a search that has states has a first one"
        states, labels = [state], [("the beginning",)]
        for ordinal in reversed(ordinals):
            label, state = self._step(state, ordinal)
            states.append(state)
            labels.append(label)
        return states, labels

    def _step(self, state: SearchState, ordinal: int) -> tuple[StepLabel, SearchState]:
        """Make one step again; a later step of the same state may be the one with the violation."""
        for number, found in enumerate(self.system.steps(state)):
            if number == ordinal:
                return found
        raise LocalProtocolError("a state has fewer steps now than when it was explored: steps are not repeatable")

    # ---- the search ----

    def _explore(self, first: SearchState, result: Result, began: float) -> None:
        """Explore level by level: all states at one distance from the first, then the next."""
        system = self.system
        self._first_state = first
        self._enter(first, NO_STATE, 0)
        level, depth = [(0, first)], 0
        while level:
            result.depth = depth
            following: list[tuple[int, SearchState]] = []
            for number, state in level:
                if len(self._before) >= self._max_states or time.perf_counter() - began > self._max_seconds:
                    result.stopped_at = f"{len(self._before)} states, depth {depth}"
                    return
                n_steps = self._take_steps(number, state, result, following)
                if system.is_settled(state):
                    self.ends.append(number)
                elif not n_steps:
                    raise _Found(SearchViolation("DEADLOCK", "nothing more can happen, and not all is done"), number)
            level, depth = following, depth + 1
        result.exhausted = True

    def _take_steps(
        self, number: int, state: SearchState, result: Result, following: list[tuple[int, SearchState]]
    ) -> int:
        sources, targets = self._edges
        ordinal = -1
        for ordinal, (label, after) in enumerate(self._following(number, state)):
            if label[0].startswith(FAULT):
                fault = label[0][len(FAULT) : -1]
                result.faults[fault] = result.faults.get(fault, 0) + 1
            target, is_new = self._enter(after, number, ordinal)
            sources.append(number)
            targets.append(target)
            if is_new:
                self._judge(target, after)
                following.append((target, after))
        result.steps += ordinal + 1
        return ordinal + 1

    def _enter(self, state: SearchState, before: int, ordinal: int) -> tuple[int, bool]:
        """The state's number, and whether it is a new one."""
        key = self.system.key(state)
        number = self._number_of.get(key)
        if number is not None:
            return number, False
        number = self._number_of[key] = len(self._before)
        self._before.append(before)
        self._ordinal.append(ordinal)
        return number, True

    def _first(self) -> SearchState:
        try:
            return self.system.initial()
        except SearchViolation as violation:
            raise _Found(violation, NO_STATE) from violation
        except LocalProtocolError as error:
            raise _Found(_illegal(error), NO_STATE) from error

    def _following(self, number: int, state: SearchState) -> list[tuple[StepLabel, SearchState]]:
        try:
            return self.system.successors(state)
        except SearchViolation as violation:
            raise _Found(violation, number) from violation
        except LocalProtocolError as error:
            raise _Found(_illegal(error), number) from error

    def _judge(self, number: int, state: SearchState) -> None:
        try:
            self.system.check(state)
        except SearchViolation as violation:
            raise _Found(violation, number) from violation

    def _demand_a_way_out(self) -> None:
        """Walk backwards from the ends: a state that is not reached can never end."""
        sources, targets = (np.frombuffer(edges, dtype=np.int64) for edges in self._edges)
        good = np.zeros(len(self._before), dtype=bool)
        good[self.ends] = True
        todo = ~good[sources]
        sources, targets = sources[todo], targets[todo]
        while len(sources):
            reached = sources[good[targets]]
            if not len(reached):
                lost = int(np.flatnonzero(~good)[0])
                raise _Found(SearchViolation("DEADLOCK", "from here no way leads to an end where all is done"), lost)
            good[reached] = True
            todo = ~good[sources]
            sources, targets = sources[todo], targets[todo]


def _illegal(error: LocalProtocolError) -> SearchViolation:
    return SearchViolation("ILLEGAL", str(error).partition(";")[0])


class _Found(Exception):
    """A violation, in or right after this state; NO_STATE: on the way to the first one."""

    def __init__(self, violation: SearchViolation, number: int) -> None:
        super().__init__(str(violation))
        self.violation, self.number = violation, number


# ---- paths -----------------------------------------------------------------------------------------------------------
#
# Collects the facts of one path through the states, for the checker that also judges simulations and real runs.
#
# The search's own invariants see every state; the checker sees a history. It must get the facts unchanged and in order.


PathFact = tuple[str, str, Out]
"""Role, name, and output of a step."""

_ROLE = {"master": "master", "slave": "slave", "cluster": "worker"}


def facts_of(system: System, states: Sequence[SearchState]) -> list[PathFact]:
    """The facts from the empty run to the last of `states`, which begin with the search's first."""
    found: list[PathFact] = []
    system.on_fact = lambda role, name, out: found.append((role, name, out))
    try:
        if system.initial() != states[0]:
            raise ValueError("these states are not of this search")
        for before, after in pairwise(states):
            found += _of_step(system, before, after)
    finally:
        system.on_fact = None
    return found


def _of_step(system: System, before: SearchState, after: SearchState) -> list[PathFact]:
    seen: list[PathFact] = []
    outer, system.on_fact = system.on_fact, lambda role, name, out: seen.append((role, name, out))
    try:
        for _, state in system.steps(before):
            if state == after:
                return seen
            seen.clear()
    finally:
        system.on_fact = outer
    raise ValueError("one of these states does not follow the one before")


def judge(facts: Sequence[PathFact]) -> Checker:
    """A checker that got all these facts."""
    checker = Checker(live=True)
    for number, (role, name, out) in enumerate(facts):
        if out[0] == "journal":
            checker.feed(journaled(out[1]))
        elif out[0] == "fact" and not out[1].startswith("_"):
            checker.feed(Fact(_ROLE[role], name, out[1], out[3], float(number)))
    return checker


def judge_ends(search: Search, ends: Sequence[int], limit: int) -> list[str]:
    """The checker's violations on the shortest paths to `limit` of these states, spread over all of them."""
    every = max(1, len(ends) // limit)
    wrong: list[str] = []
    for end in ends[::every][:limit]:
        states, _ = search.path(end)
        checker = judge(facts_of(search.system, states))
        wrong += [str(violation) for violation in checker.finish()]
    return wrong
