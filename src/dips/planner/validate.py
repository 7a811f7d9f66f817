"""Checks a schedule: every operation once and on its device, in a possible order, within memory, able to end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence, Set

from dips.planner.costs import Costs
from dips.planner.errors import PlanError
from dips.planner.exchange import check_exchanges, check_shards
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.simulate import Timeline, simulate


def validate(schedule: Schedule, costs: Costs, memory: Sequence[int] | None = None) -> Timeline:
    """Check a schedule and simulate it. memory[d]: limit of device d, in the units of costs.

    Raises PlanError, which names the device and the cell, for: an operation that is missing, doubled or elsewhere;
    one before an operation that it needs on its own device; memory over the limit; devices that wait for each other;
    exchanges of replicas in a wrong place.
    """
    check_complete(schedule)
    for device, order in enumerate(schedule.orders):
        _check_order(device, order)
    if memory is not None:
        for device, (peak, limit) in enumerate(zip(peaks(schedule, costs), memory, strict=True)):
            if peak > limit:
                raise PlanError(
                    f"{schedule.name}: device {device} holds {peak} of activations at once, its memory allows {limit}: "
                    "use a schedule that holds fewer microbatches, or more memory"
                )
    timeline = simulate(schedule, costs)
    if costs.exchanges:
        check_exchanges(timeline.exchanges, costs.exchanges, *_stage_spans(timeline))
    if costs.shards:
        check_shards(timeline.shards, costs.shards, schedule.n_microbatches)
    return timeline


def _stage_spans(timeline: Timeline) -> tuple[list[int], list[int]]:
    """Start of the first operation and end of the last one of each stage."""
    starts: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for order, begun, ended in zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True):
        for op, start, end in zip(order, begun, ended, strict=True):
            starts[op.stage].append(start)
            ends[op.stage].append(end)
    stages = range(timeline.schedule.n_stages)
    return [min(starts[stage]) for stage in stages], [max(ends[stage]) for stage in stages]


def peaks(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The most activation memory that each device holds at any time: F charges when it starts, D, W and B release
    when they end."""
    found, last = [], schedule.parts - 1
    for order in schedule.orders:
        held = peak = 0
        for op in order:
            stage = costs.stages[op.stage]
            if op.kind is Kind.F and op.part == 0:
                held += stage.activation
                peak = max(peak, held)
            elif op.part == last:
                held -= stage.released(op.kind)
        found.append(peak)
    return tuple(found)


def check_complete(schedule: Schedule) -> None:
    """Check that every operation is there once and on its device. Raises PlanError."""
    seen: set[Op] = set()
    parts_of: Counter[tuple[int, int, Kind]] = Counter()
    for device, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            wrong = _misplaced(schedule, device, op, seen)
            if wrong:
                raise PlanError(f"{schedule.name}: device {device}, cell {index + 1} ({op}) {wrong}")
            seen.add(op)
            parts_of[op.stage, op.microbatch, op.kind] += 1
    whole = schedule.parts
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.n_microbatches):
            f, d, w, b = (parts_of.get((stage, microbatch, kind), 0) for kind in (Kind.F, Kind.D, Kind.W, Kind.B))
            if f != whole or (d, w, b) not in ((whole, whole, 0), (0, 0, whole)):
                raise PlanError(
                    f"{schedule.name}: stage {stage} has {f} F, {d} I, {w} W and {b} B of microbatch {microbatch}: it "
                    f"needs {whole} F, and either {whole} I and {whole} W or {whole} B"
                )


def _misplaced(schedule: Schedule, device: int, op: Op, seen: Set[Op]) -> str:
    """What is wrong with an operation at its place; empty when nothing is."""
    if op.stage >= schedule.n_stages or op.microbatch >= schedule.n_microbatches or op.part >= schedule.parts:
        return (
            f"is outside of {schedule.n_stages} stages, {schedule.n_microbatches} microbatches and "
            f"{schedule.parts} parts: remove it"
        )
    if schedule.device_of_stage[op.stage] != device:
        return f"belongs to device {schedule.device_of_stage[op.stage]}: move it there"
    return "is there a second time: remove one" if op in seen else ""


def _check_order(device: int, order: Sequence[Op]) -> None:
    """Check that each operation comes after what it needs on its own device."""
    done: set[Op] = set()
    for index, op in enumerate(order):
        if op.part:
            needed = op._replace(part=op.part - 1)
        else:
            needed = Op(Kind.D if op.kind is Kind.W else Kind.F, op.stage, op.microbatch)
        if (op.part or op.kind is not Kind.F) and needed not in done:
            raise PlanError(f"device {device}, cell {index + 1}: {op} comes before {needed}, which it needs: swap them")
        done.add(op)
