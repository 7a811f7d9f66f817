"""CrossPipe's greedy schedule for a wave: two stages on each device, down the pipeline and back (arXiv:2507.00217,
section 4.2; the paper gives Algorithm 1 for one stage on each device, and solves waves).

As there, the device that can begin something first gets its next block: F first while it warms up, F and D in turn
afterwards, W where memory or an input on its way stops both. Of two F or two D, the one on the way back goes first: it
frees memory sooner. So that waves cannot jam, what a device holds of microbatches on their way down always leaves room
for one on its way back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dips.planner.costs import Costs
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule, wave

NEVER = 1 << 62
_KINDS = (Kind.F, Kind.D, Kind.W)


@dataclass(slots=True)
class _Device:
    """State of one device. queues[kind][chunk]: (microbatch, time of arrival), in order. chunk 1 is on the way back.
    back: of held, what belongs to chunk 1."""

    stages: tuple[int, int]
    limit: int
    free_ns: int = 0
    held: int = 0
    queues: dict[Kind, tuple[deque[tuple[int, int]], deque[tuple[int, int]]]] = field(
        default_factory=lambda: {kind: (deque(), deque()) for kind in _KINDS}
    )
    begun_f: int = 0
    begun_d: int = 0
    back: int = 0
    d_was_last: bool = True
    order: list[Op] = field(default_factory=list)


def cross_wave(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int]) -> Schedule:
    """Make the schedule. costs: of 2 n_devices stages; memory[d]: limit of device d in their units.

    Raises PlanError when a device cannot hold one microbatch.
    """
    return _Greedy(n_devices, n_microbatches, costs, memory).schedule()


class _Greedy:
    def __init__(self, n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int]) -> None:
        if len(costs.stages) != 2 * n_devices or len(memory) != n_devices:
            raise PlanError(f"{len(costs.stages)} stages and {len(memory)} limits for a wave of {n_devices} devices")
        self._places, self._n, self._n_microbatches, self._costs = wave(n_devices), n_devices, n_microbatches, costs
        self._devices = [_Device((d, 2 * n_devices - 1 - d), memory[d]) for d in range(n_devices)]
        for d, device in enumerate(self._devices):
            needed = sum(costs.stages[stage].activation for stage in device.stages)
            if needed > device.limit:
                raise PlanError(
                    f"device {d} holds {needed} for one microbatch, its memory allows {device.limit}: make the "
                    "microbatch "
                    "smaller, use more stages, or recompute activations"
                )
        self._devices[0].queues[Kind.F][0].extend((m, 0) for m in range(n_microbatches))
        self._link_free: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = [(0, 0)]
        self._when = [0] + [NEVER] * (n_devices - 1)

    def schedule(self) -> Schedule:
        while self._heap:
            now, number = heappop(self._heap)
            if now == self._when[number]:
                device = self._devices[number]
                self._place(number, device, *self._choose(device, now), now)
                self._look(number)
        orders = tuple(tuple(device.order) for device in self._devices)
        return Schedule("cross_wave", self._places, self._n_microbatches, orders)

    def _look(self, number: int) -> None:
        device = self._devices[number]
        when = min(self._at(device, kind, chunk) for kind in _KINDS for chunk in (0, 1))
        self._when[number] = when
        if when < NEVER:
            heappush(self._heap, (when, number))

    def _at(self, device: _Device, kind: Kind, chunk: int) -> int:
        """When the next block of this kind and chunk could begin; NEVER while none is known or memory is full."""
        queue = device.queues[kind][chunk]
        if not queue or (kind is Kind.F and not self._fits(device, chunk)):
            return NEVER
        return max(device.free_ns, queue[0][1])

    def _fits(self, device: _Device, chunk: int) -> bool:
        there, back = (self._costs.stages[stage].activation for stage in device.stages)
        if chunk:
            return device.held + back <= device.limit
        return device.held + there + max(0, back - device.back) <= device.limit

    def _choose(self, device: _Device, now: int) -> tuple[Kind, int]:
        ready = [(kind, chunk) for kind in _KINDS for chunk in (1, 0) if self._at(device, kind, chunk) <= now]
        kinds = [kind for kind, _ in ready]
        if not device.begun_d and Kind.D not in kinds:
            preferred = (Kind.F, Kind.W, Kind.D)
        elif device.begun_f == 2 * self._n_microbatches or not device.d_was_last:
            preferred = (Kind.D, Kind.F, Kind.W)
        else:
            preferred = (Kind.F, Kind.D, Kind.W)
        return min(ready, key=lambda block: (preferred.index(block[0]), -block[1]))

    def _place(self, number: int, device: _Device, kind: Kind, chunk: int, now: int) -> None:
        microbatch, _ = device.queues[kind][chunk].popleft()
        stage = device.stages[chunk]
        cost = self._costs.stages[stage]
        device.order.append(Op(kind, stage, microbatch))
        device.free_ns = now + self._costs.compute_ns(stage, kind)
        if kind is Kind.W:
            self._release(device, chunk, cost.released(kind))
            return
        device.d_was_last = kind is Kind.D
        if kind is Kind.F:
            device.begun_f += 1
            self._release(device, chunk, -cost.activation)
            self._hand_on(number, stage, stage + 1, Kind.F, microbatch)
        else:
            device.begun_d += 1
            self._release(device, chunk, cost.released(kind))
            device.queues[Kind.W][chunk].append((microbatch, device.free_ns))
            self._hand_on(number, stage, stage - 1, Kind.D, microbatch)

    def _release(self, device: _Device, chunk: int, amount: int) -> None:
        device.held -= amount
        device.back -= amount * chunk

    def _hand_on(self, number: int, stage: int, target_stage: int, kind: Kind, microbatch: int) -> None:
        device = self._devices[number]
        if target_stage == 2 * self._n:
            device.queues[Kind.D][1].append((microbatch, device.free_ns))
        elif target_stage >= 0:
            target = self._places[target_stage]
            chunk = int(target_stage >= self._n)
            self._devices[target].queues[kind][chunk].append((microbatch, self._arrival_ns(number, target)))
            if target != number:
                self._look(target)

    def _arrival_ns(self, number: int, target: int) -> int:
        """When a message arrives. The blocks of a device end in their order, so its messages take their link in that
        order."""
        free_ns = self._devices[number].free_ns
        wire = self._costs.wires.get((number, target))
        if wire is None:
            return free_ns
        if wire.busy_ns or wire.hold_ns:
            free_ns = max(free_ns, self._link_free.get(wire.resource, 0)) + wire.busy_ns
            self._link_free[wire.resource] = free_ns + wire.hold_ns
        return free_ns + wire.latency_ns
