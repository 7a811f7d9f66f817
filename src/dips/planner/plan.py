"""Makes a plan: the best of all schedules for a problem, the others by comparison, and which change would help most.

Candidates: every schedule that fits the memory, with the stage divisions and the ways of sharing a link that the
problem allows, and the other answer to slow links, a whole pipeline at each site with gradients exchanged between
them (data parallel across sites, CrossPipe, arXiv:2507.00217, appendix E). The answer is the one with the shortest
iteration, exchanges of replicas included.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.core.units import format_bytes
from dips.planner.calibration import interval_json, interval_text
from dips.planner.candidates import (
    NAMES,
    Candidate,
    RefusedCandidate,
    coordinated,
    data_parallel,
    divided,
    jeeves_of,
    jeeves_with,
    optimal_of,
    plain,
    replicas_of,
)
from dips.planner.cluster import in_proportion
from dips.planner.costs import NS, costs_json
from dips.planner.ir import Schedule
from dips.planner.problem import Problem, assumptions, problem_json
from dips.planner.schedules import SCHEDULES
from dips.planner.simulate import simulate, simulate_fleet
from dips.planner.trace import MOST_LANES, draw, trace_events

# ---- effects ---------------------------------------------------------------------------------------------------------
#
# Finds the change of a setting that helps most: plans again with each change alone, for the best schedules only.


FEW = 8
"""Replicas that are simulated, before and after a change, to see its effect."""


@dataclass(frozen=True)
class ChangeEffect:
    """The effect of a change of the setting."""

    change: str
    saved: float  # the part of each microbatch's share of the iteration that it saves


def effects_of(problem: Problem, ranked: Sequence[Candidate]) -> Iterator[ChangeEffect]:
    """Plan again with each change alone, for the best schedules only; the greatest saving first."""
    changes: list[tuple[str, Problem]] = [
        ("microbatches x 2", problem.with_training(microbatches=2 * problem.n_microbatches))
    ]
    if len(set(problem.site_of)) > 1:
        changes += [
            ("bandwidth between sites x 2", problem.with_links(bandwidth=2)),
            ("latency between sites / 2", problem.with_links(latency=0.5)),
        ]
    more = 2.0
    if problem.setup.profile is None or problem.setup.profile.memory_microbatches is None:
        memory = min(site.memory_gib for site in problem.setup.sites if site.memory_gib is not None) * 2**30
        more -= max(problem.state_bytes(problem.uniform())) / memory
    changes.append(("memory of activations x 2", problem.with_memory(more)))
    half, sites = problem.n_devices // 2, problem.setup.sites
    if all(in_proportion([site.devices for site in sites], half)) and not any(site.stages for site in sites):
        changes.append((f"{half} stages, the other devices free", problem.with_training(pipeline=half)))
    before = _near_the_front(problem, ranked)
    found = []
    for change, other in changes:
        each = _near_the_front(other, ranked) * problem.n_microbatches / other.n_microbatches
        found.append(ChangeEffect(change, max(0.0, 1 - each / before)))  # a change that does not help need not be used
    yield from sorted(found, key=lambda effect: -effect.saved)


def _near_the_front(problem: Problem, ranked: Sequence[Candidate]) -> float:
    """The best iteration, in seconds, of the chosen order, its kind of schedule and the greedy ones; infinite where
    none fits. With another number of stages they are divided evenly."""
    chosen = ranked[0]
    spans = [_replayed_s(problem, chosen)]
    together = chosen.sharing == "coordinated"
    for name in dict.fromkeys([chosen.name, "cross_ud/1", "jeeves"]):
        try:
            if name.startswith("dp/"):
                spans.append(data_parallel(problem).iteration_s)
            elif name in SCHEDULES:
                candidate = plain(problem, name, chosen.division)
                spans.append((coordinated(problem, candidate, FEW) if together else candidate).iteration_s)
            elif name == "jeeves":
                uniform = problem.uniform()
                found = (c.division for c in ranked if c.name == "jeeves" and len(c.division) == len(uniform))
                division = next(found, uniform)
                spans.append(jeeves_with(problem, division, together, FEW).iteration_s)
        except ConfigError:
            continue
    return min(spans)


def _replayed_s(problem: Problem, chosen: Candidate) -> float:
    """The iteration of the chosen order with another setting, in seconds; infinite when its microbatches differ."""
    first = chosen.schedules[0]
    as_before = first.n_microbatches == problem.n_microbatches and len(chosen.site_of) == problem.n_devices
    if not as_before or chosen.name.startswith("dp/"):
        return math.inf
    if chosen.sharing != "coordinated":
        return simulate(first, problem.costs(chosen.division, first.device_of_stage)).makespan_ns / NS
    played = min(FEW, problem.replicas)
    orders = [first] * played if len(chosen.schedules) == 1 else chosen.schedules[:played]
    costs = problem.costs(chosen.division, first.device_of_stage, together=problem.replicas / played)
    return simulate_fleet(orders, costs).makespan_ns / NS


# ---- plan ------------------------------------------------------------------------------------------------------------


COORDINATED_TOO = 3
"""Schedules that are also simulated with one message at a time: the best so many, and jeeves."""


@dataclass(frozen=True)
class Plan:
    """A plan."""

    problem: Problem
    candidates: tuple[Candidate, ...]  # the fastest first; the first is chosen
    refused: tuple[RefusedCandidate, ...]
    effects: tuple[ChangeEffect, ...]

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


def make_plan(problem: Problem, sensitivity: bool = True) -> Plan:
    """Make the plan of a problem. Raises ConfigError when nothing fits, with the reason of each candidate."""
    names = schedules_of(problem)
    found: list[Candidate] = []
    refused: list[RefusedCandidate] = []
    for name in names:
        try:
            if name == "jeeves":
                found += jeeves_of(problem)
            elif name == "dp":
                found.append(data_parallel(problem))
            elif name.startswith("optimal"):
                found.append(optimal_of(problem, name))
            else:
                found += divided(problem, name)
        except ConfigError as error:
            refused.append(RefusedCandidate(name, str(error)))
    if not found:
        _check_one_fits(problem)
        reasons = "; ".join(f"{no.name}: {no.why}" for no in refused[:3])
        raise ConfigError(f"{problem.setup.file}: no schedule is possible: {reasons}")
    if problem.shares_links and problem.setup.options.replicas != "fair":
        found.sort(key=lambda c: c.iteration_s)
        # jeeves is planned both ways in the first place, and replicas of dp share no link.
        several = [c for c in found if c.sharing == "fair" and c.name != "jeeves" and not c.name.startswith("dp/")]
        if problem.setup.options.replicas == "best":
            several = list({c.makespan_ns: c for c in reversed(several)}.values())[::-1][:COORDINATED_TOO]
        else:
            found = [c for c in found if c.sharing != "fair"]
        found += [coordinated(problem, candidate) for candidate in several]
    ranked = tuple(sorted(found, key=lambda c: (c.makespan_ns, c.division != problem.uniform())))
    effects = tuple(effects_of(problem, ranked)) if sensitivity else ()
    return Plan(problem, ranked, tuple(refused), effects)


def _check_one_fits(problem: Problem) -> None:
    """Raise ConfigError when a stage cannot hold a single microbatch."""
    division, training = problem.uniform(), problem.setup.training
    limits, costs = problem.limits(division), problem.costs(division)
    for device, (stage, limit) in enumerate(zip(costs.stages, limits, strict=True)):
        if stage.activation > limit:
            profile = problem.setup.profile
            measured = profile is not None and profile.memory_microbatches is not None
            key = (
                "[profile]: memory_microbatches" if measured else f"[[sites]] {problem.site_of[device] + 1}: memory_gib"
            )
            raise ConfigError(
                f"{problem.setup.file} {key} leaves {format_bytes(limit)} for activations, one microbatch of stage "
                f"{device} needs {format_bytes(stage.activation)}: give more memory or stages, a smaller "
                f'microbatch_sequences (now {training.microbatch_sequences}), or recompute = "full"'
            )


def schedules_of(problem: Problem) -> list[str]:
    """The schedules that a plan of this problem compares. Raises ConfigError for one that the file names in vain."""
    asked, options = problem.setup.options.schedules, problem.setup.options
    for name in asked:
        if name not in NAMES:
            raise ConfigError(
                f"{problem.setup.file} [options]: schedules has {name!r}, which is unknown: "
                f"choose from {', '.join(NAMES)}"
            )
    names = list(asked or NAMES)
    if not options.solver_s:
        if asked and any(name.startswith("optimal") for name in asked):
            raise ConfigError(
                f"{problem.setup.file} [options]: optimal schedules need solver_s, the solver's seconds: give it"
            )
        names = [name for name in names if not name.startswith("optimal")]
    if len(problem.setup.sites) < 2 and not asked:
        names.remove("dp")
    return names


def pipelines_of(problem: Problem) -> Problem:
    """The same problem without dp, which places replicas elsewhere."""
    options = problem.setup.options
    names = [name for name in options.schedules or NAMES if name != "dp"] or list(SCHEDULES)
    solved = [name for name in names if options.solver_s or not name.startswith("optimal")]
    return problem.with_options(schedules=solved)


# ---- plan file -------------------------------------------------------------------------------------------------------
#
# Writes a plan as files: plan.json (everything), plan.csv (the order of operations, in the form of torch's pipeline
# runtime), trace.json (Perfetto), timeline.svg and timeline.png; and reads plan.json.


FORMAT = 1

PLAN_FILES = ("plan.json", "plan.csv", "trace.json", "timeline.svg", "timeline.png")
"""What write_plan() writes into a folder."""


def plan_json(plan: Plan) -> dict[str, Any]:
    """The content of plan.json; times in seconds."""
    setup, chosen = plan.problem.setup, plan.chosen
    best, schedule, bound, sites = chosen.iteration_s, chosen.schedules[0], chosen.lower_bound_ns, setup.sites
    return {
        "format": FORMAT,
        "setup": Path(setup.file).name,
        "model": setup.model.name,
        "replicas": plan.problem.replicas,
        "calibration_error": plan.problem.calibration_error,
        "chosen": {
            "schedule": chosen.name,
            "sharing": chosen.sharing,
            "iteration_s": chosen.iteration_s,
            **interval_json("iteration", chosen.iteration_s, plan.problem.calibration_error),
            "sync_s": chosen.sync_ns / NS,
            "layers": list(chosen.division),
            "bubble_fraction": chosen.bubble_fraction,
            "lower_bound_s": None if bound is None else bound / NS,
            "stages": [
                {
                    "device": device,
                    "site": sites[chosen.site_of[device]].name,
                    "layers": layers_of(chosen, device),
                    "state_bytes": chosen.state_bytes[device],
                    "activation_bytes": chosen.activation_bytes[device],
                    "activation_limit_bytes": chosen.limit_bytes[device],
                }
                for device in range(len(chosen.site_of))
            ],
            "links": [
                {"sender": sites[a].name, "receiver": sites[b].name, "bytes": size}
                for (a, b), size in sorted(chosen.link_bytes.items())
            ],
        },
        "candidates": [
            {
                "schedule": c.name,
                "sharing": c.sharing,
                "layers": list(c.division),
                "iteration_s": c.iteration_s,
                **interval_json("iteration", c.iteration_s, plan.problem.calibration_error),
                "bubble_fraction": c.bubble_fraction,
                "slower_by": c.iteration_s / best - 1,
            }
            for c in plan.candidates
        ],
        "refused": [{"schedule": no.name, "why": no.why} for no in plan.refused],
        "sensitivity": [{"change": effect.change, "saves": effect.saved} for effect in plan.effects],
        "assumptions": assumptions(plan.problem),
        "schedule": {
            "name": schedule.name,
            "device_of_stage": list(schedule.device_of_stage),
            "microbatches": schedule.n_microbatches,
            "parts": schedule.parts,
            "orders": schedule.to_csv().splitlines(),
        },
        "costs": costs_json(chosen.costs),
        "schedules_of_other_replicas": [other.to_csv().splitlines() for other in orders_of(chosen)[1:]],
        "exchanges": [
            {
                "stage": one.stage,
                "what": "weights" if one.before else "gradients",
                "start": one.start_ns,
                "freed": one.freed_ns,
                "end": one.ends_ns,
            }
            for one in chosen.timeline.all_exchanges
        ],
        "schedule_of_replica": [orders_of(chosen).index(one) for one in chosen.schedules],
        "problem": problem_json(plan.problem),
        "timeline": [
            [[start, end] for start, end in zip(starts, ends, strict=True)]
            for starts, ends in zip(chosen.timeline.starts, chosen.timeline.ends, strict=True)
        ],
    }


def orders_of(chosen: Candidate) -> list[Schedule]:
    """The different schedules of its replicas."""
    return list(dict.fromkeys(chosen.schedules))


def layers_of(chosen: Candidate, device: int) -> list[int]:
    """The layers on a device, one number for each stage of it."""
    places = chosen.schedules[0].device_of_stage
    return [layers for layers, place in zip(chosen.division, places, strict=True) if place == device]


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Write all files of a plan, and make the folder. Raises ConfigError when it cannot be written."""
    chosen = plan.chosen
    sites = plan.problem.setup.sites
    names = [f"{sites[site].name} {device}" for device, site in enumerate(chosen.site_of)]
    texts = (
        json.dumps(plan_json(plan)) + "\n",
        chosen.schedules[0].with_parts_as_stages().to_csv(),
        json.dumps(trace_events(chosen.timeline, names)) + "\n",
    )
    files = [folder / name for name in PLAN_FILES]
    interval = interval_text(chosen.iteration_s, plan.problem.calibration_error)
    title = f"{plan.problem.setup.model.name}: {chosen.name}, {chosen.iteration_s:.4g} s an iteration ({interval})"
    ready_folder(folder)
    with writing(folder):
        for file, text in zip(files, texts, strict=False):
            file.write_text(text)
        draw(replicas_of(plan.problem, chosen), files[len(texts) :], title, names, *_rows_of(plan))
    return files


def _rows_of(plan: Plan) -> tuple[dict[tuple[int, int], str], str]:
    """The names of the links between devices, for a drawing, and what a row of a device has."""
    chosen, replicas = plan.chosen, plan.problem.replicas
    sites = [plan.problem.setup.sites[site].name for site in chosen.site_of]
    together = f", {replicas} replicas" if chosen.sharing == "fair" else ""
    links = {
        (a, b): f"{sites[a]} to {sites[b]}{together}" if sites[a] != sites[b] else f"inside {sites[a]}"
        for a, b in sorted(chosen.costs.wires, key=lambda pair: (sites[pair[0]] == sites[pair[1]], pair))
    }
    if chosen.sharing != "coordinated":
        return links, "" if replicas == 1 else f"one of {replicas} equal replicas"
    drawn = "the first on top" if replicas <= MOST_LANES else f"{MOST_LANES - 1} and the last one to end"
    return links, f"{replicas} replicas, {drawn}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the error of a file that cannot be written into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder}: no file can be written there: {error.strerror}: choose another --out") from error


def ready_folder(folder: Path) -> None:
    """Make the folder and check that files can be written there, before the long computation. Raises ConfigError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def read_plan(text: str, where: str) -> tuple[Schedule, list[list[tuple[int, int]]]]:
    """Read the schedule and the timeline of a plan.json. Raises ConfigError."""
    try:
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise ConfigError(
                f"format is {found.get('format')!r}, not {FORMAT}: make the plan again with dips plan FILE"
            )
        inner = found["schedule"]
        places: Sequence[int] = [int(device) for device in inner["device_of_stage"]]
        schedule = Schedule.from_csv("\n".join(inner["orders"]), str(inner["name"]), places)
        times = [[(int(start), int(end)) for start, end in row] for row in found["timeline"]]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not a plan.json ({type(error).__name__}: {error}): make one with dips plan FILE"
        ) from error
    if [len(row) for row in times] != [len(order) for order in schedule.orders]:
        raise ConfigError(
            f"{where}: timeline and schedule have unequal lengths: make the plan again with dips plan FILE"
        )
    for device, row in enumerate(times):
        flat = [0, *(at_ns for pair in row for at_ns in pair)]
        if any(before > after for before, after in pairwise(flat)):
            raise ConfigError(
                f"{where}: timeline of device {device} goes back in time: make the plan again with dips plan FILE"
            )
    if not any(end for row in times for _, end in row):
        raise ConfigError(f"{where}: timeline takes no time: make the plan again with dips plan FILE")
    return schedule, times
