"""JEEVES' communication-aware schedule (Deng et al., HotNets 2025, section 3.1): greedy in simulated time.

An operation runs as soon as its input is there and its stage is idle. A forward pass is held back while the stage's
memory is full; a backward pass goes first where both could run. The order of what ran is the schedule.

Several replicas are simulated together over links that they share: a link carries one message at a time
at its full rate, in the order in which messages are ready, equal ones by replica (section 3.3: one global list of
transfers). So each replica gets an order of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from dips.planner.costs import Costs, Wire
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule, straight

_ARRIVES_F, _ARRIVES_B, _ENDS = 0, 1, 2


def jeeves(n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int = 1) -> list[Schedule]:
    """Make one schedule for each replica. memory[d]: limit of device d in the units of costs.

    Raises PlanError when a device cannot hold one microbatch.
    """
    return _played(n_microbatches, costs, memory, replicas).schedules()


def jeeves_span_ns(n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int = 1) -> int:
    """How long the schedules of all replicas take together. Raises as jeeves() does."""
    return _played(n_microbatches, costs, memory, replicas).now


def _played(n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int) -> _Greedy:
    for stage, (cost, limit) in enumerate(zip(costs.stages, memory, strict=True)):
        if cost.activation > limit:
            raise PlanError(
                f"stage {stage} holds {cost.activation} for one microbatch, its memory allows {limit}: make the "
                "microbatch smaller, use more stages, or recompute activations"
            )
    greedy = _Greedy(n_microbatches, costs, memory, replicas)
    greedy.play()
    return greedy


class _Greedy:
    """The greedy simulation. Device d of replica r has number r * n + d. Events are (time, device << 2 | what)."""

    def __init__(self, n_microbatches: int, costs: Costs, memory: Sequence[int], replicas: int) -> None:
        n = len(costs.stages)
        self._n, self._n_microbatches, self._replicas = n, n_microbatches, replicas
        self._f_ns = [stage.f_ns for stage in costs.stages]
        self._b_ns = [stage.d_ns + stage.w_ns for stage in costs.stages]
        self._activation = [stage.activation for stage in costs.stages]
        self._limit = list(memory)
        self._wires: list[tuple[Wire | None, Wire | None]] = [
            (_wire(costs, replica, stage, stage + 1), _wire(costs, replica, stage, stage - 1))
            for replica in range(replicas)
            for stage in range(n)
        ]
        total = n * replicas
        self._f: list[deque[int]] = [deque() for _ in range(total)]
        self._b: list[deque[int]] = [deque() for _ in range(total)]
        self._held = [0] * total
        self._running: list[Op | None] = [None] * total
        self._orders: list[list[Op]] = [[] for _ in range(total)]
        self._travels: tuple[list[deque[int]], list[deque[int]]] = (
            [deque() for _ in range(total)], [deque() for _ in range(total)],
        )  # fmt: skip
        self._link_free: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self.now = 0

    def play(self) -> None:
        n, heap = self._n, self._heap
        for replica in range(self._replicas):
            self._f[replica * n].extend(range(self._n_microbatches))
            self._begin(replica * n, 0)
        while heap:
            now = self.now = heap[0][0]
            touched = []
            while heap and heap[0][0] == now:
                touched.append(self._happen(heappop(heap)[1], now))
            for device in touched:
                if self._running[device] is None:
                    self._begin(device, now)

    def schedules(self) -> list[Schedule]:
        n = self._n
        return [
            Schedule("jeeves", straight(n), self._n_microbatches, tuple(map(tuple, self._orders[r * n : r * n + n])))
            for r in range(self._replicas)
        ]

    def _happen(self, event: int, now: int) -> int:
        """Process one event; returns the device that may begin an operation after it."""
        device, what = event >> 2, event & 3
        if what == _ENDS:
            self._end(device, now)
        elif what == _ARRIVES_F:
            self._f[device].append(self._travels[0][device].popleft())
        else:
            self._b[device].append(self._travels[1][device].popleft())
        return device

    def _begin(self, device: int, now: int) -> None:
        stage = device % self._n
        if self._b[device]:
            op, lasts = Op(Kind.B, stage, self._b[device].popleft()), self._b_ns[stage]
        elif self._f[device] and self._held[device] + self._activation[stage] <= self._limit[stage]:
            op, lasts = Op(Kind.F, stage, self._f[device].popleft()), self._f_ns[stage]
            self._held[device] += self._activation[stage]
        else:
            return
        self._running[device] = op
        self._orders[device].append(op)
        heappush(self._heap, (now + lasts, device << 2 | _ENDS))

    def _end(self, device: int, now: int) -> None:
        op = self._running[device]
        assert op is not None
        self._running[device] = None
        if op.kind is Kind.F:
            if op.stage + 1 < self._n:
                self._send(device + 1, op.microbatch, self._wires[device][0], now, _ARRIVES_F)
            else:
                self._b[device].append(op.microbatch)
            return
        self._held[device] -= self._activation[op.stage]
        if op.stage:
            self._send(device - 1, op.microbatch, self._wires[device][1], now, _ARRIVES_B)

    def _send(self, target: int, microbatch: int, wire: Wire | None, now: int, what: int) -> None:
        """Send a message; messages between two devices arrive in the order in which they were sent."""
        arrives = now
        if wire is not None:
            if wire.busy_ns or wire.hold_ns:
                arrives = max(now, self._link_free.get(wire.resource, 0))
                self._link_free[wire.resource] = arrives + wire.busy_ns + wire.hold_ns
            arrives += wire.busy_ns + wire.latency_ns
        self._travels[what][target].append(microbatch)
        heappush(self._heap, (arrives, target << 2 | what))


def _wire(costs: Costs, replica: int, source: int, target: int) -> Wire | None:
    wire = costs.wires.get((source, target))
    return wire.of(replica) if wire else None
