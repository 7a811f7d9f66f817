"""Replicas whose messages share links evenly, simulated plainly: each of n messages on a link has an n-th of its rate.

One sender's messages to one receiver use one connection, one after the other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from fractions import Fraction

from dips.planner.costs import Costs
from dips.planner.ir import Kind, Op, Schedule

Starts = tuple[tuple[int, ...], ...]


def fair_starts(schedules: Sequence[Schedule], costs: Costs) -> list[Starts]:
    """When each operation starts, by replica and device; messages go through whole blocks of straight pipelines."""
    now = Fraction(0)
    starts: dict[tuple[int, int], list[int]] = defaultdict(list)
    free: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    running: dict[tuple[int, int], Op] = {}
    arrived: dict[tuple[int, Kind, int, int], Fraction] = {}
    lines: dict[tuple[int, int, int], deque[Op]] = defaultdict(deque)  # the first is sent, or not acknowledged yet
    left: dict[int, dict[tuple[int, int, int], Fraction]] = defaultdict(dict)  # by link and line, in ns
    acknowledged: dict[tuple[int, int, int], Fraction] = {}

    def offer(line: tuple[int, int, int]) -> None:
        wire = costs.wires[line[1:]]
        left[wire.resource][line] = Fraction(wire.busy_ns)

    while True:
        for replica, schedule in enumerate(schedules):
            for device, order in enumerate(schedule.orders):
                place = replica, device
                if place in running or len(starts[place]) == len(order):
                    continue
                op = order[len(starts[place])]
                needs = op.kind is not Kind.W and (op.kind is not Kind.F or op.stage > 0)
                ready = arrived.get((replica, Kind.F if op.kind is Kind.F else Kind.B, op.stage, op.microbatch))
                if needs and ready is None:
                    continue
                start = max(free[place], ready or Fraction(0)) if needs else free[place]
                starts[place].append(int(start))
                free[place] = start + costs.compute_ns(op.stage, op.kind)
                running[place] = op
        times = [free[place] for place in running] + list(acknowledged.values())
        times += [now + min(shares.values()) * len(shares) for shares in left.values() if shares]
        if not times:
            return [tuple(tuple(starts[r, d]) for d in range(s.n_devices)) for r, s in enumerate(schedules)]
        before, now = now, min(times)
        for shares in left.values():
            for line in shares:
                shares[line] -= (now - before) / len(shares)
        for (replica, device), op in [item for item in running.items() if free[item[0]] == now]:
            del running[replica, device]
            stage = op.stage + (1 if op.kind is Kind.F else -1)
            if op.kind is Kind.F and stage == schedules[replica].n_stages:
                arrived[replica, Kind.B, op.stage, op.microbatch] = now
            elif op.kind is not Kind.W and stage >= 0 and (device, stage) in costs.wires:
                lines[replica, device, stage].append(op)
                if len(lines[replica, device, stage]) == 1:
                    offer((replica, device, stage))
            elif op.kind is not Kind.W and stage >= 0:
                arrived[replica, Kind.F if op.kind is Kind.F else Kind.B, stage, op.microbatch] = now
        for shares in left.values():
            for line in [line for line, rest in shares.items() if not rest]:
                del shares[line]
                op, (replica, device, stage) = lines[line][0], line
                wire = costs.wires[device, stage]
                kind = Kind.F if op.kind is Kind.F else Kind.B
                arrived[replica, kind, stage, op.microbatch] = now + wire.latency_ns
                acknowledged[line] = now + wire.hold_ns
        for line in [line for line, at in acknowledged.items() if at == now]:
            del acknowledged[line]
            lines[line].popleft()
            if lines[line]:
                offer(line)
