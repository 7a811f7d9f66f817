"""`dips plan`: pipeline schedules over links between sites, compared and shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dips.core.errors import ConfigError
from dips.planner.costs import NS, uniform
from dips.planner.ir import Kind, Schedule
from dips.planner.simulate import Timeline
from dips.planner.sweep import Case, Row, cases, rows_of
from dips.planner.validate import validate

app = typer.Typer(no_args_is_help=False)

N = TypeVar("N", int, float)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
WIDEST = 400
"""Cells of time that `show` draws in a line."""


@app.command()
def sweep(
    stages: Annotated[str, typer.Option(metavar="N,...", help="Devices in the pipeline.")] = "4",
    microbatches: Annotated[str, typer.Option(metavar="N,...", help="Microbatches of an iteration.")] = "8",
    sites: Annotated[str, typer.Option(metavar="N,...", help="Equal sites that the devices stand at.")] = "2",
    latency: Annotated[str, typer.Option(metavar="R,...", help="Of a message between sites, in T_F.")] = "0,0.5,1",
    bandwidth: Annotated[str, typer.Option(metavar="R,...", help="A message's time on its link, in T_F.")] = "0",
    memory: Annotated[str, typer.Option(metavar="R,...", help="Activation memory, in that of 1F1B.")] = "1",
    optimal: Annotated[bool, typer.Option("--optimal", help="Also let a solver look for the best schedule.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="The solver's time for each schedule.")] = 20.0,
    as_json: AsJson = False,
) -> int:
    """Every schedule for every combination of sizes and delays.

    Times are in units of T_F, the forward pass of one microbatch on one device; T_F = T_D = T_W = 1.
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds:g} is no time: give more than 0")
    grid = cases(
        *(
            _numbers(name, text, int)
            for name, text in (("stages", stages), ("microbatches", microbatches), ("sites", sites))
        ),
        *(
            _numbers(name, text, float)
            for name, text in (("latency", latency), ("bandwidth", bandwidth), ("memory", memory))
        ),
    )
    told = Console(stderr=True)
    rows = [
        row
        for case in track(grid, "planning", console=told, disable=not told.is_terminal)
        for row in _rows(case, optimal, seconds)
    ]
    print(json.dumps([_as_json(row) for row in rows])) if as_json else _print(rows)
    return 0


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A schedule: one line for each device, as in 0F0,0F1,0B0.")
    ],
    latency: Annotated[float, typer.Option(help="Of a message between any two devices, in T_F.")] = 0.0,
    as_json: AsJson = False,
) -> int:
    """Check a schedule and draw when each device computes what.

    Every operation must stand once, on one device, in a possible order; else the cell is named.
    """
    schedule = Schedule.from_csv(_read(file), file.name)
    case = Case(
        schedule.n_devices, schedule.n_microbatches, schedule.n_devices, latency, 0.0, float(schedule.n_microbatches)
    )
    timeline = validate(schedule, uniform(schedule.n_stages, schedule.chunks, wires=case.costs().wires))
    if as_json:
        print(json.dumps(_timeline_json(timeline)))
        return 0
    print("\n".join(_grid(timeline)))
    print(f"makespan {timeline.makespan_ns / NS:g} T_F, bubble {timeline.bubble_fraction:.1%}")
    return 0


# ---- sweep ----


def _numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"--{name} {text!r} is no list of {what}: write them with commas, as in 4,8") from None


def _rows(case: Case, optimal: bool, seconds: float) -> Iterable[Row]:
    return rows_of(case, seconds if optimal else 0.0)


def _as_json(row: Row) -> dict[str, object]:
    return {key: value for key, value in asdict(row).items() if value is not None}


def _print(rows: Iterable[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("n_pp", "n_mb", "sites", "latency", "bandwidth", "memory"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    for name in ("makespan", "activations", "bound"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (row.n_pp, row.n_mb, row.n_sites, row.latency, row.bandwidth, row.memory)
        bound = "" if row.lower_bound is None else f"{row.lower_bound:g}"
        table.add_row(*(f"{v:g}" for v in sizes), row.schedule, f"{row.makespan:g}", f"{row.peak_activations:g}", bound)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


# ---- show ----


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a schedule: {error}") from error


def _timeline_json(timeline: Timeline) -> dict[str, object]:
    rows = zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True)
    return {
        "makespan": timeline.makespan_ns / NS,
        "bubble_fraction": timeline.bubble_fraction,
        "devices": [
            [{"op": str(op), "start": start / NS, "end": end / NS} for op, start, end in zip(*row, strict=True)]
            for row in rows
        ],
    }


def _grid(timeline: Timeline) -> Iterable[str]:
    """One line for each device, a column for each half T_F (or more, where that is too wide)."""
    cell_ns = max(NS // 2, -(-timeline.makespan_ns // WIDEST))
    width = len(str(timeline.schedule.n_microbatches - 1)) + 1
    for device, order in enumerate(timeline.schedule.orders):
        cells = [" " * width] * (-(-timeline.makespan_ns // cell_ns))
        for op, start, end in zip(order, timeline.starts[device], timeline.ends[device], strict=True):
            name = f"{op.kind.value if op.kind is not Kind.D else 'D'}{op.microbatch}".ljust(width)
            first, last = start // cell_ns, max(start // cell_ns + 1, end // cell_ns)
            cells[first:last] = [name, *(["-" * width] * (last - first - 1))]
        yield f"{device:>3} |{''.join(cells)}|"
