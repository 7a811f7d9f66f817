"""Counts which transitions state machines take, which refusals are raised, and the faults and kills of a run where
they really happened, with the phase of the round.

A check that a test never sees fail proves nothing. Simulations and searches count with Seen.
A fault that was planned ends in one of two ways: it struck, or the reason why it could not is counted here. It must
never count what was only planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dips.core import errors, machine
from dips.core.errors import RefusalCode
from dips.core.machine import Transition, TransitionTable

Arrow = tuple[str, str, str, str]
"""Of a table: from, input, to (machine.Transition.arrow)."""

_REFUSE = ("dips.core.", "dips.master.", "dips.slave.", "dips.local.")
_PASS_ON = frozenset({"dips.core.net.grpc_calls"})
"""Makes refusals that a peer raised into exceptions again."""


def refuses(module: str) -> bool:
    """Whether what this module raises is a refusal of the product's."""
    return module.startswith(_REFUSE) and module not in _PASS_ON


def codes() -> list[str]:
    """Every refusal that can be raised, by name."""
    return [code.name for code in RefusalCode if code is not RefusalCode.UNSPECIFIED]


def arrows_of(tables: Collection[TransitionTable[Any]]) -> list[Arrow]:
    return [(t.name, start.value, name, end.value) for t in tables for start, name, end in t.arrows()]


@dataclass
class Seen:
    """How often each transition was taken, and each refusal raised."""

    arrows: Counter[Arrow] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, other: Seen) -> None:
        self.arrows.update(other.arrows)
        self.refusals.update(other.refusals)

    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """Counts everything that this process does inside."""
        machine.observers.append(self._moved)
        errors.watchers.append(self._refused)
        try:
            yield self
        finally:
            machine.observers.remove(self._moved)
            errors.watchers.remove(self._refused)

    def _moved(self, move: Transition[Any]) -> None:
        self.arrows[move.arrow] += 1

    def _refused(self, code: RefusalCode, module: str) -> None:
        if refuses(module):
            self.refusals[code.name] += 1


def report(seen: Seen, tables: Sequence[TransitionTable[Any]], indent: str = "  ") -> list[str]:
    """Each transition and each refusal with its count, table by table, and what was never seen."""
    lines = ["transitions, and how often each was taken"]
    never: list[str] = []
    for table in sorted(tables, key=lambda table: table.name):
        counts = [(arrow, seen.arrows[arrow]) for arrow in arrows_of([table])]
        taken = ", ".join(
            f"{a} upon {name} {n}" if a == b else f"{a} > {b} upon {name} {n}" for (_, a, name, b), n in counts if n
        )
        lines.append(f"{indent}{table.name}: {taken or 'none'}")
        never += [f"{table.name} {a} > {b} upon {name}" for (_, a, name, b), n in counts if not n]
    lines.append(f"transitions never taken: {len(never)}" + (f" ({'; '.join(never)})" if never else ""))
    raised = ", ".join(f"{code} {n}" for code in codes() if (n := seen.refusals[code]))
    unseen = [code for code in codes() if not seen.refusals[code]]
    lines.append(f"refusals raised: {raised or 'none'}; never: {', '.join(unseen) or 'none'}")
    return lines


Phased = Counter[tuple[str, str]]
"""(what, phase of the round) -> how often."""

NO_MASTER, STARTING, RECOVERY = "NO MASTER", "STARTING", "RECOVERY"
"""Phases without a round: no master, a master that is starting, or the recovery of the slaves' state."""

HEALED_ROUNDS = "rounds from all being back to the next version"
HEALED_S = "seconds from all being back to the next version"
BYSTANDER_S = "seconds that a cluster waited for its verdict with a bad one"
BYSTANDER_SHARE = "share of the time that it may wait there"

OVER = "the run was over before its time"
NOTHING = "there was nothing to strike at"
NO_MOMENT = "it was armed, and its moment did not come"


@dataclass
class RunCounts:
    """The counts of one run, or of many runs together. fired, kills: what struck, and which role's process was killed,
    by the phase that the master's tape recorded last."""

    fired: Counter[str] = field(default_factory=Counter)
    fired_in: Phased = field(default_factory=Counter)
    kills: Phased = field(default_factory=Counter)
    # planned, begun: kinds of faults that were to strike, and those that found something to strike at
    planned: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    idle: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, why it did not strike)
    fills: dict[str, tuple[int, int]] = field(default_factory=dict)  # budget -> (size, most) where it was fullest
    worst: dict[str, float] = field(default_factory=dict)  # name -> the largest value seen

    def struck(self, kind: str, phase: str) -> None:
        self.fired[kind] += 1
        self.fired_in[kind, phase] += 1

    def cannot(self, kind: str, why: str, n: int = 1) -> None:
        """`n` of the planned faults of this kind did not strike, and why."""
        if n:
            self.idle[kind, why] += n

    def filled(self, budget: str, size: int, most: int) -> None:
        """Note the use of a budget."""
        known = self.fills.get(budget)
        if known is None or size * known[1] > known[0] * most:
            self.fills[budget] = (size, most)

    def took(self, name: str, value: float) -> None:
        """Keep the largest value under this name."""
        self.worst[name] = max(value, self.worst.get(name, 0.0))

    def close(self, armed: frozenset[str]) -> None:
        """The run is over: note why planned faults did not strike. armed: kinds that wait for their moment."""
        for kind, n in self.planned.items():
            known = sum(count for (name, _), count in self.idle.items() if name == kind)
            self.cannot(kind, OVER, n - self.begun[kind] - known)
            if kind in armed and not self.fired[kind]:
                self.cannot(kind, NO_MOMENT, self.begun[kind])

    def add(self, other: RunCounts) -> None:
        """Add the counts of another run."""
        self.fired.update(other.fired)
        self.fired_in.update(other.fired_in)
        self.kills.update(other.kills)
        self.planned.update(other.planned)
        self.begun.update(other.begun)
        self.idle.update(other.idle)
        for budget, (size, most) in other.fills.items():
            self.filled(budget, size, most)
        for name, value in other.worst.items():
            self.took(name, value)


def by_phase(counted: Mapping[tuple[str, str], int], group_of: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Phase -> group -> how often. group_of: what -> its group; what has none is its own."""
    table: dict[str, Counter[str]] = {}
    for (what, phase), n in counted.items():
        table.setdefault(phase, Counter())[group_of.get(what, what)] += n
    return table
