"""JEEVES' memory-aware stage division (Deng et al., HotNets 2025, section 3.2): the number of layers of each stage.

The paper's objective, an integer program, is solved first (CP-SAT in place of a commercial solver). It only
estimates the time of the greedy schedule, and its best point can be slower in simulation than a uniform division. So
hill climbing on the simulator follows, from the solver's point and from the uniform one; the result is never worse
than uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dips.core.errors import ConfigError
from dips.planner.problem import Problem
from dips.planner.schedules.greedy import jeeves_span_ns
from dips.planner.units import Division

UNIT_NS = 1000
"""The solver's unit of time: its products stay small."""

LONGEST_STAGE, LONGEST, LONGEST_WAITS = 10**9, 10**12, 10**15
"""Limits of the solver's variables, in this unit."""

FEW_REPLICAS = 4
"""Replicas that the hill climbing simulates, with proportionally larger messages; its result is judged with all
replicas."""

MOST_TRIALS = 150
"""Divisions that are simulated in all."""

SpanOf = Callable[[Division], int]


@dataclass(frozen=True)
class Divided:
    """The division that was found."""

    division: Division
    span_ns: int  # makespan of the greedy schedule for it, with all replicas
    uniform_ns: int  # and for the uniform division
    seed: Division  # the solver's division; uniform where the solver has none
    tried: int  # divisions that were simulated


def divide(problem: Problem, coordinated: bool = True) -> Divided:
    """Find the best division. coordinated: replicas send one message at a time.

    Raises ConfigError where not even a uniform division has a schedule.
    """
    uniform = problem.uniform()
    few = _spans(problem, min(problem.replicas, FEW_REPLICAS) if coordinated else 1)
    try:
        seed = solve(problem)
    except ConfigError:
        seed = uniform
    climb = _Climb(few)
    slopes = list(_slopes(problem))
    ends = {uniform, climb.up(min([uniform, seed, *slopes], key=lambda d: (climb.of(d), d))), climb.up(uniform)}
    whole = _spans(problem, problem.replicas if coordinated else 1)
    judged = {division: whole(division) for division in ends if few(division) < _NONE}
    if uniform not in judged:
        if not judged:
            problem.limits(uniform)  # its error names the stage with too little memory
            raise ConfigError(f"{problem.setup.file}: no stage division fits the memory: use more stages, or recompute")
        judged[uniform] = _NONE
    best = min(judged, key=lambda division: (judged[division], division != uniform, division))
    return Divided(best, judged[best], judged[uniform], seed, len(climb.known))


_NONE = 1 << 62


def _spans(problem: Problem, replicas: int) -> SpanOf:
    """The greedy schedule's makespan for a division; _NONE when memory is too small. replicas: how many are
    simulated."""
    together = problem.replicas / replicas

    def span_ns(division: Division) -> int:
        try:
            costs, limits = problem.costs(division, together=together), problem.limits(division)
            return jeeves_span_ns(problem.n_microbatches, costs, limits, replicas)
        except ConfigError:
            return _NONE

    return span_ns


class _Climb:
    def __init__(self, span_ns: SpanOf) -> None:
        self._span_ns = span_ns
        self.known: dict[Division, int] = {}

    def up(self, division: Division) -> Division:
        """Move one unit from a stage to another one while that is faster, the best such move each time."""
        while True:
            moves = [move for move in _moves(division) if move in self.known or len(self.known) < MOST_TRIALS]
            best = min(moves, key=lambda move: (self.of(move), move), default=division)
            if self.of(best) >= self.of(division):
                return division
            division = best

    def of(self, division: Division) -> int:
        if division not in self.known:
            self.known[division] = self._span_ns(division)
        return self.known[division]


def _moves(division: Division) -> list[Division]:
    found = []
    for source, layers in enumerate(division):
        for target in range(len(division)):
            if target != source and layers > 1:
                moved = list(division)
                moved[source] -= 1
                moved[target] += 1
                found.append(tuple(moved))
    return found


def _slopes(problem: Problem) -> Iterator[Division]:
    """Divisions with fewer layers on the first stages or at the first sites, which hold most microbatches, and with
    layers as the sites have memory: single moves do not reach them when several stages are full at once."""
    n, total = problem.n_devices, len(problem.units)
    memory_gib = [problem.setup.sites[site].memory_gib for site in problem.site_of]
    if len(set(memory_gib)) > 1:
        yield _shared(total, [each or 0.0 for each in memory_gib])
    for lean in (0.05, 0.1, 0.15, 0.2, 0.3):
        yield _shared(total, [1 - lean + 2 * lean * stage / max(1, n - 1) for stage in range(n)])
        last = max(1, max(problem.site_of))
        yield _shared(total, [1 - lean + 2 * lean * site / last for site in problem.site_of])


def _shared(total: int, weights: Sequence[float]) -> Division:
    """At least one unit for each stage, the others as near to the weights as whole numbers allow."""
    rest, whole = total - len(weights), sum(weights)
    ideal = [max(0.0, total * weight / whole - 1) for weight in weights]
    scale = rest / (sum(ideal) or 1.0)
    found = [int(share * scale) for share in ideal]
    behind = sorted(range(len(weights)), key=lambda i: (found[i] - ideal[i] * scale, i))
    for index in range(rest - sum(found)):
        found[behind[index % len(weights)]] += 1
    return tuple(1 + more for more in found)


# ---- the paper's integer program ----


def solve(problem: Problem) -> Division:
    """The division with the smallest value of the paper's objective; all units count as equal, as the paper's layers.
    Raises ConfigError where even stages leave no memory for activations: the objective counts what they hold."""
    from ortools.sat.python import cp_model  # imported here: it takes a second, and only this needs it

    program = _Program(problem, cp_model.CpModel())
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 2.0
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    if solver.solve(program.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return problem.uniform()
    return tuple(solver.value(layers) for layers in program.layers)


class _Program:
    """The integer program. Variables: layers of each stage. Objective: the longer of the computation-dominant and the
    communication-dominant path, plus the wait for the first release of memory, as often as memory is full."""

    def __init__(self, problem: Problem, model: Any) -> None:
        self.model = model
        n, units = problem.n_devices, problem.units
        self._n, self._total = n, len(units)
        uniform = problem.uniform()
        costs = problem.costs(uniform)
        each = list(zip(costs.stages, uniform, strict=True))
        self._f = [cost.f_ns // layers // UNIT_NS for cost, layers in each]  # of one layer on each stage
        self._b = [(cost.d_ns + cost.w_ns) // layers // UNIT_NS for cost, layers in each]
        wires = [(costs.wires.get((s, s + 1)), costs.wires.get((s + 1, s))) for s in range(n - 1)]
        self._delay = [
            (
                sum(w.busy_ns + w.latency_ns for w in pair if w) // UNIT_NS,
                sum(w.busy_ns for w in pair if w) // 2 // UNIT_NS,
            )
            for pair in wires
        ]
        self.layers = [model.new_int_var(1, self._total - n + 1, f"layers {stage}") for stage in range(n)]
        model.add(sum(self.layers) == self._total)
        self._microbatches = problem.n_microbatches
        ideal = self._ideal()
        waits = self._waits(problem)
        model.minimize(ideal + waits)

    def _both(self, stage: int) -> Any:
        return (self._f[stage] + self._b[stage]) * self.layers[stage]

    def _ideal(self) -> Any:
        ideal = self.model.new_int_var(0, LONGEST, "ideal")
        for slowest in range(self._n):
            before = sum(self._both(stage) for stage in range(slowest))
            delay = sum(self._delay[boundary][0] for boundary in range(slowest))
            self.model.add(ideal >= before + delay + self._microbatches * self._both(slowest))
        for boundary, (delay, busy) in enumerate(self._delay):
            if busy:
                whole = sum(self._both(stage) for stage in range(self._n))
                others = sum(other for at, (other, _) in enumerate(self._delay) if at != boundary)
                self.model.add(ideal >= whole + others + delay + (self._microbatches - 1) * busy)
        return ideal

    def _waits(self, problem: Problem) -> Any:
        """The first stage holds `fit` microbatches. The first release comes when microbatch 1 has gone there and back;
        the last stage, never idle, wants microbatch fit + 1 after fit others."""
        model, n = self.model, self._n
        unit = max(1, round(max(u.activation_bytes for u in problem.units)))
        rooms = max(1, min(problem.limits(problem.uniform())) // unit)
        fit = model.new_int_var(1, self._microbatches, "fit")
        room = model.new_int_var(0, rooms, "room")
        model.add_division_equality(room, rooms, self.layers[0])
        model.add(fit <= room)
        wanted = model.new_int_var(0, LONGEST, "wanted")
        last = model.new_int_var(0, LONGEST_STAGE, "last")
        model.add(last == self._both(n - 1))
        model.add_multiplication_equality(wanted, [fit, last])
        there_and_back = sum(self._both(s) for s in range(n)) + sum(delay for delay, _ in self._delay)
        wait = model.new_int_var(0, LONGEST, "wait")
        model.add(wait >= there_and_back - wanted)
        times = model.new_int_var(0, self._microbatches, "times")
        model.add_division_equality(times, self._microbatches - 1, fit)
        waits = model.new_int_var(0, LONGEST_WAITS, "waits")
        model.add_multiplication_equality(waits, [wait, times])
        return waits
