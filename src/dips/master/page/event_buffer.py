"""Passes events of the tape from the control loop to the page's thread; neither side ever waits.

The buffer is bounded: of a burst that the page cannot take, the oldest events are dropped here, never from the tape.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dips.core.clock import Clock
from dips.core.observe.tape import Tape

# ---- bounds ----------------------------------------------------------------------------------------------------------
#
# All bounds of the status page, with their costs.
#
# The page's costs for the run must never grow: memory, time of the control loop, connections.


SAMPLE_S = 1.0
"""The period of samples of the state: each takes 0.2 ms of the control loop with 8 clusters, about 1 ms with 64."""

MAX_STREAMS = 32
"""The most open pages. Each costs one connection and, for each sample, one write of a few KB."""

MAX_CONNECTIONS = 128
"""The most connections of all kinds; further ones are closed before TLS begins, which takes 0.6 MB for each (asyncio's
buffer alone 256 KiB)."""

MAX_NEWCOMERS, MAX_NEWCOMERS_OF_ADDRESS = 64, 32
"""The most connections, in all and from one address, that have not been shown anything yet. A browser opens six, and an
office may be behind one address."""

SILENT_S = 15.0
"""A connection that has not sent a request which it may make by then is closed."""

WAIT_S = 5.0
"""A stream without a sample for this long sends a sign: the page sees that it is alive, the master that it is open."""

WRITE_S = 20.0
"""A stream whose reader takes nothing for this long is ended; the browser connects again."""

MAX_ROWS = 1200
"""The most samples of the curves. When they are full, every second one is dropped, and from then on samples are taken
half as often: 1200 rows are enough for the first minutes of a run and for its third month."""

CHARTED_CLUSTERS = 24
"""The most clusters whose losses are kept and drawn: 24 x 1200 numbers, 230 KB. The page says when there are more."""

MAX_HELDOUT = 600
"""The most held-out losses, reduced in the same way."""

MAX_EVENTS = 400
"""The most lines of the timeline, 100 KB."""

MAX_ROUNDS = 240
"""The most rounds of the timeline."""

MAX_TEXT = 300
"""The most characters of a text from outside: reasons, notes, names."""

TAPE_TAIL_BYTES = 512 * 1024
"""Bytes at the end of the master's tape, read once at the start, so that the timeline survives a restart."""


# ---- event buffer ----------------------------------------------------------------------------------------------------


MAX_WAITING = 2000
"""The most events between two samples."""

TapeEvent = tuple[float, str, Mapping[str, Any]]
"""(Unix time, kind, fields)."""


class EventBuffer:
    """The events written to the tape since the last take(). Safe to call from several threads."""

    def __init__(self) -> None:
        self._waiting: deque[TapeEvent] = deque(maxlen=MAX_WAITING)

    def add(self, wall_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        self._waiting.append((wall_s, kind, fields))

    def take(self) -> list[TapeEvent]:
        """Removes and returns the waiting events, oldest first."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken


class BufferedTape(Tape):
    """A tape that also adds its events to an event buffer, after they are written."""

    def __init__(self, path: Path, role: str, name: str, clock: Clock, event_buffer: EventBuffer) -> None:
        super().__init__(path, role, name, clock)
        self._copied_to, self._wall_s = event_buffer, clock.wall_s

    def write(self, kind: str, cause: str, **fields: object) -> None:
        super().write(kind, cause, **fields)
        self._copied_to.add(self._wall_s(), kind, fields)


def earlier_events(path: Path, most_bytes: int = TAPE_TAIL_BYTES) -> Iterator[TapeEvent]:
    """The last events of an existing tape; none when it cannot be read. Incomplete lines are left out."""
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


def read_event(line: bytes) -> TapeEvent | None:
    """Reads one line of a tape; None when it is none."""
    try:
        event = json.loads(line)
        return float(event["wall_s"]), str(event["kind"]), event
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
