"""Counts which transitions state machines take and which refusals are raised.

A check that a test never sees fail proves nothing. Simulations, searches and random walks count with Seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
        machine.observe(self._moved)
        errors.watch_refusals(self._refused)
        try:
            yield self
        finally:
            machine.forget(self._moved)
            errors.forget_refusals(self._refused)

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
