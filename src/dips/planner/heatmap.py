"""Draws a sweep as maps: for each latency and bandwidth the best schedule, and how many times faster it is than another
one, as CrossPipe draws it (arXiv:2507.00217, Figures 8 and 9)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dips.planner.errors import PlanError
from dips.planner.sweep import SweepRow
from dips.planner.trace import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

_COLUMNS = 4
_CELL_INCHES = (1.05, 0.62)
_COLOURS = "viridis"  # brightness rises with the number, so the map can be read without colours too


class Best(NamedTuple):
    """The best schedule of a cell. times_faster: the other schedule's makespan / this one's."""

    schedule: str
    makespan: float
    times_faster: float


@dataclass(frozen=True)
class Panel:
    """The map of one pipeline. cells[i][j]: for latencies[i] and bandwidths[j].

    over_fits: whether the schedule for comparison would fit the memory everywhere.
    """

    n_pp: int
    n_mb: int
    n_sites: int
    memory: float
    latencies: tuple[float, ...]
    bandwidths: tuple[float, ...]
    cells: tuple[tuple[Best, ...], ...]
    over: str
    over_fits: bool

    @property
    def title(self) -> str:
        sites = "1 site" if self.n_sites == 1 else f"{self.n_sites} sites"
        return f"{self.n_pp} stages, {self.n_mb} microbatches, {sites}, memory {self.memory:g}"


def panels(rows: Iterable[SweepRow], over: str = "1f1b") -> list[Panel]:
    """A map for each pipeline, in the order of the rows. over: the schedule that is compared with.

    Of schedules that fit the memory the one with the shortest makespan is the best; of equal ones, the first. Raises
    PlanError when there is no row of `over`.
    """
    pipelines: dict[tuple[int, int, int, float], dict[tuple[float, float], list[SweepRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        pipelines[row.n_pp, row.n_mb, row.n_sites, row.memory][row.latency, row.bandwidth].append(row)
    return [_panel(pipeline, points, over) for pipeline, points in pipelines.items()]


def _panel(
    pipeline: tuple[int, int, int, float], points: dict[tuple[float, float], list[SweepRow]], over: str
) -> Panel:
    latencies = tuple(dict.fromkeys(latency for latency, _ in points))
    bandwidths = tuple(dict.fromkeys(bandwidth for _, bandwidth in points))
    others = {point: _named(over, rows) for point, rows in points.items()}
    cells = tuple(
        tuple(_best(points[latency, bandwidth], others[latency, bandwidth]) for bandwidth in bandwidths)
        for latency in latencies
    )
    return Panel(*pipeline, latencies, bandwidths, cells, over, all(map(_fits, others.values())))


def _named(name: str, rows: Sequence[SweepRow]) -> SweepRow:
    for row in rows:
        if row.schedule == name:
            return row
    known = ", ".join(row.schedule for row in rows)
    raise PlanError(
        f"no schedule {name!r} of {rows[0].n_pp} stages and {rows[0].n_mb} microbatches to compare with: "
        f"choose one of {known}"
    )


def _best(rows: Sequence[SweepRow], other: SweepRow) -> Best:
    best = min(filter(_fits, rows), key=lambda row: row.makespan)
    return Best(best.schedule, best.makespan, other.makespan / best.makespan)


def _fits(row: SweepRow) -> bool:
    return row.peak_activations <= row.memory * row.n_pp * (1 + 1e-9)


def draw_maps(maps: Sequence[Panel], files: Sequence[Path]) -> None:
    """Write all maps as one picture, in the form of each file's suffix (.svg, .png). Needs matplotlib."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    factors = [cell.times_faster for panel in maps for line in panel.cells for cell in line]
    scale = Normalize(min(1.0, *factors), max(1.01, *factors))
    columns = min(_COLUMNS, len(maps))
    lines = -(-len(maps) // columns)
    wide = max(len(panel.bandwidths) for panel in maps) * _CELL_INCHES[0] + 0.9
    high = max(len(panel.latencies) for panel in maps) * _CELL_INCHES[1] + 0.9
    figure = Figure(figsize=(max(5.0, columns * wide + 1.0), lines * high + 0.5), dpi=110, layout="constrained")
    all_axes = figure.subplots(lines, columns, squeeze=False)
    for axes in all_axes.flat[len(maps) :]:
        axes.set_axis_off()
    for axes, panel in zip(all_axes.flat, maps, strict=False):
        _draw_panel(axes, panel, scale)
    bar = figure.colorbar(ScalarMappable(scale, _COLOURS), ax=all_axes, shrink=0.8, aspect=30)
    bar.set_label(f"times faster than {maps[0].over}")
    figure.suptitle("The best schedule that fits the memory, for each delay between sites")
    save(figure, files)


def _draw_panel(axes: Axes, panel: Panel, scale: Normalize) -> None:
    from matplotlib import colormaps

    factors = [[cell.times_faster for cell in line] for line in panel.cells]
    axes.imshow(factors, cmap=_COLOURS, norm=scale, aspect="auto", origin="lower")
    for line, cells in enumerate(panel.cells):
        for column, cell in enumerate(cells):
            red, green, blue, _ = colormaps[_COLOURS](float(scale(cell.times_faster)))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axes.text(
                column,
                line,
                f"{cell.schedule}\n{cell.times_faster:.2f}x",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    axes.set_xticks(range(len(panel.bandwidths)), [f"{value:g}" for value in panel.bandwidths])
    axes.set_yticks(range(len(panel.latencies)), [f"{value:g}" for value in panel.latencies])
    axes.set_xlabel("bandwidth: time on the link / T_F", fontsize=8)
    axes.set_ylabel("latency / T_F", fontsize=8)
    axes.set_title(panel.title, fontsize=9)
