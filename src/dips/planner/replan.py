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
from pathlib import Path
from typing import Any

from pydantic import Field

from dips.core.config import MAX_TOML_BYTES, Knobs, SettingsFile
from dips.core.errors import ConfigError
from dips.planner.calibration import interval_json
from dips.planner.candidates import Candidate
from dips.planner.cluster import Link
from dips.planner.costs import NS
from dips.planner.ir import Schedule
from dips.planner.model import Amount, Duration, DurationOrNone, Maybe, PositiveCount
from dips.planner.plan import FORMAT, Plan, make_plan, pipelines_of
from dips.planner.problem import Problem, TimesPerLayer, read_problem, regrouped
from dips.planner.simulate import simulate, simulate_fleet
from dips.planner.units import OPTIMIZER_BYTES, WEIGHT_BYTES, Division

MOVED = (WEIGHT_BYTES + OPTIMIZER_BYTES) / WEIGHT_BYTES
"""The bytes of a layer that move, divided by those of its weights."""


@dataclass(frozen=True)
class Running:
    """A plan that is in use."""

    problem: Problem  # of its file
    groups: int  # of sites that hold whole pipelines
    name: str
    sharing: str
    division: Division
    schedules: tuple[Schedule, ...]  # one, or one for each replica

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
    """When a swap is worth it."""

    least_gain: float = 0.02  # part of an iteration
    within: int = 1000  # iterations after which it must have paid off
    pause_s: float = 0.0  # the time of any swap in addition to moving layers


@dataclass(frozen=True)
class Swap:
    """The cost of a swap."""

    layers: int
    link_bytes: dict[tuple[str, str], float]  # over each directed link between sites, by name
    inside_bytes: float  # within sites
    seconds: float


@dataclass(frozen=True)
class ReplanVerdict:
    """The decision."""

    plan: Plan  # the best of the others, with the measured numbers
    planned_s: float  # iteration of the present schedule, as planned
    now_s: float  # and as measured
    swap: Swap
    break_even: int | None  # iterations after which a swap has paid off; None: never
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
    """Plan again with the measured numbers and decide. Raises ConfigError when the file is not of this plan, or nothing
    fits."""
    whole = with_measured_links(running.problem, measured)
    problem = with_measured_stages(regrouped(whole, running.groups), running.division, running.places, measured)
    plan = make_plan(pipelines_of(problem), sensitivity=False)
    if running.groups > 1:  # with the problem of the file, and names that say where replicas are
        named = tuple(replace(one, name=f"dp/{one.name}") for one in plan.candidates)
        plan = replace(plan, problem=whole.with_paces(plan.problem.paces), candidates=named)
    new = plan.chosen
    swap = swap_cost(problem, running, new, limits.pause_s)
    planned_s = running.iteration_s(regrouped(running.problem, running.groups))
    now_s = running.iteration_s(problem)
    break_even, advised, why = decide(now_s, new.iteration_s, swap.seconds, limits)
    return ReplanVerdict(plan, planned_s, now_s, swap, break_even, advised, why)


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


def verdict_json(running: Running, verdict: ReplanVerdict) -> dict[str, Any]:
    """The verdict as a JSON object; times in seconds."""
    new, swap, error = verdict.new, verdict.swap, running.problem.calibration_error
    return {
        "advised": verdict.advised,
        "why": verdict.why,
        "calibration_error": error,
        "present": {
            "schedule": running.name,
            "sharing": running.sharing,
            "layers": list(running.division),
            "planned_s": verdict.planned_s,
            "iteration_s": verdict.now_s,
            **interval_json("iteration", verdict.now_s, error),
        },
        "new": {
            "schedule": new.name,
            "sharing": new.sharing,
            "layers": list(new.division),
            "iteration_s": new.iteration_s,
            **interval_json("iteration", new.iteration_s, error),
        },
        "gain_s": verdict.gain_s,
        "swap": {
            "layers": swap.layers,
            "links": [
                {"sender": sender, "receiver": receiver, "bytes": size}
                for (sender, receiver), size in sorted(swap.link_bytes.items())
            ],
            "inside_bytes": swap.inside_bytes,
            "seconds": swap.seconds,
        },
        "break_even_iterations": verdict.break_even,
    }


# ---- what a swap costs -----------------------------------------------------------------------------------------------


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
    sites = problem.setup.sites
    named = {(sites[a].name, sites[b].name): size for (a, b), size in over.items()}
    links = [(problem.setup.link(*pair), size) for pair, size in named.items()]
    times = [link.latency_ms / 1e3 + size / link.bytes_per_s for link, size in links]
    for (site, _, _), size in inside.items():
        network = sites[site].network_gbps
        each_bytes = size / problem.setup.training.tensor  # every device of a stage sends its part
        times.append(each_bytes * 8 / network / 1e9 if network else 0.0)
    return Swap(len(moved), named, sum(inside.values()), max(times, default=0.0) + pause_s)


def layers_moved(
    old: tuple[Division, tuple[int, ...]], new: tuple[Division, tuple[int, ...]]
) -> list[tuple[int, int, int]]:
    """(unit, from device, to device) of those that change their device; old, new: divisions and the devices of
    stages."""
    before, after = (
        [place for layers, place in zip(division, places, strict=True) for _ in range(layers)]
        for division, places in (old, new)
    )
    return [(u, a, b) for u, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def _hops(problem: Problem, here: int, there: int) -> list[tuple[int, int]]:
    """The links between two sites: the direct one, or those along the pipeline."""
    sites = problem.setup.sites
    try:
        problem.setup.link(sites[here].name, sites[there].name)
    except ConfigError:
        step = 1 if there > here else -1
        return [(site, site + step) for site in range(here, there, step)]
    return [(here, there)] if here != there else []


# ---- a plan that runs ------------------------------------------------------------------------------------------------


def read_running(text: str, where: str) -> Running:
    """Read a running plan from its plan.json. Raises ConfigError."""
    try:
        found = json.loads(text)
        chosen, inner = found["chosen"], found["schedule"]
        if found["format"] != FORMAT or "problem" not in found or "schedule_of_replica" not in found:
            raise ConfigError(
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
        raise ConfigError(
            f"{where} is not a plan.json ({type(error).__name__}: {error}): make one with dips plan FILE --out FOLDER"
        ) from error
    _check(problem, division, schedules, where)
    groups = len(problem.setup.sites) if name.startswith("dp/") else 1
    return Running(problem, groups, name, sharing, division, schedules)


def _check(problem: Problem, division: Division, schedules: Sequence[Schedule], where: str) -> None:
    first = schedules[0]
    same = first.n_devices == problem.n_devices and first.n_microbatches == problem.n_microbatches
    if not same or len(division) != first.n_stages or sum(division) != len(problem.units):
        raise ConfigError(f"{where}: its schedule and its problem do not match: make the plan again")


# ---- what was measured -----------------------------------------------------------------------------------------------
#
# Read from a TOML or JSON file. [measured] says where the numbers come from; [[stages]] has the times of one microbatch
# on each stage of the plan, as plan.json numbers them; [[links]] the rate of a link. Values that were not measured stay
# as planned.


TABLES = ("measured", "stages", "links")


class MeasuredTable(Knobs):
    """The table [measured]: where the numbers come from."""

    source: str = Field(min_length=1, description="who measured, when and how: one text for all numbers of the file")
    iterations: PositiveCount = Field(default=1, description="iterations that were measured; times are their medians")


class MeasuredStage(Knobs):
    """Times of one microbatch on one stage of the plan, recomputation included. Give all stages or none."""

    stage: Maybe = Field(description="number of the stage, from 0 on, in the order of the model")
    forward_ms: Duration = Field(description="T_F")
    input_gradient_ms: Duration = Field(description="T_D: the gradient of the input")
    weight_gradient_ms: DurationOrNone = Field(description="T_W: the gradient of the weights")


class MeasuredLink(Knobs):
    """A link between two sites of the plan: the rate that is left for this training."""

    sender: str = Field(description="site that sends")
    receiver: str = Field(description="site that receives")
    both_ways: bool = Field(default=True, description="whether the link back is equal")
    bandwidth_gbps: Amount = Field(description="10^9 bit a second, of all replicas together")
    latency_ms: DurationOrNone = Field(description="time of one bit on its way")


@dataclass(frozen=True)
class MeasuredFile:
    """The content of a whole file."""

    file: str
    run: MeasuredTable
    stages: tuple[MeasuredStage, ...]  # in their order, or none
    links: tuple[MeasuredLink, ...]


def read_measured(file: Path) -> MeasuredFile:
    """Read the file. Raises ConfigError, which name file and key."""
    tables = SettingsFile(str(file), _json(file)) if file.suffix == ".json" else SettingsFile.read(file, TABLES)
    unknown = sorted(set(tables.tables) - set(TABLES))
    if unknown:
        raise ConfigError(f"{file}: {unknown[0]!r} is unknown: write [measured], [[stages]] and [[links]]")
    if "measured" not in tables.tables:
        raise ConfigError(f'{file}: the table [measured] is missing: add it, with source = "who measured, and how"')
    found = MeasuredFile(
        str(file),
        tables.settings(MeasuredTable, "measured"),
        tables.settings_of_rows(MeasuredStage, "stages"),
        tables.settings_of_rows(MeasuredLink, "links"),
    )
    if not found.stages and not found.links:
        raise ConfigError(f"{file} has neither [[stages]] nor [[links]]: give what was measured")
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_TOML_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_TOML_BYTES else None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read as a profile: {error.strerror}: name another file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not JSON: {error}: correct it, or write TOML into a file that ends in .toml"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a profile: write an object with measured, stages and links")
    return found


def with_measured_links(problem: Problem, measured: MeasuredFile) -> Problem:
    """The problem with the measured links. Raises ConfigError for a link that the plan does not have."""
    if not measured.links:
        return problem
    return replace(problem, setup=replace(problem.setup, links=_links(problem, measured)))


def with_measured_stages(
    problem: Problem, division: Division, places: tuple[int, ...], measured: MeasuredFile
) -> Problem:
    """The problem with the measured stages. division and places: of the plan that ran. A device's ratio of measured to
    planned time is used for any layers that it gets. Raises ConfigError for stages that the plan does not have."""
    return problem.with_paces(_paces(problem, division, places, measured)) if measured.stages else problem


def _links(problem: Problem, measured: MeasuredFile) -> tuple[Link, ...]:
    """All links, one for each direction, the measured ones with their numbers."""
    found: dict[tuple[str, str], Link] = {}
    for link in problem.setup.links:
        for way in [(link.sender, link.receiver), (link.receiver, link.sender)][: 1 + link.both_ways]:
            found[way] = link.model_copy(update={"sender": way[0], "receiver": way[1], "both_ways": False})
    seen: set[tuple[str, str]] = set()
    for number, new in enumerate(measured.links, 1):
        where = f"{measured.file} [[links]] {number}"
        for way in [(new.sender, new.receiver), (new.receiver, new.sender)][: 1 + new.both_ways]:
            if way not in found:
                known = ", ".join(f"{a} to {b}" for a, b in found) or "none"
                raise ConfigError(f"{where}: the plan has no link from {way[0]} to {way[1]}: choose from {known}")
            if way in seen:
                raise ConfigError(f"{where}: from {way[0]} to {way[1]} was given before: remove one")
            seen.add(way)
            numbers = {"bandwidth_gbps": new.bandwidth_gbps, "latency_ms": new.latency_ms, "oversubscription": 1.0}
            found[way] = found[way].model_copy(update={**numbers, "source": measured.run.source})
    return tuple(found.values())


def _paces(
    problem: Problem, division: Division, places: tuple[int, ...], measured: MeasuredFile
) -> tuple[TimesPerLayer, ...]:
    stages = sorted(measured.stages, key=lambda one: one.stage)
    if [one.stage for one in stages] != list(range(len(division))):
        raise ConfigError(
            f"{measured.file}: [[stages]] are {[one.stage for one in stages]}, the plan has 0 to {len(division) - 1}: "
            "give each once"
        )
    planned = problem.with_paces(()).costs(division, places).stages
    sums = [[[0.0, 0.0] for _ in range(3)] for _ in range(problem.n_devices)]
    for one, plan, device in zip(stages, planned, places, strict=True):
        times_ms = (one.forward_ms, one.input_gradient_ms, one.weight_gradient_ms)
        for kind, (time_ms, plan_ns) in enumerate(zip(times_ms, (plan.f_ns, plan.d_ns, plan.w_ns), strict=True)):
            if time_ms and not plan_ns:
                raise ConfigError(f"{measured.file}: stage {one.stage} takes time where the plan has none: give 0")
            sums[device][kind][0] += time_ms * 1e6
            sums[device][kind][1] += plan_ns
    paces = ([got / wanted if wanted else 1.0 for got, wanted in row] for row in sums)
    return tuple((f, d, w) for f, d, w in paces)
