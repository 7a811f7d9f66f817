"""Simulates several replicas of a pipeline whose messages share links.

There are three ways of sharing. fifo: a link carries one message at a time at its full rate, in the order in
which messages are ready (JEEVES' coordination, HotNets 2025, section 3.3; equal ones by replica). order: the same in a
given order (its global list of transfers). fair: the messages of
all senders at once, each at an equal part of the rate, as competing connections do.

A wire's hold_ns delays only its own sender here: the next message of that device on that wire (blocking sends).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heappop, heappush
from math import ceil

from dips.planner.costs import Costs, Wire
from dips.planner.errors import PlanError
from dips.planner.ir import Op, Schedule
from dips.planner.program import NOTHING, Give, Program, compile_program
from dips.planner.simulate import UNKNOWN, Run, SimulatedMessage, Timeline, exchanged, stuck

Order = Mapping[int, Sequence[tuple[int, Op]]]
"""For each link, the messages as (replica, operation) in the order in which it carries them."""


class Sharing(StrEnum):
    FIFO = "fifo"
    ORDER = "order"
    FAIR = "fair"


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
        busy = sum(sum(map(sum, t.ends)) - sum(map(sum, t.starts)) for t in self.timelines)
        whole = self.makespan_ns * sum(t.schedule.n_devices for t in self.timelines)
        return 1.0 - busy / whole if whole else 0.0

    def order(self, costs: Costs) -> dict[int, list[tuple[int, Op]]]:
        """The global list of transfers: by link, in the simulated order."""
        found: dict[int, list[tuple[int, int, Op]]] = defaultdict(list)
        for replica, timeline in enumerate(self.timelines):
            for message in timeline.messages:
                wire = costs.wires[message.source, message.target]
                found[wire.resource].append((message.start_ns, replica, message.op))
        return {
            link: [(replica, op) for _, replica, op in sorted(sent, key=lambda m: m[:2])]
            for link, sent in found.items()
        }


def simulate_fleet(
    schedules: Sequence[Schedule], costs: Costs, sharing: Sharing = Sharing.FIFO, order: Order | None = None
) -> Fleet:
    """Simulate one schedule for each replica. order: needed with Sharing.ORDER.

    Raises PlanError, which names replica and cell, when they cannot end.
    """
    program = compile_program(schedules, costs)
    n = schedules[0].n_devices
    if sharing is Sharing.FIFO and not any(wire.hold_ns for wire in costs.wires.values()):
        fast = Run(program)
        fast.follow_time()
        return _fleet(schedules, costs, program, fast.at, fast.starts, fast.ends, fast.sent_by(n))
    run = _Run(program, n, sharing, order or {})
    run.play()
    return _fleet(schedules, costs, program, run.at, run.starts, run.ends, run.messages)


def _fleet(
    schedules: Sequence[Schedule],
    costs: Costs,
    program: Program,
    at: Sequence[int],
    starts: list[list[int]],
    ends: list[list[int]],
    messages: Sequence[Sequence[SimulatedMessage]],
) -> Fleet:
    """The result without pauses, with the exchanges of replicas."""
    _check_ended(schedules, program.operations_before(at))
    starts, ends, n = program.strip(starts), program.strip(ends), schedules[0].n_devices
    played = ((schedule, ends[replica * n : replica * n + n]) for replica, schedule in enumerate(schedules))
    done = exchanged(costs, played)
    return Fleet(tuple(replace(one, exchanges=done) for one in _timelines(schedules, starts, ends, messages)))


def _check_ended(schedules: Sequence[Schedule], all_at: Sequence[int]) -> None:
    n = schedules[0].n_devices
    for replica, schedule in enumerate(schedules):
        at = all_at[replica * n : replica * n + n]
        if any(index < len(row) for index, row in zip(at, schedule.orders, strict=True)):
            raise PlanError(f"replica {replica}: {stuck(schedule, at)}")


def _timelines(
    schedules: Sequence[Schedule],
    starts: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    messages: Sequence[Sequence[SimulatedMessage]],
) -> Iterator[Timeline]:
    n = schedules[0].n_devices
    for replica, schedule in enumerate(schedules):
        mine = range(replica * n, replica * n + n)
        yield Timeline(
            schedule,
            tuple(tuple(starts[d]) for d in mine),
            tuple(tuple(ends[d]) for d in mine),
            tuple(message for d in mine for message in messages[d]),
        )


@dataclass
class _Waiting:
    """A message on its way to or over a link. left: the rest of its nanoseconds alone on the link."""

    device: int
    index: int
    give: Give
    wire: Wire
    ready_ns: int
    start_ns: int = 0


@dataclass
class _Link:
    """A link. now: (fifo, order) the message it carries. served: virtual time of a fair link, at `since`."""

    queue: deque[_Waiting] = field(default_factory=deque)
    order: deque[tuple[int, int]] = field(default_factory=deque)
    waiting: dict[tuple[int, int], _Waiting] = field(default_factory=dict)
    busy: bool = False
    shared: list[tuple[float, int, _Waiting]] = field(default_factory=list)
    served: float = 0.0
    since: int = 0
    wakes: int = -1


class _Run:
    """One simulation. Events are (time, rank, number, what): ends of operations before links at the same time, by
    device."""

    def __init__(self, program: Program, n: int, sharing: Sharing, order: Order) -> None:
        self._program, self._n, self._sharing = program, n, sharing
        total = len(program.devices)
        self.at = [0] * total
        self.starts: list[list[int]] = [[] for _ in range(total)]
        self.ends: list[list[int]] = [[] for _ in range(total)]
        self.messages: list[list[SimulatedMessage]] = [[] for _ in range(total)]
        self._free = [0] * total
        self._running = [False] * total
        self._there = [UNKNOWN] * program.n_slots
        for slot, at_ns in program.filled.items():
            self._there[slot] = at_ns
        self._links: dict[int, _Link] = defaultdict(_Link)
        self._own: dict[tuple[int, int], deque[_Waiting]] = defaultdict(deque)
        self._heap: list[tuple[int, int, int, int]] = []
        if sharing is Sharing.ORDER:
            index_of = [{op: index for index, op in enumerate(row)} for row in program.orders]
            device_of = {(d // n, op): d for d, row in enumerate(index_of) for op in row}
            for link, sent in order.items():
                devices = [device_of[replica, op] for replica, op in sent]
                found = ((d, index_of[d][op]) for d, (_, op) in zip(devices, sent, strict=True))
                self._links[link].order.extend(found)

    def play(self) -> None:
        for device in range(len(self.at)):
            self._begin(device)
        while self._heap:
            now, rank, number, what = heappop(self._heap)
            if rank == 0:
                self._end(number, now)
            elif rank == 1:
                self._freed(number, now, what)
            else:
                self._acknowledged(number, what, now)

    def _begin(self, device: int) -> None:
        lasts, needs, _ = self._program.devices[device]
        index = self.at[device]
        if self._running[device] or index == len(lasts):
            return
        need = needs[index]
        ready = self._there[need] if need >= 0 else 0
        if ready < 0:
            return
        start = max(self._free[device], ready)
        self.starts[device].append(start)
        self.ends[device].append(start + lasts[index])
        self._free[device] = start + lasts[index]
        self._running[device] = True
        heappush(self._heap, (start + lasts[index], 0, device, 0))

    def _end(self, device: int, now: int) -> None:
        index = self.at[device]
        give = self._program.devices[device].gives[index]
        self.at[device] = index + 1
        self._running[device] = False
        if give is not None:
            if give.wire is None:
                self._arrive(give, now)
            else:
                self._send(_Waiting(device, index, give, give.wire, now), now)
        self._begin(device)

    def _arrive(self, give: Give, at_ns: int) -> None:
        self._there[give.slot] = at_ns
        if give.target != NOTHING:
            self._begin(give.target)

    # ---- senders ----

    def _send(self, message: _Waiting, now: int) -> None:
        """Send to the link, or queue after the sender's last message while that one is unacknowledged or, on a fair
        link, unsent: one sender's messages to one receiver use one connection."""
        if message.wire.hold_ns or self._sharing is Sharing.FAIR:
            line = self._own[message.device, message.give.target]
            line.append(message)
            if len(line) > 1:
                return
        self._offer(message, now)

    def _acknowledged(self, device: int, target: int, now: int) -> None:
        line = self._own[device, target]
        line.popleft()
        if line:
            self._offer(line[0], now)

    def _done(self, message: _Waiting, now: int) -> None:
        """Finish a message that left its link at `now`."""
        wire, target = message.wire, message.give.target
        arrives = now + wire.latency_ns
        op = self._program.orders[message.device][message.index]
        n = self._n
        sent = SimulatedMessage(op, message.device % n, target % n, message.ready_ns, message.start_ns, now, arrives)
        self.messages[message.device].append(sent)
        if wire.hold_ns or self._sharing is Sharing.FAIR:
            heappush(self._heap, (now + wire.hold_ns, 2, message.device, target))
        self._arrive(message.give, arrives)

    # ---- links ----

    def _offer(self, message: _Waiting, now: int) -> None:
        link = self._links[message.wire.resource]
        if not message.wire.busy_ns:
            message.start_ns = now
            self._done(message, now)
        elif self._sharing is Sharing.FAIR:
            self._join(message.wire.resource, link, message, now)
        elif self._sharing is Sharing.ORDER:
            link.waiting[message.device, message.index] = message
            self._serve(message.wire.resource, link, now)
        else:
            link.queue.append(message)
            self._serve(message.wire.resource, link, now)

    def _serve(self, number: int, link: _Link, now: int) -> None:
        """Let the next message have the whole link."""
        if link.busy:
            return
        if self._sharing is Sharing.ORDER:
            if not link.order or link.order[0] not in link.waiting:
                return
            link.queue.appendleft(link.waiting.pop(link.order.popleft()))
        if link.queue:
            link.busy = True
            link.queue[0].start_ns = now
            heappush(self._heap, (now + link.queue[0].wire.busy_ns, 1, number, -1))

    def _freed(self, number: int, now: int, what: int) -> None:
        link = self._links[number]
        if self._sharing is Sharing.FAIR:
            self._leave(number, link, now, what)
            return
        message = link.queue.popleft()
        link.busy = False
        self._serve(number, link, now)
        self._done(message, now)

    # ---- fair links: each of n messages gets one n-th of the rate ----

    def _join(self, number: int, link: _Link, message: _Waiting, now: int) -> None:
        self._pass(link, now)
        message.start_ns = now
        heappush(link.shared, (link.served + message.wire.busy_ns, message.device, message))
        self._wake(number, link, now)

    def _leave(self, number: int, link: _Link, now: int, what: int) -> None:
        if what != link.wakes:
            return
        self._pass(link, now)
        done = []
        while link.shared and link.shared[0][0] <= link.served + 1e-3:
            done.append(heappop(link.shared)[2])
        self._wake(number, link, now)
        for message in done:
            self._done(message, now)

    def _pass(self, link: _Link, now: int) -> None:
        if link.shared:
            link.served += (now - link.since) / len(link.shared)
        link.since = now

    def _wake(self, number: int, link: _Link, now: int) -> None:
        """Note when the first of the messages on the link will have been served; older notes no longer count."""
        link.wakes += 1
        if link.shared:
            left = (link.shared[0][0] - link.served) * len(link.shared)
            heappush(self._heap, (now + max(0, ceil(left - 1e-3)), 1, number, link.wakes))
