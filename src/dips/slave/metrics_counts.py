"""Counts a slave process's jobs, commands and snapshots where the shell carries them out: only on the event loop.

The data port counts chunks itself.
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
    """All counts at one moment. snapshot_s: when the last snapshot became durable, of the process's clock."""

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
        """Count a line of the tape, or the end of a stream ("unlinked"). Kinds are the state machine's."""
        self._events[kind] += 1

    @contextlib.contextmanager
    def job(self, kind: str) -> Iterator[None]:
        """Count and time a job of JOBS; one that is refused is counted as failed."""
        began_s = self.clock.monotonic_s()
        try:
            yield
        except Refused:
            self._failures[kind] += 1
            raise
        self._jobs.setdefault(kind, Durations()).observe(self.clock.monotonic_s() - began_s)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Count and time the writing of a snapshot or its manifest."""
        began_s = self.clock.monotonic_s()
        yield
        self._snapshot_s = self.clock.monotonic_s()
        self._snapshots.observe(self._snapshot_s - began_s)

    @contextlib.contextmanager
    def update(self, n_elems: int, pushes: int) -> Iterator[None]:
        """Time an outer step: it reads theta, momentum and the pushes, and writes theta and momentum."""
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
