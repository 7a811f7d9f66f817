"""Schedules that take links into account, made by simulating time: CrossPipe's greedy, SpanTrain's compact zero-bubble
order and JEEVES' greedy (list schedules).

CrossPipe and SpanTrain plan one pipeline. JEEVES plans several replicas that meet on their links, where messages take
turns in the order in which they are ready; so it follows the ends of operations in time, and each replica gets an order
of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from dips.core.errors import ConfigError
from dips.planner.costs import Costs, Wire
from dips.planner.ir import Kind, Op, Schedule, straight, wave

NEVER = 1 << 62


def _check_memory(what: str, needed: Sequence[int], memory: Sequence[int]) -> None:
    """Raise ConfigError where one microbatch does not fit. what: holds needed[i] of memory[i]."""
    for number, (held, limit) in enumerate(zip(needed, memory, strict=True)):
        if held > limit:
            raise ConfigError(
                f"{what} {number} holds {held} for one microbatch, its memory allows {limit}: make the microbatch "
                "smaller, use more stages, or recompute activations"
            )


# ---- CrossPipe -------------------------------------------------------------------------------------------------------
#
# arXiv:2507.00217, section 4.2, Algorithm 1. Always the device that can begin something first gets its next block. Its
# phase decides which one: F while it warms up, F and D in turn in the steady phase, D before W at the end; W where
# memory, or an input that is on its way, stops F and D.


def cross_ud(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int], parts: int = 1) -> Schedule:
    """CrossUDSub: one stage on each device, blocks cut into `parts` sub-blocks. memory[d]: limit of device d in the
    units of costs.

    Raises ConfigError when a device cannot hold one microbatch.
    """
    if len(costs.stages) != n_devices or len(memory) != n_devices or parts < 1:
        raise ConfigError(f"{len(costs.stages)} stages, {len(memory)} limits and {parts} parts for {n_devices} devices")
    _check_memory("stage", [stage.activation for stage in costs.stages], memory)
    places = straight(n_devices)
    orders = _CrossPipe(places, n_microbatches, costs, memory, parts).orders()
    return Schedule(f"cross_ud/{parts}", places, n_microbatches, orders, parts)


def cross_wave(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int]) -> Schedule:
    """The same for a wave, two stages on each device, down the pipeline and back (the paper gives the algorithm for
    one stage on each device, and solves waves). costs: of 2 n_devices stages; memory[d]: limit of device d in their
    units.

    Raises ConfigError when a device cannot hold one microbatch.
    """
    if len(costs.stages) != 2 * n_devices or len(memory) != n_devices:
        raise ConfigError(f"{len(costs.stages)} stages and {len(memory)} limits for a wave of {n_devices} devices")
    held = [stage.activation for stage in costs.stages]
    needed = [there + back for there, back in zip(held[:n_devices], reversed(held[n_devices:]), strict=True)]
    _check_memory("device", needed, memory)
    places = wave(n_devices)
    return Schedule("cross_wave", places, n_microbatches, _CrossPipe(places, n_microbatches, costs, memory, 1).orders())


_F, _D, _W = 0, 1, 2
_KINDS = (Kind.F, Kind.D, Kind.W)


@dataclass(slots=True)
class _Device:
    """One device. Queues and parts are by slot: kind * (stages of a device) + which of its stages. The last stage of a
    wave's device is on the way back."""

    number: int
    stages: tuple[int, ...]
    limit: int
    queues: list[deque[tuple[int, int]]]  # (microbatch, when its input is there), in their order
    part: list[int]  # the next part of the block that was begun
    at: list[int]  # when the next sub-block could begin; NEVER while none is known, or memory is full
    order: list[Op]
    free_ns: int = 0  # the end of its last sub-block
    held: int = 0
    held_last: int = 0  # of it, what belongs to the last stage
    begun_d: int = 0
    d_was_last: bool = True


class _CrossPipe:
    def __init__(
        self, places: Sequence[int], n_microbatches: int, costs: Costs, memory: Sequence[int], parts: int
    ) -> None:
        self._places, self._costs, self._parts = places, costs, parts
        self._chunks = chunks = len(places) // len(memory)
        self._devices = []
        for number, limit in enumerate(memory):
            stages = tuple(stage for stage, place in enumerate(places) if place == number)
            slots = range(len(_KINDS) * chunks)
            queues: list[deque[tuple[int, int]]] = [deque() for _ in slots]
            self._devices.append(_Device(number, stages, limit, queues, [0] * len(slots), [NEVER] * len(slots), []))
        self._lasts = [
            [[costs.compute_ns(stage, kind, part, parts) for part in range(parts)] for kind in _KINDS]
            for stage in range(len(places))
        ]
        self._link_free: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._when = [NEVER] * len(memory)
        self._devices[0].queues[_F].extend((m, 0) for m in range(n_microbatches))
        self._look(self._devices[0])

    def orders(self) -> tuple[tuple[Op, ...], ...]:
        while self._heap:
            now_ns, number = heappop(self._heap)
            if now_ns == self._when[number]:  # else the device was looked at again since
                device = self._devices[number]
                self._place(device, self._choose(device, now_ns), now_ns)
                self._look(device)
        return tuple(tuple(device.order) for device in self._devices)

    def _look(self, device: _Device) -> None:
        """Note when this device can begin what."""
        free_ns, at = device.free_ns, device.at
        for slot, queue in enumerate(device.queues):
            at[slot] = max(free_ns, queue[0][1]) if queue else NEVER
        for chunk in range(self._chunks):
            if at[chunk] < NEVER and not device.part[chunk] and not self._fits(device, chunk):
                at[chunk] = NEVER
        when = self._when[device.number] = min(at)
        if when < NEVER:
            heappush(self._heap, (when, device.number))

    def _fits(self, device: _Device, chunk: int) -> bool:
        """Whether memory allows another F. So that waves cannot jam, microbatches on their way down always leave room
        for one on its way back."""
        needed = device.held + self._costs.stages[device.stages[chunk]].activation
        if chunk < self._chunks - 1:
            needed += max(0, self._costs.stages[device.stages[-1]].activation - device.held_last)
        return needed <= device.limit

    def _choose(self, device: _Device, now_ns: int) -> int:
        """The slot of the ready sub-block that the phase prefers."""
        chunks = self._chunks
        ready = [at <= now_ns for at in device.at]
        if self._parts > 1:
            for slot in range(_W * chunks):  # a block of F or D that was begun is ended first; parts of W fill gaps
                if ready[slot] and device.part[slot]:
                    return slot
        warm = device.begun_d or any(ready[_D * chunks : _W * chunks])
        d_first = warm and not device.d_was_last  # at the end no F is left, so D goes first anyway
        for kind in (_D, _F, _W) if d_first else (_F, _D, _W):
            for slot in range((kind + 1) * chunks - 1, kind * chunks - 1, -1):  # the way back first: it frees memory
                if ready[slot]:
                    return slot
        raise AssertionError(f"device {device.number} can begin nothing at {now_ns} ns")

    def _place(self, device: _Device, slot: int, now_ns: int) -> None:
        kind, chunk = divmod(slot, self._chunks)
        stage, part, queue = device.stages[chunk], device.part[slot], device.queues[slot]
        microbatch, cost = queue[0][0], self._costs.stages[stage]
        device.order.append(Op(_KINDS[kind], stage, microbatch, part))
        device.free_ns = now_ns + self._lasts[stage][kind][part]
        if not part and kind != _W:
            device.d_was_last = kind == _D
            if kind == _F:
                self._hold(device, chunk, cost.activation)
            else:
                device.begun_d += 1
        if part + 1 < self._parts:
            device.part[slot] = part + 1
            return
        device.part[slot] = 0
        queue.popleft()
        if kind == _F:
            self._hand_on(device, stage + 1, kind, microbatch)
            return
        self._hold(device, chunk, -cost.released(_KINDS[kind]))
        if kind == _D:
            device.queues[_W * self._chunks + chunk].append((microbatch, device.free_ns))
            self._hand_on(device, stage - 1, kind, microbatch)

    def _hold(self, device: _Device, chunk: int, amount: int) -> None:
        device.held += amount
        if chunk == self._chunks - 1:
            device.held_last += amount

    def _hand_on(self, device: _Device, stage: int, kind: int, microbatch: int) -> None:
        """Send the output of a block to a stage; behind the last one a forward pass makes its own backward pass
        possible."""
        if stage == len(self._places):
            device.queues[_W * self._chunks - 1].append((microbatch, device.free_ns))
        elif stage >= 0:
            target, arrives_ns = self._devices[self._places[stage]], device.free_ns
            wire = self._costs.wires.get((device.number, target.number))
            if wire is not None:  # blocks of a device end in their order, so its messages take their link in that order
                arrives_ns = wire.take(self._link_free, arrives_ns) + wire.busy_ns + wire.latency_ns
            target.queues[kind * self._chunks + target.stages.index(stage)].append((microbatch, arrives_ns))
            if target is not device:
                self._look(target)


# ---- SpanTrain -------------------------------------------------------------------------------------------------------
#
# SpanTrain, section 3.3.1 and Figure 6b: "compact zero-bubble". Its priorities on CrossPipe's engine: whenever a device
# is free, the oldest ready F, else the oldest ready D, else the oldest ready W. So all forward passes that are there
# run first, and W fills every bubble.
#
# The paper also updates weights in that order, so that a forward pass may use weights that miss some microbatches
# (section 4.2: 6.4 to 8.2 % more iterations), which does not equal synchronous training. That is not here: a Schedule
# is one iteration, all of whose gradients belong to the same weights, and has no operation that changes these.


def compact_zb(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int]) -> Schedule:
    """F before D before W, one stage on each device. memory[d]: limit of device d in the units of costs; a forward
    pass that would exceed it waits. Without that, a device holds up to all microbatches.

    Gradients are summed over all microbatches before weights change, as in any other schedule: it equals synchronous
    training. Raises ConfigError when a device cannot hold one microbatch.
    """
    if len(costs.stages) != n_devices or len(memory) != n_devices:
        raise ConfigError(f"{len(costs.stages)} stages and {len(memory)} limits for {n_devices} devices")
    _check_memory("stage", [stage.activation for stage in costs.stages], memory)
    places = straight(n_devices)
    orders = _CompactZeroBubble(places, n_microbatches, costs, memory, 1).orders()
    return Schedule("compact_zb", places, n_microbatches, orders)


class _CompactZeroBubble(_CrossPipe):
    """The same engine with SpanTrain's priorities."""

    def _choose(self, device: _Device, now_ns: int) -> int:
        return next(slot for slot, at in enumerate(device.at) if at <= now_ns)  # one stage: slots are F, D, W


# ---- JEEVES ----------------------------------------------------------------------------------------------------------
#
# Deng et al., HotNets 2025, section 3.1: an operation runs as soon as its input is there and its stage is idle. A
# forward pass is held back while the stage's memory is full; a backward pass goes first where both could run. A link
# carries one message at a time at its full rate, in the order in which messages are ready, equal ones by replica
# (section 3.3: one global list of transfers).


def jeeves(n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int = 1) -> list[Schedule]:
    """Make one schedule for each replica. memory[d]: limit of device d in the units of costs.

    Raises ConfigError when a device cannot hold one microbatch.
    """
    orders, n = _Jeeves(n_microbatches, costs, memory, replicas).orders, len(costs.stages)
    return [
        Schedule("jeeves", straight(n), n_microbatches, tuple(map(tuple, orders[r * n : r * n + n])))
        for r in range(replicas)
    ]


def jeeves_span_ns(n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int = 1) -> int:
    """How long the schedules of all replicas take together. Raises as jeeves() does."""
    return _Jeeves(n_microbatches, costs, memory, replicas).now


_ARRIVES_F, _ARRIVES_B, _ENDS = 0, 1, 2


class _Jeeves:
    """The simulation, which ends with its construction. Device d of replica r has number r * n + d. Events are
    (time, device << 2 | what). orders: what ran, in its order. now: the end of the last operation."""

    def __init__(self, n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int) -> None:
        _check_memory("stage", [stage.activation for stage in costs.stages], memory)
        self._n = n = len(costs.stages)
        self._f_ns, self._b_ns = ([costs.compute_ns(s, kind) for s in range(n)] for kind in (Kind.F, Kind.B))
        self._activation = [stage.activation for stage in costs.stages]
        self._limit = list(memory)

        def wire_of(replica: int, source: int, target: int) -> Wire | None:
            wire = costs.wires.get((source, target))
            return wire.of(replica) if wire else None

        self._wires = [
            (wire_of(replica, stage, stage + 1), wire_of(replica, stage, stage - 1))
            for replica in range(replicas)
            for stage in range(n)
        ]
        total = n * replicas
        self._f: list[deque[int]] = [deque() for _ in range(total)]
        self._b: list[deque[int]] = [deque() for _ in range(total)]
        self._held = [0] * total
        self._running: list[Op | None] = [None] * total
        self._travels: tuple[list[deque[int]], list[deque[int]]] = (
            [deque() for _ in range(total)], [deque() for _ in range(total)],
        )  # fmt: skip
        self._link_free: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self.orders: list[list[Op]] = [[] for _ in range(total)]
        self.now = 0
        for first in range(0, total, n):
            self._f[first].extend(range(n_microbatches))
            self._begin(first)
        self._run()

    def _run(self) -> None:
        heap = self._heap
        while heap:
            now = self.now = heap[0][0]
            touched = []
            while heap and heap[0][0] == now:  # all that happens now is known before an operation begins now
                event = heappop(heap)[1]
                device, what = event >> 2, event & 3
                if what == _ENDS:
                    self._end(device)
                elif what == _ARRIVES_F:
                    self._f[device].append(self._travels[0][device].popleft())
                else:
                    self._b[device].append(self._travels[1][device].popleft())
                touched.append(device)
            for device in touched:
                if self._running[device] is None:
                    self._begin(device)

    def _begin(self, device: int) -> None:
        stage = device % self._n
        if self._b[device]:
            op, lasts = Op(Kind.B, stage, self._b[device].popleft()), self._b_ns[stage]
        elif self._f[device] and self._held[device] + self._activation[stage] <= self._limit[stage]:
            op, lasts = Op(Kind.F, stage, self._f[device].popleft()), self._f_ns[stage]
            self._held[device] += self._activation[stage]
        else:
            return
        self._running[device] = op
        self.orders[device].append(op)
        heappush(self._heap, (self.now + lasts, device << 2 | _ENDS))

    def _end(self, device: int) -> None:
        op = self._running[device]
        assert op is not None
        self._running[device] = None
        if op.kind is Kind.F:
            if op.stage + 1 < self._n:
                self._send(device + 1, op.microbatch, self._wires[device][0], _ARRIVES_F)
            else:
                self._b[device].append(op.microbatch)
            return
        self._held[device] -= self._activation[op.stage]
        if op.stage:
            self._send(device - 1, op.microbatch, self._wires[device][1], _ARRIVES_B)

    def _send(self, target: int, microbatch: int, wire: Wire | None, what: int) -> None:
        """Send a message; messages between two devices arrive in the order in which they were sent."""
        arrives = self.now
        if wire is not None:
            arrives = wire.take(self._link_free, arrives) + wire.busy_ns + wire.latency_ns
        self._travels[what][target].append(microbatch)
        heappush(self._heap, (arrives, target << 2 | what))
