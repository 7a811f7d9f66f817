"""Defines the paper's figures about losses, as comparisons: what each runs, and how the result compares.

The paper trains LLaMA3.2-1B; here a small byte model is trained, so statements can be compared, not numbers. A set-up
of long runs names the lines that it has, in its table [figures].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dips.core.errors import ConfigError
from dips.core.release import software_versions
from dips.core.units import format_count
from dips.lab.compare.jobs import ComparisonJob, text_digest, write_json
from dips.lab.compare.methods import find_method
from dips.lab.compare.pictures import draw_curves
from dips.lab.compare.record import RunRecord
from dips.lab.compare.report import MethodSummary, by_label, difference_text, loss_text, show, table_of, time_text
from dips.lab.compare.setup import ComparisonSetup

CLOSE = 0.15
"""Nats per byte: the difference up to which losses count as comparable in a sentence."""

FAR = 0.5
"""Nats per byte above DiLoCo with clip from which a run counts as not converging in a sentence."""

DP, DILOCO, CLIPPED = "DP", "DiLoCo", "DiLoCo, clip 1"

Lines = Mapping[str, MethodSummary]


@dataclass(frozen=True)
class FigureLine:
    """One line of a figure."""

    label: str
    method: str
    setup: ComparisonSetup
    variant: str  # names the files of its runs; empty when it is a run of the plain comparison


@dataclass(frozen=True)
class Figure:
    """A figure of the paper about losses."""

    name: str
    title: str
    section: str  # of the paper
    statement: str  # quoted from the paper
    lines: Callable[[ComparisonSetup], list[FigureLine]]  # all that it can have
    reading: Callable[[Lines], str]  # our sentence about the result
    reference: str = ""  # the line that the reading compares others with

    def chosen(self, setup: ComparisonSetup) -> list[FigureLine]:
        """The lines that the figure has on this set-up: all, or those in its table [figures]. Raises ConfigError for
        a line that the figure cannot have, and when the one that others are compared with is missing."""
        lines = {line.label: line for line in self.lines(setup)}
        labels = setup.figures.get(self.name)
        if labels is None:
            return list(lines.values())
        place = f"set-up {setup.name} [figures] {self.name}"
        for label in labels:
            if label not in lines:
                raise ConfigError(f"{place}: there is no line {label!r}: choose from {', '.join(map(repr, lines))}")
        if not labels or (self.reference and self.reference not in labels):
            why = f"{self.reference!r}, with which the others are compared" if self.reference else "a line"
            raise ConfigError(f"{place}: give {why}")
        return [lines[label] for label in dict.fromkeys(labels)]

    def title_on(self, setup: ComparisonSetup) -> str:
        return f"{self.title} (fewer lines)" if self.name in setup.figures else self.title


def figure_jobs(
    lines: Sequence[FigureLine], seeds: Sequence[int], data: Sequence[Path]
) -> list[tuple[FigureLine, ComparisonJob]]:
    """The runs of a figure: every line with every seed. Raises ConfigError for text that cannot be used, and for a
    set-up on which one of its methods cannot run."""
    for line in lines:
        line.setup.check(find_method(line.method))
    text = text_digest(lines[0].setup, data)
    return [
        (line, ComparisonJob(line.method, seed, line.setup, text, tuple(data), variant=line.variant))
        for seed in seeds
        for line in lines
    ]


def spread(n_clusters: int, largest: float) -> tuple[float, ...]:
    """Gaps from 0 to the largest at equal distances, as the paper's clusters have them."""
    return tuple(largest * index / max(1, n_clusters - 1) for index in range(n_clusters))


def _synchronous(setup: ComparisonSetup) -> list[FigureLine]:
    """The lines of synchronous methods: at equal tokens their losses do not depend on gaps, so plain runs are used."""
    return [
        FigureLine(DP, "dp", setup, ""),
        FigureLine(DILOCO, "diloco", setup, ""),
        FigureLine(CLIPPED, "diloco-clip", setup, ""),
    ]


def _with_gaps(setup: ComparisonSetup, method: str, percents: Sequence[int]) -> list[FigureLine]:
    changed = {percent: setup.with_overrides(gaps=spread(setup.n_clusters, percent / 100)) for percent in percents}
    return [FigureLine(f"Async-{percent}", method, other, f"gaps-{percent}") for percent, other in changed.items()]


def _with_steps(setup: ComparisonSetup, inner_steps: int) -> FigureLine:
    """The lines with H steps and gaps to 50 %; if these are the set-up's, a run of the plain comparison is shared."""
    largest = 0.5
    gaps = None if max(setup.clusters.gaps) == largest else spread(setup.n_clusters, largest)
    changed = setup.with_overrides(inner_steps=inner_steps, gaps=gaps)
    same = changed.digest() == setup.digest()
    return FigureLine(f"H {inner_steps}", "dips", changed, "" if same else f"h-{inner_steps}")


def _reading_2b(lines: Lines) -> str:
    above = _above(lines, CLIPPED)
    far = [label for label, difference in above.items() if difference is None or difference > FAR]
    said = f"{_told(above)} above {CLIPPED}; {len(far)} of {len(above)} fail to converge (not finite, or {FAR} above)"
    if len(above) < 2:
        return f"{said}."
    values = list(above.values())
    known = [difference for difference in values if difference is not None]
    grows = len(known) == len(values) and known == sorted(known)
    return f"{said}. {'The loss grows with the gap.' if grows else 'The loss does not grow with each step of the gap.'}"


def _reading_7(lines: Lines) -> str:
    above = _above(lines, CLIPPED)
    lost = [label for label, difference in above.items() if difference is None]
    near = [label for label, difference in above.items() if difference is not None and difference <= CLOSE]
    stable = "none is lost" if not lost else f"lost: {', '.join(lost)}"
    return f"{_told(above)} above {CLIPPED}; {stable}; {len(near)} of {len(above)} within {CLOSE} of it."


def _reading_12(lines: Lines) -> str:
    losses = {label: line.loss for label, line in lines.items() if line.loss is not None}
    if not losses:
        return "no run ended with a finite loss."
    best = min(losses, key=lambda label: losses[label])
    rest = [f"{label} {loss - losses[best]:+.3f}" for label, loss in losses.items() if label != best]
    lost = [f"{label} not finite" for label, line in lines.items() if line.loss is None]
    return f"best is {best} with {losses[best]:.3f}; {', '.join([*rest, *lost])}."


def _above(lines: Lines, reference: str) -> dict[str, float | None]:
    """How much higher the loss of each asynchronous line ends."""
    apart = {label: line.minus(lines[reference]) for label, line in lines.items() if label.startswith("Async")}
    return {label: None if difference is None else difference.mean for label, difference in apart.items()}


def _told(differences: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{label} {'not finite' if difference is None else format(difference, '+.2f')}"
        for label, difference in differences.items()
    )


_FIGURES = (
    Figure(
        "2b",
        "naive asynchronous training, gaps to 10, 20, 30 and 40 %",
        "2.2",
        "Compared to the synchronous training methods DiLoCo and DP, naive asynchronous trainings fail to converge the "
        "model. Furthermore, larger performance gaps exacerbate the convergence issues.",
        lambda setup: _synchronous(setup) + _with_gaps(setup, "async", (10, 20, 30, 40)),
        _reading_2b,
        CLIPPED,
    ),
    Figure(
        "7",
        "Di-PS, gaps to 40, 100 and 200 %",
        "4.1",
        "Di-PS can provide a stable convergence in asynchronous cross-cluster training, performing comparably to "
        "synchronous methods across all heterogeneous scenarios.",
        lambda setup: _synchronous(setup) + _with_gaps(setup, "dips", (40, 100, 200)),
        _reading_7,
        CLIPPED,
    ),
    Figure(
        "12",
        "Di-PS, inner steps between two pushes, gaps to 50 %",
        "5.3",
        "The inner steps of 64 and 128 result in similar convergence performance, while other values tend to slow down "
        "convergence. In particular, larger inner steps lead to degraded convergence quality.",
        lambda setup: [_with_steps(setup, inner_steps) for inner_steps in (4, 8, 16, 32, 64, 128)],
        _reading_12,
    ),
)

FIGURES: Mapping[str, Figure] = {figure.name: figure for figure in _FIGURES}
"""Figures by their number in the paper."""


# ---- figure report ---------------------------------------------------------------------------------------------------
#
# Runs and reports a figure about losses: its table and picture, and the paper's statement with our result.


SCHEMA = "dips-compare-figure/1"

Gather = Callable[[Sequence[ComparisonJob]], list[RunRecord]]


@dataclass(frozen=True)
class FigureResult:
    """The result of a figure."""

    figure: Figure
    setup: ComparisonSetup
    labelled: Sequence[tuple[FigureLine, RunRecord]]  # each run with its line
    summaries: Lines  # the lines over their seeds


def run_figure(
    figure: Figure, setup: ComparisonSetup, seeds: Sequence[int], data: Sequence[Path], gather: Gather
) -> FigureResult:
    """Run a figure. Raises ConfigError and DipsError as the runs do."""
    pairs = figure_jobs(figure.chosen(setup), seeds, data)
    records = gather([job for _, job in pairs])
    labelled = [(line, record) for (line, _), record in zip(pairs, records, strict=True)]
    ideal = [(line.label, record, line.setup.ideal_tokens) for line, record in labelled]
    return FigureResult(figure, setup, labelled, by_label(ideal))


def write_figure(found: FigureResult, run_dir: Path) -> list[Path]:
    """Write figure-NAME.json and .png into the run's directory."""
    paths = [run_dir / f"figure-{found.figure.name}.{kind}" for kind in ("json", "png")]
    write_json(paths[0], figure_json(found))
    curves = [(line.label, record) for line, record in found.labelled]
    draw_curves(paths[1], curves, "tokens", f"Figure {found.figure.name}: {found.figure.title_on(found.setup)}")
    return paths


def figure_json(found: FigureResult) -> dict[str, Any]:
    figure = found.figure
    return {
        "schema": SCHEMA,
        "figure": figure.name,
        "title": figure.title_on(found.setup),
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
    what = found.figure.title_on(found.setup)
    title = f"Figure {found.figure.name}: {what}; loss after {format_count(found.setup.run.tokens)} tokens"
    headings = [f"minus\n{name}" for name in references]
    table = table_of(title, ["line", "loss", *headings, "virtual\ntime", "of\nideal", "stale", "good\nout"])
    for label, line in found.summaries.items():
        table.add_row(
            label,
            loss_text(line),
            *(difference_text(line.minus(found.summaries[name])) for name in references),
            time_text(line),
            show(line.mean("share_of_ideal"), ".1%"),
            show(line.mean("staleness_mean"), ".2f"),
            show(line.over("flagged_good", sum), "d"),
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
