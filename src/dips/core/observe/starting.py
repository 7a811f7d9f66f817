"""Reports the progress of a start that takes long: kernels that compile, gigabytes that are touched for the first time.

A line of the log, and a record of kind "starting" on the tape, from which a launcher takes it to its console. What is
over at once says nothing.
"""

from __future__ import annotations

import logging

from dips.core.clock import Clock
from dips.core.observe.tape import Tape
from dips.core.units import format_bytes, format_seconds

KIND = "starting"
"""Of the tape's records; each has `what`, `done`, `of` and the `sentence`."""

EVERY_S = 5.0
"""Between two lines about one thing."""

QUIET_S = 1.0
"""What takes no longer is not worth a line."""


class Starting:
    """One thing that takes long, and how far it is; made when it begins. To be used by one thread at a time."""

    def __init__(self, what: str, logger: logging.Logger, tape: Tape, clock: Clock, quiet_s: float = QUIET_S) -> None:
        """what: a word or two for people, such as "memory". quiet_s: before the first line."""
        self._what = what
        self._logger = logger
        self._tape = tape
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._due_s = self._began_s + quiet_s
        self._said = False

    def compiles(self, name: str, done: int, of: int, kept: str = "") -> None:
        """A kernel of this name is compiled now; `done` are begun, this one included. kept: where the code is kept, or
        why it is not; for the first line."""
        more = f"; {kept}" if kept and not self._said else ""
        self._at(done, of, f"{self._what}: compiling {done} of {of} ({name}){more}")

    def touched(self, done_bytes: int, of_bytes: int) -> None:
        """So much memory is really there by now."""
        self._at(done_bytes, of_bytes, f"{self._what}: {format_bytes(done_bytes)} of {format_bytes(of_bytes)} are made")

    def end(self) -> None:
        """It is over; reports so if progress was reported."""
        if self._said:
            took = format_seconds(round(self._clock.monotonic_s() - self._began_s, 1))
            self._say(1, 1, f"{self._what}: ready after {took}")

    def _at(self, done: int, of: int, sentence: str) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._said = True
            self._say(done, of, sentence)

    def _say(self, done: int, of: int, sentence: str) -> None:
        self._logger.info("%s", sentence)
        self._tape.write(KIND, "", what=self._what, done=done, of=of, sentence=sentence)
