"""Simulates one iteration in which each stage takes pieces of its own size, over links whose bandwidth changes.

A planned microbatch has so many sequences. A stage computes a piece of it at a time; a piece never crosses the border
of a microbatch. The cache at a stage's input aggregates pieces that arrive until there is one of the stage's own size,
or splits a larger one (SpanTrain, section 3.4). Gradients are sums over sequences, and an iteration computes each
sequence once at each stage with the same weights, whatever the sizes: its gradients are those of the whole batch, so it
equals synchronous training.

A piece takes the overhead of an operation and the time of its sequences; a message of a piece takes its part of the
link's time, and the whole latency. All else follows dips.planner.simulate, to which it is equal to the nanosecond with
whole microbatches and the plan's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from dips.core.errors import ConfigError
from dips.planner.adapter.traces import WHOLE, Channel
from dips.planner.costs import Costs, StageCost
from dips.planner.exchange import gates, reduced
from dips.planner.ir import Kind, Schedule, straight


class Sizes(NamedTuple):
    """The sequences that one stage takes at a time."""

    fill: int  # forward, until its first gradient begins
    run: int  # forward and backward, from there until its last forward pass has ended
    drain: int  # backward, after that


class LinkMessage(NamedTuple):
    """One message that crossed a link."""

    sender: int  # stage
    receiver: int
    sequences: int
    start_ns: int  # it occupied the link from here
    freed_ns: int  # to here
    arrives_ns: int


class Piece(NamedTuple):
    """One operation on a part of a microbatch, as it was played."""

    kind: Kind
    stage: int
    microbatch: int
    first: int  # of its sequences
    sequences: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What is played: a schedule, its costs, and what pieces of microbatches cost.

    Raises ConfigError for what cannot be cut into pieces.
    """

    schedule: Schedule
    costs: Costs  # of whole microbatches
    sequences: int  # of a microbatch
    # (sequences, costs of a piece of so many at each stage) as profiled, without overhead; times in between are
    # interpolated. Empty: times are in proportion to the sequences
    profiled: tuple[tuple[int, tuple[StageCost, ...]], ...] = ()
    # activations that each device may hold: a device chooses what it runs by SpanTrain's compact order, F before D
    # before W. None: devices follow the order of the schedule, cell by cell
    limits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule.parts > 1:
            raise ConfigError(
                f"{self.schedule.name} cuts its blocks into {self.schedule.parts} parts, so pieces of microbatches "
                "have no place in it: make a plan with another schedule, such as compact_zb or 1f1b"
            )
        if self.limits is not None and self.schedule.device_of_stage != straight(self.schedule.n_devices):
            raise ConfigError("the compact order has one stage on each device, in the order of the model")

    @cached_property
    def whole(self) -> tuple[Sizes, ...]:
        """The planned sizes: whole microbatches everywhere."""
        return (Sizes(self.sequences, self.sequences, self.sequences),) * self.schedule.n_stages

    def compute_ns(self, stage: int, kind: Kind, sequences: int) -> int:
        """Time of a piece, without overhead. Below the smallest profiled size times are in proportion."""
        whole = self.costs.stages[stage].compute_ns(kind)
        if sequences == self.sequences:
            return whole
        known = [(0, 0), *((n, costs[stage].compute_ns(kind)) for n, costs in self.profiled), (self.sequences, whole)]
        for (low, before), (high, after) in pairwise(known):
            if low <= sequences <= high and high > low:
                return before + (after - before) * (sequences - low) // (high - low)
        raise ConfigError(f"a piece of {sequences} sequences of a microbatch of {self.sequences}")


@dataclass(frozen=True)
class Played:
    """One iteration."""

    begin_ns: int
    end_ns: int  # of the last operation or exchange
    busy_ns: tuple[int, ...]  # time that each device computed
    operations: int
    messages: tuple[int, ...]  # that each device received over a wire

    @property
    def span_ns(self) -> int:
        return self.end_ns - self.begin_ns


Watch = Callable[[LinkMessage], Sequence[Sizes] | None]
"""Gets each message when it arrives; returns the sizes from then on, or None where they stay."""


def play(
    pipeline: Pipeline,
    sizes: Sequence[Sizes],
    channels: Mapping[int, Channel] | None = None,
    begin_ns: int = 0,
    watch: Watch | None = None,
    pieces: list[Piece] | None = None,
) -> Played:
    """Play one iteration. sizes[s]: of stage s. channels: by the resource of a wire; the plan's bandwidth elsewhere.
    pieces: gets every operation.

    Raises ConfigError when devices wait for each other.
    """
    run = _Run(pipeline, sizes, channels or {}, begin_ns, watch, pieces)
    run.follow()
    return run.played()


_F, _D, _W = 0, 1, 2
_ROW = {Kind.F: _F, Kind.D: _D, Kind.B: _D, Kind.W: _W}
_ENDS, _ARRIVES, _WAKES = 0, 1, 2

_Event = tuple[int, int, int, int, int, int, int, int, int]
"""(time, what, device, stage, row, microbatch, sequences, start on the link, end there); those at the same time in the
order of devices, as in simulate."""


class _Run:
    """One iteration. there[r][s][m]: sequences of microbatch m whose input for F (r = 0) or D (1) is in the cache of
    stage s; done[r][s][m]: those that F, D or W (2) have ended. B counts as D."""

    def __init__(
        self,
        pipeline: Pipeline,
        sizes: Sequence[Sizes],
        channels: Mapping[int, Channel],
        begin_ns: int,
        watch: Watch | None,
        pieces: list[Piece] | None,
    ) -> None:
        schedule = self._schedule = pipeline.schedule
        self._pipe, self._sizes, self._channels = pipeline, sizes, channels
        self._watch, self._pieces = watch, pieces
        self._n, self._b, stages = schedule.n_microbatches, pipeline.sequences, schedule.n_stages
        self._there = [[[0] * self._n for _ in range(stages)] for _ in (_F, _D)]
        self._there[_F][0] = [self._b] * self._n
        self._done = [[[0] * self._n for _ in range(stages)] for _ in (_F, _D, _W)]
        self._left_f = [self._n * self._b for _ in range(stages)]  # sequences whose F has not ended
        self._begun_d = [False] * stages
        self._running = [False] * schedule.n_devices
        self._at = [0] * schedule.n_devices  # the cell that each device has reached
        self._next = [[0] * stages for _ in (_F, _D, _W)]  # compact order: the oldest microbatch that is not done
        self._held = [0] * schedule.n_devices  # activations x sequences of a microbatch
        self._link_free: dict[int, int] = {}
        self._lasts: dict[tuple[Kind, int, int], int] = {}
        self._begin_ns = self.now = begin_ns
        self._stage_end = [begin_ns] * stages
        self._busy = [0] * schedule.n_devices
        self._messages = [0] * schedule.n_devices
        self._operations = 0
        self._split = schedule.split
        self._heap: list[_Event] = []
        self._last_ns = [0] * stages  # the length of each stage's last operation
        self._gates = [begin_ns] * stages  # when the first F of each may start, for its weights
        self._gate()

    def follow(self) -> None:
        heap = self._heap
        while heap:
            now = self.now = heap[0][0]
            touched: set[int] = set()
            while heap and heap[0][0] == now:  # all that happens now is known before an operation begins now
                event = heappop(heap)
                touched.add(event[2])
                if event[1] == _ENDS:
                    self._end(event, touched)
                elif event[1] == _ARRIVES:
                    self._arrive(event, touched)
            for device in sorted(touched):
                if not self._running[device]:
                    self._begin(device)
        missing = [s for s in range(self._schedule.n_stages) if self._left(s)]
        if missing:
            raise ConfigError(
                f"{self._schedule.name} cannot end: stage {missing[0]} waits for a piece that no stage can send"
            )

    def _left(self, stage: int) -> bool:
        rows = self._done if self._split else self._done[:_W]
        return any(done < self._b for row in rows for done in row[stage])

    def played(self) -> Played:
        end_ns, costs = max(self._stage_end), self._pipe.costs
        if costs.exchanges:
            ready = [end - self._begin_ns for end in self._stage_end]
            last_ns = self._last_ns if costs.overlapped else None
            last = [one.ends_ns for one in reduced(costs.exchanges, ready, last_ns)]
            end_ns = max(end_ns, self._begin_ns + max(last, default=0))
        return Played(self._begin_ns, end_ns, tuple(self._busy), self._operations, tuple(self._messages))

    # ---- what a device runs next ----

    def _gate(self) -> None:
        """Set the gates of the stages that have not begun: a shorter first piece needs its weights sooner."""
        costs, begins = self._pipe.costs, [min(size.fill, self._b) for size in self._sizes]
        first_ns = [self._length(Kind.F, stage, begins[stage]) for stage in range(len(costs.exchanges))]
        waits = gates(costs.exchanges, first_ns if costs.overlapped else None) or [0] * len(begins)
        for stage, wait_ns in enumerate(waits):
            if not self._last_ns[stage]:
                gate = self._gates[stage] = self._begin_ns + wait_ns
                device = self._schedule.device_of_stage[stage]
                heappush(self._heap, (max(gate, self.now), _WAKES, device, stage, 0, 0, 0, 0, 0))

    def _length(self, kind: Kind, stage: int, n: int) -> int:
        found = self._lasts.get((kind, stage, n))
        if found is None:
            found = self._pipe.compute_ns(stage, kind, n) + self._pipe.costs.operation_ns
            self._lasts[kind, stage, n] = found
        return found

    def _begin(self, device: int) -> None:
        found = self._by_cells(device) if self._pipe.limits is None else self._by_readiness(device)
        if found is None:
            return
        kind, stage, microbatch, n = found
        row = _ROW[kind]
        lasts = self._length(kind, stage, n)
        if row == _F:
            self._held[device] += self._pipe.costs.stages[stage].activation * n
        elif row == _D:
            self._begun_d[stage] = True
        self._running[device] = True
        self._busy[device] += lasts
        self._last_ns[stage] = lasts
        self._operations += 1
        if self._pieces is not None:
            first = self._done[row][stage][microbatch]
            self._pieces.append(Piece(kind, stage, microbatch, first, n, self.now, self.now + lasts))
        heappush(self._heap, (self.now + lasts, _ENDS, device, stage, row, microbatch, n, 0, 0))

    def _ready(self, row: int, stage: int, microbatch: int) -> int:
        """The sequences of the next piece of F or D, 0 while its input is not there."""
        done, sizes = self._done[row][stage][microbatch], self._sizes[stage]
        if row == _F:
            size = sizes.run if self._begun_d[stage] else sizes.fill
        else:
            size = sizes.run if self._left_f[stage] else sizes.drain
        n = min(size, self._b - done)
        return n if self._there[row][stage][microbatch] >= done + n and self.now >= self._gates[stage] else 0

    def _by_cells(self, device: int) -> tuple[Kind, int, int, int] | None:
        order = self._schedule.orders[device]
        if self._at[device] == len(order):
            return None
        kind, stage, microbatch, _ = order[self._at[device]]
        row = _ROW[kind]
        if row == _W:  # weights' gradients send nothing, so all of a microbatch are one operation
            n = self._b - self._done[_W][stage][microbatch]
        else:
            n = self._ready(row, stage, microbatch)
        return (kind, stage, microbatch, n) if n else None

    def _by_readiness(self, stage: int) -> tuple[Kind, int, int, int] | None:
        assert self._pipe.limits is not None
        microbatch = self._next[_F][stage]
        if microbatch < self._n:
            n = self._ready(_F, stage, microbatch)
            needed = self._held[stage] + self._pipe.costs.stages[stage].activation * n
            if n and needed <= self._pipe.limits[stage] * self._b:
                return Kind.F, stage, microbatch, n
        microbatch = self._next[_D][stage]
        if microbatch < self._n:
            n = self._ready(_D, stage, microbatch)
            if n:
                return Kind.D, stage, microbatch, n
        microbatch = self._next[_W][stage]
        if microbatch < self._n:
            n = self._done[_D][stage][microbatch] - self._done[_W][stage][microbatch]
            if n:
                return Kind.W, stage, microbatch, n
        return None

    # ---- what has happened ----

    def _end(self, event: _Event, touched: set[int]) -> None:
        _, _, device, stage, row, microbatch, n, _, _ = event
        self._running[device] = False
        self._stage_end[stage] = self.now
        done = self._done[row][stage]
        done[microbatch] += n
        if done[microbatch] == self._b:
            self._at[device] += 1
            self._next[row][stage] += 1
        cost = self._pipe.costs.stages[stage]
        if row == _F:
            self._left_f[stage] -= n
            if stage + 1 < self._schedule.n_stages:
                self._send(stage, stage + 1, row, microbatch, n, touched)
            else:
                self._there[_D][stage][microbatch] += n
        elif row == _D:
            self._held[device] -= cost.released(Kind.D if self._split else Kind.B) * n
            if stage:
                self._send(stage, stage - 1, row, microbatch, n, touched)
        else:
            self._held[device] -= cost.released(Kind.W) * n

    def _send(self, stage: int, target: int, row: int, microbatch: int, n: int, touched: set[int]) -> None:
        places = self._schedule.device_of_stage
        wire = self._pipe.costs.wires.get((places[stage], places[target]))
        if wire is None:
            self._there[row][target][microbatch] += n
            touched.add(places[target])
            return
        start = self.now
        if wire.busy_ns or wire.hold_ns:
            start = max(start, self._link_free.get(wire.resource, 0))
        channel = self._channels.get(wire.resource)
        if channel is None:
            freed = start + -(-wire.busy_ns * n // self._b)
        else:
            freed = channel.end_ns(start, wire.busy_ns * n * WHOLE // self._b)
        if wire.busy_ns or wire.hold_ns:
            self._link_free[wire.resource] = freed + wire.hold_ns
        self._messages[places[target]] += 1
        arrives = freed + wire.latency_ns
        heappush(self._heap, (arrives, _ARRIVES, places[target], target, row, microbatch, n, start, freed))

    def _arrive(self, event: _Event, touched: set[int]) -> None:
        _, _, _, stage, row, microbatch, n, start, freed = event
        self._there[row][stage][microbatch] += n
        if self._watch is None:
            return
        sender = stage - 1 if row == _F else stage + 1
        changed = self._watch(LinkMessage(sender, stage, n, start, freed, self.now))
        if changed is not None:
            self._sizes = changed
            self._gate()
            touched.update(range(self._schedule.n_devices))
