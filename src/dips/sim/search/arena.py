"""Numbers the local states of machines: each distinct one is kept once, and each step from it is made once.

A global state is then a short tuple of numbers, and most of a search is looking things up. It must never hand out the
kept machine itself to be changed: a step works on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from dips.sim.search.copying import Fingerprints, clone
from dips.sim.search.violation import SearchViolation

M = TypeVar("M")

Out = tuple[Any, ...]
"""An output of a step: its kind and values."""

BLIND = frozenset(
    {"story", "_story", "config", "_config", "recent", "_calls", "_table", "_label", "since_s", "now_s", "last_wall_s"}
    | {"layout", "_layout", "data_plan", "_plan", "welcome", "_changes", "note", "rounds_aborted", "aborted_of"}
    | {"schedule", "link_rates"}
)
"""Attributes that no decision reads, or that never differ within one search. schedule: which slave a transfer goes to
first, which no other decision reads. link_rates: for people only."""


class Arena(Generic[M]):
    """All local states of one kind of machine. canonical: makes states equal that differ only in spent numbers.

    twice: make each step twice, and demand the same of both (I14).
    """

    def __init__(self, canonical: Callable[[M], None], twice: bool = False) -> None:
        self._canonical = canonical
        self._twice = twice
        self._prints = Fingerprints(BLIND)
        self._ids: dict[bytes, int] = {}
        self._memo: dict[tuple[int, Hashable], tuple[int, tuple[Out, ...]]] = {}
        self.things: list[M] = []

    def __getitem__(self, number: int) -> M:
        """The state with this number, to be read and never changed."""
        return self.things[number]

    def enter(self, thing: M) -> int:
        """The number of this state; `thing` belongs to the arena from now on."""
        self._canonical(thing)
        digest = self._prints.digest(thing)
        number = self._ids.get(digest)
        if number is None:
            number = self._ids[digest] = len(self.things)
            self.things.append(thing)
        return number

    def step(self, number: int, key: Hashable, act: Callable[[M], list[Out]]) -> tuple[int, tuple[Out, ...]]:
        """The state after `act` and what it did; `key` must say everything that act depends on."""
        found = self._memo.get((number, key))
        if found is None:
            thing = clone(self.things[number])
            outs = tuple(act(thing))
            found = self._memo[number, key] = (self.enter(thing), outs)
            if self._twice:
                self._demand_the_same(found, clone(self.things[number]), key, act)
        return found

    def _demand_the_same(
        self, found: tuple[int, tuple[Out, ...]], thing: M, key: Hashable, act: Callable[[M], list[Out]]
    ) -> None:
        outs = tuple(act(thing))
        if (self.enter(thing), outs) != found:
            raise SearchViolation("I14", f"the same step, {key}, of the same state has two outcomes")
