"""Simulates several replicas of a pipeline whose messages share links.

A link carries one message at a time at its full rate, in the order in which messages are ready, equal ones by replica
(JEEVES' coordination, HotNets 2025, section 3.3). A wire's hold_ns delays only its own sender here: the next message of
that device on that wire (blocking sends). Replicas that share a link evenly need no fleet: equal ones are one pipeline
whose messages are as large as all of theirs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from dips.planner.costs import Costs, Wire
from dips.planner.errors import PlanError
from dips.planner.ir import Schedule
from dips.planner.simulate import (
    NOTHING,
    Give,
    Program,
    Run,
    SimulatedMessage,
    Timeline,
    compile_program,
    exchanged,
    stuck,
)


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
    run = BlockingRun(program) if blocking else Run(program)
    run.follow_time()
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


@dataclass
class _Waiting:
    """A message on its way to or over a link."""

    device: int
    index: int  # of the operation that made it
    give: Give
    wire: Wire
    ready_ns: int
    start_ns: int = 0


_ENDS, _FREED, _ACKNOWLEDGED = 0, 1, 2


class BlockingRun(Run):
    """A simulation in which senders wait for acknowledgements. Events are (time, kind, device or link, target): ends of
    operations before links at the same time, by device."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._running = [False] * len(self.at)
        self._on_link: dict[int, deque[_Waiting]] = defaultdict(deque)
        """By link: the message that it carries, and those that wait for it."""

        self._unacknowledged: dict[tuple[int, int], deque[_Waiting]] = defaultdict(deque)
        """By sender and receiver: the message that is not acknowledged, and those that wait for that."""

        self._heap: list[tuple[int, int, int, int]] = []

    def follow_time(self) -> None:
        for device in range(len(self.at)):
            self._begin(device)
        while self._heap:
            now, kind, number, target = heappop(self._heap)
            if kind == _ENDS:
                self._end(number, now)
            elif kind == _FREED:
                message = self._on_link[number].popleft()
                self._serve(number, now)
                self._deliver(message, now)
            else:
                line = self._unacknowledged[number, target]
                line.popleft()
                if line:
                    self._offer(line[0], now)

    def _begin(self, device: int) -> None:
        """Begin the device's next operation, if its input is there or on its way."""
        lasts, needs, _ = self.program.devices[device]
        index = self.at[device]
        if self._running[device] or index == len(lasts):
            return
        ready = self._there[needs[index]] if needs[index] >= 0 else 0
        if ready < 0:
            return
        start = max(self._free[device], ready)
        start, end = self._span(device, index, start) if self._players else (start, start + lasts[index])
        self.starts[device].append(start)
        self.ends[device].append(end)
        self._free[device] = end
        self._running[device] = True
        heappush(self._heap, (end, _ENDS, device, NOTHING))

    def _end(self, device: int, now: int) -> None:
        index = self.at[device]
        give = self.program.devices[device].gives[index]
        self.at[device] = index + 1
        self._running[device] = False
        if give is not None and give.wire is not None:
            message = _Waiting(device, index, give, give.wire, now)
            line = self._unacknowledged[device, give.target]
            if give.wire.hold_ns:
                line.append(message)
            if len(line) < 2:
                self._offer(message, now)
        elif give is not None:
            self._arrive(give, now)
        self._begin(device)

    def _offer(self, message: _Waiting, now: int) -> None:
        """Give a message to its link, which may carry others first."""
        if not message.wire.busy_ns:
            message.start_ns = now
            self._deliver(message, now)
            return
        line = self._on_link[message.wire.resource]
        line.append(message)
        if len(line) == 1:
            self._serve(message.wire.resource, now)

    def _serve(self, link: int, now: int) -> None:
        """Let the first message that waits have the link."""
        if self._on_link[link]:
            message = self._on_link[link][0]
            message.start_ns = now
            heappush(self._heap, (now + message.wire.busy_ns, _FREED, link, NOTHING))

    def _deliver(self, message: _Waiting, now: int) -> None:
        """Finish a message that left its link at `now`."""
        device, target, wire = message.device, message.give.target, message.wire
        op, arrives = self.program.orders[device][message.index], now + wire.latency_ns
        sent = SimulatedMessage(op, device, target, message.ready_ns, message.start_ns, now, arrives)
        self.messages.append(sent)
        if wire.hold_ns:
            heappush(self._heap, (now + wire.hold_ns, _ACKNOWLEDGED, device, target))
        self._arrive(message.give, arrives)

    def _arrive(self, give: Give, at_ns: int) -> None:
        self._there[give.slot] = at_ns
        if give.target != NOTHING:
            self._begin(give.target)
