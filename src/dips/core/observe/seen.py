"""Counts which transitions state machines take and which refusals are raised, or notes them in a file for tests.

A check that a test never sees fail proves nothing. Simulations, searches and random walks count with Seen. Where
DIPS_SEEN_LOG names a file, each process that a test starts notes there, once each, what it saw, and at the end of
`.ci/run` tests/seen.py asks for what no process saw. Without the variable nothing is observed.

Only what the product's own code does counts: a test that makes a Refused or walks a table by hand has shown nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dips.core import errors, machine
from dips.core.errors import RefusalCode
from dips.core.machine import Transition, TransitionTable

LOG_VARIABLE = "DIPS_SEEN_LOG"

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


# ---- the file for tests ----


class _Notes:
    """Appends what is seen for the first time; one write for each, so that processes may share the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: set[tuple[str, ...]] = set()

    def moved(self, move: Transition[Any]) -> None:
        row = ("transition", *move.arrow)
        if row not in self._known and _caller(2).startswith("dips."):
            self._note(row)

    def refused(self, code: RefusalCode, module: str) -> None:
        row = ("refusal", code.name)
        if row not in self._known and refuses(module):
            self._note(row)

    def _note(self, row: tuple[str, ...]) -> None:
        self._known.add(row)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, (json.dumps(row) + "\n").encode())
        finally:
            os.close(handle)


def _caller(depth: int) -> str:
    """The module that called the observed function: `depth` frames above the observer."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


_notes: _Notes | None = None


def note(environment: Mapping[str, str] | None = None) -> None:
    """From now on note what is seen in the file that DIPS_SEEN_LOG names, if any. A second call does nothing."""
    global _notes
    path = (os.environ if environment is None else environment).get(LOG_VARIABLE, "")
    if not path or (_notes is not None and _notes.path == path):
        return
    _notes = _Notes(path)
    machine.observe(_notes.moved)
    errors.watch_refusals(_notes.refused)


def read_log(text: str) -> Seen:
    """What all processes noted together: in how many of them each was seen."""
    seen = Seen()
    for line in text.splitlines():
        match json.loads(line):
            case ["transition", str(table), str(start), str(name), str(end)]:
                seen.arrows[table, start, name, end] += 1
            case ["refusal", str(code)]:
                seen.refusals[code] += 1
    return seen
