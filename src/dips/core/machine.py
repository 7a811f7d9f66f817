"""State machines as transition tables: a phase and an input name give the phases that may follow.

A pair that is not in the table raises LocalProtocolError with the machine's history and leaves the phase unchanged.
The diagrams in docs/protocol.md are generated from these tables. Observers (failpoints, coverage) are put in from
outside; without one a move costs nothing more. This module must never import what can read a clock or the system.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from dips.core.errors import LocalProtocolError
from dips.core.ids import Incarnation, PushId, RoundId, Version

P = TypeVar("P", bound=Enum)

HISTORY_LENGTH = 256
"""Steps that a machine's history keeps; 256 steps of about 200 bytes are 50 KB for each machine."""


class MachineHistory:
    """The bounded log of what happened and why, one line for each step, oldest first."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=HISTORY_LENGTH)

    def add(self, at_s: float, machine: str, cause: str, text: str) -> None:
        self.lines.append(f"{at_s:.3f} [{cause}] {machine}: {text}")

    def newest(self) -> str:
        """The last lines, for the sentence of an error."""
        return "\n  ".join([*self.lines][-30:])


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Record:
    """An effect of every machine: write one line to the tape of its process. Each kind of line is a subclass, in
    state/tape.py of its role, and a frozen dataclass whose fields have their names; `kind` is its name on the tape."""

    KIND: ClassVar[str] = ""

    cause: str

    def __init_subclass__(cls, *, kind: str = "") -> None:
        cls.KIND = kind
        dataclass(frozen=True, kw_only=True)(cls)

    @property
    def kind(self) -> str:
        """The line's name on the tape."""
        return self.KIND

    @property
    def fields(self) -> dict[str, object]:
        """The line's own fields, as they are written: ids as text, bytes as hex, defaults left out."""
        return {
            name: write(value)
            for name, write, default in _fields_of(type(self))  # type: ignore[arg-type]  # mypy: no class is Hashable
            if (value := getattr(self, name)) is not default and value != default
        }


@functools.cache
def _fields_of(kind: type[Record]) -> tuple[tuple[str, Callable[[Any], object], object], ...]:
    """Each field's name, what makes its text, and its default. No id, where there may be one, is written "None"."""
    hints = typing.get_type_hints(kind)
    return tuple((item.name, _writer(hints[item.name]), item.default) for item in dataclasses.fields(kind)[1:])


def _writer(hint: Any) -> Callable[[Any], object]:
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    if kinds & {Version, RoundId, PushId, Incarnation}:
        return str
    return bytes.hex if bytes in kinds else lambda value: value


@dataclass(frozen=True)
class Log:
    """An effect of every machine: log one line for people when the sentence of this key changes."""

    level: int  # logging's
    key: str
    sentence: str
    cause: str = ""


class TransitionTable(Generic[P]):
    """Which phases may follow a phase upon an input."""

    def __init__(self, name: str, initial: P, rows: Mapping[tuple[P, str], Iterable[P]]) -> None:
        self.name = name
        self.initial = initial
        self.rows: dict[tuple[P, str], frozenset[P]] = {key: frozenset(to) for key, to in rows.items()}
        _tables.append(self)

    def arrows(self) -> list[tuple[P, str, P]]:
        """(from, input, to), in a stable order, for diagrams and coverage."""
        arrows = [(start, name, end) for (start, name), ends in self.rows.items() for end in ends]
        return sorted(arrows, key=lambda arrow: (arrow[0].value, arrow[1], arrow[2].value))


@dataclass(frozen=True)
class Transition(Generic[P]):
    """A step that a machine is about to make: its table has the arrow, its phase is `start` still."""

    table: TransitionTable[P]
    start: P
    input_name: str
    end: P

    @property
    def arrow(self) -> tuple[str, str, str, str]:
        """(table, from, input, to), for coverage; comparable with every arrow of TransitionTable.arrows()."""
        return (self.table.name, self.start.value, self.input_name, self.end.value)


Observer = Callable[[Transition[Any]], None]

observers: list[Observer] = []
"""Called before every move of every machine in this process."""

_tables: list[TransitionTable[Any]] = []


def tables() -> list[TransitionTable[Any]]:
    """Every table that was made in this process, in the order of their modules' import."""
    return list(_tables)


class Phase(Generic[P]):
    """The current phase of one machine; moves only along its table."""

    def __init__(self, table: TransitionTable[P], story: MachineHistory, label: str = "") -> None:
        self._table = table
        self._story = story
        self._label = label or table.name
        self.now: P = table.initial
        self.since_s = 0.0

    def move(self, input_name: str, to: P, at_s: float, cause: str = "-", why: str = "") -> None:
        """Go to `to` upon `input_name`.

        Raises LocalProtocolError, phase unchanged, when the table has no such arrow.
        """
        if to not in self._table.rows.get((self.now, input_name), frozenset()):
            raise LocalProtocolError(
                f"{self._label}: no transition from {self.now.value} to {to.value} upon {input_name}; "
                f"its history:\n  {self._story.newest()}"
            )
        for observer in tuple(observers):
            observer(Transition(self._table, self.now, input_name, to))
        text = f"{self.now.value} -> {to.value} upon {input_name}" + (f": {why}" if why else "")
        self._story.add(at_s, self._label, cause, text)
        if to is not self.now:
            self.since_s = at_s
        self.now = to

    def allows(self, input_name: str) -> bool:
        return (self.now, input_name) in self._table.rows
