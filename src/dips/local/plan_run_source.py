"""Finds what `dips plan run` runs: a schedule with its costs, from a plan.json, from a plan.csv, or by its name.

torch's runtime knows no parts of blocks, so each part becomes a stage, as in plan.csv, with its part of the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dips.planner.api import is_plan, read_text
from dips.planner.costs import Costs, StageCost, Wire, equal_sites
from dips.planner.costs_file import read_costs
from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Schedule
from dips.planner.plan_file import read_plan
from dips.planner.schedules.cross_ud import cross_ud
from dips.planner.schedules.cross_wave import cross_wave
from dips.planner.sweep import GREEDY_PARTS, STATIC, Case, cases
from dips.planner.validate import validate

CASE = {"stages": 4, "microbatches": 8, "sites": 2, "latency": 0.5, "bandwidth": 0.25, "memory": 1.0}
"""What is run where a schedule is named alone: latency and bandwidth in T_F, memory in that of 1F1B."""

MOST_RANKS = 64
_OF_CSV = ("sites", "latency", "bandwidth")
ALONE = "the plan's replicas take turns on the links; here one of them runs alone"
UNEXCHANGED = "one replica runs: what replicas exchange of gradients and weights is neither predicted nor run here"


@dataclass(frozen=True)
class PlanSource:
    """schedule: of whole blocks, its parts being stages. costs: of those stages. sites[d]: the name of device d's.
    note: in what the run differs from the plan; empty: in nothing."""

    schedule: Schedule
    costs: Costs
    sites: tuple[str, ...]
    note: str = ""


def source_of(plan: str, options: dict[str, float | None]) -> PlanSource:
    """plan: a file's path or a schedule's name; options: those of CASE, None where not given.

    Raises PlanError for what cannot be read, found or run.
    """
    makers = _makers()
    if plan in makers:
        found = _named(plan, makers[plan], _filled(options))
    else:
        text = _text(Path(plan), makers)
        found = _from_json(text, plan, options) if is_plan(text) else _from_csv(text, plan, options)
    found = _with_parts_as_stages(found)
    validate(found.schedule, found.costs)
    _check_ranks(found.schedule)
    return found


def scaled(costs: Costs, n_devices: int, forward_ms: float) -> Costs:
    """The same with all times in proportion, so that a forward pass of one microbatch takes so long on a device (on
    average, where devices differ). Raises PlanError where forward passes take no time."""
    forward_ns = sum(stage.f_ns for stage in costs.stages)
    if not forward_ns:
        raise PlanError("forward passes of the plan take no time: nothing can be timed with it")
    factor = forward_ms * 1e6 * n_devices / forward_ns
    stages = tuple(
        replace(s, f_ns=round(s.f_ns * factor), d_ns=round(s.d_ns * factor), w_ns=round(s.w_ns * factor))
        for s in costs.stages
    )
    wires = {pair: _times(wire, factor) for pair, wire in costs.wires.items()}
    return Costs(stages, wires)


def _times(wire: Wire, factor: float) -> Wire:
    busy_ns, latency_ns, hold_ns = (round(ns * factor) for ns in (wire.busy_ns, wire.latency_ns, wire.hold_ns))
    return wire._replace(busy_ns=busy_ns, latency_ns=latency_ns, hold_ns=hold_ns)


# ---- by name ----

PlanMaker = Callable[[Case], tuple[Schedule, Costs]]


def _makers() -> dict[str, PlanMaker]:
    static = {name: _static(name) for name in STATIC}
    greedy = {f"cross_ud/{parts}": _ud(parts) for parts in GREEDY_PARTS}
    return {**static, **greedy, "cross_wave": _wave}


def _static(name: str) -> PlanMaker:
    make, chunks = STATIC[name]
    return lambda case: (make(case.n_pp, case.n_mb), case.costs(chunks, wraps=name == "interleaved_1f1b"))


def _ud(parts: int) -> PlanMaker:
    return lambda case: (cross_ud(case.n_pp, case.n_mb, case.costs(), case.limits(), parts), case.costs())


def _wave(case: Case) -> tuple[Schedule, Costs]:
    return cross_wave(case.n_pp, case.n_mb, case.costs(2), case.limits()), case.costs(2)


def _named(name: str, make: PlanMaker, given: dict[str, float]) -> PlanSource:
    (case,) = cases(
        *([int(given[key])] for key in ("stages", "microbatches", "sites")),
        *([given[key]] for key in ("latency", "bandwidth", "memory")),
    )
    schedule, costs = make(case)
    return PlanSource(schedule, costs, _site_names(case.n_pp, case.n_sites))


def _filled(options: dict[str, float | None]) -> dict[str, float]:
    return {key: CASE[key] if value is None else value for key, value in options.items()}


def _site_names(n_devices: int, n_sites: int) -> tuple[str, ...]:
    return tuple(f"site {site}" for site in equal_sites(n_devices, n_sites))


# ---- from files ----


def _text(file: Path, makers: Sequence[str] | dict[str, PlanMaker]) -> str:
    if not file.exists():
        raise PlanError(
            f"{file} is no file, nor a schedule: name a plan.json, a plan.csv, or one of {', '.join(makers)}"
        )
    return read_text(file, "plan", "name a plan.json or a plan.csv")


def _from_json(text: str, where: str, options: dict[str, float | None]) -> PlanSource:
    _refuse(options, (), "a plan.json, which has its own")
    schedule, _ = read_plan(text, where)
    found = json.loads(text)
    try:
        costs = read_costs(found["costs"])
        sites = tuple(str(stage["site"]) for stage in found["chosen"]["stages"])
        notes = [ALONE] * (found["chosen"]["sharing"] == "coordinated")
        notes += [UNEXCHANGED] * bool(found["costs"]["replicas_exchange"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{where} does not say what its operations cost ({type(error).__name__}: {error}): make it again with "
            "dips plan FILE --out FOLDER"
        ) from error
    return PlanSource(schedule, costs, sites, "; ".join(notes))


def _from_csv(text: str, where: str, options: dict[str, float | None]) -> PlanSource:
    _refuse(options, _OF_CSV, "a plan.csv, which has its own")
    schedule = Schedule.from_csv(text, where)
    n = schedule.n_devices
    given = _filled({**options, "sites": options["sites"] or 2 - n % 2})
    delays = ([given["latency"]], [given["bandwidth"]])
    (case,) = cases([n], [schedule.n_microbatches], [int(given["sites"])], *delays, [1.0])
    last_to_first = any(
        {a, b} == {0, n - 1} for a, b in zip(schedule.device_of_stage, schedule.device_of_stage[1:], strict=False)
    )
    one = case.costs(schedule.chunks, wraps=last_to_first)
    costs = Costs((one.stages[0],) * schedule.n_stages, one.wires)
    return PlanSource(schedule, costs, _site_names(n, case.n_sites))


def _refuse(options: dict[str, float | None], known: Sequence[str], what: str) -> None:
    for key, value in options.items():
        if value is not None and key not in known:
            raise PlanError(f"--{key} does not go with {what}: leave it out")


# ---- what torch can run ----


def _with_parts_as_stages(source: PlanSource) -> PlanSource:
    schedule, costs = source.schedule, source.costs
    if schedule.parts == 1:
        return source
    stages = tuple(
        _part(costs, stage, part, schedule.parts)
        for stage in range(schedule.n_stages)
        for part in range(schedule.parts)
    )
    return replace(source, schedule=schedule.with_parts_as_stages(), costs=Costs(stages, costs.wires))


def _part(costs: Costs, stage: int, part: int, parts: int) -> StageCost:
    """Backward passes go through the parts in the other order. Activations do not matter here."""
    back = parts - 1 - part
    return StageCost(
        costs.compute_ns(stage, Kind.F, part, parts),
        costs.compute_ns(stage, Kind.D, back, parts),
        costs.compute_ns(stage, Kind.W, back, parts),
        activation=0,
        d_release=0,
    )


def _check_ranks(schedule: Schedule) -> None:
    idle = [device for device, order in enumerate(schedule.orders) if not order]
    if idle:
        raise PlanError(f"{schedule.name}: device {idle[0]} runs nothing: every rank needs a stage")
    if schedule.n_devices > MOST_RANKS:
        raise PlanError(f"{schedule.n_devices} ranks are too many processes for one machine: at most {MOST_RANKS}")
