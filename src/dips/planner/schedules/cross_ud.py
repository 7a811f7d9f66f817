"""CrossPipe's greedy schedule, which knows the links (arXiv:2507.00217, section 4.2, Algorithm 1): CrossUDSub.

One stage on each device. Blocks are cut into `parts` sub-blocks. Always the device that can begin something first
gets its next sub-block; its phase decides which one: F while it warms up, F and D in turn in the steady phase, D before
W at the end; W where memory or an input that is on its way stops F and D.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dips.planner.costs import Costs, StageCost
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule, straight

NEVER = 1 << 62


@dataclass(slots=True)
class _Device:
    """State of one device. free_ns: end of its last sub-block. f, d: (microbatch, time of arrival) in their order; w:
    microbatches whose D has ended.

    part_f, part_d, part_w: the next part of the block that was begun. at_f, at_d, at_w: when the next sub-block of the
    kind could begin; NEVER while none is known or memory is full.
    """

    stage: int
    limit: int
    cost: StageCost
    lasts: dict[Kind, list[int]]
    free_ns: int = 0
    held: int = 0
    f: deque[tuple[int, int]] = field(default_factory=deque)
    d: deque[tuple[int, int]] = field(default_factory=deque)
    w: deque[int] = field(default_factory=deque)
    begun_f: int = 0
    begun_d: int = 0
    part_f: int = 0
    part_d: int = 0
    part_w: int = 0
    at_f: int = NEVER
    at_d: int = NEVER
    at_w: int = NEVER
    d_was_last: bool = True
    order: list[Op] = field(default_factory=list)


def cross_ud(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int], parts: int = 1) -> Schedule:
    """Make the schedule. memory[d]: limit of device d in the units of costs.

    Raises PlanError when a device cannot hold one microbatch.
    """
    return _Greedy(n_devices, n_microbatches, costs, memory, parts).schedule()


class _Greedy:
    def __init__(self, n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int], parts: int) -> None:
        if len(costs.stages) != n_devices or len(memory) != n_devices or parts < 1:
            raise PlanError(
                f"{len(costs.stages)} stages, {len(memory)} limits and {parts} parts for {n_devices} devices"
            )
        for stage, (cost, limit) in enumerate(zip(costs.stages, memory, strict=True)):
            if cost.activation > limit:
                raise PlanError(
                    f"stage {stage} holds {cost.activation} for one microbatch, its memory allows {limit}: make the "
                    "microbatch smaller, use more stages, or recompute activations"
                )
        self._n, self._n_microbatches, self._costs, self._parts = n_devices, n_microbatches, costs, parts
        self._devices = [self._device(stage, limit) for stage, limit in enumerate(memory)]
        self._devices[0].f.extend((m, 0) for m in range(n_microbatches))
        self._link_free: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._when = [NEVER] * n_devices
        self._look(self._devices[0])

    def _device(self, stage: int, limit: int) -> _Device:
        lasts = {
            kind: [self._costs.compute_ns(stage, kind, part, self._parts) for part in range(self._parts)]
            for kind in (Kind.F, Kind.D, Kind.W)
        }
        return _Device(stage, limit, self._costs.stages[stage], lasts)

    def schedule(self) -> Schedule:
        while self._heap:
            at_ns, stage = heapq.heappop(self._heap)
            if at_ns == self._when[stage]:
                device = self._devices[stage]
                self._place(device, self._choose(device, at_ns), at_ns)
                self._look(device)
        orders = tuple(tuple(device.order) for device in self._devices)
        return Schedule(f"cross_ud/{self._parts}", straight(self._n), self._n_microbatches, orders, self._parts)

    def _look(self, device: _Device) -> None:
        """Note when this device can begin what."""
        free_ns = device.free_ns
        device.at_f = device.at_d = NEVER
        device.at_w = free_ns if device.w else NEVER
        if device.f and (device.part_f or device.held + device.cost.activation <= device.limit):
            device.at_f = max(free_ns, device.f[0][1])
        if device.d:
            device.at_d = max(free_ns, device.d[0][1])
        when = min(device.at_f, device.at_d, device.at_w)
        self._when[device.stage] = when
        if when < NEVER:
            heapq.heappush(self._heap, (when, device.stage))

    def _choose(self, device: _Device, now_ns: int) -> Kind:
        """Choose the ready sub-block that the phase prefers. A block of F or D that was begun is ended first; parts of
        W fill gaps."""
        f, d = device.at_f <= now_ns, device.at_d <= now_ns
        if f and device.part_f:
            return Kind.F
        if d and device.part_d:
            return Kind.D
        if f and not device.begun_d and not d:
            return Kind.F
        if device.begun_f == self._n_microbatches or not device.d_was_last:
            first, second = d, f
            kinds = (Kind.D, Kind.F)
        else:
            first, second = f, d
            kinds = (Kind.F, Kind.D)
        if first:
            return kinds[0]
        return kinds[1] if second else Kind.W

    def _place(self, device: _Device, kind: Kind, now_ns: int) -> None:
        last_part = self._parts - 1
        if kind is Kind.F:
            microbatch, part = device.f[0][0], device.part_f
            device.part_f = part + 1 if part < last_part else 0
            if not part:
                device.begun_f += 1
                device.held += device.cost.activation
                device.d_was_last = False
        elif kind is Kind.D:
            microbatch, part = device.d[0][0], device.part_d
            device.part_d = part + 1 if part < last_part else 0
            if not part:
                device.begun_d += 1
                device.d_was_last = True
        else:
            microbatch, part = device.w[0], device.part_w
            device.part_w = part + 1 if part < last_part else 0
        device.order.append(Op(kind, device.stage, microbatch, part))
        device.free_ns = now_ns + device.lasts[kind][part]
        if part == last_part:
            self._end(device, kind, microbatch)

    def _end(self, device: _Device, kind: Kind, microbatch: int) -> None:
        cost = device.cost
        if kind is Kind.W:
            device.held -= cost.activation - cost.d_release
            device.w.popleft()
        elif kind is Kind.F:
            device.f.popleft()
            self._hand_on(device, microbatch, device.stage + 1, forward=True)
        else:
            device.held -= cost.d_release
            device.d.popleft()
            device.w.append(microbatch)
            self._hand_on(device, microbatch, device.stage - 1, forward=False)

    def _hand_on(self, device: _Device, microbatch: int, stage: int, forward: bool) -> None:
        """Send the output of the block; at the last stage a forward pass makes its own backward pass possible."""
        if stage == self._n:
            device.d.append((microbatch, device.free_ns))
        elif stage >= 0:
            target = self._devices[stage]
            (target.f if forward else target.d).append((microbatch, self._arrival_ns(device, stage)))
            self._look(target)

    def _arrival_ns(self, device: _Device, target: int) -> int:
        """When a message arrives. Blocks of one device end in their order, so its messages take their link in that
        order."""
        wire = self._costs.wires.get((device.stage, target))
        if wire is None:
            return device.free_ns
        freed_ns = device.free_ns
        if wire.busy_ns or wire.hold_ns:
            freed_ns = max(freed_ns, self._link_free.get(wire.resource, 0)) + wire.busy_ns
            self._link_free[wire.resource] = freed_ns + wire.hold_ns
        return freed_ns + wire.latency_ns
