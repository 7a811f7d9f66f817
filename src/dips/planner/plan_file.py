"""Writes a plan as files: plan.json (everything), plan.csv (the order of operations, in the form of torch's pipeline
runtime), trace.json (Perfetto), timeline.svg and timeline.png; and reads plan.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from dips.planner.candidates import Candidate
from dips.planner.costs import NS
from dips.planner.costs_file import costs_json
from dips.planner.errors import PlanError
from dips.planner.ir import Schedule
from dips.planner.plan import Plan
from dips.planner.problem_file import assumptions, problem_json
from dips.planner.trace import draw, trace_events

FORMAT = 1


def plan_json(plan: Plan) -> dict[str, Any]:
    """The content of plan.json; times in seconds."""
    setup, chosen = plan.problem.setup, plan.chosen
    best = chosen.iteration_s
    return {
        "format": FORMAT,
        "setup": Path(setup.file).name,
        "model": setup.model.name,
        "replicas": plan.problem.replicas,
        "chosen": candidate_json(plan, chosen),
        "candidates": [
            {
                "schedule": c.name,
                "sharing": c.sharing,
                "layers": list(c.division),
                "iteration_s": c.iteration_s,
                "bubble_fraction": c.bubble_fraction,
                "slower_by": c.iteration_s / best - 1,
            }
            for c in plan.candidates
        ],
        "refused": [{"schedule": no.name, "why": no.why} for no in plan.refused],
        "sensitivity": [{"change": effect.change, "saves": effect.saved} for effect in plan.effects],
        "assumptions": assumptions(plan.problem),
        "schedule": schedule_json(chosen.schedules[0]),
        "costs": costs_json(chosen.costs),
        "schedules_of_other_replicas": [schedule.to_csv().splitlines() for schedule in orders_of(chosen)[1:]],
        "exchanges": [
            {
                "stage": one.stage,
                "what": "weights" if one.before else "gradients",
                "start": one.start_ns,
                "freed": one.freed_ns,
                "end": one.ends_ns,
            }
            for one in chosen.timeline.exchanges
        ],
        "schedule_of_replica": [orders_of(chosen).index(schedule) for schedule in chosen.schedules],
        "problem": problem_json(plan.problem),
        "timeline": [
            [[start, end] for start, end in zip(starts, ends, strict=True)]
            for starts, ends in zip(chosen.timeline.starts, chosen.timeline.ends, strict=True)
        ],
    }


def orders_of(chosen: Candidate) -> list[Schedule]:
    """The different schedules of its replicas."""
    return list(dict.fromkeys(chosen.schedules))


def candidate_json(plan: Plan, chosen: Candidate) -> dict[str, Any]:
    sites = plan.problem.setup.sites
    bound = chosen.lower_bound_ns
    return {
        "schedule": chosen.name,
        "sharing": chosen.sharing,
        "iteration_s": chosen.iteration_s,
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
    }


def layers_of(chosen: Candidate, device: int) -> list[int]:
    """The layers on a device, one number for each stage of it."""
    places = chosen.schedules[0].device_of_stage
    return [layers for layers, place in zip(chosen.division, places, strict=True) if place == device]


def schedule_json(schedule: Schedule) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "device_of_stage": list(schedule.device_of_stage),
        "microbatches": schedule.n_microbatches,
        "parts": schedule.parts,
        "orders": schedule.to_csv().splitlines(),
    }


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Write all files of a plan, and make the folder. Raises PlanError when it cannot be written."""
    chosen = plan.chosen
    sites = plan.problem.setup.sites
    names = [f"{sites[site].name} {device}" for device, site in enumerate(chosen.site_of)]
    drawings = [folder / "timeline.svg", folder / "timeline.png"]
    texts = {
        folder / "plan.json": json.dumps(plan_json(plan)),
        folder / "plan.csv": chosen.schedules[0].with_parts_as_stages().to_csv(),
        folder / "trace.json": json.dumps(trace_events(chosen.timeline, names)),
    }
    title = f"{plan.problem.setup.model.name}: {chosen.name}, {chosen.iteration_s:.4g} s an iteration"
    ready_folder(folder)
    with writing(folder):
        for file, text in texts.items():
            file.write_text(text + ("" if text.endswith("\n") else "\n"))
        draw(chosen.timeline, drawings, title, names)
    return [*texts, *drawings]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the error of a file that cannot be written into a PlanError."""
    try:
        yield
    except OSError as error:
        raise PlanError(f"{folder}: no file can be written there: {error.strerror}: choose another --out") from error


def ready_folder(folder: Path) -> None:
    """Make the folder and check that files can be written there, before the long computation. Raises PlanError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def read_plan(text: str, where: str) -> tuple[Schedule, list[list[tuple[int, int]]]]:
    """Read the schedule and the timeline of a plan.json. Raises PlanError."""
    try:
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise PlanError(f"format is {found.get('format')!r}, not {FORMAT}: make the plan again with dips plan FILE")
        inner = found["schedule"]
        places: Sequence[int] = [int(device) for device in inner["device_of_stage"]]
        schedule = Schedule.from_csv("\n".join(inner["orders"]), str(inner["name"]), places)
        times = [[(int(start), int(end)) for start, end in row] for row in found["timeline"]]
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PlanError(
            f"{where} is not a plan.json ({type(error).__name__}: {error}): make one with dips plan FILE"
        ) from error
    if [len(row) for row in times] != [len(order) for order in schedule.orders]:
        raise PlanError(f"{where}: timeline and schedule have unequal lengths: make the plan again with dips plan FILE")
    for device, row in enumerate(times):
        flat = [0, *(at_ns for pair in row for at_ns in pair)]
        if any(before > after for before, after in pairwise(flat)):
            raise PlanError(
                f"{where}: timeline of device {device} goes back in time: make the plan again with dips plan FILE"
            )
    if not any(end for row in times for _, end in row):
        raise PlanError(f"{where}: timeline takes no time: make the plan again with dips plan FILE")
    return schedule, times
