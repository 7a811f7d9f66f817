"""The planner's simulator once more, plainly: operations end in the order of time, every look-up by its name."""

from __future__ import annotations

import heapq

from dips.planner.costs import Costs
from dips.planner.ir import Kind, Op, Schedule

Times = list[list[tuple[int, int]]]
Sent = list[tuple[Op, int, int, int]]


def plain_simulation(schedule: Schedule, costs: Costs) -> tuple[Times, Sent]:
    """(start, end) of every operation by device; (operation, ready, start, arrival) of every message, as they are
    sent."""
    arrived: dict[tuple[bool, int, int], int] = {}
    link_free: dict[int, int] = {}
    times: Times = [[] for _ in schedule.orders]
    sent: Sent = []
    idle = [True] * schedule.n_devices
    running: list[tuple[int, int]] = []

    def begin(device: int) -> None:
        index = len(times[device])
        if not idle[device] or index == len(schedule.orders[device]):
            return
        op, ready = schedule.orders[device][index], 0
        if op.part == 0 and op.kind is not Kind.W and not (op.kind is Kind.F and op.stage == 0):
            found = arrived.get((op.kind is Kind.F, op.stage, op.microbatch))
            if found is None:
                return
            ready = found
        start = max(times[device][-1][1] if times[device] else 0, ready)
        end = start + costs.compute_ns(op.stage, op.kind, op.part, schedule.parts)
        times[device].append((start, end))
        heapq.heappush(running, (end, device))
        idle[device] = False

    def send(op: Op, source: int, end: int) -> int | None:
        stage = op.stage + 1 if op.kind is Kind.F else op.stage - 1
        if stage == schedule.n_stages:
            arrived[False, op.stage, op.microbatch] = end
        if not 0 <= stage < schedule.n_stages:
            return None
        target = schedule.device_of_stage[stage]
        wire = costs.wires.get((source, target))
        if wire is not None:
            start = max(end, link_free.get(wire.resource, 0)) if wire.busy_ns else end
            if wire.busy_ns:
                link_free[wire.resource] = start + wire.busy_ns
            sent.append((op, end, start, start + wire.busy_ns + wire.latency_ns))
        arrived[op.kind is Kind.F, stage, op.microbatch] = end if wire is None else sent[-1][3]
        return target

    for device in range(schedule.n_devices):
        begin(device)
    while running:
        end, device = heapq.heappop(running)
        op = schedule.orders[device][len(times[device]) - 1]
        idle[device] = True
        target = send(op, device, end) if op.part == schedule.parts - 1 and op.kind is not Kind.W else None
        if target is not None:
            begin(target)
        begin(device)
    return times, sent
