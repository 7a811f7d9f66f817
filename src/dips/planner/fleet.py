"""Simulates several replicas of a pipeline whose messages share links.

A link carries one message at a time at its full rate, in the order in which messages are ready, equal ones by replica
(JEEVES' coordination, HotNets 2025, section 3.3). A wire's hold_ns delays only its own sender here: the next message of
that device on that wire (blocking sends). Replicas that share a link evenly need no fleet: equal ones are one pipeline
whose messages are as large as all of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dips.planner.costs import Costs
from dips.planner.errors import PlanError
from dips.planner.ir import Schedule
from dips.planner.simulate import Run, SimulatedMessage, Timeline, compile_program, exchanged, stuck


@dataclass(frozen=True)
class Fleet:
    """The result: a timeline for each replica; device d is the same in all."""

    timelines: tuple[Timeline, ...]

    @property
    def makespan_ns(self) -> int:
        """From the first start of an operation or exchange to the last one's end, of any replica."""
        return max(one.end_ns for one in self.timelines) - min(one.begin_ns for one in self.timelines)

    @property
    def bubble_fraction(self) -> float:
        """The part of makespan x all devices without computation."""
        busy = sum(t.busy_ns for t in self.timelines)
        whole = self.makespan_ns * sum(t.schedule.n_devices for t in self.timelines)
        return 1.0 - busy / whole if whole else 0.0


def simulate_fleet(schedules: Sequence[Schedule], costs: Costs) -> Fleet:
    """Simulate one schedule for each replica. Raises PlanError, which names replica and cell, when they cannot end."""
    program = compile_program(schedules, costs)
    blocking = any(wire.hold_ns for wire in costs.wires.values())
    run = Run(program, True, blocking)
    n, at = schedules[0].n_devices, program.operations_before(run.at)
    mine = [slice(replica * n, replica * n + n) for replica in range(len(schedules))]
    for replica, schedule in enumerate(schedules):
        reached = at[mine[replica]]
        if any(index < len(row) for index, row in zip(reached, schedule.orders, strict=True)):
            raise PlanError(f"replica {replica}: {stuck(schedule, reached)}")
    starts, ends = program.strip(run.starts), program.strip(run.ends)
    sent: list[list[SimulatedMessage]] = [[] for _ in starts]
    for message in run.messages:
        sent[message.source].append(message._replace(source=message.source % n, target=message.target % n))
    done = exchanged(costs, [(schedule, ends[each]) for schedule, each in zip(schedules, mine, strict=True)])
    timelines = []
    for schedule, each in zip(schedules, mine, strict=True):
        logs, waited_ns = run.sharded(each)
        rows = tuple(map(tuple, starts[each])), tuple(map(tuple, ends[each]))
        messages = tuple(message for row in sent[each] for message in row)
        timelines.append(Timeline(schedule, *rows, messages, done, logs, costs.shards, waited_ns))
    return Fleet(tuple(timelines))
