"""Pipeline schedules by name, which `fixed` and `greedy` make.

`optimal` is apart: its solver takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from dips.planner.costs import Costs
from dips.planner.ir import Schedule, loop, straight, wave
from dips.planner.schedules.fixed import gpipe, interleaved_1f1b, one_f_one_b, runs_evenly, zb_h1, zb_v
from dips.planner.schedules.greedy import compact_zb, cross_ud, cross_wave
from dips.planner.schedules.scaleacross import OPERATION, dora_pp, interleaved_zb_v, zigzag
from dips.planner.simulate import peaks, simulate


class NamedSchedule(NamedTuple):
    """A kind of schedule."""

    # of devices, microbatches, costs, and the memory of each device
    make: Callable[[int, int, Costs, Sequence[int]], Schedule]
    places: Callable[[int], tuple[int, ...]]  # of devices: the device of each stage
    fixed: bool  # the order knows no costs and no limit of memory, but for ZB-V's choice

    def chunks(self, n_devices: int) -> int:
        """The number of stages on each device."""
        return len(self.places(n_devices)) // n_devices

    def goes_round(self, n_devices: int) -> bool:
        """Whether the last device sends to the first."""
        places = self.places(n_devices)
        return n_devices > 1 and (n_devices - 1, 0) in pairwise(places)


def _fixed(make: Callable[[int, int], Schedule], places: Callable[[int], tuple[int, ...]]) -> NamedSchedule:
    return NamedSchedule(lambda n, n_microbatches, costs, memory: make(n, n_microbatches), places, True)


def _zb_v_of(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int]) -> Schedule:
    """ZB-V; where microbatches are too few for its pattern, the shortest of the orders for few, the pattern first, and
    of those that fit in the memory, if any does: the pattern needs the least.

    With as many as devices or fewer, one of them is the greedy's for links without delay: they all fit in 1F1B's
    memory. So without delay it is never longer than `cross_wave` there.
    """
    orders = [zb_v(n_devices, n_microbatches)]
    if not runs_evenly(n_devices, n_microbatches):
        orders.append(zb_v(n_devices, n_microbatches, w_between=True))
    if n_microbatches <= n_devices:
        held = [stage.activation for stage in costs.stages]
        room = [n_microbatches * (held[d] + held[-1 - d]) for d in range(n_devices)]
        greedy = cross_wave(n_devices, n_microbatches, replace(costs, wires={}), room)
        orders.append(replace(greedy, name="zb_v"))
    if len(orders) == 1:
        return orders[0]
    fit = [
        order for order in orders if all(peak <= left for peak, left in zip(peaks(order, costs), memory, strict=True))
    ]
    return min(fit or orders, key=lambda order: simulate(order, costs).makespan_ns)


SCHEDULES = {
    "gpipe": _fixed(gpipe, straight),
    "1f1b": _fixed(one_f_one_b, straight),
    "interleaved_1f1b": _fixed(interleaved_1f1b, partial(loop, chunks=2)),
    "zb_h1": _fixed(zb_h1, straight),
    "zb_v": NamedSchedule(_zb_v_of, wave, True),
    "cross_ud/1": NamedSchedule(cross_ud, straight, False),
    "cross_ud/2": NamedSchedule(partial(cross_ud, parts=2), straight, False),
    "cross_ud/4": NamedSchedule(partial(cross_ud, parts=4), straight, False),
    "cross_wave": NamedSchedule(cross_wave, wave, False),
    "compact_zb": NamedSchedule(compact_zb, straight, False),
}

CHUNKS = 4
"""Stages on each device of the schedules in MANY_CHUNKS."""


def _interleaved_zb_v_of(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int]) -> Schedule:
    """Interleaved ZBV with as many microbatches on their way as devices, made for the longest delay of a message."""
    operation_ns = max(1, costs.stages[0].f_ns)
    delay_ns = max((wire.busy_ns + wire.latency_ns for wire in costs.wires.values()), default=0)
    return interleaved_zb_v(n_devices, n_microbatches, CHUNKS, n_devices, round(OPERATION * delay_ns / operation_ns))


MANY_CHUNKS = {
    # With as many microbatches at once as devices.
    "dora_pp": NamedSchedule(lambda n, batches, *_: dora_pp(n, batches, CHUNKS, n), partial(loop, chunks=CHUNKS), True),
    "interleaved_zb_v": NamedSchedule(_interleaved_zb_v_of, partial(zigzag, chunks=CHUNKS), True),
}
"""Schedules of ScaleAcross Explorer, which can be run; plans and sweeps do not choose from them."""

CROSS_UD = ("cross_ud/1", "cross_ud/2", "cross_ud/4")
""""UDSub" in the paper: blocks in so many parts."""
