"""Between the control loop and the page's thread: what the tape said, the page hears; nothing ever waits.

The ear is bounded: of a burst that the page cannot take, the oldest events are lost to it, never to the tape.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dips.core.clock import Clock
from dips.core.observe.telemetry import Tape
from dips.master.page.bounds import TAPE_TAIL_BYTES

MAX_WAITING = 2000
"""Events between two samples."""

Heard = tuple[float, str, Mapping[str, Any]]
"""(Unix time, kind, fields)."""


class Ear:
    """What was written to the tape since it was last asked. Safe to call from several threads."""

    def __init__(self) -> None:
        self._waiting: deque[Heard] = deque(maxlen=MAX_WAITING)

    def hear(self, wall_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        self._waiting.append((wall_s, kind, fields))

    def take(self) -> list[Heard]:
        """What waited, oldest first."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken


class HeardTape(Tape):
    """A tape whose events an ear hears as well, after they are written."""

    def __init__(self, path: Path, role: str, name: str, clock: Clock, ear: Ear) -> None:
        super().__init__(path, role, name, clock)
        self._heard_by, self._wall_s = ear, clock.wall_s

    def write(self, kind: str, cause: str, **fields: object) -> None:
        super().write(kind, cause, **fields)
        self._heard_by.hear(self._wall_s(), kind, fields)


def earlier_events(path: Path, most_bytes: int = TAPE_TAIL_BYTES) -> Iterator[Heard]:
    """The last events that stand on a tape already; none when it cannot be read. Torn lines are left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines[1 if size > most_bytes else 0 : -1]:
        event = read_event(line)
        if event is not None:
            yield event


def read_event(line: bytes) -> Heard | None:
    """One line of a tape; None when it is none."""
    try:
        event = json.loads(line)
        return float(event["wall_s"]), str(event["kind"]), event
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
