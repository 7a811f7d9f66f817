"""Formats a sweep for a terminal: a line for each schedule, and maps of the best."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from dips.planner.heatmap import Panel
from dips.planner.sweep import SweepRow


def rows_table(rows: Iterable[SweepRow]) -> Table:
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
    return table


def heading(panel: Panel) -> str:
    note = "" if panel.over_fits else f" ({panel.over} itself does not fit)"
    return f"{panel.title}: the best, and how many times faster than {panel.over}{note}"


def map_table(panel: Panel) -> Table:
    """A map as a table: a column for each bandwidth, a line for each latency, the longest first, as in the picture."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("latency \\ bandwidth", justify="right")
    for bandwidth in panel.bandwidths:
        table.add_column(f"{bandwidth:g}", justify="right")
    for latency, cells in zip(reversed(panel.latencies), reversed(panel.cells), strict=True):
        table.add_row(f"{latency:g}", *(f"{cell.schedule} {cell.times_faster:.2f}x" for cell in cells))
    return table
