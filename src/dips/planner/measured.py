"""Reads what was measured of a running plan: a TOML or JSON file with the times of each stage, and with links.

[measured] says where the numbers come from; [[stages]] has the times of one microbatch on each stage of the plan, as
plan.json numbers them; [[links]] the rate of a link. Values that were not measured stay as planned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import Field

from dips.core.config import MAX_TOML_BYTES, Knobs, load_table, read_tables
from dips.planner.cluster import Amount, Duration, DurationOrNone, Link
from dips.planner.errors import PlanError
from dips.planner.model import Maybe, PositiveCount
from dips.planner.problem import Problem, TimesPerLayer
from dips.planner.units import Division

TABLES = ("measured", "stages", "links")


class MeasuredRun(Knobs):
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
    """The content of a whole file. stages: in their order, or none."""

    file: str
    run: MeasuredRun
    stages: tuple[MeasuredStage, ...]
    links: tuple[MeasuredLink, ...]


def read_measured(file: Path) -> MeasuredFile:
    """Read the file. Raises PlanError or ConfigError, which name file and key."""
    tables = _json(file) if file.suffix == ".json" else read_tables(file, TABLES)
    unknown = sorted(set(tables) - set(TABLES))
    if unknown:
        raise PlanError(f"{file}: {unknown[0]!r} is unknown: write [measured], [[stages]] and [[links]]")
    run = tables.get("measured")
    if not isinstance(run, dict):
        raise PlanError(f'{file}: the table [measured] is missing: add it, with source = "who measured, and how"')
    found = MeasuredFile(
        str(file),
        load_table(MeasuredRun, run, f"{file} [measured]"),
        tuple(
            load_table(MeasuredStage, row, f"{file} [[stages]] {n}")
            for n, row in enumerate(_rows(tables, "stages", file), 1)
        ),
        tuple(
            load_table(MeasuredLink, row, f"{file} [[links]] {n}")
            for n, row in enumerate(_rows(tables, "links", file), 1)
        ),
    )
    if not found.stages and not found.links:
        raise PlanError(f"{file} has neither [[stages]] nor [[links]]: give what was measured")
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_TOML_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_TOML_BYTES else None
    except OSError as error:
        raise PlanError(f"{file} cannot be read as a profile: {error.strerror}: name another file") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{file} is not JSON: {error}: correct it, or write TOML into a file that ends in .toml"
        ) from error
    if not isinstance(found, dict):
        raise PlanError(f"{file} is not a profile: write an object with measured, stages and links")
    return found


def _rows(tables: dict[str, Any], name: str, file: Path) -> list[dict[str, Any]]:
    found = tables.get(name, [])
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise PlanError(f"{file}: {name!r} is not a list of tables: write each below a line [[{name}]]")
    return found


# ---- into a problem ----


def with_measured_links(problem: Problem, measured: MeasuredFile) -> Problem:
    """The problem with the measured links. Raises PlanError for a link that the plan does not have."""
    if not measured.links:
        return problem
    return replace(problem, setup=replace(problem.setup, links=_links(problem, measured)))


def with_measured_stages(
    problem: Problem, division: Division, places: tuple[int, ...], measured: MeasuredFile
) -> Problem:
    """The problem with the measured stages. division and places: of the plan that ran. A device's ratio of measured to
    planned time is used for any layers that it gets. Raises PlanError for stages that the plan does not have."""
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
                raise PlanError(f"{where}: the plan has no link from {way[0]} to {way[1]}: choose from {known}")
            if way in seen:
                raise PlanError(f"{where}: from {way[0]} to {way[1]} was given before: remove one")
            seen.add(way)
            numbers = {"bandwidth_gbps": new.bandwidth_gbps, "latency_ms": new.latency_ms, "oversubscription": 1.0}
            found[way] = found[way].model_copy(update={**numbers, "source": measured.run.source})
    return tuple(found.values())


def _paces(
    problem: Problem, division: Division, places: tuple[int, ...], measured: MeasuredFile
) -> tuple[TimesPerLayer, ...]:
    stages = sorted(measured.stages, key=lambda one: one.stage)
    if [one.stage for one in stages] != list(range(len(division))):
        raise PlanError(
            f"{measured.file}: [[stages]] are {[one.stage for one in stages]}, the plan has 0 to {len(division) - 1}: "
            "give each once"
        )
    planned = problem.with_paces(()).costs(division, places).stages
    sums = [[[0.0, 0.0] for _ in range(3)] for _ in range(problem.n_devices)]
    for one, plan, device in zip(stages, planned, places, strict=True):
        times_ms = (one.forward_ms, one.input_gradient_ms, one.weight_gradient_ms)
        for kind, (time_ms, plan_ns) in enumerate(zip(times_ms, (plan.f_ns, plan.d_ns, plan.w_ns), strict=True)):
            if time_ms and not plan_ns:
                raise PlanError(f"{measured.file}: stage {one.stage} takes time where the plan has none: give 0")
            sums[device][kind][0] += time_ms * 1e6
            sums[device][kind][1] += plan_ns
    return tuple(_pace(row) for row in sums)


def _pace(row: list[list[float]]) -> TimesPerLayer:
    f, d, w = (got / wanted if wanted else 1.0 for got, wanted in row)
    return f, d, w


def layers_moved(
    old: tuple[Division, tuple[int, ...]], new: tuple[Division, tuple[int, ...]]
) -> list[tuple[int, int, int]]:
    """(unit, from device, to device) of those that change their device; old, new: divisions and the devices of
    stages."""
    before, after = (_device_of_units(*each) for each in (old, new))
    return [(u, a, b) for u, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def _device_of_units(division: Division, places: tuple[int, ...]) -> list[int]:
    ends, stage, found = list(accumulate(division)), 0, []
    for unit in range(ends[-1]):
        while unit >= ends[stage]:
            stage += 1
        found.append(places[stage])
    return found
