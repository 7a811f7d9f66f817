"""Runs and reports a figure about losses: its table and picture, and the paper's statement with our result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dips.compare.figures import CLIPPED, DP, Figure, FigureLine, Lines, figure_jobs
from dips.compare.jobs import ComparisonJob, write_json
from dips.compare.pictures import draw_curves
from dips.compare.record import RunRecord
from dips.compare.report import loss_text, show, table_of, time_text
from dips.compare.setup import ComparisonSetup
from dips.compare.summary import by_label
from dips.core.release import software_versions
from dips.core.units import format_count

SCHEMA = "dips-compare-figure/1"

Gather = Callable[[Sequence[ComparisonJob]], list[RunRecord]]


@dataclass(frozen=True)
class FigureResult:
    """The result of a figure. labelled: each run with its line; summaries: the lines over their seeds."""

    figure: Figure
    setup: ComparisonSetup
    labelled: Sequence[tuple[FigureLine, RunRecord]]
    summaries: Lines


def run_figure(
    figure: Figure, setup: ComparisonSetup, seeds: Sequence[int], data: Sequence[Path], gather: Gather
) -> FigureResult:
    """Run a figure. Raises ConfigError and DipsError as the runs do."""
    pairs = figure_jobs(figure.lines(setup), seeds, data)
    records = gather([job for _, job in pairs])
    labelled = [(line, record) for (line, _), record in zip(pairs, records, strict=True)]
    ideal = [(line.label, record, line.setup.ideal_tokens_per_s) for line, record in labelled]
    return FigureResult(figure, setup, labelled, by_label(ideal))


def write_figure(found: FigureResult, run_dir: Path) -> list[Path]:
    """Write figure-NAME.json and .png into the run's directory."""
    paths = [run_dir / f"figure-{found.figure.name}.{kind}" for kind in ("json", "png")]
    write_json(paths[0], figure_json(found))
    curves = [(line.label, record) for line, record in found.labelled]
    draw_curves(paths[1], curves, "tokens", f"Figure {found.figure.name}: {found.figure.title}")
    return paths


def figure_json(found: FigureResult) -> dict[str, Any]:
    figure = found.figure
    return {
        "schema": SCHEMA,
        "figure": figure.name,
        "title": figure.title,
        "paper": {"section": figure.section, "statement": figure.statement},
        "here": figure.reading(found.summaries),
        "setup": found.setup.to_json(),
        "lines": {
            label: {
                "loss_mean": line.loss,
                "loss_sd": line.sd,
                "not_finite": line.not_finite,
                "virtual_s": line.virtual_s,
                "share_of_ideal": line.mean("share_of_ideal"),
                "seeds": {str(seed): run.to_json() for seed, run in line.runs.items()},
            }
            for label, line in found.summaries.items()
        },
        "software": software_versions(),
    }


def figure_table(found: FigureResult) -> Table:
    references = [name for name in (CLIPPED, DP) if name in found.summaries]
    title = (
        f"Figure {found.figure.name}: {found.figure.title}; loss after {format_count(found.setup.run.tokens)} tokens"
    )
    headings = [f"minus\n{name}" for name in references]
    table = table_of(title, ["line", "loss", *headings, "virtual\ntime", "of\nideal", "stale", "good\nout"])
    for label, line in found.summaries.items():
        table.add_row(
            label,
            loss_text(line),
            *(show(line.minus(found.summaries[name]), "+.3f") for name in references),
            time_text(line),
            show(line.mean("share_of_ideal"), ".1%"),
            show(line.mean("staleness_mean"), ".2f"),
            show(line.total("flagged_good"), "d"),
        )
    return table


def tell_figure(found: FigureResult, console: Console) -> None:
    """Print the set-up, the table, the paper's statement and our result."""
    for what, value in found.setup.describe():
        console.print(f"{what:<11} {value}", soft_wrap=True, markup=False)
    console.print("")
    console.print(figure_table(found), "")
    if len({line.setup.clusters.gaps for line, _ in found.labelled}) > 1:
        console.print(
            "DP and DiLoCo: with the gaps above, at which their losses are the same; times are not comparable."
        )
    tell_statement(console, found.figure.section, found.figure.statement, [found.figure.reading(found.summaries)])


def tell_statement(console: Console, section: str, statement: str, readings: Sequence[str]) -> None:
    """Print the paper's statement, and below it our result."""
    console.print(f'the paper ({section}): "{statement}"', markup=False)
    for reading in readings:
        console.print(f"here: {reading}", markup=False)
