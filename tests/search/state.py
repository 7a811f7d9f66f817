"""The global state of a search, as numbers, the draft in which the next one is made, and the error of a broken
invariant."""

from __future__ import annotations

import hashlib
import marshal
from typing import Any, NamedTuple

# ---- violation -------------------------------------------------------------------------------------------------------
#
# The error for a violated invariant in a search.


class SearchViolation(Exception):
    """An invariant does not hold. name: I1 to I14, ILLEGAL (a step that is not in a machine's table), OWNERS (two ranks
    of a cluster own one chunk), names (a second process took a name over), or DEADLOCK."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}")
        self.name = name
        self.sentence = sentence

    def __reduce__(self) -> tuple[type[SearchViolation], tuple[str, str]]:
        return SearchViolation, (self.name, self.sentence)


# ---- state -----------------------------------------------------------------------------------------------------------


REQUEST, HELD, ANSWER = 0, 1, 2
"""Places of a call: on its way, with the master, on its way back."""

WHOLE, BROKEN, CLOSING = 0, 1, 2
"""States of a stream: intact; broken, not yet noticed by the master; ended by the master, not yet noticed by the
slave."""

NEWEST, OLD = 0, 1
"""The master of a stream or call: with two live masters, the one of the newer epoch or the older one."""

NO_MASTER = -1
"""In place of the old master's number when there is only one master."""


class SearchCall(NamedTuple):
    """An open call. call_id 0: no process waits for the answer."""

    cluster: int
    call_id: int
    stage: int
    message: int  # number of the request or of the answer
    token: int
    past: int = 0  # 1 when the master took it although its cluster has a newer incarnation by then
    at: int = NEWEST  # the master that holds it


class SlaveStream(NamedTuple):
    """A slave's stream: commands down, messages up, oldest first."""

    number: int
    slave: int
    down: tuple[int, ...]
    up: tuple[int, ...]
    condition: int
    at: int = NEWEST  # the master that it leads to


class SearchState(NamedTuple):
    """A global state, by numbers."""

    master: int
    slaves: tuple[int, ...]
    clusters: tuple[int, ...]
    links: tuple[SlaveStream, ...]
    calls: tuple[SearchCall, ...]
    strays: tuple[tuple[int, int], ...]  # messages of slaves that arrive once more, by stream
    chunks: tuple[tuple[int, int], ...]  # chunks that arrive late, by slave
    budget: tuple[int, ...]  # faults left, in the order of FAULTS, then all together
    reference: int
    old: int = NO_MASTER  # a master whose epoch is past, and that does not know it; NO_MASTER where there is none

    def key(self) -> bytes:
        """A key of 128 bits for this state: among ten million states two are equal with a chance of 1e-25."""
        plain = (*self[:3], tuple(map(tuple, self.links)), tuple(map(tuple, self.calls)), *self[5:])
        return key_of(plain)


def key_of(plain: Any) -> bytes:
    """A key of 128 bits for a structure of plain values. Equals have equal bytes: marshal's version 2 writes no
    references."""
    return hashlib.blake2b(marshal.dumps(plain, 2), digest_size=16).digest()


class Messages:
    """Messages by number."""

    def __init__(self) -> None:
        self._ids: dict[Any, int] = {}
        self.all: list[Any] = []

    def number(self, message: Any) -> int:
        key = (message.__class__, message)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.all)
            self.all.append(message)
        return found


class Draft:
    """A state that is being made."""

    def __init__(self, state: SearchState) -> None:
        self.master = state.master
        self.slaves = list(state.slaves)
        self.clusters = list(state.clusters)
        self.links = {link.number: link for link in state.links}
        self.calls = list(state.calls)
        self.strays = list(state.strays)
        self.chunks = list(state.chunks)
        self.old = state.old
        self.budget = state.budget
        self.reference = state.reference

    def done(self) -> SearchState:
        return SearchState(
            self.master,
            tuple(self.slaves),
            tuple(self.clusters),
            tuple(sorted(self.links.values())),
            tuple(sorted(self.calls)),
            tuple(sorted(self.strays)),
            tuple(sorted(self.chunks)),
            self.budget,
            self.reference,
            self.old,
        )

    def link_of(self, slave: int) -> SlaveStream | None:
        """The stream that the slave considers open."""
        return next((k for k in self.links.values() if k.slave == slave and k.condition != BROKEN), None)

    def free_link(self, slave: int) -> int:
        """The smallest unused number for this slave's next stream."""
        number = 10 * (slave + 1)
        while number in self.links:
            number += 1
        return number

    def free_token(self, cluster: int) -> int:
        """An unused token; tokens identify the caller: 100 and on for cluster 0, and so on."""
        used = {call.token for call in self.calls if call.stage == HELD}
        token = 100 * (cluster + 1)
        while token in used:
            token += 1
        return token

    def spend(self, fault: int) -> None:
        budget = list(self.budget)
        budget[fault] -= 1
        budget[-1] -= 1
        self.budget = tuple(budget)
