"""Counts the faults and kills of a run where they really happened, with the phase of the round.

A fault that was planned ends in one of two ways: it struck, or the reason why it could not is counted here. It must
never count what was only planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

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
