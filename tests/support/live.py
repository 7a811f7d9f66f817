"""At most as many live runs at a time as this machine has processors for, whoever started them.

One file for each usable processor, in a directory of the machine; who holds its lock has that processor. A run takes
one or two, and the kernel gives them back when its test process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

PLACE = Path("/tmp/dips-live")
LOOK_S = 0.05
HEAVY, LIGHT = 2, 1
"""Processors of a run that computes all the time (torch, many processes), and of one that mostly waits."""

_taking = threading.RLock()
_held: list[int] = []
_runs = 0


@contextlib.contextmanager
def run(weight: int = LIGHT) -> Iterator[None]:
    """Hold so many processors while a run lives. A run inside another one takes none.

    The wait for them is no part of the test's ten minutes.
    """
    global _runs
    with _taking:
        if not _runs:
            _held.extend(_tokens(weight))
        _runs += 1
    try:
        yield
    finally:
        with _taking:
            _runs -= 1
            while not _runs and _held:
                os.close(_held.pop())


class Run:
    """Context manager: begins once it has its processors, and ends whatever it has begun."""

    weight = LIGHT

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(run(self.weight))
            stack.callback(self._end)
            self._begin()
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def _begin(self) -> None: ...

    def _end(self) -> None:
        raise NotImplementedError


def _tokens(weight: int) -> list[int]:
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's limit stands still
    try:
        PLACE.mkdir(mode=0o777, exist_ok=True)
        gate = _opened("gate")
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)  # one at a time takes, so that none waits with half of what it needs
            places = [f"processor-{number}" for number in range(len(os.sched_getaffinity(0)))]
            taken: dict[str, int] = {}
            while len(taken) < min(weight, len(places)):
                for place in places:
                    if place not in taken and len(taken) < weight and (token := _free(place)) is not None:
                        taken[place] = token
                time.sleep(0 if len(taken) == weight else LOOK_S)  # between two looks at what others hold
            return list(taken.values())
        finally:
            os.close(gate)
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)


def _free(place: str) -> int | None:
    token = _opened(place)
    try:
        fcntl.flock(token, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(token)
        return None
    return token


def _opened(name: str) -> int:
    return os.open(PLACE / name, os.O_RDWR | os.O_CREAT, 0o666)
