"""Named places where a process can be made to die, wait or fail, so that recovery is tested and not hoped for.

Production pays one dictionary look-up at each place and nothing in state machines. Must never be armed by accident:
only DIPS_FAILPOINTS or a test arms them, the variable alone makes a process refuse to start unless failpoints are
enabled as well, and a process that starts armed logs a warning. The language is in
failpoint_spec.py, the names in failpoint_names.py (docs/testing.md, failpoints).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dips.core import machine
from dips.core.errors import ConfigError
from dips.core.observe import seen
from dips.core.observe.failpoint_spec import (
    RETURNED,
    FailpointAction,
    FailpointKind,
    Term,
    is_transition,
    parse,
    role_of,
    transition_name,
)

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
    It is also where a process begins to note what tests see of it (seen.py).
    """
    global _installed
    environment = os.environ if environment is None else environment
    seen.note(environment)
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
    _arm(spec, _seed(environment.get(SEED_VARIABLE, "0")), environment.get(LOG_VARIABLE))
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
def armed(text: str, seed: int = 0, log_path: str | None = None) -> Iterator[None]:
    """set_failpoints for the length of a block; what was armed before is forgotten. For tests."""
    set_failpoints(text, seed, log_path)
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
        arrows = _arrow_names(table_name)
        if arrows and name not in arrows:
            raise ConfigError(f"{SPEC_VARIABLE}: the table {table_name} has no {name!r}; it has {', '.join(arrows)}")


def _arrow_names(table_name: str) -> list[str]:
    tables: list[machine.TransitionTable[Any]] = machine.tables()
    found = (table for table in tables if table.name.replace(" ", "_") == table_name)
    return sorted({transition_name(table.name, start.value, name) for table in found for start, name in table.rows})


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{SEED_VARIABLE} is {text!r}: give a whole number") from None


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


@dataclass(frozen=True)
class Fired:
    """One line of the file that DIPS_FAILPOINT_LOG names."""

    name: str
    action: str
    pid: int


def read_log(text: str) -> list[Fired]:
    """The lines of a failpoint log, oldest first."""
    rows = (line.split() for line in text.splitlines() if line)
    return [Fired(name, action, int(pid)) for name, action, pid in rows]
