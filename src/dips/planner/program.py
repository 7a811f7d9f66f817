"""Compiles schedules into flat lists of numbers, on which the simulators run.

An operation is an index on its device. What it waits for and what it makes possible are slots: one for each
(replica, direction, stage, microbatch) that says when that input is there. Devices of replica r come after those of
replica r - 1; replicas share nothing but their links.

Where a stage waits for its weights (dips.planner.exchange), a pause comes before its first operation: an operation
of length 0 that needs a slot that is filled from the beginning. strip() removes the pauses from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from dips.planner.costs import Costs, Wire
from dips.planner.errors import PlanError
from dips.planner.exchange import gates
from dips.planner.ir import Kind, Op, Schedule

NOTHING = -1
T = TypeVar("T")


class Give(NamedTuple):
    """The output of an operation. slot: filled when the message arrives; target: the device that gets it. wire: None
    when it arrives at once."""

    slot: int
    target: int
    wire: Wire | None


class Device(NamedTuple):
    """The operations of one device. lasts[i]: nanoseconds of operation i; needs[i]: the slot that it waits for, or
    NOTHING; gives[i]: or None."""

    lasts: list[int]
    needs: list[int]
    gives: list[Give | None]


class Program(NamedTuple):
    """A compiled program. filled: slots that are filled from the beginning, and when. pauses[d]: indices of the pauses
    on device d."""

    devices: list[Device]
    n_slots: int
    orders: list[tuple[Op, ...]]
    filled: dict[int, int]
    pauses: list[list[int]]

    def strip(self, rows: list[list[T]]) -> list[list[T]]:
        """Remove the entries of pauses from the values of each device."""
        if not any(self.pauses):
            return rows
        found = [list(row) for row in rows]
        for row, pauses in zip(found, self.pauses, strict=True):
            for index in reversed(pauses):
                del row[index]
        return found

    def operations_before(self, at: Sequence[int]) -> list[int]:
        """How many operations precede index at[d] on each device."""
        return [index - sum(p < index for p in pauses) for index, pauses in zip(at, self.pauses, strict=True)]


def compile_program(schedules: Sequence[Schedule], costs: Costs) -> Program:
    """Compile schedules, one for each replica. Raises PlanError where costs are of another number of stages."""
    devices: list[Device] = []
    orders: list[tuple[Op, ...]] = []
    base = 0
    for replica, schedule in enumerate(schedules):
        if len(costs.stages) != schedule.n_stages:
            raise PlanError(f"costs of {len(costs.stages)} stages for a schedule of {schedule.n_stages}")
        tables = _Tables(schedule, costs, base, len(devices), replica)
        devices += [tables.device(device, order) for device, order in enumerate(schedule.orders)]
        orders += schedule.orders
        base += 2 * schedule.n_stages * schedule.n_microbatches
    program = Program(devices, base, orders, {}, [[] for _ in devices])
    waits = gates(costs.exchanges, costs.overlapped)
    return _with_pauses(program, waits) if any(waits) else program


def _with_pauses(program: Program, waits: Sequence[int]) -> Program:
    """Insert the pauses. waits[s]: before this time stage s has no weights."""
    filled = {program.n_slots + stage: at_ns for stage, at_ns in enumerate(waits)}
    orders, pauses = list(program.orders), []
    for number, (device, order) in enumerate(zip(program.devices, program.orders, strict=True)):
        firsts = sorted({op.stage: at for at, op in reversed(list(enumerate(order)))}.values())
        longer = list(order)
        for at in reversed(firsts):  # from the end, so that earlier indices do not change
            device.lasts.insert(at, 0)
            device.needs.insert(at, program.n_slots + order[at].stage)
            device.gives.insert(at, None)
            longer.insert(at, order[at])
        orders[number] = tuple(longer)
        pauses.append([at + before for before, at in enumerate(firsts)])
    return Program(program.devices, program.n_slots + len(waits), orders, filled, pauses)


class _Tables:
    """The tables of one replica, whose slots begin at `base` and whose devices at `first`."""

    def __init__(self, schedule: Schedule, costs: Costs, base: int, first: int, replica: int) -> None:
        self._n, self._last_part = schedule.n_microbatches, schedule.parts - 1
        n_stages, place, n = schedule.n_stages, schedule.device_of_stage, self._n
        self._forward, self._backward, self._first_stage = base, base + n_stages * n, 0
        self._lasts = [
            {kind: [costs.compute_ns(stage, kind, part, schedule.parts) for part in range(schedule.parts)]
             for kind in Kind}
            for stage in range(n_stages)
        ]  # fmt: skip

        def wire_of(here: int, there: int) -> Wire | None:
            wire = costs.wires.get((here, there))
            return wire.of(replica) if wire else None

        self._after_f: list[tuple[int, int, Wire | None] | None] = []
        self._after_d: list[tuple[int, int, Wire | None] | None] = []
        for stage in range(n_stages):
            here = place[stage]
            if stage + 1 < n_stages:
                there = place[stage + 1]
                forth = (self._forward + (stage + 1) * n, first + there, wire_of(here, there))
            else:
                forth = (self._backward + stage * n, NOTHING, None)
            self._after_f.append(forth)
            if stage:
                there = place[stage - 1]
                self._after_d.append((self._backward + (stage - 1) * n, first + there, wire_of(here, there)))
            else:
                self._after_d.append(None)

    def device(self, number: int, order: Sequence[Op]) -> Device:
        lasts: list[int] = []
        needs: list[int] = []
        gives: list[Give | None] = []
        tables, last_part, n = self._lasts, self._last_part, self._n
        forward, backward, after_f, after_d = self._forward, self._backward, self._after_f, self._after_d
        kind_f, kind_w = Kind.F, Kind.W
        new = tuple.__new__
        for kind, stage, microbatch, part in order:
            lasts.append(tables[stage][kind][part])
            if kind is kind_w:
                needs.append(NOTHING)
                gives.append(None)
                continue
            if kind is kind_f:
                needs.append(forward + stage * n + microbatch if stage and not part else NOTHING)
                after = after_f[stage]
            else:
                needs.append(backward + stage * n + microbatch if not part else NOTHING)
                after = after_d[stage]
            if after is None or part != last_part:
                gives.append(None)
            else:
                gives.append(new(Give, (after[0] + microbatch, after[1], after[2])))
        return Device(lasts, needs, gives)
