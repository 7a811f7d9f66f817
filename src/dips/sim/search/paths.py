"""Collects the facts of one path through the states, for the checker that also judges simulations and real runs.

The search's own invariants see every state; the checker sees a history. It must get the facts unchanged and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dips.judge.invariants.checker import Checker
from dips.sim.search.copying import Out
from dips.sim.search.explore import Search
from dips.sim.search.state import SearchState
from dips.sim.search.system import System

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
            checker.feed_journal(out[1])
        elif out[0] == "fact" and not out[1].startswith("_"):
            checker.feed_tape(_ROLE[role], name, out[1], out[3], float(number))
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
