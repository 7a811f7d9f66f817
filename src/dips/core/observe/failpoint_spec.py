"""The language of DIPS_FAILPOINTS: which failpoints do what, and how often.

    master.journal.before_commit=2*off->crash(9); slave.snapshot.after_fsync=10%sleep(0.5)

Entries are divided by `;`. An entry is a name, `=` and one or more terms joined by `->`; a term is
`[p%][n*]action[(argument)]`. At each hit the first term that still has turns left (`n*`) and whose chance (`p%`)
comes true is carried out; when none does, nothing happens. Pure: must never look at the environment or at a clock.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dips.core.errors import ConfigError
from dips.core.observe.failpoint_names import TABLES, all_names, obeyed

CRASH_EXIT_CODE = 86
"""How crash ends a process unless an argument says otherwise: a number that nothing else here ends with."""


class FailpointKind(Enum):
    """The actions of failpoints. drop, dup and corrupt are left to the call site; all others happen by themselves."""

    OFF = "off"
    NOTE = "note"
    CRASH = "crash"
    KILL = "kill"
    STOP = "stop"
    SLEEP = "sleep"
    ERROR = "error"
    DROP = "drop"
    DUP = "dup"
    CORRUPT = "corrupt"


RETURNED = frozenset({FailpointKind.DROP, FailpointKind.DUP, FailpointKind.CORRUPT})
_IN_TABLES = frozenset(
    {
        FailpointKind.OFF,
        FailpointKind.NOTE,
        FailpointKind.CRASH,
        FailpointKind.KILL,
        FailpointKind.STOP,
        FailpointKind.SLEEP,
    }
)

_TERM = re.compile(
    r"(?:(?P<percent>\d+(?:\.\d+)?)%)?(?:(?P<turns>\d+)\*)?(?P<action>[a-z]+)(?:\((?P<argument>[^()]*)\))?\Z"
)
_TRANSITION = re.compile(r"(?P<table>[a-z_]+)\.(?P<phase>[A-Z][A-Z_]*)\.(?P<input>\S+)\Z")


@dataclass(frozen=True)
class FailpointAction:
    """One thing to do. exit_code: of crash; delay_s: of sleep; message: of error, and free words elsewhere."""

    kind: FailpointKind
    exit_code: int = CRASH_EXIT_CODE
    delay_s: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Term:
    """An action with its limits: chance 0..1 of each hit, turns until it is used up (None: no end)."""

    action: FailpointAction
    chance: float = 1.0
    turns: int | None = None


FailpointSpec = Mapping[str, tuple[Term, ...]]


def parse(text: str) -> dict[str, tuple[Term, ...]]:
    """Parse the text into terms by name.

    Raises ConfigError that names the entry, what is wrong with it, and what would be right.
    """
    spec: dict[str, tuple[Term, ...]] = {}
    for entry in (part.strip() for part in text.split(";")):
        if not entry:
            continue
        name, equals, terms = (part.strip() for part in entry.partition("="))
        if not equals or not terms:
            raise _wrong(entry, "write NAME=ACTION, such as master.journal.before_commit=crash")
        if name in spec:
            raise _wrong(entry, f"{name} is there twice; join its actions with ->")
        check_name(name)
        spec[name] = tuple(_term(entry, term.strip()) for term in terms.split("->"))
        for term in spec[name]:
            _check_place(entry, name, term.action.kind)
    return spec


def check_name(name: str) -> None:
    """Raise ConfigError, with names that are close, unless a failpoint of this name exists."""
    known = all_names()
    arrow = _TRANSITION.match(name)
    if name in known or (arrow and arrow["table"] in TABLES):
        return
    candidates = [*known, *(f"{table}." for table in TABLES)] if arrow is None else list(TABLES)
    word = name if arrow is None else arrow["table"]
    close = difflib.get_close_matches(word, candidates, n=3, cutoff=0.5)
    what = "no failpoint" if arrow is None else f"no table {word!r} with the failpoint"
    hint = f"; did you mean {', '.join(close)}?" if close else "; see core/observe/failpoint_names.py for all names"
    raise ConfigError(f"DIPS_FAILPOINTS: there is {what} {name!r}{hint}")


def transition_name(table: str, phase: str, input_name: str) -> str:
    """The failpoint of an arrow: `<table>.<FROM>.<input>`, blanks as underscores."""
    return f"{table}.{phase}.{input_name}".replace(" ", "_")


def is_transition(name: str) -> bool:
    """Whether the name is that of an arrow of a table, not of a place in an adapter."""
    return _TRANSITION.match(name) is not None


def role_of(name: str) -> str:
    """The role in whose processes this failpoint is; "core" for all of them."""
    arrow = _TRANSITION.match(name)
    return TABLES[arrow["table"]] if arrow else name.partition(".")[0]


def _term(entry: str, text: str) -> Term:
    found = _TERM.match(text)
    if found is None:
        raise _wrong(entry, f"{text!r} is not [p%][n*]action[(argument)], such as 50%2*sleep(0.1)")
    try:
        kind = FailpointKind(found["action"])
    except ValueError:
        known = ", ".join(kind.value for kind in FailpointKind)
        raise _wrong(entry, f"{found['action']!r} is not an action; choose one of {known}") from None
    chance = float(found["percent"]) / 100 if found["percent"] else 1.0
    if not 0 < chance <= 1:
        raise _wrong(entry, f"{found['percent']} % is not a chance: write more than 0 and at most 100")
    turns = int(found["turns"]) if found["turns"] else None
    if turns == 0:
        raise _wrong(entry, "0* would never happen: leave the term out")
    return Term(_action(entry, kind, found["argument"]), chance, turns)


def _action(entry: str, kind: FailpointKind, argument: str | None) -> FailpointAction:
    if kind is FailpointKind.SLEEP:
        return FailpointAction(kind, delay_s=_seconds(entry, argument))
    if kind is FailpointKind.CRASH:
        return FailpointAction(kind, exit_code=_exit_code(entry, argument))
    if argument is not None and kind is not FailpointKind.ERROR:
        raise _wrong(entry, f"{kind.value} takes no argument")
    return FailpointAction(kind, message=argument or "")


def _seconds(entry: str, argument: str | None) -> float:
    try:
        delay_s = float(argument or "")
    except ValueError:
        delay_s = -1.0
    if not 0 <= delay_s < float("inf"):
        raise _wrong(entry, "sleep wants seconds, as in sleep(0.5)")
    return delay_s


def _exit_code(entry: str, argument: str | None) -> int:
    if argument is None:
        return CRASH_EXIT_CODE
    if not (argument.isascii() and argument.isdecimal() and int(argument) <= 255):
        raise _wrong(entry, "crash wants an exit code from 0 to 255, as in crash(9), or none")
    return int(argument)


def _check_place(entry: str, name: str, kind: FailpointKind) -> None:
    if is_transition(name):
        if kind not in _IN_TABLES:
            able = ", ".join(sorted(kind.value for kind in _IN_TABLES))
            raise _wrong(entry, f"{kind.value} means nothing between two phases of a state machine; it can {able}")
    elif kind in RETURNED and kind.value not in obeyed().get(name, ()):
        able = ", ".join(obeyed().get(name, ())) or "none of drop, dup and corrupt"
        raise _wrong(entry, f"{name} cannot {kind.value}; it can {able}")


def _wrong(entry: str, why: str) -> ConfigError:
    return ConfigError(f"DIPS_FAILPOINTS: in {entry!r}: {why}")
