"""What happened in this life of a slave, counted where the engine carries it out: on the event loop, and nowhere else.

A count is a dictionary's entry for each job, command and snapshot; chunks are counted by the data port itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dips.core.clock import Clock
from dips.core.errors import Refused
from dips.core.layout import FLOAT32_BYTES
from dips.core.observe.counting import Durations, Observed

JOBS = ("load", "measure", "prepare", "commit", "list", "move")


@dataclass(frozen=True)
class Update:
    """One outer step: its time in seconds, and the bytes that it had to move, each stream counted once."""

    seconds: float
    n_bytes: int


@dataclass(frozen=True)
class Counted:
    """All counts, as they stood at one moment. snapshot_s: when the last one became durable, of the process's clock."""

    events: Mapping[str, int]
    jobs: Mapping[str, Observed]
    failures: Mapping[str, int]
    snapshots: Observed
    snapshot_s: float | None
    update: Update | None


@dataclass
class Counts:
    """Counts of one process."""

    clock: Clock
    _events: Counter[str] = field(default_factory=Counter)
    _jobs: dict[str, Durations] = field(default_factory=dict)
    _failures: Counter[str] = field(default_factory=Counter)
    _snapshots: Durations = field(default_factory=Durations)
    _snapshot_s: float | None = None
    _update: Update | None = None

    def note(self, kind: str) -> None:
        """A line of the tape, or the end of a stream ("unlinked"). Kinds are the state machine's."""
        self._events[kind] += 1

    @contextlib.contextmanager
    def job(self, kind: str) -> Iterator[None]:
        """A job of JOBS; one that is refused is counted as failed."""
        began_s = self.clock.monotonic_s()
        try:
            yield
        except Refused:
            self._failures[kind] += 1
            raise
        self._jobs.setdefault(kind, Durations()).observe(self.clock.monotonic_s() - began_s)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """A snapshot or its manifest on its way to the disk."""
        began_s = self.clock.monotonic_s()
        yield
        self._snapshot_s = self.clock.monotonic_s()
        self._snapshots.observe(self._snapshot_s - began_s)

    @contextlib.contextmanager
    def update(self, n_elems: int, pushes: int) -> Iterator[None]:
        """An outer step: it reads theta, momentum and the pushes, and writes theta and momentum."""
        began_s = self.clock.monotonic_s()
        yield
        n_bytes = (4 + pushes) * n_elems * FLOAT32_BYTES
        self._update = Update(self.clock.monotonic_s() - began_s, n_bytes)

    def counted(self) -> Counted:
        return Counted(
            dict(self._events),
            {kind: durations.observed() for kind, durations in self._jobs.items()},
            dict(self._failures),
            self._snapshots.observed(),
            self._snapshot_s,
            self._update,
        )
