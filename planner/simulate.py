"""When every operation and every message of a schedule begins and ends.

CrossPipe's conventions (arXiv:2507.00217, section 3.5): an operation starts when its device has ended the one before
and its input is there; a message starts when its producer ends and its link is free, occupies the link for busy_ns
and arrives latency_ns later; sending costs a device nothing. A link serves messages in the order in which they are
ready, equal ones by device.

The simulation follows time (a heap of device wake-ups) only where a link is shared by several senders; where each link
has one sender, messages are ready in the sender's own order, and following the dependencies gives the same times
sooner.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dips.planner.costs import Costs
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule


@dataclass(frozen=True)
class Message:
    """One that crossed a link. ready_ns: its producer ended; it occupied the link in [start_ns, freed_ns)."""

    op: Op
    source: int
    target: int
    ready_ns: int
    start_ns: int
    freed_ns: int
    arrives_ns: int


@dataclass(frozen=True)
class Timeline:
    """starts[d][i], ends[d][i]: of operation i of device d. messages: those between devices that have a wire."""

    schedule: Schedule
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]

    @property
    def makespan_ns(self) -> int:
        """From the first operation's start to the last one's end, anywhere."""
        return max(e[-1] for e in self.ends if e) - min(s[0] for s in self.starts if s)

    def span_ns(self, device: int) -> int:
        """From this device's first start to its last end."""
        return self.ends[device][-1] - self.starts[device][0]

    @property
    def stage0_span_ns(self) -> int:
        """Of the device that holds the first stage."""
        return self.span_ns(self.schedule.device_of_stage[0])

    @property
    def device_span_ns(self) -> int:
        """The largest span of one device."""
        return max(self.span_ns(device) for device in range(self.schedule.n_devices) if self.starts[device])

    @property
    def bubble_fraction(self) -> float:
        """The part of makespan x devices in which nothing was computed."""
        busy = sum(e - s for ss, es in zip(self.starts, self.ends, strict=True) for s, e in zip(ss, es, strict=True))
        return 1.0 - busy / (self.makespan_ns * self.schedule.n_devices)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Play a schedule. Raises PlanError, which names the cells that wait for each other, when it cannot end."""
    return _Run(schedule, costs).play()


class _Run:
    """Positions: the operation with index i on device d is numbered first[d] + i."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        if len(costs.stages) != schedule.n_stages:
            raise PlanError(f"costs of {len(costs.stages)} stages for a schedule of {schedule.n_stages}")
        self._schedule, self._costs = schedule, costs
        self._n = schedule.n_devices
        self._last_part = schedule.parts - 1
        self._at = [0] * self._n
        self._free = [0] * self._n
        self._link_free: dict[int, int] = {}
        self._messages: list[Message] = []
        self._starts: list[list[int]] = [[] for _ in range(self._n)]
        self._ends: list[list[int]] = [[] for _ in range(self._n)]
        # When the input of an operation is there, by (kind class, stage, microbatch) of who needs it.
        self._arrived: dict[tuple[bool, int, int], int] = {}
        self._compute = [
            {
                (kind, part): costs.compute_ns(stage, kind, part, schedule.parts)
                for kind in Kind
                for part in range(schedule.parts)
            }
            for stage in range(schedule.n_stages)
        ]

    def play(self) -> Timeline:
        if self._shares_links():
            self._follow_time()
        else:
            self._follow_dependencies()
        if any(at < len(order) for at, order in zip(self._at, self._schedule.orders, strict=True)):
            raise PlanError(_stuck(self._schedule, self._at))
        starts, ends = tuple(map(tuple, self._starts)), tuple(map(tuple, self._ends))
        return Timeline(self._schedule, starts, ends, tuple(self._messages))

    def _shares_links(self) -> bool:
        senders: dict[int, set[int]] = {}
        for (source, _), wire in self._costs.wires.items():
            if wire.busy_ns:
                senders.setdefault(wire.resource, set()).add(source)
        return any(len(found) > 1 for found in senders.values())

    # ---- links with one sender each ----

    def _follow_dependencies(self) -> None:
        queue = deque(range(self._n))
        queued = [True] * self._n
        while queue:
            device = queue.popleft()
            queued[device] = False
            for woken in self._run_device(device):
                if not queued[woken]:
                    queued[woken] = True
                    queue.append(woken)

    def _run_device(self, device: int) -> set[int]:
        """Run on until an input is missing; the devices that were sent something."""
        order, free = self._schedule.orders[device], self._free[device]
        woken: set[int] = set()
        starts, ends, arrived, last_part = self._starts[device], self._ends[device], self._arrived, self._last_part
        for index in range(self._at[device], len(order)):
            op = order[index]
            ready = 0
            if op.part == 0 and _has_input(op):
                found = arrived.get((op.kind is Kind.F, op.stage, op.microbatch))
                if found is None:
                    self._at[device], self._free[device] = index, free
                    return woken
                ready = found
            start = free if free > ready else ready
            free = start + self._compute[op.stage][op.kind, op.part]
            starts.append(start)
            ends.append(free)
            if op.part == last_part and op.kind is not Kind.W:
                target = self._send(op, device, free)
                if target is not None and target != device:
                    woken.add(target)
        self._at[device], self._free[device] = len(order), free
        return woken

    def _send(self, op: Op, source: int, end_ns: int) -> int | None:
        """What the end of an operation makes possible; the device that gets its message."""
        schedule = self._schedule
        if op.kind is Kind.F:
            if op.stage == schedule.n_stages - 1:
                self._arrived[False, op.stage, op.microbatch] = end_ns
                return None
            key, stage = (True, op.stage + 1, op.microbatch), op.stage + 1
        else:
            if op.stage == 0:
                return None
            key, stage = (False, op.stage - 1, op.microbatch), op.stage - 1
        target = schedule.device_of_stage[stage]
        self._arrived[key] = self._carry(op, source, target, end_ns)
        return target

    def _carry(self, op: Op, source: int, target: int, ready_ns: int) -> int:
        wire = self._costs.wires.get((source, target))
        if wire is None:
            return ready_ns
        start_ns = max(ready_ns, self._link_free.get(wire.resource, 0)) if wire.busy_ns else ready_ns
        freed_ns = start_ns + wire.busy_ns
        if wire.busy_ns:
            self._link_free[wire.resource] = freed_ns
        self._messages.append(Message(op, source, target, ready_ns, start_ns, freed_ns, freed_ns + wire.latency_ns))
        return freed_ns + wire.latency_ns

    # ---- links that several devices send over ----

    def _follow_time(self) -> None:
        """Operations end in the order of time, so that messages reach a shared link in the order they are ready."""
        running: list[tuple[int, int]] = []  # (end, device)
        idle = [True] * self._n
        for device in range(self._n):
            self._begin(device, idle, running)
        while running:
            end_ns, device = heapq.heappop(running)
            op = self._schedule.orders[device][self._at[device]]
            self._at[device] += 1
            idle[device] = True
            target = self._send(op, device, end_ns) if op.part == self._last_part and op.kind is not Kind.W else None
            if target is not None and target != device:
                self._begin(target, idle, running)
            self._begin(device, idle, running)

    def _begin(self, device: int, idle: list[bool], running: list[tuple[int, int]]) -> None:
        """Start what is next if its input is on its way: the start may lie ahead, and nothing can come in between."""
        order, index = self._schedule.orders[device], self._at[device]
        if not idle[device] or index == len(order):
            return
        op, ready = order[index], 0
        if op.part == 0 and _has_input(op):
            found = self._arrived.get((op.kind is Kind.F, op.stage, op.microbatch))
            if found is None:
                return
            ready = found
        start = max(self._free[device], ready)
        self._free[device] = start + self._compute[op.stage][op.kind, op.part]
        self._starts[device].append(start)
        self._ends[device].append(self._free[device])
        heapq.heappush(running, (self._free[device], device))
        idle[device] = False


def _has_input(op: Op) -> bool:
    """Whether something must arrive before it: from another stage, or from its own forward pass at the last one."""
    return op.kind is not Kind.W and not (op.kind is Kind.F and op.stage == 0)


def _stuck(schedule: Schedule, at: Sequence[int]) -> str:
    waiting = [
        f"device {device} waits at cell {index + 1} ({schedule.orders[device][index]})"
        for device, index in enumerate(at)
        if index < len(schedule.orders[device])
    ]
    return f"the schedule cannot end: {', '.join(waiting[:4])}; no device can send what they wait for"
