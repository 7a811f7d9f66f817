"""Compares every schedule over a grid of pipelines and links: the effect of delay, as in CrossPipe's Figures 8 and 9.

All times are ratios to T_F of one microbatch on one device: T_F = T_D = T_W = 1, D and W each release half of an
activation. latency and bandwidth are the two delays of a message that crosses sites; bandwidth is the time that it
occupies its link. memory is a multiple of 1F1B's own need: activations of as many microbatches as there are devices,
on each device.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dips.core.errors import ConfigError
from dips.planner.calibration import interval_of
from dips.planner.costs import NS, Costs, equal_sites, site_wires, uniform
from dips.planner.ir import Schedule, straight, wave
from dips.planner.profile import Calibration
from dips.planner.schedules import CROSS_UD, MANY_CHUNKS, SCHEDULES
from dips.planner.simulate import peaks, simulate, validate
from dips.planner.trace import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

ACTIVATION = 1 << 20
"""Units of one microbatch's activation on one device: divides evenly among chunks and parts."""

MOST = 1e6
"""The largest delay or memory: a larger number is a mistake."""

MOST_BLOCKS = 1 << 18
"""The largest stages x microbatches of a case: 64 x 4096. One such case takes minutes."""

MOST_BLOCKS_OF_A_GRID = 1 << 23
"""The largest stages x microbatches of all cases together, which takes hours."""

OPTIMAL = ("cross_ud/optimal", "cross_wave/optimal")


@dataclass(frozen=True)
class SweepOverheads:
    """What a calibration adds to every operation and message, in units of T_F."""

    operation: float = 0.0
    message: float = 0.0
    error: float | None = None  # of calibrated predictions, as a fraction; None: not calibrated


def overheads_of(calibration: Calibration, forward_ms: float) -> SweepOverheads:
    """The overheads of a profile, where T_F takes so many milliseconds."""
    operation, message = (us / 1e3 / forward_ms for us in (calibration.operation_us, calibration.send_us))
    return SweepOverheads(operation, message, calibration.error)


UNCALIBRATED = SweepOverheads()


@dataclass(frozen=True)
class GridPoint:
    """One point of the grid."""

    n_pp: int
    n_mb: int
    n_sites: int
    latency: float
    bandwidth: float
    memory: float
    overheads: SweepOverheads = UNCALIBRATED

    def costs(self, chunks: int = 1, wraps: bool = False) -> Costs:
        """The costs with `chunks` stages on each device. wraps: the last device sends to the first."""
        wires = site_wires(equal_sites(self.n_pp, self.n_sites), self.bandwidth, self.latency, wraps)
        costs = uniform(self.n_pp * chunks, chunks, wires=wires, activation=ACTIVATION)
        operation_ns, send_ns = (round(units * NS) for units in (self.overheads.operation, self.overheads.message))
        if not (operation_ns or send_ns):
            return costs
        return costs.with_overheads(operation_ns, send_ns, (*range(self.n_pp), *(0,) * wraps))

    def limits(self) -> list[int]:
        """The activation memory of each device."""
        return [round(self.memory * self.n_pp * ACTIVATION)] * self.n_pp

    def schedule(self, name: str) -> tuple[Schedule, Costs]:
        """A schedule by its name, and the costs that it was made for. Raises ConfigError where it cannot be made."""
        kind = {**SCHEDULES, **MANY_CHUNKS}[name]
        costs = self.costs(kind.chunks(self.n_pp), wraps=kind.goes_round(self.n_pp))
        return kind.make(self.n_pp, self.n_mb, costs, self.limits()), costs


@dataclass(frozen=True)
class SweepRow:
    """A schedule's times in a case, in units of T_F."""

    n_pp: int
    n_mb: int
    n_sites: int
    latency: float
    bandwidth: float
    memory: float
    schedule: str
    makespan: float
    device_span: float
    stage0_span: float
    peak_activations: float  # microbatches, on the device that holds most
    # no schedule of this kind, with blocks in as many parts, has a shorter makespan; None: no solver looked
    lower_bound: float | None = None
    # the makespan - and + the error of the calibration; None: not calibrated
    makespan_low: float | None = None
    makespan_high: float | None = None


def cases(
    stages: Sequence[int],
    microbatches: Sequence[int],
    sites: Sequence[int],
    latencies: Sequence[float],
    bandwidths: Sequence[float],
    memories: Sequence[float],
    *,
    overheads: SweepOverheads = UNCALIBRATED,
) -> list[GridPoint]:
    """The grid, checked as a whole before anything is computed. Raises ConfigError."""
    blocks = sum(stages) * sum(microbatches) * len(sites) * len(latencies) * len(bandwidths) * len(memories)
    sizes = itertools.product(dict.fromkeys(stages), dict.fromkeys(microbatches), dict.fromkeys(sites))
    delays = itertools.product(dict.fromkeys(latencies), dict.fromkeys(bandwidths), dict.fromkeys(memories))
    found = []
    for size, delay in itertools.product(sizes, delays):
        case = GridPoint(*size, *delay, overheads)
        _check(case)
        found.append(case)
        if blocks > MOST_BLOCKS_OF_A_GRID:
            raise ConfigError(
                f"{blocks} stages x microbatches in all combinations together would take days, at most "
                f"{MOST_BLOCKS_OF_A_GRID} can be compared: give fewer or smaller numbers"
            )
    return found


def _check(case: GridPoint) -> None:
    for value in (case.latency, case.bandwidth, case.memory, case.overheads.operation, case.overheads.message):
        if not math.isfinite(value) or value > MOST:
            raise ConfigError(f"{value:g} is not a number that can be planned with: give one up to {MOST:g}")
    if case.n_pp < 1 or case.n_mb < 1:
        raise ConfigError(f"{case.n_pp} stages and {case.n_mb} microbatches: both are at least 1")
    if case.n_pp * case.n_mb > MOST_BLOCKS:
        raise ConfigError(
            f"{case.n_pp} stages x {case.n_mb} microbatches are {case.n_pp * case.n_mb}, at most {MOST_BLOCKS} can be "
            "planned: give fewer"
        )
    if min(case.latency, case.bandwidth) < 0:
        raise ConfigError(f"latency {case.latency:g} and bandwidth {case.bandwidth:g}: neither is negative")
    if case.memory * case.n_pp < 1:
        raise ConfigError(
            f"memory {case.memory:g} of {case.n_pp} stages holds no microbatch: give at least {1 / case.n_pp:g}"
        )
    equal_sites(case.n_pp, case.n_sites)


def names_of(case: GridPoint, optimal: bool = False) -> list[str]:
    """The schedules that a case has rows for. Interleaved 1F1B takes a multiple of its devices as microbatches."""
    fits = {name: name != "interleaved_1f1b" or case.n_mb % case.n_pp == 0 for name in SCHEDULES}
    return [*(name for name in SCHEDULES if fits[name]), *(OPTIMAL if optimal else ())]


def check_compared(grid: Sequence[GridPoint], over: str, optimal: bool) -> None:
    """Raise ConfigError when a case has no row of `over`, before anything is computed."""
    for case in grid:
        names = names_of(case, optimal)
        if over not in names:
            raise ConfigError(
                f"{over!r} is not a schedule that {case.n_pp} stages and {case.n_mb} microbatches can be compared "
                f"with: choose one of {', '.join(names)}"
            )


def rows_of(case: GridPoint, optimal_s: float = 0.0) -> Iterator[SweepRow]:
    """The rows of one case, every schedule. optimal_s > 0: the solver's too, with so much time for each.

    Static schedules have no memory limit: their peak_activations say what they need.
    """
    for name in names_of(case):
        schedule, costs = case.schedule(name)
        yield _row(case, schedule, costs, name, None if SCHEDULES[name].fixed else case.limits())
    if optimal_s > 0:
        kinds = (("zb_h1", *CROSS_UD, "compact_zb"), ("zb_v", "cross_wave"))
        down, back = ([case.schedule(name)[0] for name in names] for names in kinds)
        yield _best_cut(case, down, case.costs(), optimal_s)
        yield _optimum(case, OPTIMAL[1], wave(case.n_pp), case.costs(2), back, optimal_s)


def _best_cut(case: GridPoint, others: Sequence[Schedule], costs: Costs, time_limit_s: float) -> SweepRow:
    """The shorter one of the schedule with whole blocks and, if the greedy is better with parts, one with as many
    parts."""
    place = straight(case.n_pp)
    whole = [other for other in others if other.parts == 1]
    best = _optimum(case, OPTIMAL[0], place, costs, whole, time_limit_s)
    cut = [other for other in others if other.parts > 1]
    shortest = min(cut, key=lambda other: simulate(other, costs).makespan_ns)
    if simulate(shortest, costs).makespan_ns < round(best.makespan * NS):
        best = _optimum(case, OPTIMAL[0], place, costs, [shortest], time_limit_s)
    return best


def _optimum(
    case: GridPoint, name: str, places: Sequence[int], costs: Costs, others: Sequence[Schedule], time_limit_s: float
) -> SweepRow:
    """The solver's schedule, begun at the best of `others`, of the same kind, that fits; never worse than that."""
    from dips.planner.schedules.optimal import optimal  # OR-tools: a second to import, and only needed here

    limits = case.limits()
    fitting = [other for other in others if all(map(operator.le, peaks(other, costs), limits))]
    hint = min(fitting, key=lambda other: simulate(other, costs).makespan_ns, default=None)
    parts = 1 if hint is None else hint.parts
    found = optimal(name, places, case.n_mb, costs, limits, hint, time_limit_s, parts=parts)
    return _row(case, found.schedule, costs, name, limits, found.lower_bound_ns)


def _row(
    case: GridPoint,
    schedule: Schedule,
    costs: Costs,
    name: str,
    memory: Sequence[int] | None = None,
    lower_bound_ns: int | None = None,
) -> SweepRow:
    timeline = validate(schedule, costs, memory)
    low, high = interval_of(timeline.makespan_ns / NS, case.overheads.error) or (None, None)
    return SweepRow(
        n_pp=case.n_pp,
        n_mb=case.n_mb,
        n_sites=case.n_sites,
        latency=case.latency,
        bandwidth=case.bandwidth,
        memory=case.memory,
        schedule=name,
        makespan=timeline.makespan_ns / NS,
        device_span=timeline.device_span_ns / NS,
        stage0_span=timeline.span_ns(schedule.device_of_stage[0]) / NS,
        peak_activations=max(peaks(schedule, costs)) / ACTIVATION,
        lower_bound=None if lower_bound_ns is None else lower_bound_ns / NS,
        makespan_low=low,
        makespan_high=high,
    )


# ---- heatmap ---------------------------------------------------------------------------------------------------------
#
# Draws a sweep as maps: for each latency and bandwidth the best schedule, and how many times faster it is than another
# one, as CrossPipe draws it (arXiv:2507.00217, Figures 8 and 9).


_COLUMNS = 4
_CELL_INCHES = (1.05, 0.62)
_COLOURS = "viridis"  # brightness rises with the number, so the map can be read without colours too


class Best(NamedTuple):
    """The best schedule of a cell."""

    schedule: str
    makespan: float
    times_faster: float  # the other schedule's makespan / this one's


@dataclass(frozen=True)
class Panel:
    """The map of one pipeline."""

    n_pp: int
    n_mb: int
    n_sites: int
    memory: float
    latencies: tuple[float, ...]
    bandwidths: tuple[float, ...]
    cells: tuple[tuple[Best, ...], ...]  # cells[i][j]: for latencies[i] and bandwidths[j]
    over: str  # the schedule for comparison
    over_fits: bool  # whether that would fit the memory everywhere

    @property
    def title(self) -> str:
        return f"{self.pipeline}, {self.sites}, memory {self.memory:g}"

    @property
    def pipeline(self) -> str:
        return f"{self.n_pp} stages, {self.n_mb} microbatches"

    @property
    def sites(self) -> str:
        return "1 site" if self.n_sites == 1 else f"{self.n_sites} sites"


def panels(rows: Iterable[SweepRow], over: str = "1f1b") -> list[Panel]:
    """A map for each pipeline, in the order of the rows. over: the schedule that is compared with.

    Of schedules that fit the memory the one with the shortest makespan is the best; of equal ones, the first. Raises
    ConfigError when there is no row of `over`.
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
    best = {point: min(filter(_fits, rows), key=lambda row: row.makespan) for point, rows in points.items()}
    cells = tuple(
        tuple(
            Best(row.schedule, row.makespan, others[point].makespan / row.makespan)
            for row, point in ((best[latency, bandwidth], (latency, bandwidth)) for bandwidth in bandwidths)
        )
        for latency in latencies
    )
    return Panel(*pipeline, latencies, bandwidths, cells, over, all(map(_fits, others.values())))


def _named(name: str, rows: Sequence[SweepRow]) -> SweepRow:
    for row in rows:
        if row.schedule == name:
            return row
    known = ", ".join(row.schedule for row in rows)
    raise ConfigError(
        f"no schedule {name!r} of {rows[0].n_pp} stages and {rows[0].n_mb} microbatches to compare with: "
        f"choose one of {known}"
    )


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
    # A panel is at least as large as its title and the words at its axes need.
    wide = max(2.7, max(len(panel.bandwidths) for panel in maps) * _CELL_INCHES[0] + 1.1)
    high = max(2.8, max(len(panel.latencies) for panel in maps) * _CELL_INCHES[1] + 1.2)
    figure = Figure(figsize=(max(6.5, columns * wide + 1.0), lines * high + 0.5), dpi=110, layout="constrained")
    all_axes = figure.subplots(lines, columns, squeeze=False)
    for axes in all_axes.flat[len(maps) :]:
        axes.set_axis_off()
    for axes, panel in zip(all_axes.flat, maps, strict=False):
        _draw_panel(axes, panel, scale)
    bar = figure.colorbar(ScalarMappable(scale, _COLOURS), ax=all_axes, shrink=0.8, aspect=30)
    bar.set_label(f"times faster than {maps[0].over}")
    figure.suptitle("The shortest schedule that fits the memory, for each link between sites", fontsize=11)
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
    axes.set_xlabel("time of a message on the link,\nin forward passes (T_F)", fontsize=8)
    axes.set_ylabel("latency of the link,\nin forward passes (T_F)", fontsize=8)
    axes.set_title(f"{panel.pipeline},\n{panel.sites}, {panel.memory:g} x the memory of 1F1B", fontsize=9)
