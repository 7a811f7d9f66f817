"""Draws the pictures of a comparison: loss over tokens, loss over virtual time, and each push's norm, cosine and
verdict.

They must draw only what the records hold. Colours are those of Okabe and Ito, which colour-blind people can
distinguish; line styles and marks differ as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dips.lab.compare.record import CurvePoint, PushFact, RunRecord
from dips.lab.compare.report import EXCLUDED, KNOWS_NOTHING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")
_CURVES_INCHES = (8.0, 5.0)
_PANEL_INCHES = (4.4, 2.5)
_DPI = 100
_COLUMNS = 2
_RING = "none"
"""No fill colour: an empty square marks what was injected."""

Along = Literal["tokens", "virtual_s"]
_ALONG = {"tokens": "tokens (bytes of text)", "virtual_s": "virtual seconds"}


@dataclass(frozen=True)
class _Point:
    at_s: float
    value: float | None
    push: PushFact


def draw_curves(path: Path, labelled: Sequence[tuple[str, RunRecord]], along: Along, title: str) -> None:
    """Write held-out losses as PNG. One colour for each label; its first run is drawn in full colour, further ones
    pale."""
    figure = empty_figure(_CURVES_INCHES)
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(label for label, _ in labelled))
    seen: set[str] = set()
    for label, record in labelled:
        _curve(axes, record.curve, along, labels.index(label), label, again=label in seen)
        seen.add(label)
    axes.set_xlabel(_ALONG[along])
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(left=0)
    axes.set_ylim(*_readable([record for _, record in labelled]))
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    figure.savefig(path, format="png")


def draw_norms(path: Path, records: Sequence[RunRecord]) -> None:
    """Write the norm of each judged push as PNG, one panel for each run, on a logarithmic scale."""
    _draw_pushes(path, records, "norm", "norm of the pseudo-gradient", logarithmic=True)


def draw_cosines(path: Path, records: Sequence[RunRecord]) -> None:
    """Write the cosine of each judged push as PNG, one panel for each run."""
    _draw_pushes(path, records, "cosine", "cosine", logarithmic=False)


def draw_bars(
    path: Path, groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], ylabel: str, title: str
) -> None:
    """Write bars as PNG. series: (label, one value for each group)."""
    figure = empty_figure(_CURVES_INCHES)
    axes = figure.add_subplot()
    width = 0.8 / max(1, len(series))
    for index, (label, values) in enumerate(series):
        left = [place - 0.4 + (index + 0.5) * width for place in range(len(groups))]
        hatch = ("", "//", "..", "xx")[index // len(COLOURS) % 4]
        axes.bar(left, values, width, label=label, color=COLOURS[index % len(COLOURS)], hatch=hatch)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(ylabel)
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    _legend(figure, axes)
    figure.savefig(path, format="png")


def empty_figure(inches: tuple[float, float], dpi: int = _DPI) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small", frameon=False)


def _readable(records: Sequence[RunRecord]) -> tuple[float, float]:
    """Axis limits that include every loss up to that of an untrained model: a lost run must not hide the others."""
    losses = [point.loss for record in records for point in record.curve if point.loss is not None]
    known = [loss for loss in losses if loss <= KNOWS_NOTHING] or [KNOWS_NOTHING]
    margin = 0.05 * (max(known) - min(known)) + 0.01
    return min(known) - margin, max(known) + margin


def _curve(axes: Axes, curve: Sequence[CurvePoint], along: Along, index: int, label: str, *, again: bool) -> None:
    points = [point for point in curve if point.loss is not None]
    axes.plot(
        [float(getattr(point, along)) for point in points],
        [float(point.loss) for point in points if point.loss is not None],
        color=COLOURS[index % len(COLOURS)],
        linestyle=STYLES[index // len(COLOURS) % len(STYLES)] if index >= len(COLOURS) else "-",
        linewidth=1.5,
        alpha=0.35 if again else 1.0,
        marker="o",
        markersize=2.5,
        label=None if again else label,
    )


def _draw_pushes(path: Path, records: Sequence[RunRecord], quantity: str, ylabel: str, *, logarithmic: bool) -> None:
    shown = [record for record in records if record.judged]
    rows, columns = max(1, math.ceil(len(shown) / _COLUMNS)), min(_COLUMNS, max(1, len(shown)))
    figure = empty_figure((_PANEL_INCHES[0] * _COLUMNS, _PANEL_INCHES[1] * rows + 0.5))
    for place, record in enumerate(shown, 1):
        axes = figure.add_subplot(rows, columns, place)
        points = [
            _Point(row.virtual_s, getattr(push, quantity), push)
            for row in record.judged
            for push in row.pushes
            if _out(push) or _finite(getattr(push, quantity))
        ]
        for index, cluster in enumerate(_clusters([record])):
            colour = COLOURS[index % len(COLOURS)]
            its = [point for point in points if point.push.cluster == cluster]
            _marks(axes, [point for point in its if not _out(point.push)], "o", colour)
            _marks(axes, [point for point in its if _out(point.push)], "x", colour)
        _marks(axes, [point for point in points if point.push.bad], "s", _RING)
        if logarithmic:
            axes.set_yscale("log")
        spoilt = f" with {record.inject}" if record.inject else ""
        axes.set_title(f"{record.method}{spoilt}, seed {record.seed}", fontsize="small")
        axes.tick_params(which="both", labelsize="x-small")
        axes.grid(alpha=0.3)
    figure.supxlabel(_ALONG["virtual_s"], fontsize="small")
    figure.supylabel(ylabel, fontsize="small")
    _legend_of_marks(figure, shown)
    figure.savefig(path, format="png")


def _marks(axes: Axes, points: Sequence[_Point], mark: str, colour: str) -> None:
    """The marks of the pushes; those that are not finite are on the upper edge."""
    ring = colour == _RING
    inside = [(point.at_s, point.value) for point in points if point.value is not None and _finite(point.value)]
    above = [(point.at_s, 1.0) for point in points if not _finite(point.value)]
    for found, transform in ((inside, axes.transData), (above, axes.get_xaxis_transform())):
        (line,) = axes.plot(
            [at_s for at_s, _ in found],
            [value for _, value in found],
            transform=transform,
            clip_on=False,
            linestyle="none",
            marker=mark,
            markersize=7 if ring else 4,
            color="black" if ring else colour,
            markerfacecolor=colour,
            markeredgewidth=0.7 if ring else 1.2,
        )
        line.set_in_layout(False)  # marks on the edge extend beyond the axes, which must not grow for them


def _legend_of_marks(figure: Figure, records: Sequence[RunRecord]) -> None:
    from matplotlib.lines import Line2D

    def mark(marker: str, colour: str, face: str, label: str) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, color=colour, markerfacecolor=face, label=label)

    handles = [
        mark("o", COLOURS[index % len(COLOURS)], COLOURS[index % len(COLOURS)], f"cluster {name}")
        for index, name in enumerate(_clusters(records))
    ]
    handles.append(mark("x", "black", "black", "excluded (upper edge: not finite)"))
    if any(push.bad for record in records for row in record.judged for push in row.pushes):
        handles.append(mark("s", "black", "none", "injected"))
    figure.legend(handles=handles, loc="outside upper center", ncols=6, fontsize="small", frameon=False)


def _clusters(records: Sequence[RunRecord]) -> list[str]:
    return sorted({push.cluster for record in records for row in record.judged for push in row.pushes})


def _out(push: PushFact) -> bool:
    return push.verdict == EXCLUDED


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
