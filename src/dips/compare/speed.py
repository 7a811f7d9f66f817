"""Defines the paper's figures about throughput: what each runs, and how the result compares with the paper.

Nothing is trained: the real state machines run the set-up's rounds over its links (dips.compare.throughput), and the
paper's baselines without servers are computed. A gain is relative to synchronous DiLoCo, the faster of its two forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dips.compare.figures import SCHEMA, tell_statement
from dips.compare.jobs import write_json
from dips.compare.methods import find_method
from dips.compare.pictures import draw_bars
from dips.compare.pool import CompareProgress, JobWork, PoolJobFailed, TellProgress, run_jobs
from dips.compare.report import table_of
from dips.compare.setup import ComparisonSetup
from dips.compare.throughput import ThroughputComparison, compare, first_clusters, with_last_link
from dips.core.clock import Clock
from dips.core.errors import DipsError
from dips.core.release import software_versions

METHODS = ("dips", "dynamic", "dynamic-push", "dynamic-full")
GBPS = 1e9
RATES_GBPS = (1, 2, 5, 10)
"""Rates of the last cluster's link, each way."""


@dataclass(frozen=True)
class SpeedJob:
    """One set-up, in which all methods are measured. column: its heading in the table."""

    column: str
    setup: ComparisonSetup
    seed: int

    @property
    def title(self) -> str:
        return f"{self.setup.name}, {self.column}"


@dataclass(frozen=True)
class SpeedResult:
    """The throughputs of one family of set-ups, column by column."""

    setup: ComparisonSetup
    columns: Sequence[tuple[str, ThroughputComparison]]

    def shares(self, method: str) -> list[float]:
        """Throughput as a part of the ideal one."""
        return [found.of(method).share_of_ideal for _, found in self.columns]

    def gains(self, method: str, over: str | None = None) -> list[float]:
        """Speed relative to synchronous DiLoCo, or to another method."""
        return [
            found.of(method).gain_over(found.synchronous if over is None else found.of(over))
            for _, found in self.columns
        ]

    def ideal_gains(self) -> list[float]:
        """Speed of clusters that train all the time and never wait, relative to synchronous DiLoCo."""
        return [found.synchronous.ideal_tokens_per_s / found.synchronous.tokens_per_s for _, found in self.columns]

    def methods(self) -> list[str]:
        """Baselines first."""
        _, found = self.columns[0]
        return [item.method for item in (*found.baselines, *found.measured)]


@dataclass(frozen=True)
class SpeedFigure:
    """setups: the shipped ones that it is made of. statement: quoted from the paper, [...] for omissions.
    reading: our sentence about one result."""

    name: str
    title: str
    section: str
    statement: str
    setups: tuple[str, ...]
    columns: Callable[[ComparisonSetup], list[tuple[str, ComparisonSetup]]]
    reading: Callable[[SpeedResult], str]


def speed_jobs(figure: SpeedFigure, setups: Sequence[ComparisonSetup], seed: int) -> list[SpeedJob]:
    """The jobs of a figure. Raises ConfigError for a set-up that the figure cannot use."""
    return [SpeedJob(column, changed, seed) for setup in setups for column, changed in figure.columns(setup)]


def do_speed(job: SpeedJob, tell: TellProgress) -> ThroughputComparison:
    return compare(job.setup, [find_method(name) for name in METHODS], job.seed)


def _last_links(setup: ComparisonSetup) -> list[tuple[str, ComparisonSetup]]:
    return [(f"{rate} Gbit/s", with_last_link(setup, rate * GBPS)) for rate in RATES_GBPS]


def _numbers_of_clusters(setup: ComparisonSetup) -> list[tuple[str, ComparisonSetup]]:
    return [(str(n), first_clusters(setup, n)) for n in range(1, setup.n_clusters + 1)]


def _reading_9(found: SpeedResult) -> str:
    return (
        f"{found.setup.name}: over synchronous DiLoCo {_each(found.gains)}, of an ideal {span(found.ideal_gains())}; "
        f"DiLoCo over data parallel {span(found.gains('ring-diloco', 'dp'))}; dynamic-full over asynchronous DiLoCo "
        f"without servers {span(found.gains('dynamic-full', 'ring-async'))}."
    )


def _reading_10(found: SpeedResult) -> str:
    if len(found.columns) == 1:
        return "one cluster never waits."
    several = SpeedResult(found.setup, found.columns[1:])
    shares = "; ".join(f"{name} {span(several.shares(name), '.1%', '')}" for name in METHODS)
    return (
        f"from 2 to {len(found.columns)} clusters, of ideal: {shares}. dynamic-full over synchronous DiLoCo "
        f"{span(several.gains('dynamic-full'))}, over asynchronous DiLoCo without servers "
        f"{span(several.gains('dynamic-full', 'ring-async'))}."
    )


def _each(gains: Callable[[str], list[float]]) -> str:
    return ", ".join(f"{name} {span(gains(name))}" for name in METHODS)


def span(values: Sequence[float], form: str = ".2f", unit: str = "x") -> str:
    """From the smallest to the largest, such as "1.12-1.20x"."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


_FIGURES = (
    SpeedFigure(
        "9",
        "end-to-end throughput, the last cluster's link at 1 to 10 Gbit/s",
        "5.1",
        "Compared to global DP, the synchronous DiLoCo accelerates training 1.15-2.51x in real clusters and "
        "2.03-10.35x in emulated clusters [...]. Di-PS further achieves 1.23-1.38x speedups over synchronous DiLoCo in "
        "emulation clusters [...]. In the real cluster configuration with more severe performance disparity, Di-PS "
        "achieves 2.87-2.93x speedups over synchronous DiLoCo. [...] Di-PS provides stable convergence (Figure 7a) and "
        "adapts to heterogeneous networks, accelerating end-to-end training by 1.00-1.16x.",
        ("emulated", "real"),
        _last_links,
        _reading_9,
    ),
    SpeedFigure(
        "10",
        "weak scaling, clusters added one after another",
        "5.2",
        "Di-PS achieves 1.00-1.03x speedups over the asynchronous DiLoCo approach [...]. In comparison to the "
        "synchronous DiLoCo approach, Di-PS achieves speedups ranging from 1.00 to 5.74x. [...] Except for the "
        "single-cluster case, Di-PS achieves 98.2-98.6% of the ideal performance [...].",
        ("weak-scaling",),
        _numbers_of_clusters,
        _reading_10,
    ),
)

SPEED_FIGURES: Mapping[str, SpeedFigure] = {figure.name: figure for figure in _FIGURES}
"""Figures by their number in the paper."""


# ---- speed report ----------------------------------------------------------------------------------------------------
#
# Runs and reports a figure about throughput: tables, pictures, and the paper's statement with our result.


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
