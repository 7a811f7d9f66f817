"""Decides whether a running pipeline should change its schedule when measured times and links differ from the plan.

CrossPipe (arXiv:2507.00217), sections 6.2 and 8.2: profile again, plan again, and swap the schedule while training goes
on. The present schedule and the new ones are simulated with the measured numbers. A swap costs the time to move layers
that change their device: 14 bytes a parameter (16-bit weights, 32-bit weights and two moments), one copy over each link
between sites, all links at once, while training waits; nothing where only the order changes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dips.core.errors import ConfigError
from dips.planner.across import regrouped
from dips.planner.candidates import Candidate
from dips.planner.costs import NS, OPTIMIZER_BYTES, WEIGHT_BYTES
from dips.planner.errors import PlanError
from dips.planner.fleet import simulate_fleet
from dips.planner.ir import Schedule
from dips.planner.measured import MeasuredFile, layers_moved, with_measured_links, with_measured_stages
from dips.planner.plan import FORMAT, Plan, make_plan, pipelines_of
from dips.planner.problem import Problem, read_problem
from dips.planner.simulate import simulate
from dips.planner.units import Division

MOVED = (WEIGHT_BYTES + OPTIMIZER_BYTES) / WEIGHT_BYTES
"""The bytes of a layer that move, divided by those of its weights."""


@dataclass(frozen=True)
class Running:
    """A plan that is in use. problem: of its file. groups: of sites that hold whole pipelines. schedules: one, or
    one for each replica."""

    problem: Problem
    groups: int
    name: str
    sharing: str
    division: Division
    schedules: tuple[Schedule, ...]

    @property
    def places(self) -> tuple[int, ...]:
        return self.schedules[0].device_of_stage

    def iteration_s(self, problem: Problem) -> float:
        """The iteration's time with the numbers of `problem`, which is regrouped."""
        if self.sharing != "coordinated":
            return simulate(self.schedules[0], problem.costs(self.division, self.places)).makespan_ns / NS
        orders = self.schedules if len(self.schedules) > 1 else self.schedules * problem.replicas
        return simulate_fleet(orders, problem.costs(self.division, self.places, together=1)).makespan_ns / NS


@dataclass(frozen=True)
class Limits:
    """When a swap is worth it. least_gain: part of an iteration. within: iterations after which it must have paid off.
    pause_s: the time of any swap in addition to moving layers."""

    least_gain: float = 0.02
    within: int = 1000
    pause_s: float = 0.0


@dataclass(frozen=True)
class Swap:
    """The cost of a swap. link_bytes: over each directed link between sites, by name. inside_bytes: within sites."""

    layers: int
    link_bytes: dict[tuple[str, str], float]
    inside_bytes: float
    seconds: float


@dataclass(frozen=True)
class ReplanVerdict:
    """The decision. planned_s, now_s: iteration of the present schedule, as planned and as measured. new: the best of
    the others, under the measured numbers. break_even: iterations after which a swap has paid off; None: never."""

    plan: Plan
    planned_s: float
    now_s: float
    swap: Swap
    break_even: int | None
    advised: bool
    why: str

    @property
    def new(self) -> Candidate:
        return self.plan.chosen

    @property
    def gain_s(self) -> float:
        """The gain in each iteration; negative when the present schedule is faster."""
        return self.now_s - self.new.iteration_s


def replan(running: Running, measured: MeasuredFile, limits: Limits) -> ReplanVerdict:
    """Plan again with the measured numbers and decide. Raises PlanError when the file is not of this plan, or nothing
    fits."""
    whole = with_measured_links(running.problem, measured)
    problem = with_measured_stages(regrouped(whole, running.groups), running.division, running.places, measured)
    plan = _as_of_file(make_plan(pipelines_of(problem), sensitivity=False), running, whole)
    new = plan.chosen
    swap = swap_cost(problem, running, new, limits.pause_s)
    planned_s = running.iteration_s(regrouped(running.problem, running.groups))
    now_s = running.iteration_s(problem)
    break_even, advised, why = decide(now_s, new.iteration_s, swap.seconds, limits)
    return ReplanVerdict(plan, planned_s, now_s, swap, break_even, advised, why)


def _as_of_file(plan: Plan, running: Running, whole: Problem) -> Plan:
    """The candidates with the problem of the file, and with names that say where replicas are."""
    if running.groups == 1:
        return plan
    named = tuple(replace(one, name=f"dp/{one.name}") for one in plan.candidates)
    return replace(plan, problem=whole.with_paces(plan.problem.paces), candidates=named)


def decide(now_s: float, new_s: float, swap_s: float, limits: Limits) -> tuple[int | None, bool, str]:
    """(iterations until a swap has paid off, whether to swap, why) from the two iterations and the swap's time."""
    gain_s = now_s - new_s
    if gain_s <= 0:
        return None, False, "no faster schedule was found"
    break_even = math.ceil(swap_s / gain_s)
    if gain_s < limits.least_gain * now_s:
        return break_even, False, f"it would gain {gain_s / now_s:.2%}, less than {limits.least_gain:.2%}"
    if break_even > limits.within:
        return break_even, False, f"it would pay off after {break_even} iterations, later than {limits.within}"
    return break_even, True, f"it gains {gain_s / now_s:.2%} of each iteration and pays off after {break_even}"


# ---- what a swap costs ----


def swap_cost(problem: Problem, running: Running, new: Candidate, pause_s: float = 0.0) -> Swap:
    """The bytes that move when the new plan replaces the old one, and how long that takes."""
    moved = layers_moved((running.division, running.places), (new.division, new.schedules[0].device_of_stage))
    over: dict[tuple[int, int], float] = defaultdict(float)
    inside: dict[tuple[int, int, int], float] = defaultdict(float)
    for unit, source, target in moved:
        size = problem.units[unit].weight_bytes * MOVED
        here, there = problem.site_of[source], problem.site_of[target]
        if here == there:
            inside[here, source, target] += size
        for pair in _hops(problem, here, there):
            over[pair] += size
    times = [_link_s(problem, pair, size) for pair, size in over.items()]
    for (site, _, _), size in inside.items():
        network = problem.setup.sites[site].network_gbps
        times.append(size * 8 / network / 1e9 if network else 0.0)
    sites = problem.setup.sites
    named = {(sites[a].name, sites[b].name): size for (a, b), size in over.items()}
    return Swap(len(moved), named, sum(inside.values()), max(times, default=0.0) + pause_s)


def _hops(problem: Problem, here: int, there: int) -> list[tuple[int, int]]:
    """The links between two sites: the direct one, or those along the pipeline."""
    sites = problem.setup.sites
    try:
        problem.setup.link(sites[here].name, sites[there].name)
    except PlanError:
        step = 1 if there > here else -1
        return [(site, site + step) for site in range(here, there, step)]
    return [(here, there)] if here != there else []


def _link_s(problem: Problem, pair: tuple[int, int], size: float) -> float:
    link = problem.setup.link(*(problem.setup.sites[site].name for site in pair))
    return link.latency_ms / 1e3 + size / link.bytes_per_s


# ---- a plan that runs ----


def read_running(text: str, where: str) -> Running:
    """Read a running plan from its plan.json. Raises PlanError."""
    try:
        found = json.loads(text)
        chosen, inner = found["chosen"], found["schedule"]
        if found["format"] != FORMAT or "problem" not in found or "schedule_of_replica" not in found:
            raise PlanError(
                f"{where} was made by another release of dips: make it again with dips plan FILE --out FOLDER"
            )
        name, sharing = str(chosen["schedule"]), str(chosen["sharing"])
        places = tuple(int(device) for device in inner["device_of_stage"])
        orders = [inner["orders"], *found["schedules_of_other_replicas"]]
        rows = [Schedule.from_csv("\n".join(order), name, places) for order in orders]
        schedules = tuple(rows[int(index)] for index in found["schedule_of_replica"])
        division = tuple(int(layers) for layers in chosen["layers"])
        problem = read_problem(found["problem"], where)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise PlanError(
            f"{where} is not a plan.json ({type(error).__name__}: {error}): make one with dips plan FILE --out FOLDER"
        ) from error
    _check(problem, division, schedules, where)
    groups = len(problem.setup.sites) if name.startswith("dp/") else 1
    return Running(problem, groups, name, sharing, division, schedules)


def _check(problem: Problem, division: Division, schedules: Sequence[Schedule], where: str) -> None:
    first = schedules[0]
    same = first.n_devices == problem.n_devices and first.n_microbatches == problem.n_microbatches
    if not same or len(division) != first.n_stages or sum(division) != len(problem.units):
        raise PlanError(f"{where}: its schedule and its problem do not match: make the plan again")
