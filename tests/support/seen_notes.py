"""Notes in the file that DIPS_SEEN_LOG names which transitions and refusals a process sees.

Each process that a test starts notes there, once each, what it saw (tests/sitecustomize.py), and in the end
tests/seen.py asks for what no process saw. Without the variable nothing is observed.

Only what the product's own code does counts: a test that makes a Refused or walks a table by hand has shown nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from dips.core import errors, machine
from dips.core.errors import RefusalCode
from dips.core.machine import Transition

if TYPE_CHECKING:
    from dips.lab.sim.counts import Seen

LOG_VARIABLE = "DIPS_SEEN_LOG"


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
        from dips.lab.sim.counts import refuses  # it may be what is being imported when notes begin

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


def note() -> None:
    """From now on note what is seen in the file that DIPS_SEEN_LOG names, if any. A second call does nothing."""
    global _notes
    path = os.environ.get(LOG_VARIABLE, "")
    if not path or (_notes is not None and _notes.path == path):
        return
    _notes = _Notes(path)
    machine.observers.append(_notes.moved)
    errors.watchers.append(_notes.refused)


def read_log(text: str) -> Seen:
    from dips.lab.sim.counts import Seen

    seen = Seen()
    for line in text.splitlines():
        match json.loads(line):
            case ["transition", str(table), str(start), str(name), str(end)]:
                seen.arrows[table, start, name, end] += 1
            case ["refusal", str(code)]:
                seen.refusals[code] += 1
    return seen
