"""The best order that a constraint solver finds (CrossPipe, arXiv:2507.00217, section 4.1, with OR-tools' CP-SAT).

An interval for each operation (each part of it, where blocks are cut as in section 4.2) and for each message that
occupies a link; no two overlap on a device or a link; a message follows its producer, its latency precedes its
consumer; activations are a cumulative resource of each device; microbatches keep their order within a stage and kind
(which halves the search, and excludes no best schedule when stages' costs are equal for all microbatches). What
replicas exchange is as in the paper's Figure 7: each stage's weights come before its first F, its gradients are an
interval on their network after its last W. With ZeRO stages 2 and 3, whose layers exchange for every microbatch, the
model is a relaxation: an operation takes what its layers need on an idle network, and the makespan is at least the time
on each network; so the bound holds, and what the solver finds is simulated with all of it. Minimizes the makespan,
exchanges included. The solver's lower bound says how far from the best a schedule may be.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ortools.sat.python import cp_model

from dips.core.errors import ConfigError
from dips.planner.costs import Costs
from dips.planner.exchange import reduced
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.simulate import Timeline, peaks, simulate

KINDS = (Kind.F, Kind.D, Kind.W)

MOST_MEMORY_UNITS = 1 << 20
"""Into which the solver's model divides a device's memory. The solver multiplies them by times in integers of 64 bits,
and calls a problem impossible where these overflow. What is rounded allows more, never less: the bound holds, and
schedules are checked."""


@dataclass(frozen=True)
class Optimum:
    """The solver's schedule."""

    schedule: Schedule
    lower_bound_ns: int  # no schedule of this problem has a shorter makespan
    proved: bool  # the simulated makespan of the schedule is equal to it
    wall_s: float


def optimal(
    name: str,
    device_of_stage: Sequence[int],
    n_microbatches: int,
    costs: Costs,
    memory: Sequence[int],
    hint: Schedule | None = None,
    time_limit_s: float = 20.0,
    parts: int = 1,
) -> Optimum:
    """Find the best order. memory[d]: limit of device d in the units of costs. hint: a schedule (split, and of as many
    parts) to begin with, that must fit that memory; the result is never longer. parts: pieces that every block is cut
    into.

    Raises ConfigError when none was found in the time, and no
    hint was given.
    """
    if hint is not None and hint.parts != parts:
        raise ConfigError(
            f"{name}: blocks cut into {parts} cannot begin with a schedule that cuts them into {hint.parts}"
        )
    problem = _Problem(tuple(device_of_stage), n_microbatches, costs, memory, parts)
    if hint is not None:
        problem.hint(simulate(hint, costs))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = 1
    status = solver.solve(problem.model)
    solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    if not solved and (hint is None or status != cp_model.UNKNOWN):
        why = (
            "none exists: give each device memory for one microbatch"
            if status == cp_model.INFEASIBLE
            else (f"none was found in {time_limit_s:g} s: allow more time")
        )
        raise ConfigError(f"{name}: no schedule within the memory; {why}")
    candidates = [problem.schedule(name, solver)] if solved else []
    if hint is not None:
        candidates.append(replace(hint, name=name))
    candidates = [one for one in candidates if all(map(operator.le, peaks(one, costs), memory))]
    if not candidates:
        raise ConfigError(f"{name}: the solver's schedule needs a little more memory than there is: give a little more")
    spans_ns = [simulate(schedule, costs).makespan_ns for schedule in candidates]
    span_ns = min(spans_ns)
    bound_ns = math.ceil(max(solver.best_objective_bound, 0.0)) * problem.unit_ns  # -inf where nothing is known
    proved = status == cp_model.OPTIMAL and span_ns <= bound_ns
    return Optimum(candidates[spans_ns.index(span_ns)], bound_ns, proved, solver.wall_time)


class _Problem:
    """The solver's model. Times are in the largest unit that divides all of them, which keeps the solver's domains
    small."""

    def __init__(
        self, device_of_stage: tuple[int, ...], n_microbatches: int, costs: Costs, memory: Sequence[int], parts: int
    ) -> None:
        self._device_of_stage, self._n, self._costs = device_of_stage, n_microbatches, costs
        self._n_stages, self._parts = len(device_of_stage), parts
        self.unit_ns = self._unit()
        self.model = cp_model.CpModel()
        self._horizon = self._serial()
        self._blocks: list[Op] = []
        self._starts: dict[Op, Any] = {}
        self._messages: dict[Op, Any] = {}
        self._exchanges: dict[tuple[int, bool], Any] = {}
        on_device: dict[int, list[Any]] = defaultdict(list)
        for stage in range(self._n_stages):
            for microbatch in range(n_microbatches):
                for kind in KINDS:
                    on_device[device_of_stage[stage]] += self._add_block(Op(kind, stage, microbatch))
        self._order()
        self._depend()
        for intervals in on_device.values():
            self.model.add_no_overlap(intervals)
        self._limit(memory)
        self._makespan = self.model.new_int_var(0, self._horizon, "makespan")
        for op in self._blocks:
            if op.microbatch == self._n - 1:
                self.model.add(self._makespan >= self._end(op))
        self._exchange()
        self._exchange_shards()
        self.model.minimize(self._makespan)

    def hint(self, timeline: Timeline) -> None:
        for device, order in enumerate(timeline.schedule.orders):
            for op, start_ns in zip(order, timeline.starts[device], strict=True):
                if op in self._starts:
                    self.model.add_hint(self._starts[op], start_ns // self.unit_ns)
        for message in timeline.messages:
            if message.op in self._messages:
                self.model.add_hint(self._messages[message.op], message.start_ns // self.unit_ns)
        for one in timeline.exchanges:
            if (one.stage, one.before) in self._exchanges:
                self.model.add_hint(self._exchanges[one.stage, one.before], one.start_ns // self.unit_ns)
        self.model.add_hint(self._makespan, timeline.makespan_ns // self.unit_ns)

    def schedule(self, name: str, solver: Any) -> Schedule:
        n_devices = max(self._device_of_stage) + 1
        rows: list[list[tuple[int, Op]]] = [[] for _ in range(n_devices)]
        for op, start in self._starts.items():
            rows[self._device_of_stage[op.stage]].append((solver.value(start), op))

        # An operation of length 0 may begin together with another one: it comes first, unless it depends on that one.
        def at(cell: tuple[int, Op]) -> tuple[int, bool, int, int, int]:
            start, op = cell
            return start, self._length(op) > 0, KINDS.index(op.kind), op.microbatch, op.part

        orders = tuple(tuple(op for _, op in sorted(row, key=at)) for row in rows)
        return Schedule(name, self._device_of_stage, self._n, orders, self._parts)

    # ---- parts ----

    def _unit(self) -> int:
        pieces = [(kind, part) for kind in KINDS for part in range(self._parts)]
        stages = range(self._n_stages)
        times = [self._costs.least_ns(stage, kind, part, self._parts) for stage in stages for kind, part in pieces]
        times += [ns for wire in self._costs.wires.values() for ns in (wire.busy_ns, wire.latency_ns, wire.hold_ns)]
        times += [ns for one in self._costs.exchanges for ns in one[1:5]]
        times += [self._overlap_ns(stage) for stage in range(len(self._costs.exchanges))]
        times += [ns for one in self._costs.shards for ns in one[2:]]
        return math.gcd(*times) or 1

    def _serial(self) -> int:
        """The time of all operations and messages one after the other."""
        pieces = [(kind, part) for kind in KINDS for part in range(self._parts)]
        stages = range(self._n_stages)
        work = sum(self._costs.least_ns(stage, kind, part, self._parts) for stage in stages for kind, part in pieces)
        slowest = max((wire.busy_ns + wire.latency_ns + wire.hold_ns for wire in self._costs.wires.values()), default=0)
        between_replicas = sum(sum(one[1:5]) for one in self._costs.exchanges)
        between_replicas += sum(3 * self._n * one.layers * sum(one[2:]) for one in self._costs.shards)
        return (self._n * (work + 2 * self._n_stages * slowest) + between_replicas) // self.unit_ns

    def _add_block(self, block: Op) -> list[Any]:
        """Add the parts of a block, which follow each other; they are indexed by the first one."""
        self._blocks.append(block)
        intervals = []
        for op in (block._replace(part=part) for part in range(self._parts)):
            start = self.model.new_int_var(0, self._horizon, str(op))
            if op.part:
                self.model.add(start >= self._part_end(op._replace(part=op.part - 1)))
            self._starts[op] = start
            intervals.append(self.model.new_fixed_size_interval_var(start, self._length(op), f"{op} runs"))
        return intervals

    def _length(self, op: Op) -> int:
        return self._costs.least_ns(op.stage, op.kind, op.part, self._parts) // self.unit_ns

    def _part_end(self, op: Op) -> Any:
        return self._starts[op] + self._length(op)

    def _end(self, block: Op) -> Any:
        return self._part_end(block._replace(part=self._parts - 1))

    def _order(self) -> None:
        for op in self._blocks:
            after = Op(op.kind, op.stage, op.microbatch + 1)
            if after in self._starts:
                self.model.add(self._starts[after] >= self._end(op))

    def _depend(self) -> None:
        on_link: dict[int, list[Any]] = defaultdict(list)
        for op in self._blocks:
            if op.kind is Kind.W:
                self.model.add(self._starts[op] >= self._end(Op(Kind.D, op.stage, op.microbatch)))
            else:
                self._hand_on(op, on_link)
        for intervals in on_link.values():
            self.model.add_no_overlap(intervals)

    def _hand_on(self, op: Op, on_link: Mapping[int, list[Any]]) -> None:
        if op.kind is Kind.F:
            self.model.add(self._starts[Op(Kind.D, op.stage, op.microbatch)] >= self._end(op))
        stage = op.stage + (1 if op.kind is Kind.F else -1)
        if not 0 <= stage < self._n_stages:
            return
        consumer = self._starts[Op(op.kind, stage, op.microbatch)]
        wire = self._costs.wires.get((self._device_of_stage[op.stage], self._device_of_stage[stage]))
        if wire is None:
            self.model.add(consumer >= self._end(op))
            return
        busy, latency = wire.busy_ns // self.unit_ns, wire.latency_ns // self.unit_ns
        taken = busy + wire.hold_ns // self.unit_ns
        if not taken:
            self.model.add(consumer >= self._end(op) + latency)
            return
        start = self.model.new_int_var(0, self._horizon, f"{op} leaves")
        self._messages[op] = start
        on_link[wire.resource].append(self.model.new_fixed_size_interval_var(start, taken, f"{op} travels"))
        self.model.add(start >= self._end(op))
        self.model.add(consumer >= start + busy + latency)

    def _limit(self, memory: Sequence[int]) -> None:
        """Limit memory: a part of each activation is held from the start of F to the end of D, the rest to the end of
        W."""
        for device, limit in enumerate(memory):
            held, demands = [], []
            for op in [op for op in self._blocks if op.kind is Kind.F and self._device_of_stage[op.stage] == device]:
                cost = self._costs.stages[op.stage]
                for kind, demand in ((Kind.D, cost.d_release), (Kind.W, cost.activation - cost.d_release)):
                    if demand:
                        last = Op(kind, op.stage, op.microbatch)
                        length = self.model.new_int_var(0, self._horizon, f"{op} to {last}")
                        held.append(
                            self.model.new_interval_var(
                                self._starts[op], length, self._end(last), f"{op} held for {last}"
                            )
                        )
                        demands.append(demand)
            unit = max(math.gcd(limit, *demands), limit // MOST_MEMORY_UNITS, 1)
            self.model.add_cumulative(held, [demand // unit for demand in demands], limit // unit)

    # ---- between replicas ----

    def _exchange(self) -> None:
        """Add the exchanges between replicas. Weights arrive at known times: they are sent from time 0 on, in the order
        of the stages (which excludes no best schedule: no stage starts before the previous one). Gradients are
        intervals."""
        costs = self._costs
        if not costs.exchanges:
            return
        if not costs.overlapped:
            self._apart()
            return
        on_network: dict[int, list[Any]] = defaultdict(list)
        there = costs.gates_ns(self._parts)
        for stage, one in enumerate(costs.exchanges):
            self.model.add(self._starts[Op(Kind.F, stage, 0)] >= there[stage] // self.unit_ns)
            if one.reduces:
                last = self._end(Op(Kind.W, stage, self._n - 1))
                busy, latency = one.reduce_ns // self.unit_ns, one.reduce_latency_ns // self.unit_ns
                start = self.model.new_int_var(0, self._horizon, f"gradients of {stage} leave")
                self._exchanges[stage, False] = start
                self.model.add(start >= last - self._overlap_ns(stage) // self.unit_ns)
                self.model.add(self._makespan >= start + busy + latency)
                travels = self.model.new_fixed_size_interval_var(start, busy, f"gradients of {stage} travel")
                on_network[one.resource].append(travels)
        for intervals in on_network.values():
            self.model.add_no_overlap(intervals)

    def _overlap_ns(self, stage: int) -> int:
        """How long gradients travel before a stage's last operation ends: at most so long as with a B, which overlaps
        more than its W alone does."""
        lasts_ns = self._costs.compute_ns(stage, Kind.B, self._parts - 1, self._parts)
        return self._costs.exchanges[stage].overlap_ns(False, lasts_ns)

    def _exchange_shards(self) -> None:
        """Add what holds whatever the networks carry meanwhile: the first layer's weights come before each stage's
        first F, the last layer's gradients after its last W, and a network carries all of its exchanges."""
        on_network: dict[int, int] = defaultdict(int)
        for stage, one in enumerate(self._costs.shards):
            first = (one.gather_ns + one.gather_latency_ns) // self.unit_ns
            last = (one.reduce_ns + one.reduce_latency_ns) // self.unit_ns
            self.model.add(self._starts[Op(Kind.F, stage, 0)] >= first)
            self.model.add(self._makespan >= self._end(Op(Kind.W, stage, self._n - 1)) + last)
            busy = one.layers * self._n * (2 * one.gather_ns + one.reduce_ns) // self.unit_ns
            on_network[one.resource] += busy
        self.model.add(self._makespan >= max(on_network.values(), default=0))

    def _apart(self) -> None:
        """Add the exchanges as constants: weights before all operations, gradients after all of them."""
        exchanges = self._costs.exchanges
        head = max(self._costs.gates_ns(), default=0) // self.unit_ns
        none_before = [0] * len(exchanges)
        tail = max((one.ends_ns for one in reduced(exchanges, none_before, None)), default=0) // self.unit_ns
        for op in self._blocks:
            if op.kind is Kind.F and op.microbatch == 0:
                self.model.add(self._starts[op] >= head)
            elif op.kind is Kind.W and op.microbatch == self._n - 1:
                self.model.add(self._makespan >= self._end(op) + tail)
