"""Named places where a process can be made to die, wait or fail, so that recovery is tested and not hoped for.

Production pays one dictionary look-up at each place and nothing in state machines. Must never be armed by accident:
only DIPS_FAILPOINTS or a test arms them, the variable alone makes a process refuse to start unless failpoints are
enabled as well, and a process that starts armed logs a warning. The names are in
failpoint_names.py (docs/evidence.md, failpoints).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dips.core import machine
from dips.core.errors import ConfigError
from dips.core.observe.failpoint_names import TABLES, all_names, obeyed

# ---- failpoint spec --------------------------------------------------------------------------------------------------
#
# The language of DIPS_FAILPOINTS: which failpoints do what, and how often.
#
#     master.journal.before_commit=2*off->crash(9); slave.snapshot.after_fsync=10%sleep(0.5)
#
# Entries are divided by `;`. An entry is a name, `=` and one or more terms joined by `->`; a term is
# `[p%][n*]action[(argument)]`. At each hit the first term that still has turns left (`n*`) and whose chance (`p%`)
# comes true is carried out; when none does, nothing happens. Pure: must never look at the environment or at a clock.


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
_IN_TABLES = (
    *(FailpointKind.OFF, FailpointKind.NOTE, FailpointKind.CRASH, FailpointKind.KILL, FailpointKind.STOP),
    FailpointKind.SLEEP,
)

_TERM = re.compile(
    r"(?:(?P<percent>\d+(?:\.\d+)?)%)?(?:(?P<turns>\d+)\*)?(?P<action>[a-z]+)(?:\((?P<argument>[^()]*)\))?\Z"
)
_TRANSITION = re.compile(r"(?P<table>[a-z_]+)\.(?P<phase>[A-Z][A-Z_]*)\.(?P<input>\S+)\Z")


@dataclass(frozen=True)
class FailpointAction:
    """One thing to do."""

    kind: FailpointKind
    exit_code: int = CRASH_EXIT_CODE  # of crash
    delay_s: float = 0.0  # of sleep
    message: str = ""  # of error, and free words elsewhere


@dataclass(frozen=True)
class Term:
    """An action with its limits: chance 0..1 of each hit, turns until it is used up (None: no end)."""

    action: FailpointAction
    chance: float = 1.0
    turns: int | None = None


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
            kind = term.action.kind
            if is_transition(name):
                if kind not in _IN_TABLES:
                    able = ", ".join(sorted(kind.value for kind in _IN_TABLES))
                    raise _wrong(
                        entry, f"{kind.value} means nothing between two phases of a state machine; it can {able}"
                    )
            elif kind in RETURNED and kind.value not in obeyed().get(name, ()):
                able = ", ".join(obeyed().get(name, ())) or "none of drop, dup and corrupt"
                raise _wrong(entry, f"{name} cannot {kind.value}; it can {able}")
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
        try:
            delay_s = float(argument or "")
        except ValueError:
            delay_s = -1.0
        if not 0 <= delay_s < float("inf"):
            raise _wrong(entry, "sleep wants seconds, as in sleep(0.5)")
        return FailpointAction(kind, delay_s=delay_s)
    if kind is FailpointKind.CRASH:
        text = str(CRASH_EXIT_CODE) if argument is None else argument
        if not (text.isascii() and text.isdecimal() and int(text) <= 255):
            raise _wrong(entry, "crash wants an exit code from 0 to 255, as in crash(9), or none")
        return FailpointAction(kind, exit_code=int(text))
    if argument is not None and kind is not FailpointKind.ERROR:
        raise _wrong(entry, f"{kind.value} takes no argument")
    return FailpointAction(kind, message=argument or "")


def _wrong(entry: str, why: str) -> ConfigError:
    return ConfigError(f"DIPS_FAILPOINTS: in {entry!r}: {why}")


# ---- failpoints ------------------------------------------------------------------------------------------------------


SPEC_VARIABLE = "DIPS_FAILPOINTS"
ENABLED_VARIABLE = "DIPS_FAILPOINTS_ENABLED"
SEED_VARIABLE = "DIPS_FAILPOINTS_SEED"
LOG_VARIABLE = "DIPS_FAILPOINT_LOG"
"""The file that gets a line `name action pid` for everything that a failpoint does, before it does it."""

_logger = logging.getLogger(__name__)


class _Point:
    """One armed failpoint: which terms have turns left, and its own chances, which no other point disturbs."""

    def __init__(self, name: str, terms: tuple[Term, ...], seed: int) -> None:
        self.name = name
        self._terms = terms
        self._left = [term.turns for term in terms]
        self._random = random.Random(f"{seed}:{name}")
        self._lock = threading.Lock()
        self.hits = 0
        self.fired: Counter[str] = Counter()

    def hit(self) -> FailpointAction | None:
        """Choose what this hit does, and carry it out unless the call site has to. Blocks for sleep."""
        with self._lock:
            self.hits += 1
            action = self._choose()
            if action is None or action.kind is FailpointKind.OFF:
                return None
            self.fired[action.kind.value] += 1
        _log(self.name, action)
        if action.kind in RETURNED:
            return action
        _carry_out(self.name, action)
        return None

    def _choose(self) -> FailpointAction | None:
        for index, term in enumerate(self._terms):
            left = self._left[index]
            if left == 0 or (term.chance < 1 and self._random.random() >= term.chance):
                continue
            if left is not None:
                self._left[index] = left - 1
            return term.action
        return None


_armed: dict[str, _Point] = {}
_installed: tuple[str, str] | None = None
_log_path: str | None = None


def failpoint(name: str) -> FailpointAction | None:
    """Carry out here what the failpoint `name` is armed with: nothing unless it is armed.

    crash, kill, stop, sleep (which blocks the calling thread, event loop included) and error (an OSError, EIO) happen
    inside. drop, dup and corrupt are returned, and the caller must obey.
    """
    point = _armed.get(name)
    return None if point is None else point.hit()


def copies(action: FailpointAction | None) -> int:
    """How often a call site that obeys drop and dup passes a message on: 0, 1 or 2 times."""
    match action:
        case FailpointAction(FailpointKind.DROP):
            return 0
        case FailpointAction(FailpointKind.DUP):
            return 2
    return 1


def install(role: str, environment: Mapping[str, str] | None = None, *, enabled: bool = False) -> None:
    """Arm what DIPS_FAILPOINTS says for `role`'s processes; others' names are left to them.

    Call at the start of a process, after logging is configured and the role's tables are imported; a second call with
    the same words changes nothing, so that turns which are used up stay so. `enabled`: what --failpoints says; else
    DIPS_FAILPOINTS_ENABLED=1 does. Raises ConfigError when neither does, and for a name, an action or a seed that
    cannot be understood.
    """
    global _installed
    environment = os.environ if environment is None else environment
    text = environment.get(SPEC_VARIABLE, "").strip()
    if not text or _installed == (role, text):
        return
    if not enabled and environment.get(ENABLED_VARIABLE, "").lower() not in ("1", "true", "yes", "on"):
        raise ConfigError(
            f"{SPEC_VARIABLE} is set, which makes processes fail on purpose, but failpoints are not enabled: unset it, "
            f"or give --failpoints (or {ENABLED_VARIABLE}=1) if this is a test"
        )
    spec = {name: terms for name, terms in parse(text).items() if role_of(name) in (role, "core")}
    _check_transitions(spec)
    text_of_seed = environment.get(SEED_VARIABLE, "0")
    try:
        seed = int(text_of_seed)
    except ValueError:
        raise ConfigError(f"{SEED_VARIABLE} is {text_of_seed!r}: give a whole number") from None
    _arm(spec, seed, environment.get(LOG_VARIABLE))
    _installed = (role, text)
    if spec:
        _logger.warning("failpoints are armed, this process will misbehave on purpose: %s", ", ".join(sorted(spec)))


def set_failpoints(text: str, seed: int = 0, log_path: str | None = None) -> None:
    """Arm exactly what `text` says, in this process, whatever was armed before. Raises ConfigError as install does."""
    spec = parse(text)
    _check_transitions(spec)
    _arm(spec, seed, log_path)


def clear() -> None:
    """Disarm everything and forget all counts."""
    _arm({}, 0, None)


@contextlib.contextmanager
def armed(text: str, seed: int = 0) -> Iterator[None]:
    """set_failpoints for the length of a block; what was armed before is forgotten. For tests."""
    set_failpoints(text, seed)
    try:
        yield
    finally:
        clear()


def hits() -> dict[str, int]:
    """How often each armed failpoint was reached, whether or not it did anything."""
    return {name: point.hits for name, point in _armed.items()}


def fired() -> dict[str, dict[str, int]]:
    """What each armed failpoint did, by action; `off` is not counted."""
    return {name: dict(point.fired) for name, point in _armed.items()}


def _arm(spec: Mapping[str, tuple[Term, ...]], seed: int, log_path: str | None) -> None:
    global _log_path, _installed
    _log_path, _installed = log_path, None
    _armed.clear()
    _armed.update({name: _Point(name, terms, seed) for name, terms in spec.items()})
    machine.forget(_before_move)
    if any(map(is_transition, spec)):
        machine.observe(_before_move)


def _before_move(move: machine.Transition[Any]) -> None:
    failpoint(transition_name(move.table.name, move.start.value, move.input_name))


def _check_transitions(spec: Mapping[str, tuple[Term, ...]]) -> None:
    """Raise ConfigError for an arrow that a table of this process does not have; tables of others are unknown here."""
    for name in filter(is_transition, spec):
        table_name = name.partition(".")[0]
        tables = [table for table in machine.tables() if table.name.replace(" ", "_") == table_name]
        arrows = {transition_name(table.name, start.value, move) for table in tables for start, move in table.rows}
        if arrows and name not in arrows:
            has = ", ".join(sorted(arrows))
            raise ConfigError(f"{SPEC_VARIABLE}: the table {table_name} has no {name!r}; it has {has}")


def _log(name: str, action: FailpointAction) -> None:
    """Append one line by one write, so that processes that die together do not tear each other's lines."""
    if _log_path is None:
        return
    handle = os.open(_log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(handle, f"{name} {action.kind.value} {os.getpid()}\n".encode())
    finally:
        os.close(handle)


def _carry_out(name: str, action: FailpointAction) -> None:
    match action.kind:
        case FailpointKind.CRASH:
            os._exit(action.exit_code)
        case FailpointKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FailpointKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FailpointKind.SLEEP:
            time.sleep(action.delay_s)
        case FailpointKind.ERROR:
            raise OSError(errno.EIO, action.message or f"failpoint {name}")
