"""`dips plan`: finds the best way to train a model over links between sites; compares, checks and shows schedules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer.core import TyperGroup

from dips.cli.plan_more import replan, run, tradeoff
from dips.cli.plan_text import heading, map_table, rows_table, tell
from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.planner.api import MOST_SECONDS, is_plan, planned, played, pose, read_text, swept
from dips.planner.api import compare as compare_setups
from dips.planner.costs import NS
from dips.planner.ir import Kind
from dips.planner.plan import make_plan, plan_json, ready_folder, write_plan, writing
from dips.planner.simulate import Timeline
from dips.planner.sweep import Panel, SweepRow, cases, check_compared, draw_maps, panels
from dips.planner.validation import PaperCheck, all_checks


class PlanGroup(TyperGroup):
    """`dips plan FILE` is `dips plan make FILE`: what is no sub-command is a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(no_args_is_help=False, cls=PlanGroup)
app.command(name="run")(run)
app.command(name="tradeoff")(tradeoff)
app.command(name="replan")(replan)

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
        float | None, typer.Option("--seconds", help="Time for a solver to find the best order, for each kind.")
    ] = None,
    sensitivity: Annotated[bool, typer.Option(help="Also say what would help most.")] = True,
    as_json: AsJson = False,
) -> int:
    """The best schedule for a file's sites, links and model: how long an iteration takes, memory of each stage,
    bytes of each link, what else was tried, what would help most.

    `dips plan FILE` is short for `dips plan make FILE`. With --out, writes plan.json, plan.csv (for torch's pipeline
    runtime), trace.json (for Perfetto), timeline.svg and timeline.png.
    """
    problem = pose(file, solver_s)
    if out is not None:
        ready_folder(out)
    plan = make_plan(problem, sensitivity)
    files = write_plan(plan, out) if out is not None else []
    if as_json:
        print(json.dumps(plan_json(plan)))
        return 0
    console = _console()
    for piece in tell(plan):
        console.print(piece, highlight=False, markup=False)
    _tell_files(files)
    return 0


@app.command()
def compare(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="As for `dips plan FILE`, at least two.")],
    as_json: AsJson = False,
) -> int:
    """The plans of several files side by side: each schedule's iteration, in seconds."""
    if len(files) < 2:
        raise ConfigError("dips plan compare takes at least two files: name another one")
    rows = compare_setups(files)
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
    """Published numbers of JEEVES and CrossPipe next to what the planner computes, with the error of each.

    Exit code 1 if a number is outside of its tolerance; numbers without one are for information. What a paper leaves
    out, and what was taken in its place, is printed above its numbers.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {seconds:g} is no time: give more than 0, up to {MOST_SECONDS:g}")
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
    sites: Annotated[str, typer.Option(metavar="N,...", help="Equal sites at which the devices are.")] = "2",
    latency: Annotated[str, typer.Option(metavar="R,...", help="Between two sites, in T_F.")] = "0,0.5,1",
    bandwidth: Annotated[str, typer.Option(metavar="R,...", help="A message's time on its link, in T_F.")] = "0",
    memory: Annotated[str, typer.Option(metavar="R,...", help="Activation memory, in that of 1F1B.")] = "1",
    optimal: Annotated[bool, typer.Option("--optimal", help="Also let a solver look for the best schedule.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="The solver's time for each schedule.")] = 20.0,
    over: Annotated[str, typer.Option(metavar="SCHEDULE", help="What the maps compare the best one with.")] = "1f1b",
    only_map: Annotated[bool, typer.Option("--map", help="Print the maps alone, not each schedule.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where rows.json, map.svg and map.png go; none: only print.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Every schedule for every combination of sizes and delays, and maps of the best.

    Times are in units of T_F, the forward pass of one microbatch on one device; T_F = T_D = T_W = 1. A map says for
    each latency and bandwidth which schedule that fits the memory is best, and how many times faster it is than
    another one. --seconds goes with --optimal.
    """
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
    check_compared(grid, over, optimal)
    if out is not None:
        ready_folder(out)
    stderr = Console(stderr=True)
    shown = track(grid, "planning", console=stderr, disable=not stderr.is_terminal)
    rows = list(swept(shown, optimal, seconds))
    maps = panels(rows, over)
    files = _write_sweep(rows, maps, out) if out is not None else []
    if as_json:
        print(_rows_json(rows))
        return 0
    if not only_map:
        _console().print(rows_table(rows))
    for panel in maps:
        _console().print(heading(panel), highlight=False, markup=False)
        _console().print(map_table(panel))
    _tell_files(files)
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
    be there once, on one device, in a possible order; else the cell is named.
    """
    text = read_text(file)
    whole = is_plan(text)
    timeline = planned(text, str(file)) if whole else played(text, str(file), latency)
    if as_json:
        print(json.dumps(_timeline_json(timeline)))
        return 0
    makespan_ns = timeline.makespan_ns
    print("\n".join(_grid(timeline, -(-makespan_ns // 100) if whole else NS // 2)))
    length = format_seconds(makespan_ns / NS) if whole else f"{makespan_ns / NS:g} T_F"
    print(f"makespan {length}, bubble {timeline.bubble_fraction:.1%}")
    return 0


# ---- plans ----


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def _tell_files(files: Iterable[Path]) -> None:
    for written in files:
        _console().print(f"wrote {written}", highlight=False, markup=False, soft_wrap=True)


def _print_checks(checks: Iterable[PaperCheck]) -> None:
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
        shown = text if len(text) <= 60 else text[:60] + "..."
        raise ConfigError(f"--{name} {shown!r} is no list of {what}: write them with commas, as in 4,8") from None


def _rows_json(rows: Iterable[SweepRow]) -> str:
    return json.dumps([{key: value for key, value in asdict(row).items() if value is not None} for row in rows])


def _write_sweep(rows: Iterable[SweepRow], maps: Sequence[Panel], folder: Path) -> list[Path]:
    rows_file, drawings = folder / "rows.json", [folder / "map.svg", folder / "map.png"]
    with writing(folder):
        rows_file.write_text(_rows_json(rows) + "\n")
        draw_maps(maps, drawings)
    return [rows_file, *drawings]


# ---- show ----


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
