"""Named places where a process can be made to die, wait or fail, so that recovery is tested and not hoped for.

Production pays one dictionary look-up at each place and nothing in state machines. Must never be armed by accident:
only DIPS_FAILPOINTS or a test arms them, the variable alone makes a process refuse to start unless failpoints are
enabled as well, and a process that starts armed logs a warning. The names stand at
the end (docs/evidence.md, failpoints): a section for each role. A name is `<role>.<thing>.<before|after>_<step>`; a
word in braces stands for each value in PLACEHOLDERS. Failpoints of state machines are not listed: each arrow of a table
in TABLES has the name `<table>.<FROM>.<input>`, blanks as underscores. No name may be there that no code uses
(tests/repository checks both ways).
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
    hint = f"; did you mean {', '.join(close)}?" if close else "; see core/observe/failpoints.py for all names"
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
    if _before_move in machine.observers:
        machine.observers.remove(_before_move)
    if any(map(is_transition, spec)):
        machine.observers.append(_before_move)


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


# ---- master --------------------------------------------------------------------------------------------------------

MASTER: dict[str, str] = {
    "master.journal.before_commit": "entries are in an open transaction: they are lost, and no peer knows of them",
    "master.journal.after_commit": "entries are durable, but the state machine does not know it yet",
    "master.journal.before_create": "the tables of a new journal are in an open transaction",
    "master.journal.after_create": "the new journal is committed, its name in the directory not yet flushed",
    "master.replica.before_send": "records are durable here, and the standby does not have them yet",
    "master.replica.before_hear": "a standby follows, and its first acknowledgement is not read yet",
    "master.replica.before_receive": "records have come to the standby, which has not begun to write them",
    "master.replica.before_acknowledge": "records are durable at the standby, and the master does not know it yet",
    "master.replica.before_connect": "a standby is about to connect to the master that it follows",
    "master.replica.before_tell": "a standby has taken over, and the other master does not know of it yet",
    "master.archive.before_write": "a segment of old records is about to be written: its file is open and empty",
    "master.archive.before_fsync": "the segment is written under a temporary name and not flushed",
    "master.archive.before_rename": "the segment is flushed and has its temporary name still",
    "master.archive.after_rename": "the segment has its name, not flushed; its records are still in the journal",
    "master.archive.before_delete": "the segment is durable, and its records are about to leave the journal",
    "master.archive.before_prune": "the journal says how far the archive is pruned; the oldest segment is still there",
    "master.address.before_rename": "the new address has its temporary name; readers see the old one or none",
    "master.address.after_rename": "readers see the new address; its name is not flushed",
    "master.directory.before_fsync": "a name in the master's directory was changed and is not flushed",
    "master.rpc.before_{method}": "a call has arrived and nothing was decided",
    "master.rpc.after_{method}": "a call is decided, its answer not sent: drop loses it, as a broken link does",
    "master.slave_stream.before_hear": "a slave's message has arrived; drop loses it, dup handles it twice",
    "master.slave_stream.before_send": "a command is about to go to a slave; drop loses it, dup sends it twice",
}

# ---- slave ---------------------------------------------------------------------------------------------------------

SLAVE: dict[str, str] = {
    "slave.ring.before_allocate": "a snapshot file is there, its room not claimed",
    "slave.ring.after_allocate": "a snapshot file has its size, not durably",
    "slave.ring.before_write": "the manifest of the version that leaves is gone, its file still whole",
    "slave.ring.after_piece": "a snapshot file holds a mixture of two versions; reached for every piece of 4 MiB",
    "slave.{kind}.before_fsync": "the bytes are written and not flushed",
    "slave.{kind}.after_fsync": "the bytes are durable: a whole shadow, or a small file under a temporary name",
    "slave.{file}.before_create": "a small file is about to be written under a temporary name",
    "slave.{file}.before_rename": "a small file is flushed and has its temporary name still",
    "slave.{file}.after_rename": "a small file has its name, the directory is not flushed",
    "slave.manifest.before_remove": "a version is about to leave the ring: it is committed still",
    "slave.manifest.after_remove": "the manifest of the version that leaves is gone, the directory not flushed",
    "slave.directory.before_fsync": "names in the slave's directory changed and are not flushed",
    "slave.directory.after_fsync": "names in the slave's directory are durable, no peer knows it",
    "slave.pushes.before_write": "a staged push is about to be kept as evidence (record_pushes)",
    "slave.pushes.before_fsync": "a push is written as evidence and not flushed; no record names it",
    "slave.pushes.after_fsync": "a push is kept as evidence, and no record names it",
    "slave.link.before_attach": "the slave is about to send its hello on a new stream",
    "slave.link.before_send": "an answer or a beat is about to go to the master; drop loses it, dup sends it twice",
    "slave.link.after_send": "an answer or a beat went to the master",
    "slave.link.before_receive": "all commands that came are obeyed; the slave waits for the next",
    "slave.link.after_receive": "a command has arrived; drop loses it, dup obeys it twice",
    "slave.data.before_answer": "an answer of the data port is about to go out; drop, dup and corrupt do what they say",
}

# ---- worker --------------------------------------------------------------------------------------------------------

WORKER: dict[str, str] = {
    "worker.rpc.before_{method}": "a call is about to leave; error is a call that never left",
    "worker.rpc.after_{method}": "the answer is there and no code has seen it; drop loses it, as a broken link does",
    "worker.push.before_copy": "a push begins, the parameters are about to be copied for it",
    "worker.push.before_chunk": "a chunk of a push is about to be sent; drop loses it, dup sends it twice",
    "worker.push.after_last_chunk": "all slaves hold the whole push, and the master does not know it",
    "worker.pull.before_chunk": "a chunk of a version has arrived and not landed",
    "worker.pull.after_last_chunk": "a version lies in the pull buffer, the live parameters are the old ones",
    "worker.install.before_swap": "the live parameters are about to be replaced",
    "worker.install.after_swap": "the live parameters are the new ones, the pin at the master is held still",
    "worker.export.before_rename": "an exported model is flushed and has its temporary name still",
    "worker.push_record.before_write": "the record of a new push is about to be written; its number was not used",
    "worker.push_record.after_write": "the record of a new push is durable, and the master does not know of it",
    "worker.checkpoint.before_write": "a file of a checkpoint (or a push's record) is open and empty",
    "worker.checkpoint.before_fsync": "such a file is written under a temporary name, not flushed",
    "worker.checkpoint.after_fsync": "such a file is flushed and has its temporary name still",
    "worker.checkpoint.before_rename": "such a file is closed and has its temporary name still",
    "worker.checkpoint.after_rename": "such a file has its name, the directory is not flushed",
    "worker.directory.before_fsync": "a name in a folder of checkpoints or of exports was changed and is not flushed",
    "worker.checkpoint.before_manifest": "a checkpoint's tensors are durable, its manifest is not written",
    "worker.checkpoint.before_prune": "a checkpoint is durable, the ones beyond those that are kept are still there",
}

# ---- what call sites can do besides dying, waiting and failing -----------------------------------------------------

OBEYS: dict[str, tuple[str, ...]] = {
    "master.rpc.after_{method}": ("drop",),
    "worker.rpc.after_{method}": ("drop",),
    "worker.push.before_chunk": ("drop", "dup", "corrupt"),
    "worker.pull.before_chunk": ("drop", "corrupt"),
    "master.slave_stream.before_hear": ("drop", "dup"),
    "master.slave_stream.before_send": ("drop", "dup"),
    "slave.link.before_send": ("drop", "dup"),
    "slave.link.after_receive": ("drop", "dup"),
    "slave.data.before_answer": ("drop", "dup", "corrupt"),
}
"""Which of drop, dup and corrupt a call site carries out itself; all others are refused there."""

# ---- the values of words in braces ---------------------------------------------------------------------------------

_OF_CLUSTERS = (
    *("Join", "Heartbeat", "BeginPush", "FinishPush", "AwaitVerdict", "BeginPull", "FinishPull"),
    *("LeaseData", "ReturnData", "Leave"),
)
_OF_OPERATORS = ("Status", "Watch", "Pause", "Resume", "Evict", "Drain", "Reshard", "Stop", "Extend")

PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "master.method": (*_OF_CLUSTERS, *_OF_OPERATORS),
    "slave.kind": ("ring", "manifest", "promise", "identity", "round"),
    "slave.file": ("manifest", "promise", "identity", "round"),
    "worker.method": (*_OF_CLUSTERS, "Status"),
}
"""`<role>.<word>`: what {word} stands for in that role's names. The stream of a slave has names of its own."""

# ---- tables whose arrows are failpoints ----------------------------------------------------------------------------

TABLES: dict[str, str] = {
    "push": "master",
    "recovery": "master",
    "reshard": "master",
    "round": "master",
    "slave": "master",
    "slave_link": "slave",
    "slave_shard": "slave",
    "slave_save": "slave",
    "session": "worker",
}
"""The name of each transition table, blanks as underscores, and the role whose process walks it."""


def all_names() -> dict[str, str]:
    """Every name, words in braces filled in, with its sentence; arrows of tables are not among them."""
    patterns = {**MASTER, **SLAVE, **WORKER}
    return {name: text for pattern, text in patterns.items() for name in expand(pattern)}


def obeyed() -> dict[str, tuple[str, ...]]:
    """Which of drop, dup and corrupt the call site carries out, for each name where it does."""
    return {name: kinds for pattern, kinds in OBEYS.items() for name in expand(pattern)}


def expand(pattern: str) -> list[str]:
    """The names that a pattern stands for: itself when it has no word in braces."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    word, _, tail = rest.partition("}")
    values = PLACEHOLDERS[f"{head.partition('.')[0]}.{word}"]
    return [name for value in values for name in expand(head + value + tail)]
