"""CrossPipe's greedy schedule, which knows the links (arXiv:2507.00217, section 4.2, Algorithm 1): CrossUDSub.

One stage on each device. Blocks are cut into `parts` sub-blocks. Always the device that can begin something first
gets its next sub-block; which one, its phase says: F while it warms up, F and D in turn in the steady phase, D before
W at the end; W where memory or an input that is on its way stops F and D.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dips.planner.costs import Costs
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule, straight

NEVER = 1 << 62


@dataclass
class _Device:
    """free_ns: its last sub-block ended. f, d: (microbatch, there at) in their order; w: microbatches whose D has
    ended.

    current: the block that was begun and its next part. last: the kind of the last block of F or D that was begun.
    """

    stage: int
    limit: int
    free_ns: int = 0
    held: int = 0
    f: deque[tuple[int, int]] = field(default_factory=deque)
    d: deque[tuple[int, int]] = field(default_factory=deque)
    w: deque[int] = field(default_factory=deque)
    begun: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    part_of: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    last: Kind = Kind.D
    order: list[Op] = field(default_factory=list)


def cross_ud(n_devices: int, n_microbatches: int, costs: Costs, memory: Sequence[int], parts: int = 1) -> Schedule:
    """memory[d]: limit of device d in the units of costs.

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
        self._devices = [_Device(stage, limit) for stage, limit in enumerate(memory)]
        self._devices[0].f.extend((m, 0) for m in range(n_microbatches))
        self._link_free: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = [(0, 0)]
        self._when = [0] + [NEVER] * (n_devices - 1)

    def schedule(self) -> Schedule:
        while self._heap:
            at_ns, stage = heapq.heappop(self._heap)
            if at_ns == self._when[stage]:
                self._advance(self._devices[stage], at_ns)
        orders = tuple(tuple(device.order) for device in self._devices)
        return Schedule(f"cross_ud/{self._parts}", straight(self._n), self._n_microbatches, orders, self._parts)

    def _advance(self, device: _Device, now_ns: int) -> None:
        kind = self._choose(device, now_ns)
        self._place(device, kind, now_ns)
        self._look(device)

    def _look(self, device: _Device) -> None:
        """Note when this device can begin something."""
        when = min(
            (at for kind in (Kind.F, Kind.D, Kind.W) if (at := self._possible_ns(device, kind)) < NEVER), default=NEVER
        )
        self._when[device.stage] = when
        if when < NEVER:
            heapq.heappush(self._heap, (when, device.stage))

    def _possible_ns(self, device: _Device, kind: Kind) -> int:
        """When the next sub-block of this kind could begin; NEVER while nothing of it is known or memory forbids it."""
        if kind is Kind.W:
            return device.free_ns if device.w else NEVER
        queue = device.f if kind is Kind.F else device.d
        if not queue:
            return NEVER
        if kind is Kind.F and not device.part_of[kind]:
            if device.held + self._costs.stages[device.stage].activation > device.limit:
                return NEVER
        return max(device.free_ns, queue[0][1])

    def _choose(self, device: _Device, now_ns: int) -> Kind:
        ready = [kind for kind in (Kind.F, Kind.D, Kind.W) if self._possible_ns(device, kind) <= now_ns]
        for kind in (Kind.F, Kind.D):  # a block of F or D that was begun is ended: its parts are for W to fill gaps
            if device.part_of[kind] and kind in ready:
                return kind
        preferred: tuple[Kind, ...]
        if not device.begun[Kind.D] and Kind.D not in ready:
            preferred = (Kind.F, Kind.W)
        elif device.begun[Kind.F] == self._n_microbatches:
            preferred = (Kind.D, Kind.W)
        elif device.last is Kind.F:
            preferred = (Kind.D, Kind.F, Kind.W)
        else:
            preferred = (Kind.F, Kind.D, Kind.W)
        return next(kind for kind in preferred if kind in ready)

    def _place(self, device: _Device, kind: Kind, now_ns: int) -> None:
        part = device.part_of[kind]
        microbatch = device.w[0] if kind is Kind.W else (device.f if kind is Kind.F else device.d)[0][0]
        cost = self._costs.stages[device.stage]
        if not part:
            device.begun[kind] += 1
            if kind is Kind.F:
                device.held += cost.activation
            if kind is not Kind.W:
                device.last = kind
        device.order.append(Op(kind, device.stage, microbatch, part))
        device.free_ns = now_ns + self._costs.compute_ns(device.stage, kind, part, self._parts)
        device.part_of[kind] = (part + 1) % self._parts
        if part + 1 == self._parts:
            self._end(device, kind, microbatch)

    def _end(self, device: _Device, kind: Kind, microbatch: int) -> None:
        device.held -= self._costs.stages[device.stage].released(kind)
        if kind is Kind.W:
            device.w.popleft()
        elif kind is Kind.F:
            device.f.popleft()
            self._hand_on(device, microbatch, device.stage + 1, forward=True)
        else:
            device.d.popleft()
            device.w.append(microbatch)
            self._hand_on(device, microbatch, device.stage - 1, forward=False)

    def _hand_on(self, device: _Device, microbatch: int, stage: int, forward: bool) -> None:
        """Send what the block made; at the last stage a forward pass makes its own backward pass possible."""
        if stage == self._n:
            device.d.append((microbatch, device.free_ns))
        elif stage >= 0:
            target = self._devices[stage]
            (target.f if forward else target.d).append((microbatch, self._arrival_ns(device, stage)))
            self._look(target)

    def _arrival_ns(self, device: _Device, target: int) -> int:
        """Blocks of one device end in their order, so its messages take their link in that order."""
        wire = self._costs.wires.get((device.stage, target))
        if wire is None:
            return device.free_ns
        freed_ns = max(device.free_ns, self._link_free.get(wire.resource, 0)) + wire.busy_ns
        self._link_free[wire.resource] = freed_ns
        return freed_ns + wire.latency_ns
