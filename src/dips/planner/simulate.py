"""Simulates and checks a schedule: when every operation and every message begins and ends.

CrossPipe's conventions (arXiv:2507.00217, section 3.5): an operation starts when its device has ended the one before
and its input is there; a message starts when its producer ends and its link is free, occupies the link for busy_ns
and arrives latency_ns later; sending costs a device nothing. A link serves messages in the order in which they are
ready, equal ones by device. What replicas exchange before and after each stage, and for every microbatch, is in
dips.planner.exchange.

Devices run ahead, each as far as its inputs are known. Where a link has one sender, its messages are ready in the
sender's own order, so each takes the link at once. Where several devices send over a link, messages wait until no
device can run: then no message can come before the earliest of them, which takes its link. dips.planner.simulate
simulates several replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from dips.core.errors import ConfigError
from dips.planner.costs import Costs, Wire
from dips.planner.exchange import (
    Exchanged,
    LayeredOp,
    LayerPlayer,
    ShardExchange,
    ShardLog,
    check_exchanges,
    check_shards,
    gathered,
    layered,
    reduced,
)
from dips.planner.ir import Kind, Op, Schedule

NOTHING = -1
"""In place of the number of a slot or device."""

UNKNOWN = -1
"""In place of the time of a slot that is not filled yet."""

T = TypeVar("T")


class SimulatedMessage(NamedTuple):
    """A message that crossed a link."""

    op: Op
    source: int
    target: int
    ready_ns: int  # the end of its producer
    start_ns: int  # it occupied the link from here
    freed_ns: int  # to here
    arrives_ns: int  # later by the latency


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    schedule: Schedule
    starts: tuple[tuple[int, ...], ...]  # starts[d][i]: of operation i of device d
    ends: tuple[tuple[int, ...], ...]  # ends[d][i]: the same
    messages: tuple[SimulatedMessage, ...]  # those between devices that have a wire
    exchanges: tuple[Exchanged, ...] = ()  # between replicas, which this timeline takes part in
    shard_logs: tuple[ShardLog, ...] = ()  # the same for every microbatch, with ZeRO 2 and 3: of each device
    shard_costs: tuple[ShardExchange, ...] = ()
    waited_ns: int = 0  # of all devices, for these, inside of operations

    @property
    def shards(self) -> tuple[Exchanged, ...]:
        """What layers exchanged for every microbatch."""
        return tuple(row for log in self.shard_logs for row in log.rows(self.shard_costs))

    @property
    def all_exchanges(self) -> tuple[Exchanged, ...]:
        return (*self.exchanges, *self.shards)

    @property
    def begin_ns(self) -> int:
        """Start of the first operation or exchange."""
        found = [s[0] for s in self.starts if s] + [one.start_ns for one in self.exchanges]
        return min(found + [log.first_ns for log in self.shard_logs if len(log)])

    @property
    def end_ns(self) -> int:
        """End of the last operation or exchange."""
        found = [e[-1] for e in self.ends if e] + [one.ends_ns for one in self.exchanges]
        return max(found + [log.last_ns for log in self.shard_logs])

    @property
    def busy_ns(self) -> int:
        """The computation of all devices together."""
        return sum(map(sum, self.ends)) - sum(map(sum, self.starts)) - self.waited_ns

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
    def device_span_ns(self) -> int:
        """The largest span of one device."""
        return max(self.span_ns(device) for device in range(self.schedule.n_devices) if self.starts[device])

    @property
    def bubble_fraction(self) -> float:
        """The part of makespan x devices without computation."""
        whole = self.makespan_ns * self.schedule.n_devices
        return 1.0 - self.busy_ns / whole if whole else 0.0


@dataclass(frozen=True)
class Fleet:
    """The simulation of several replicas: a timeline for each; device d is the same in all."""

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


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a schedule. Raises ConfigError, which names the cells that wait for each other, when it cannot end."""
    return _timelines([schedule], costs, shares_links(costs), False)[0]


def simulate_fleet(schedules: Sequence[Schedule], costs: Costs) -> Fleet:
    """Simulate one schedule for each replica; a wire's hold_ns delays only its own sender (blocking sends). Raises
    ConfigError, which names replica and cell, when they cannot end."""
    return Fleet(_timelines(schedules, costs, True, any(wire.hold_ns for wire in costs.wires.values())))


def _timelines(schedules: Sequence[Schedule], costs: Costs, in_turn: bool, blocking: bool) -> tuple[Timeline, ...]:
    program = compile_program(schedules, costs)
    run = Run(program, in_turn, blocking)
    n = schedules[0].n_devices
    at = [index - sum(p < index for p in pauses) for index, pauses in zip(run.at, program.pauses, strict=True)]
    mine = [slice(replica * n, replica * n + n) for replica in range(len(schedules))]
    for replica, schedule in enumerate(schedules):
        waiting = [
            f"device {device} waits at cell {index + 1} ({order[index]})"
            for device, (index, order) in enumerate(zip(at[mine[replica]], schedule.orders, strict=True))
            if index < len(order)
        ]
        if waiting:
            raise ConfigError(
                (f"replica {replica}: " if len(schedules) > 1 else "")
                + f"the schedule cannot end: {', '.join(waiting[:4])}; no device can send what they wait for"
            )
    starts, ends = program.strip(run.starts), program.strip(run.ends)
    sent: list[list[SimulatedMessage]] = [[] for _ in schedules]
    for message in run.messages:
        sent[message.source // n].append(message._replace(source=message.source % n, target=message.target % n))
    done = exchanged(costs, [(schedule, ends[each]) for schedule, each in zip(schedules, mine, strict=True)])
    timelines = []
    for schedule, each, messages in zip(schedules, mine, sent, strict=True):
        players = run.players[each]
        for player in players:
            player.flush()
        timelines.append(
            Timeline(
                schedule,
                tuple(map(tuple, starts[each])),
                tuple(map(tuple, ends[each])),
                tuple(messages),
                done,
                tuple(player.log for player in players),
                costs.shards,
                sum(player.waited_ns for player in players),
            )
        )
    return tuple(timelines)


def exchanged(costs: Costs, played: Iterable[tuple[Schedule, Sequence[Sequence[int]]]]) -> tuple[Exchanged, ...]:
    """The exchanges between replicas, from the ends of their operations; played: one for each simulated replica. A
    stage's gradients leave when all replicas have ended it."""
    if not costs.exchanges:
        return ()
    last = [(0, 0)] * len(costs.stages)  # end and length of the last operation
    for schedule, ends in played:
        for order, row in zip(schedule.orders, ends, strict=True):
            for op, end in zip(order, row, strict=True):
                if end >= last[op.stage][0]:
                    last[op.stage] = end, costs.compute_ns(op.stage, op.kind, op.part, schedule.parts)
    ready, last_ns = zip(*last, strict=True)
    return (*gathered(costs.exchanges), *reduced(costs.exchanges, ready, last_ns if costs.overlapped else None))


def shares_links(costs: Costs) -> bool:
    """Whether a link that messages occupy has several senders."""
    senders: dict[int, set[int]] = {}
    for (source, _), wire in costs.wires.items():
        if wire.busy_ns or wire.hold_ns:
            senders.setdefault(wire.resource, set()).add(source)
    return any(len(found) > 1 for found in senders.values())


# ---- program ---------------------------------------------------------------------------------------------------------
#
# A schedule is compiled into flat lists of numbers, on which the simulators run. An operation is an index on its
# device. What it waits for and what it makes possible are slots: one for each (replica, direction, stage, microbatch)
# that says when that input is there. Devices of replica r come after those of replica r - 1; replicas share nothing
# but their links.
#
# Where a stage waits for its weights (dips.planner.exchange), a pause comes before its first operation: an operation
# of length 0 that needs a slot that is filled from the beginning. strip() removes the pauses from the result.


class Give(NamedTuple):
    """The output of an operation."""

    slot: int  # filled when the message arrives
    target: int  # the device that gets it
    wire: Wire | None  # None when it arrives at once


class Device(NamedTuple):
    """The operations of one device, by index."""

    lasts: list[int]  # nanoseconds
    needs: list[int]  # the slot that each waits for, or NOTHING
    gives: list[Give | None]  # None where nothing is sent


class Program(NamedTuple):
    """A compiled program."""

    devices: list[Device]
    n_slots: int
    orders: list[tuple[Op, ...]]
    filled: dict[int, int]  # slots that are filled from the beginning, and when
    pauses: list[list[int]]  # pauses[d]: indices of the pauses on device d
    # layered[d][i]: how operation i of device d exchanges, None for a pause; empty: no layer exchanges
    layered: list[list[LayeredOp | None]]
    networks_ns: list[int]  # when the network of each device is free, after the weights that come before everything
    overlapped: bool

    def strip(self, rows: list[list[T]]) -> list[list[T]]:
        """Remove the entries of pauses from the values of each device."""
        if not any(self.pauses):
            return rows
        found = [list(row) for row in rows]
        for row, pauses in zip(found, self.pauses, strict=True):
            for index in reversed(pauses):
                del row[index]
        return found


def compile_program(schedules: Sequence[Schedule], costs: Costs) -> Program:
    """Compile schedules, one for each replica. Raises ConfigError where costs are of another number of stages."""
    devices: list[Device] = []
    orders: list[tuple[Op, ...]] = []
    base = 0
    for replica, schedule in enumerate(schedules):
        if len(costs.stages) != schedule.n_stages:
            raise ConfigError(f"costs of {len(costs.stages)} stages for a schedule of {schedule.n_stages}")
        tables = _Tables(schedule, costs, base, len(devices), replica)
        devices += [tables.device(device, order) for device, order in enumerate(schedule.orders)]
        orders += schedule.orders
        base += 2 * schedule.n_stages * schedule.n_microbatches
    exchanging: list[list[LayeredOp | None]] = []
    free_ns = [0] * len(devices)
    if costs.shards:
        parts = schedules[0].parts
        how = {  # each operation exchanges
            (stage, kind, part): layered(stage, kind, part, parts, costs.shards[stage])
            for stage in range(schedules[0].n_stages)
            for kind in Kind
            for part in range(parts)
        }
        exchanging = [[how[op.stage, op.kind, op.part] for op in order] for order in orders]
        taken = {one.resource: one.freed_ns for one in gathered(costs.exchanges)}
        resource_of = {
            place: one.resource for place, one in zip(schedules[0].device_of_stage, costs.shards, strict=True)
        }
        n = schedules[0].n_devices
        free_ns = [taken.get(resource_of.get(device % n, NOTHING), 0) for device in range(len(devices))]
    program = Program(devices, base, orders, {}, [[] for _ in devices], exchanging, free_ns, costs.overlapped)
    waits = costs.gates_ns(schedules[0].parts)
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
            if program.layered:
                program.layered[number].insert(at, None)
        orders[number] = tuple(longer)
        pauses.append([at + before for before, at in enumerate(firsts)])
    return program._replace(n_slots=program.n_slots + len(waits), orders=orders, filled=filled, pauses=pauses)


class _Tables:
    """The tables of one replica, whose slots begin at `base` and whose devices at `first`."""

    def __init__(self, schedule: Schedule, costs: Costs, base: int, first: int, replica: int) -> None:
        n_stages, place, n = schedule.n_stages, schedule.device_of_stage, schedule.n_microbatches
        self._n, self._last_part = n, schedule.parts - 1
        self._forward, self._backward = base, base + n_stages * n
        self._lasts = [
            {kind: [costs.compute_ns(stage, kind, part, schedule.parts) for part in range(schedule.parts)]
             for kind in Kind}
            for stage in range(n_stages)
        ]  # fmt: skip

        def message(slots: int, source: int, target: int) -> tuple[int, int, Wire | None]:
            """The output of a stage for another one: its first slot, the device that gets it, the wire."""
            wire = costs.wires.get((place[source], place[target]))
            return slots + target * n, first + place[target], wire.of(replica) if wire else None

        # The last stage's forward pass makes its own backward pass possible, at once.
        last = (self._backward + (n_stages - 1) * n, NOTHING, None)
        self._after_f = [*(message(self._forward, stage, stage + 1) for stage in range(n_stages - 1)), last]
        self._after_d = [None, *(message(self._backward, stage, stage - 1) for stage in range(1, n_stages))]

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
                after: tuple[int, int, Wire | None] | None = after_f[stage]
            else:
                needs.append(backward + stage * n + microbatch if not part else NOTHING)
                after = after_d[stage]
            if after is None or part != last_part:
                gives.append(None)
            else:
                gives.append(new(Give, (after[0] + microbatch, after[1], after[2])))
        return Device(lasts, needs, gives)


# ---- run -------------------------------------------------------------------------------------------------------------


class Run:
    """One simulation of a program. at[d]: the operation that device d has reached.

    in_turn: links have several senders. blocking: a wire's hold_ns delays only its own sender, the next message of that
    device to the same one, which waits for the acknowledgement; else it occupies the link.
    """

    def __init__(self, program: Program, in_turn: bool, blocking: bool = False) -> None:
        n = len(program.devices)
        self.program = program
        self.at = [0] * n
        self.messages: list[SimulatedMessage] = []
        self.starts: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[list[int]] = [[] for _ in range(n)]
        self._in_turn, self._blocking = in_turn, blocking
        self._there = [UNKNOWN] * program.n_slots
        for slot, at_ns in program.filled.items():
            self._there[slot] = at_ns
        self._link_free: dict[int, int] = {}
        # What happens in the order of time: (time, 0, device, operation whose message is ready) or (time, 1, device,
        # device that acknowledges its message); ready ones first, so that they precede those that had to wait.
        self._heap: list[tuple[int, int, int, int]] = []
        # By sender and receiver: the operation whose message is not acknowledged, and those that wait for that.
        self._unacknowledged: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.players = [LayerPlayer(at_ns, program.overlapped) for at_ns in program.networks_ns if program.layered]
        self._follow()

    def _follow(self) -> None:
        queue, heap = deque(range(len(self.at))), self._heap
        queued = [True] * len(self.at)
        while True:
            while queue:
                device = queue.popleft()
                queued[device] = False
                for woken in self._run_device(device):
                    if not queued[woken]:
                        queued[woken] = True
                        queue.append(woken)
            if not heap:
                return
            now, acknowledged, device, number = heappop(heap)
            if acknowledged:
                line = self._unacknowledged[device, number]
                line.popleft()
                if not line:
                    continue
                number = line[0]
            give = self.program.devices[device].gives[number]
            assert give is not None
            assert give.wire is not None
            if self._blocking and give.wire.hold_ns and not acknowledged:
                line = self._unacknowledged[device, give.target]
                line.append(number)
                if len(line) > 1:
                    continue
            self._there[give.slot] = self._carry(device, number, give.target, give.wire, now)
            queued[give.target] = True
            queue.append(give.target)

    def _run_device(self, number: int) -> set[int]:
        """Run a device until an input is missing; returns the devices that got one."""
        lasts, needs, gives = self.program.devices[number]
        there, in_turn = self._there, self._in_turn
        woken: set[int] = set()
        starts, ends = self.starts[number], self.ends[number]
        layered = self.program.layered[number] if self.players else None
        free = ends[-1] if ends else 0
        index = self.at[number]
        for index in range(index, len(lasts)):  # noqa: B020  the loop goes on where the device stood
            need = needs[index]
            if need >= 0:
                ready = there[need]
                if ready < 0:
                    self.at[number] = index
                    return woken
                if ready > free:
                    free = ready
            op = layered[index] if layered else None
            if op:
                start, free = self.players[number].play(op, free, lasts[index])
                starts.append(start)
            else:
                starts.append(free)
                free += lasts[index]
            ends.append(free)
            give = gives[index]
            if give is not None:
                slot, target, wire = give
                if wire is None:
                    there[slot] = free
                elif in_turn:
                    heappush(self._heap, (free, 0, number, index))
                    continue
                else:
                    there[slot] = self._carry(number, index, target, wire, free)
                if target >= 0 and target != number:
                    woken.add(target)
        self.at[number] = len(lasts)
        return woken

    def _carry(self, source: int, index: int, target: int, wire: Wire, now_ns: int) -> int:
        """Send the message of an operation over its link; returns when it arrives."""
        if self._blocking and wire.hold_ns:
            start_ns = wire._replace(hold_ns=0).take(self._link_free, now_ns)
            heappush(self._heap, (start_ns + wire.busy_ns + wire.hold_ns, 1, source, target))
        else:
            start_ns = wire.take(self._link_free, now_ns)
        freed_ns = start_ns + wire.busy_ns
        arrives_ns = freed_ns + wire.latency_ns
        op, ready_ns = self.program.orders[source][index], self.ends[source][index]
        self.messages.append(SimulatedMessage(op, source, target, ready_ns, start_ns, freed_ns, arrives_ns))
        return arrives_ns


# ---- checks ----------------------------------------------------------------------------------------------------------


def validate(schedule: Schedule, costs: Costs, memory: Sequence[int] | None = None) -> Timeline:
    """Check a schedule and simulate it. memory[d]: limit of device d, in the units of costs.

    Raises ConfigError, which names the device and the cell, for: an operation that is missing, doubled or elsewhere;
    one before an operation that it needs on its own device; memory over the limit; devices that wait for each other;
    exchanges of replicas in a wrong place.
    """
    check_complete(schedule)
    for device, order in enumerate(schedule.orders):
        # Check that each operation comes after what it needs on its own device.
        done: set[Op] = set()
        for index, op in enumerate(order):
            if op.part:
                needed = op._replace(part=op.part - 1)
            else:
                needed = Op(Kind.D if op.kind is Kind.W else Kind.F, op.stage, op.microbatch)
            if (op.part or op.kind is not Kind.F) and needed not in done:
                raise ConfigError(
                    f"device {device}, cell {index + 1}: {op} comes before {needed}, which it needs: swap them"
                )
            done.add(op)
    if memory is not None:
        for device, (peak, limit) in enumerate(zip(peaks(schedule, costs), memory, strict=True)):
            if peak > limit:
                raise ConfigError(
                    f"{schedule.name}: device {device} holds {peak} of activations at once, its memory allows {limit}: "
                    "use a schedule that holds fewer microbatches, or more memory"
                )
    timeline = simulate(schedule, costs)
    if costs.exchanges:
        check_exchanges(timeline.exchanges, costs.exchanges, *_exchange_limits(timeline, costs))
    if costs.shards:
        check_shards(timeline.shards, costs.shards, schedule.n_microbatches)
    return timeline


def _exchange_limits(timeline: Timeline, costs: Costs) -> tuple[list[int], list[int]]:
    """When each stage needs all of its weights, and from when on it sends gradients."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for order, begun, ended in zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True):
        for op, span in zip(order, zip(begun, ended, strict=True), strict=True):
            spans[op.stage].append(span)
    needed, ready = [], []
    for stage, one in enumerate(costs.exchanges):
        (start, until), (since, end) = min(spans[stage]), max(spans[stage], key=lambda span: span[::-1])
        needed.append(start + one.overlap_ns(True, until - start) * costs.overlapped)
        ready.append(end - one.overlap_ns(False, end - since) * costs.overlapped)
    return needed, ready


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
    """Check that every operation is there once and on its device. Raises ConfigError."""
    seen: set[Op] = set()
    parts_of: Counter[tuple[int, int, Kind]] = Counter()
    for device, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            wrong = _misplaced(schedule, device, op, seen)
            if wrong:
                raise ConfigError(f"{schedule.name}: device {device}, cell {index + 1} ({op}) {wrong}")
            seen.add(op)
            parts_of[op.stage, op.microbatch, op.kind] += 1
    whole = schedule.parts
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.n_microbatches):
            f, d, w, b = (parts_of.get((stage, microbatch, kind), 0) for kind in (Kind.F, Kind.D, Kind.W, Kind.B))
            if f != whole or (d, w, b) not in ((whole, whole, 0), (0, 0, whole)):
                raise ConfigError(
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
