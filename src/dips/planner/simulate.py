"""Simulates a schedule: when every operation and every message begins and ends.

CrossPipe's conventions (arXiv:2507.00217, section 3.5): an operation starts when its device has ended the one before
and its input is there; a message starts when its producer ends and its link is free, occupies the link for busy_ns
and arrives latency_ns later; sending costs a device nothing. A link serves messages in the order in which they are
ready, equal ones by device. What replicas exchange before and after each stage is in dips.planner.exchange.

The simulation follows time (a heap of device wake-ups) only where a link is shared by several senders; where each link
has one sender, messages are ready in the sender's own order, and following the dependencies gives the same times
sooner. Other ways of sharing a link are in dips.planner.fleet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from dips.planner.costs import Costs
from dips.planner.errors import PlanError
from dips.planner.exchange import Exchanged, gathered, reduced
from dips.planner.ir import Op, Schedule
from dips.planner.program import Program, compile_program

UNKNOWN = -1


class SimulatedMessage(NamedTuple):
    """A message that crossed a link. ready_ns: end of its producer; it occupied the link in [start_ns, freed_ns)."""

    op: Op
    source: int
    target: int
    ready_ns: int
    start_ns: int
    freed_ns: int
    arrives_ns: int


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation. starts[d][i], ends[d][i]: of operation i of device d. messages: those between devices
    that have a wire. exchanges: between replicas, which this timeline takes part in."""

    schedule: Schedule
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    messages: tuple[SimulatedMessage, ...]
    exchanges: tuple[Exchanged, ...] = ()

    @property
    def begin_ns(self) -> int:
        """Start of the first operation or exchange."""
        return min([s[0] for s in self.starts if s] + [one.start_ns for one in self.exchanges])

    @property
    def end_ns(self) -> int:
        """End of the last operation or exchange."""
        return max([e[-1] for e in self.ends if e] + [one.ends_ns for one in self.exchanges])

    @property
    def makespan_ns(self) -> int:
        """From the start of the first operation or exchange to the end of the last one, anywhere (CrossPipe, appendix
        A, with weights that are gathered before)."""
        return self.end_ns - self.begin_ns

    @property
    def exposed_ns(self) -> int:
        """The part of the makespan before the first operation and after the last one: exchanges that no computation
        hides."""
        computed = max(e[-1] for e in self.ends if e) - min(s[0] for s in self.starts if s)
        return self.makespan_ns - computed

    def span_ns(self, device: int) -> int:
        """The time from this device's first start to its last end."""
        return self.ends[device][-1] - self.starts[device][0]

    @property
    def stage0_span_ns(self) -> int:
        """The span of the device with the first stage."""
        return self.span_ns(self.schedule.device_of_stage[0])

    @property
    def device_span_ns(self) -> int:
        """The largest span of one device."""
        return max(self.span_ns(device) for device in range(self.schedule.n_devices) if self.starts[device])

    @property
    def bubble_fraction(self) -> float:
        """The part of makespan x devices without computation."""
        busy = sum(map(sum, self.ends)) - sum(map(sum, self.starts))
        whole = self.makespan_ns * self.schedule.n_devices
        return 1.0 - busy / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a schedule. Raises PlanError, which names the cells that wait for each other, when it cannot end."""
    run = Run(compile_program([schedule], costs))
    if shares_links(costs):
        run.follow_time()
    else:
        run.follow_dependencies()
    program = run.program
    if run.stuck:
        raise PlanError(stuck(schedule, program.operations_before(run.at)))
    starts, ends = program.strip(run.starts), program.strip(run.ends)
    done = exchanged(costs, [(schedule, ends)])
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(run.messages), done)


def exchanged(costs: Costs, played: Iterable[tuple[Schedule, Sequence[Sequence[int]]]]) -> tuple[Exchanged, ...]:
    """The exchanges between replicas, from the ends of their operations; played: one for each simulated replica. A
    stage's gradients leave when all replicas have ended it."""
    if not costs.exchanges:
        return ()
    ready = [0] * len(costs.stages)
    for schedule, ends in played:
        for device, (order, row) in enumerate(zip(schedule.orders, ends, strict=True)):
            for stage, end in _last_ends(order, row, schedule.device_of_stage.count(device)).items():
                ready[stage] = max(ready[stage], end)
    return (*gathered(costs.exchanges), *reduced(costs.exchanges, ready, costs.overlapped))


def _last_ends(order: Sequence[Op], ends: Sequence[int], n_stages: int) -> dict[int, int]:
    """When the last operation of each of a device's stages ends."""
    found: dict[int, int] = {}
    for op, end in zip(reversed(order), reversed(ends), strict=True):
        if op.stage not in found:
            found[op.stage] = end
            if len(found) == n_stages:
                break
    return found


def shares_links(costs: Costs) -> bool:
    """Whether a link that messages occupy has several senders."""
    senders: dict[int, set[int]] = {}
    for (source, _), wire in costs.wires.items():
        if wire.busy_ns or wire.hold_ns:
            senders.setdefault(wire.resource, set()).add(source)
    return any(len(found) > 1 for found in senders.values())


class Run:
    """One simulation of a program. at[d]: the operation that device d has reached."""

    def __init__(self, program: Program) -> None:
        n = len(program.devices)
        self.program = program
        self.at = [0] * n
        self.messages: list[SimulatedMessage] = []
        self.starts: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[list[int]] = [[] for _ in range(n)]
        self._free = [0] * n
        self._there = [UNKNOWN] * program.n_slots
        for slot, at_ns in program.filled.items():
            self._there[slot] = at_ns
        self._link_free: dict[int, int] = {}

    @property
    def stuck(self) -> bool:
        return any(at < len(device.lasts) for at, device in zip(self.at, self.program.devices, strict=True))

    def sent_by(self, n: int) -> list[list[SimulatedMessage]]:
        """The messages by sender, as of a pipeline of n devices, one replica after another."""
        found: list[list[SimulatedMessage]] = [[] for _ in self.at]
        for message in self.messages:
            source, target = message.source % n, message.target % n
            found[message.source].append(message._replace(source=source, target=target))
        return found

    # ---- links with one sender each ----

    def follow_dependencies(self) -> None:
        queue = deque(range(len(self.at)))
        queued = [True] * len(self.at)
        while queue:
            device = queue.popleft()
            queued[device] = False
            for woken in self._run_device(device):
                if not queued[woken]:
                    queued[woken] = True
                    queue.append(woken)

    def _run_device(self, number: int) -> set[int]:
        """Run a device until an input is missing; returns the devices that were sent a message."""
        lasts, needs, gives = self.program.devices[number]
        free, there = self._free[number], self._there
        woken: set[int] = set()
        starts, ends = self.starts[number], self.ends[number]
        index = self.at[number]
        for index in range(index, len(lasts)):  # noqa: B020  the loop goes on where the device stood
            need = needs[index]
            if need >= 0:
                ready = there[need]
                if ready < 0:
                    self.at[number], self._free[number] = index, free
                    return woken
                if ready > free:
                    free = ready
            starts.append(free)
            free += lasts[index]
            ends.append(free)
            give = gives[index]
            if give is not None:
                slot, target, wire = give
                there[slot] = free if wire is None else self._carry(number, index, free)
                if target >= 0 and target != number:
                    woken.add(target)
        self.at[number], self._free[number] = len(lasts), free
        return woken

    def _carry(self, source: int, index: int, ready_ns: int) -> int:
        """Send the message of an operation that has a wire; when it arrives."""
        give = self.program.devices[source].gives[index]
        assert give is not None
        assert give.wire is not None
        start_ns = give.wire.take(self._link_free, ready_ns)
        freed_ns = start_ns + give.wire.busy_ns
        arrives_ns = freed_ns + give.wire.latency_ns
        op = self.program.orders[source][index]
        self.messages.append(SimulatedMessage(op, source, give.target, ready_ns, start_ns, freed_ns, arrives_ns))
        return arrives_ns

    # ---- links that several devices send over ----

    def follow_time(self) -> None:
        """Operations end in the order of time, so that messages reach a shared link in the order they are ready.

        A device's next operation begins as soon as its input is on its way: its start may be in the future, and nothing
        can come in between. The heap holds end x devices + device, one for each device that runs.
        """
        n = len(self.at)
        bits = n.bit_length()
        mask = (1 << bits) - 1
        there, free, at = self._there, self._free, self.at
        heap: list[int] = []
        lasts, needs, gives = zip(*self.program.devices, strict=True)
        add_start = [starts.append for starts in self.starts]
        add_end = [ends.append for ends in self.ends]
        running, left = [False] * n, [len(row) for row in lasts]
        wanted: Sequence[int] = range(n)
        while True:
            for device in wanted:  # begin the next operation there
                index = at[device]
                if running[device] or index == left[device]:
                    continue
                start, need = free[device], needs[device][index]
                if need >= 0:
                    ready = there[need]
                    if ready < 0:
                        continue
                    if ready > start:
                        start = ready
                add_start[device](start)
                start += lasts[device][index]
                add_end[device](start)
                free[device] = start
                running[device] = True
                heappush(heap, start << bits | device)
            if not heap:
                return
            entry = heappop(heap)
            end, number = entry >> bits, entry & mask
            index = at[number]
            give = gives[number][index]
            at[number] = index + 1
            running[number] = False
            if give is None:
                wanted = (number,)
                continue
            slot, target, wire = give
            there[slot] = end if wire is None else self._carry(number, index, end)
            wanted = (target, number) if target >= 0 else (number,)


def stuck(schedule: Schedule, at: Sequence[int]) -> str:
    """The error sentence for a schedule that cannot end; at[d]: the operation at which device d waits."""
    waiting = [
        f"device {device} waits at cell {index + 1} ({schedule.orders[device][index]})"
        for device, index in enumerate(at[: schedule.n_devices])
        if index < len(schedule.orders[device])
    ]
    return f"the schedule cannot end: {', '.join(waiting[:4])}; no device can send what they wait for"
