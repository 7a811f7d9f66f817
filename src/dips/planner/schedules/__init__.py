"""Pipeline schedules by name, which `fixed` and `greedy` make.

`optimal` is apart: its solver takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from dips.planner.costs import Costs
from dips.planner.ir import Schedule, loop, straight, wave
from dips.planner.schedules.fixed import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from dips.planner.schedules.greedy import cross_ud, cross_wave


class NamedSchedule(NamedTuple):
    """A kind of schedule."""

    # of devices, microbatches, costs, and the memory of each device
    make: Callable[[int, int, Costs, Sequence[int]], Schedule]
    places: Callable[[int], tuple[int, ...]]  # of devices: the device of each stage
    fixed: bool  # the order does not depend on costs and memory

    def chunks(self, n_devices: int) -> int:
        """The number of stages on each device."""
        return len(self.places(n_devices)) // n_devices


def _fixed(make: Callable[[int, int], Schedule], places: Callable[[int], tuple[int, ...]]) -> NamedSchedule:
    return NamedSchedule(lambda n, n_microbatches, costs, memory: make(n, n_microbatches), places, True)


SCHEDULES = {
    "gpipe": _fixed(gpipe, straight),
    "1f1b": _fixed(one_f_one_b, straight),
    "interleaved_1f1b": _fixed(interleaved_1f1b, partial(loop, chunks=2)),
    "zb_h1": _fixed(zb_h1, straight),
    "zb_v": _fixed(zb_v, wave),
    "cross_ud/1": NamedSchedule(cross_ud, straight, False),
    "cross_ud/2": NamedSchedule(partial(cross_ud, parts=2), straight, False),
    "cross_ud/4": NamedSchedule(partial(cross_ud, parts=4), straight, False),
    "cross_wave": NamedSchedule(cross_wave, wave, False),
}

CROSS_UD = ("cross_ud/1", "cross_ud/2", "cross_ud/4")
""""UDSub" in the paper: blocks in so many parts."""
