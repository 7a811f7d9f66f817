"""`dips plan`: the best way to train a model over links between sites; schedules compared, checked and shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer.core import TyperGroup

from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.launch.plan_text import tell
from dips.planner.cluster import read_setup
from dips.planner.costs import NS, uniform
from dips.planner.ir import Kind, Schedule
from dips.planner.plan import Plan, make_plan
from dips.planner.plan_file import plan_json, read_plan, write_plan
from dips.planner.problem import Problem
from dips.planner.simulate import Timeline
from dips.planner.sweep import Case, Row, cases, rows_of
from dips.planner.validate import check_complete, validate
from dips.planner.validation import Check, all_checks


class PlanGroup(TyperGroup):
    """`dips plan FILE` is `dips plan make FILE`: what is no sub-command is a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(no_args_is_help=False, cls=PlanGroup)

N = TypeVar("N", int, float)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
WIDEST = 400
"""Cells of time that `show` draws in a line."""


@app.command()
def make(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="TOML file with sites, links, model; or a shipped one's name.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the plan's files go; none: only print.")
    ] = None,
    solver_s: Annotated[
        float | None, typer.Option("--seconds", help="Let a solver look for the best order for so long, each kind.")
    ] = None,
    sensitivity: Annotated[bool, typer.Option(help="Also say what would help most.")] = True,
    as_json: AsJson = False,
) -> int:
    """The best schedule for a file's sites, links and model: how long an iteration takes, memory of each stage,
    bytes of each link, what else was tried, what would help most.

    `dips plan FILE` is short for `dips plan make FILE`. With --out, writes plan.json, plan.csv (for torch's pipeline
    runtime), trace.json (for Perfetto), timeline.svg and timeline.png.
    """
    problem = _problem(file, solver_s)
    plan = make_plan(problem, sensitivity)
    files = write_plan(plan, out) if out is not None else []
    if as_json:
        print(json.dumps(plan_json(plan)))
        return 0
    console = _console()
    for piece in tell(plan):
        console.print(piece, highlight=False, markup=False)
    for written in files:
        console.print(f"wrote {written}", highlight=False, markup=False)
    return 0


@app.command()
def compare(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="As for `dips plan FILE`, at least two.")],
    as_json: AsJson = False,
) -> int:
    """The plans of several files side by side: each schedule's iteration, in seconds."""
    if len(files) < 2:
        raise ConfigError("dips plan compare takes at least two files: name another one")
    plans = {file: make_plan(_problem(file, None), sensitivity=False) for file in files}
    rows = best_times(plans)
    if as_json:
        print(json.dumps({"files": files, "iteration_s": rows}))
        return 0
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("schedule")
    for file in files:
        table.add_column(Path(file).stem, justify="right")
    for name, times in rows.items():
        table.add_row(name, *("-" if one is None else f"{one:.4g}" for one in times))
    _console().print(table)
    return 0


@app.command(name="validate")
def validate_papers(
    paper: Annotated[str, typer.Option(help="jeeves, crosspipe, or all.")] = "all",
    optimal: Annotated[
        bool, typer.Option("--optimal", help="Also CrossPipe's solved schedules: ten minutes, on two cores more.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="The solver's time for each schedule.")] = 10.0,
    as_json: AsJson = False,
) -> int:
    """Published numbers of JEEVES and CrossPipe beside what the planner computes, with the error of each.

    Exit code 1 if a number is outside of its tolerance; numbers without one are for information. What a paper leaves
    out, and what was taken in its place, stands above its numbers.
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds:g} is no time: give more than 0")
    checks = list(all_checks(paper, seconds if optimal else 0.0))
    if as_json:
        print(json.dumps([check.to_json() for check in checks]))
    else:
        _print_checks(checks)
    return int(any(check.missed for check in checks))


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
        Path,
        typer.Argument(metavar="FILE", help="A plan.json, or a schedule: a line for each device, as in 0F0,0F1,0B0."),
    ],
    latency: Annotated[float, typer.Option(help="Of a message between any two devices, in T_F.")] = 0.0,
    as_json: AsJson = False,
) -> int:
    """Check a plan or a schedule and draw when each device computes what.

    A plan.json is drawn with the times that were planned, a schedule alone with equal times. Every operation must
    stand once, on one device, in a possible order; else the cell is named.
    """
    text = _read(file)
    if text.lstrip().startswith("{"):
        return _show_plan(text, file, as_json)
    schedule = Schedule.from_csv(text, file.name)
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


# ---- plans ----


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def _problem(file: str, solver_s: float | None) -> Problem:
    problem = Problem(read_setup(file))
    if solver_s is None:
        return problem
    if not 0 <= solver_s <= 3600:
        raise ConfigError(f"--seconds {solver_s:g} is no time for a solver: give 0 to 3600")
    return problem.with_options(solver_s=solver_s)


def best_times(plans: Mapping[str, Plan]) -> dict[str, list[float | None]]:
    """schedule: its best iteration in each plan, in seconds; None where it cannot be."""
    names = dict.fromkeys(c.name for plan in plans.values() for c in plan.candidates)
    return {
        name: [min((c.iteration_s for c in plan.candidates if c.name == name), default=None) for plan in plans.values()]
        for name in names
    }


def _show_plan(text: str, file: Path, as_json: bool) -> int:
    schedule, times = read_plan(text, str(file))
    check_complete(schedule)
    starts = tuple(tuple(start for start, _ in row) for row in times)
    timeline = Timeline(schedule, starts, tuple(tuple(end for _, end in row) for row in times), ())
    if as_json:
        print(json.dumps(_timeline_json(timeline)))
        return 0
    print("\n".join(_grid(timeline, -(-timeline.makespan_ns // 100))))
    print(f"makespan {format_seconds(timeline.makespan_ns / NS)}, bubble {timeline.bubble_fraction:.1%}")
    return 0


def _print_checks(checks: Iterable[Check]) -> None:
    console = _console()
    about = ""
    table: Table | None = None
    for check in checks:
        if check.about != about:
            if table is not None:
                console.print(table)
            about = check.about
            console.print(about, highlight=False, markup=False)
            table = Table(box=box.SIMPLE_HEAD)
            table.add_column("number")
            for name in ("published", "ours", "error", "tolerance", ""):
                table.add_column(name, justify="right")
        assert table is not None
        table.add_row(*check.cells())
    if table is not None:
        console.print(table)


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


def _grid(timeline: Timeline, column_ns: int = NS // 2) -> Iterable[str]:
    """One line for each device, a column for each column_ns (or more, where that is too wide)."""
    cell_ns = max(column_ns, -(-timeline.makespan_ns // WIDEST))
    width = len(str(timeline.schedule.n_microbatches - 1)) + 1
    for device, order in enumerate(timeline.schedule.orders):
        cells = [" " * width] * (-(-timeline.makespan_ns // cell_ns))
        for op, start, end in zip(order, timeline.starts[device], timeline.ends[device], strict=True):
            name = f"{op.kind.value if op.kind is not Kind.D else 'D'}{op.microbatch}".ljust(width)
            first, last = start // cell_ns, max(start // cell_ns + 1, end // cell_ns)
            cells[first:last] = [name, *(["-" * width] * (last - first - 1))]
        yield f"{device:>3} |{''.join(cells)}|"
