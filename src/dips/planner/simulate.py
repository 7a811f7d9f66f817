"""Simulates a schedule: when every operation and every message begins and ends.

CrossPipe's conventions (arXiv:2507.00217, section 3.5): an operation starts when its device has ended the one before
and its input is there; a message starts when its producer ends and its link is free, occupies the link for busy_ns
and arrives latency_ns later; sending costs a device nothing. A link serves messages in the order in which they are
ready, equal ones by device. What replicas exchange before and after each stage, and for every microbatch, is in
dips.planner.exchange.

Devices run ahead, each as far as its inputs are known. Where a link has one sender, its messages are ready in the
sender's own order, so each takes the link at once. Where several devices send over a link, messages wait until no
device can run: then no message can come before the earliest of them, which takes its link. dips.planner.fleet
simulates several replicas.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from dips.planner.costs import Costs, Wire
from dips.planner.errors import PlanError
from dips.planner.exchange import (
    Exchanged,
    LayeredOp,
    LayerPlayer,
    ShardExchange,
    ShardLog,
    gates,
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
        whole = self.makespan_ns * self.schedule.n_devices
        return 1.0 - self.busy_ns / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a schedule. Raises PlanError, which names the cells that wait for each other, when it cannot end."""
    run = Run(compile_program([schedule], costs), shares_links(costs))
    program = run.program
    if run.stuck:
        raise PlanError(stuck(schedule, program.operations_before(run.at)))
    starts, ends = program.strip(run.starts), program.strip(run.ends)
    done = exchanged(costs, [(schedule, ends)])
    logs, waited_ns = run.sharded(slice(None))
    return Timeline(
        schedule,
        tuple(map(tuple, starts)),
        tuple(map(tuple, ends)),
        tuple(run.messages),
        done,
        logs,
        costs.shards,
        waited_ns,
    )


def exchanged(costs: Costs, played: Iterable[tuple[Schedule, Sequence[Sequence[int]]]]) -> tuple[Exchanged, ...]:
    """The exchanges between replicas, from the ends of their operations; played: one for each simulated replica. A
    stage's gradients leave when all replicas have ended it."""
    if not costs.exchanges:
        return ()
    ready = [0] * len(costs.stages)
    for schedule, ends in played:
        for order, row in zip(schedule.orders, ends, strict=True):
            for op, end in zip(order, row, strict=True):
                ready[op.stage] = max(ready[op.stage], end)
    return (*gathered(costs.exchanges), *reduced(costs.exchanges, ready, costs.overlapped))


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
    exchanging: list[list[LayeredOp | None]] = []
    free_ns = [0] * len(devices)
    if costs.shards:
        kinds = _layered_ops(schedules[0], costs)
        exchanging = [[kinds[op.stage, op.kind, op.part] for op in order] for order in orders]
        taken = {one.resource: one.freed_ns for one in gathered(costs.exchanges)}
        resource_of = {
            place: one.resource for place, one in zip(schedules[0].device_of_stage, costs.shards, strict=True)
        }
        n = schedules[0].n_devices
        free_ns = [taken.get(resource_of.get(device % n, NOTHING), 0) for device in range(len(devices))]
    program = Program(devices, base, orders, {}, [[] for _ in devices], exchanging, free_ns, costs.overlapped)
    waits = gates(costs.exchanges, costs.overlapped)
    return _with_pauses(program, waits) if any(waits) else program


def _layered_ops(schedule: Schedule, costs: Costs) -> dict[tuple[int, Kind, int], LayeredOp]:
    """How each operation exchanges, by stage, kind and part."""
    return {
        (stage, kind, part): layered(stage, kind, part, schedule.parts, costs.shards[stage])
        for stage in range(schedule.n_stages)
        for kind in Kind
        for part in range(schedule.parts)
    }


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
        self._players = [LayerPlayer(at_ns, program.overlapped) for at_ns in program.networks_ns if program.layered]
        self._follow()

    def sharded(self, devices: slice) -> tuple[tuple[ShardLog, ...], int]:
        """What the layers of these devices exchanged, and how long operations waited for it."""
        players = self._players[devices]
        for player in players:
            player.flush()
        return tuple(player.log for player in players), sum(player.waited_ns for player in players)

    @property
    def stuck(self) -> bool:
        return any(at < len(device.lasts) for at, device in zip(self.at, self.program.devices, strict=True))

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
        layered = self.program.layered[number] if self._players else None
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
                start, free = self._players[number].play(op, free, lasts[index])
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


def stuck(schedule: Schedule, at: Sequence[int]) -> str:
    """The error sentence for a schedule that cannot end; at[d]: the operation at which device d waits."""
    waiting = [
        f"device {device} waits at cell {index + 1} ({schedule.orders[device][index]})"
        for device, index in enumerate(at[: schedule.n_devices])
        if index < len(schedule.orders[device])
    ]
    return f"the schedule cannot end: {', '.join(waiting[:4])}; no device can send what they wait for"
