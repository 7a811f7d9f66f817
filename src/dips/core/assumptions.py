"""The table of inequalities that must hold between the settings of one process, each with its reason and its harm.

A row is an inequality over knobs by their names. It is checked when the settings are made, before anything starts,
and docs/assumptions.md is generated from the same rows. Must never hold an inequality that no code checks, and never
know a role's settings as a type: it sees names and numbers.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dips.core.units import format_bytes, format_seconds

Values = Mapping[str, object]
"""Knobs by name. One that is None or a word (such as grace_s = "auto") leaves out the rows that name it."""

_CONSTANTS: Mapping[str, float] = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_RELATIONS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "<": (operator.lt, "less than"),
    "<=": (operator.le, "at most"),
    ">": (operator.gt, "more than"),
    ">=": (operator.ge, "at least"),
}


@dataclass(frozen=True)
class Assumption:
    """One inequality."""

    name: str
    text: str  # a formula on both sides of a relation
    why: str  # what it is for
    harm: str  # what would happen without it, as an error says it
    remedy: str

    def broken(self, values: Values) -> str | None:
        """The sentence that refuses these values; None when they are right or the row does not apply to them.

        Raises KeyError when a knob of the row is not among the values.
        """
        known = {name: values[name] for name in names_of(self.text)}
        numbers = {name: float(value) for name, value in known.items() if isinstance(value, int | float)}
        if len(numbers) < len(known):
            return None
        what, relation, bound = re.split(r" ([<>]=?) ", self.text)
        left, right = value_of(what, numbers), value_of(bound, numbers)
        holds, words = _RELATIONS[relation]
        if holds(left, right):
            return None
        shown, floor = self._shown(left), self._shown(right)
        named = f"{bound} = {floor}" if names_of(bound) else floor
        return f"{what} is {shown}, but must be {words} {named}: {self.harm}; {self.remedy}"

    def _shown(self, value: float) -> str:
        if "_s" in {name[-2:] for name in names_of(self.text)}:
            return format_seconds(value)
        if any(name.endswith("_bytes") for name in names_of(self.text)):
            return format_bytes(int(value))
        return f"{value:g}"


MASTER: tuple[Assumption, ...] = (
    Assumption(
        "beats",
        "heartbeat_s > 0",
        "liveness is known from heartbeats",
        "live peers could not be distinguished from dead ones",
        "use 2 s, the default",
    ),
    Assumption(
        "eviction",
        "evict_after_beats >= 3",
        "one beat may be lost and one late without an eviction",
        "one late beat would evict a healthy cluster",
        "use 5, the default",
    ),
    Assumption(
        "round-step",
        "round_timeout_s >= 2 * heartbeat_s",
        "a slave whose stream broke is known to be gone, and may be back, before the round gives up on it",
        "every round would abort",
        "raise round_timeout_s",
    ),
    Assumption(
        "grace-in-round",
        "grace_s < round_timeout_s",
        "the wait for further clusters is shorter than the time for a step of the round (so that one slow cluster "
        "delays the others by no more than grace and one time-out)",
        "a round would wait longer for a cluster than for its slaves",
        "lower grace_s",
    ),
    Assumption(
        "verdict-wait",
        "verdict_wait_s > grace_s",
        "the first cluster of a window waits for the whole window before there can be a verdict",
        "the first cluster would never see its verdict in time",
        "raise verdict_wait_s or lower grace_s",
    ),
    Assumption(
        "ticket",
        "ticket_ttl_s >= evict_after_beats * heartbeat_s",
        "an upload is given up only after its cluster would have been evicted",
        "uploads of clusters that are alive would be given up",
        "raise ticket_ttl_s",
    ),
    Assumption(
        "lease",
        "lease_ttl_s > ticket_ttl_s",
        "the data of a push stays lent while its upload may still go on, and longer than its cluster takes to evict",
        "data would be lent twice",
        "raise lease_ttl_s",
    ),
    Assumption(
        "linger",
        "linger_s >= heartbeat_s",
        "every cluster and slave sends one more heartbeat after the end and learns of it",
        "peers would take the end of the run for a crash of the master",
        "raise linger_s",
    ),
    Assumption(
        "smallest-chunk",
        "chunk_bytes >= 4 * KiB",
        "a chunk's header takes about 200 bytes",
        "headers would outweigh the data",
        "use 1 MiB, the default",
    ),
    Assumption(
        "largest-chunk",
        "chunk_bytes <= 64 * MiB",
        "64 MiB take 5 s at 100 Mbit/s, and nothing else passes in that time",
        "one frame would block a link for seconds",
        "use 1 MiB, the default",
    ),
    Assumption(
        "window",
        "window_chunks * chunk_bytes <= 1 * GiB",
        "chunks in flight are in memory on both sides, for each cluster and slave",
        "data in flight would fill the memory",
        "lower window_chunks",
    ),
    Assumption(
        "smallest-message",
        "max_message_bytes >= 1 * MiB",
        "a Join carries names and shapes of all parameters, about 100 bytes for each tensor",
        "no cluster with a real model could join",
        "use 64 MiB, the default",
    ),
    Assumption(
        "largest-message",
        "max_message_bytes <= 1 * GiB",
        "a message is in memory as a whole, several times over",
        "one call could fill the master's memory",
        "use 64 MiB, the default",
    ),
    Assumption(
        "enough-clusters",
        "min_clusters <= max_clusters",
        "the first round waits for min_clusters, and no more than max_clusters are admitted",
        "no round would ever begin",
        "raise max_clusters",
    ),
    Assumption(
        "enough-for-each-round",
        "min_clusters_per_round <= max_clusters",
        "a round waits for so many pushes, and no more than max_clusters are admitted",
        "no round would ever have enough",
        "lower min_clusters_per_round or raise max_clusters",
    ),
    Assumption(
        "deadline-after-grace",
        "round_deadline_s > grace_s",
        "a round with too few pushes waits past its grace",
        "no round would wait for min_clusters_per_round",
        "raise round_deadline_s or lower grace_s",
    ),
    Assumption(
        "async-lag",
        "async_lag_versions >= 1",
        "with durability = async a version is published before it is on the disks",
        "nothing could be published",
        "use 2, the default, or durability = sync",
    ),
    Assumption(
        "journal",
        "journal_records >= 16",
        "the newest record always stays in the journal, and old ones move to the archive an eighth at a time",
        "every decision would be moved at once",
        "use 20000, the default",
    ),
    Assumption(
        "archive",
        "archive_bytes >= 4 * MiB",
        "the archive keeps whole segments, of up to 4 MiB",
        "the archive could not hold its newest segment within its room",
        "use 1 GiB, the default",
    ),
)

SLAVE: tuple[Assumption, ...] = (
    Assumption(
        "snapshots",
        "snapshots_kept >= 2",
        "when slaves lose different versions, an older one that all of them still hold is what a rollback returns to",
        "after a damaged snapshot there would be nothing to return to",
        "use 3, the default",
    ),
    Assumption(
        "data-frame",
        "max_chunk_bytes >= 1 * KiB",
        "no run's chunks are smaller",
        "the data port would refuse every chunk",
        "use 2 MiB, the default",
    ),
    Assumption(
        "largest-data-frame",
        "max_chunk_bytes <= 64 * MiB",
        "the data port takes a frame into memory before it can look at it",
        "one frame could fill the memory",
        "use 2 MiB, the default",
    ),
)

WORKER: tuple[Assumption, ...] = (
    Assumption(
        "silence",
        "data_silence_s < data_stall_s",
        "a silent slave is asked again over a new connection before the whole transfer is given up",
        "one lost message would end a transfer",
        "raise data_stall_s or lower data_silence_s",
    ),
    Assumption(
        "leaving-call",
        "call_deadline_s <= leave_wait_s",
        "leaving takes at least one call",
        "the cluster would be gone before its Leave was answered",
        "raise leave_wait_s or lower call_deadline_s",
    ),
    Assumption(
        "leaving-retry",
        "retry_max_s <= leave_wait_s",
        "while leaving, a call that failed is tried again",
        "leaving would be given up within one pause between two tries",
        "raise leave_wait_s or lower retry_max_s",
    ),
)

ROLES: Mapping[str, tuple[Assumption, ...]] = {"master": MASTER, "slave": SLAVE, "worker": WORKER}


def violations(role: str, values: Values) -> list[str]:
    """A sentence for each row of `role` that these values break; settings classes collect them with others."""
    return [sentence for row in ROLES[role] if (sentence := row.broken(values)) is not None]


def names_of(formula: str) -> list[str]:
    """The names that a formula needs numbers for, in the order of the text."""
    found = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", formula))
    return [name for name in found if name not in _FUNCTIONS and name not in _CONSTANTS]


def value_of(formula: str, numbers: Mapping[str, float]) -> float:
    """Compute a sum of products in Python's notation over names and numbers, with min, max, ceil and floor: nothing
    else is called, looked up or compared. Raises ValueError for any other text, KeyError for a name without a number.
    """
    try:
        return _value(ast.parse(formula, mode="eval").body, {**_CONSTANTS, **numbers})
    except SyntaxError as error:
        raise ValueError(f"{formula!r} is not a formula") from error


def _value(node: ast.expr, numbers: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(name):
            return numbers[name]
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(left, numbers), _value(right, numbers))
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, numbers) for argument in arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not part of a formula")
