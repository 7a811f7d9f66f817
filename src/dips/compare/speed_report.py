"""Runs and reports a figure about throughput: tables, pictures, and the paper's statement with our result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dips.compare.figure_report import SCHEMA, tell_statement
from dips.compare.jobs import write_json
from dips.compare.pictures import draw_bars
from dips.compare.pool import JobWork, PoolJobFailed, run_jobs
from dips.compare.progress import CompareProgress
from dips.compare.report import table_of
from dips.compare.setup import ComparisonSetup
from dips.compare.speed import SpeedFigure, SpeedJob, SpeedResult, do_speed, speed_jobs
from dips.compare.throughput import ThroughputComparison
from dips.core.clock import Clock
from dips.core.errors import DipsError
from dips.core.release import software_versions


def run_speed(
    figure: SpeedFigure,
    setups: Sequence[ComparisonSetup],
    seed: int,
    processes: int,
    console: Console,
    clock: Clock,
    work: JobWork[SpeedJob, ThroughputComparison] = do_speed,
) -> list[SpeedResult]:
    """Run a figure; one result for each set-up. Raises ConfigError for a set-up that does not fit, DipsError when a run
    fails."""
    jobs = speed_jobs(figure, setups, seed)
    found: dict[int, ThroughputComparison] = {}
    try:
        with (
            CompareProgress(console, clock, [job.title for job in jobs], [1] * len(jobs)) as progress,
            closing(run_jobs(jobs, work, processes, progress)) as running,
        ):
            for index, comparison in running:
                found[index] = comparison
    except PoolJobFailed as failed:
        raise DipsError(f"{jobs[failed.index].title}: {failed}") from failed
    pairs = [(jobs[index], found[index]) for index in range(len(jobs))]
    return [
        SpeedResult(setup, [(job.column, comparison) for job, comparison in pairs if job.setup.name == setup.name])
        for setup in setups
    ]


def speed_json(figure: SpeedFigure, results: Sequence[SpeedResult]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "figure": figure.name,
        "title": figure.title,
        "paper": {"section": figure.section, "statement": figure.statement},
        "here": [figure.reading(result) for result in results],
        "setups": {
            result.setup.name: {
                "setup": result.setup.to_json(),
                "columns": [column for column, _ in result.columns],
                "ideal_tokens_per_s": [found.setup.ideal_tokens_per_s for _, found in result.columns],
                "ideal_over_synchronous": result.ideal_gains(),
                "methods": {
                    method: {
                        "tokens_per_s": [found.of(method).tokens_per_s for _, found in result.columns],
                        "share_of_ideal": result.shares(method),
                        "over_synchronous": result.gains(method),
                    }
                    for method in result.methods()
                },
            }
            for result in results
        },
        "software": software_versions(),
    }


def write_speed(figure: SpeedFigure, results: Sequence[SpeedResult], run_dir: Path) -> list[Path]:
    """Write figure-NAME.json, and a picture for each set-up, into the run's directory."""
    paths = [run_dir / f"figure-{figure.name}.json"]
    write_json(paths[0], speed_json(figure, results))
    for result in results:
        paths.append(run_dir / f"figure-{figure.name}-{result.setup.name}.png")
        bars = [(method, [100 * share for share in result.shares(method)]) for method in result.methods()]
        title = f"Figure {figure.name}, {result.setup.name}: {figure.title}"
        draw_bars(paths[-1], [column for column, _ in result.columns], bars, "tokens a second, % of ideal", title)
    return paths


def share_table(figure: SpeedFigure, result: SpeedResult) -> Table:
    """The table of tokens a second as a part of the ideal, column by column."""
    table = _table(f"Figure {figure.name}, {result.setup.name}: tokens a second, of ideal", result)
    for method in result.methods():
        table.add_row(method, *(f"{share:.1%}" for share in result.shares(method)))
    return table


def gain_table(result: SpeedResult) -> Table:
    """The table of tokens a second relative to synchronous DiLoCo, the faster of its two forms."""
    table = _table("tokens a second, over synchronous DiLoCo", result)
    for method in result.methods():
        table.add_row(method, *(f"{gain:.2f}x" for gain in result.gains(method)))
    table.add_row("ideal", *(f"{gain:.2f}x" for gain in result.ideal_gains()))
    return table


def tell_speed(figure: SpeedFigure, results: Sequence[SpeedResult], console: Console) -> None:
    for result in results:
        for what, value in result.setup.describe():
            console.print(f"{what:<11} {value}", soft_wrap=True, markup=False)
        for table in (share_table(figure, result), gain_table(result)):
            console.print("", table)
        console.print("")
    console.print(
        "ring-diloco, ring-async, dp: without servers, a ring all-reduce over all links, computed; diloco: over the "
        "servers. Ideal: every cluster trains all the time. Nothing is trained here.",
        markup=False,
    )
    tell_statement(console, figure.section, figure.statement, [figure.reading(result) for result in results])


def _table(title: str, result: SpeedResult) -> Table:
    return table_of(title, ["method", *(column for column, _ in result.columns)])
