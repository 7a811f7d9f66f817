"""Defines the paper's figures about losses, as comparisons: what each runs, and how the result compares.

The paper trains LLaMA3.2-1B; here the small byte model is trained, so statements can be compared, not numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dips.compare.jobs import ComparisonJob, text_digest
from dips.compare.setup import ComparisonSetup
from dips.compare.summary import MethodSummary

CLOSE = 0.15
"""Nats per byte: the difference up to which losses count as comparable in a sentence."""

FAR = 0.5
"""Nats per byte above DiLoCo with clip from which a run counts as not converging in a sentence."""

DP, DILOCO, CLIPPED = "DP", "DiLoCo", "DiLoCo, clip 1"

Lines = Mapping[str, MethodSummary]


@dataclass(frozen=True)
class FigureLine:
    """One line of a figure. variant: names the files of its runs; empty when it is a run of the plain comparison."""

    label: str
    method: str
    setup: ComparisonSetup
    variant: str


@dataclass(frozen=True)
class Figure:
    """A figure. statement: quoted from the paper. reading: our sentence about the result."""

    name: str
    title: str
    section: str
    statement: str
    lines: Callable[[ComparisonSetup], list[FigureLine]]
    reading: Callable[[Lines], str]


def figure_jobs(
    lines: Sequence[FigureLine], seeds: Sequence[int], data: Sequence[Path]
) -> list[tuple[FigureLine, ComparisonJob]]:
    """The runs of a figure: every line with every seed. Raises ConfigError for text that cannot be used."""
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


def _with_gap(setup: ComparisonSetup, label: str, method: str, percent: int) -> FigureLine:
    changed = setup.with_overrides(gaps=spread(setup.n_clusters, percent / 100))
    return FigureLine(f"{label}-{percent}", method, changed, f"gaps-{percent}")


def _with_steps(setup: ComparisonSetup, inner_steps: int) -> FigureLine:
    """The lines with H steps and gaps to 50 %; if these are the set-up's, a run of the plain comparison is shared."""
    largest = 0.5
    gaps = None if max(setup.clusters.gaps) == largest else spread(setup.n_clusters, largest)
    changed = setup.with_overrides(inner_steps=inner_steps, gaps=gaps)
    same = changed.digest() == setup.digest()
    return FigureLine(f"H {inner_steps}", "dips", changed, "" if same else f"h-{inner_steps}")


def _lines_2b(setup: ComparisonSetup) -> list[FigureLine]:
    return [*_synchronous(setup), *(_with_gap(setup, "Async", "async", percent) for percent in (10, 20, 30, 40))]


def _lines_7(setup: ComparisonSetup) -> list[FigureLine]:
    return [*_synchronous(setup), *(_with_gap(setup, "Async", "dips", percent) for percent in (40, 100, 200))]


def _lines_12(setup: ComparisonSetup) -> list[FigureLine]:
    return [_with_steps(setup, inner_steps) for inner_steps in (4, 8, 16, 32, 64, 128)]


def _reading_2b(lines: Lines) -> str:
    above = _above(lines, CLIPPED)
    far = [label for label, difference in above.items() if difference is None or difference > FAR]
    said = f"{_told(above)} above {CLIPPED}; {len(far)} of {len(above)} fail to converge (not finite, or {FAR} above)"
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
    return {label: line.minus(lines[reference]) for label, line in lines.items() if label.startswith("Async")}


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
        _lines_2b,
        _reading_2b,
    ),
    Figure(
        "7",
        "Di-PS, gaps to 40, 100 and 200 %",
        "4.1",
        "Di-PS can provide a stable convergence in asynchronous cross-cluster training, performing comparably to "
        "synchronous methods across all heterogeneous scenarios.",
        _lines_7,
        _reading_7,
    ),
    Figure(
        "12",
        "Di-PS, inner steps between two pushes, gaps to 50 %",
        "5.3",
        "The inner steps of 64 and 128 result in similar convergence performance, while other values tend to slow down "
        "convergence. In particular, larger inner steps lead to degraded convergence quality.",
        _lines_12,
        _reading_12,
    ),
)

FIGURES: Mapping[str, Figure] = {figure.name: figure for figure in _FIGURES}
"""Figures by their number in the paper."""
