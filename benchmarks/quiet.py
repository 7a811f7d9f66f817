"""Other work on this machine: waits until there is little of it, and says how much there was during a sample.

What is foreign is what the whole machine was busy with (/proc/stat, time that a hypervisor took away included) less the
processor time of the processes under measurement. Linux only; elsewhere nothing is known, and nothing is waited for.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

STAT = Path("/proc/stat")
TICK_HZ = os.sysconf("SC_CLK_TCK")
LOOK_S = 0.15
"""Long enough that one tick of the kernel's count is a small part of it."""

BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Of the line "cpu" of /proc/stat: user, nice, system, irq, softirq and steal; idle and iowait are not work."""

NICED_FIELDS = (1,)


S = TypeVar("S")


_ALL_THREADS = 2
"""Of Linux's numbers of processes' clocks: what clock_getcpuclockid(3) makes, which Python offers for threads only."""


@dataclass(frozen=True)
class Gate:
    """wait_s: the longest wait before a sample until less than `limit` processors are busy with other work; 0: none.

    A sample is quiet if there was also less during it.
    """

    wait_s: float
    limit: float

    def wait(self, own_s: Callable[[], float] = lambda: 0.0) -> None:
        """own_s: processor seconds so far of the processes under measurement, unless they rest."""
        end_s = time.monotonic() + self.wait_s
        while time.monotonic() < end_s:
            foreign = Foreign(own_s)
            time.sleep(LOOK_S)
            if self.passes(foreign.cores()):
                return

    def passes(self, foreign: float) -> bool:
        """Whether a sample with so many processors of other work was quiet; one of which nothing is known was."""
        return not foreign >= self.limit

    def quiet(self, samples: Sequence[S], foreign_of: Callable[[S], float]) -> list[S]:
        """The quiet samples."""
        return [sample for sample in samples if self.passes(foreign_of(sample))]


class Foreign:
    """How many processors other work kept busy, from the making of this object on.

    own_s: processor seconds so far of the processes under measurement.
    """

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self._began_s, self._before_s, self._niced_s = time.monotonic(), busy_s() - own_s(), busy_s(NICED_FIELDS)

    def cores(self) -> float:
        """Mean since the making; NaN where the machine does not say. The machine counts ticks of 10 ms, so this is a
        little off for short samples, below zero too.
        """
        return (busy_s() - self._own_s() - self._before_s) / (time.monotonic() - self._began_s)

    def niced(self) -> float:
        """The part of cores() of processes with a lower priority than usual: their own time, not the kernel's."""
        return (busy_s(NICED_FIELDS) - self._niced_s) / (time.monotonic() - self._began_s)


def processor_s(pid: int) -> float:
    """Processor time of a process since its start, kernel included; 0 once it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _ALL_THREADS)
    except OSError:
        return 0.0


def busy_s(fields: Sequence[int] = BUSY_FIELDS) -> float:
    """Processor seconds of the machine's work since its start; NaN where /proc/stat is missing."""
    try:
        line = STAT.read_text().partition("\n")[0]
    except OSError:
        return math.nan
    return busy_of(line, fields)


def busy_of(line: str, fields: Sequence[int] = BUSY_FIELDS) -> float:
    """Of the first line of /proc/stat."""
    ticks = line.split()[1:]
    return sum(int(ticks[field]) for field in fields) / TICK_HZ
