"""What must hold of the rows of any sweep over whole grids, whatever the numbers are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dips.planner.schedules.fixed import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from dips.planner.sweep import SweepRow

Point = tuple[int, int, int, float, float, float]
"""Stages, microbatches, sites, latency, bandwidth, memory."""

STATIC = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "interleaved_1f1b": (interleaved_1f1b, 2),
    "zb_h1": (zb_h1, 1),
    "zb_v": (zb_v, 2),
}
"""name: (maker, stages on each device), of the schedules that do not depend on costs."""

WITHOUT_DELAY = {
    "gpipe": lambda p, m: 3 * (m + p - 1),
    "1f1b": lambda p, m: 3 * (m + p - 1),
    "interleaved_1f1b": lambda p, m: 3 * m + 1.5 * (p - 1),
    "zb_h1": lambda p, m: 3 * m + p - 1,
    "zb_v": lambda p, m: 3 * m + (p - 1) / 2,
}
"""Closed forms of the makespan with T_F = T_D = T_W = 1, for as many microbatches as devices or more (CrossPipe, Table
3; Zero Bubble, arXiv:2401.10241; for ZB-V what is found)."""


def by_point(rows: Iterable[SweepRow]) -> dict[Point, dict[str, SweepRow]]:
    found: dict[Point, dict[str, SweepRow]] = defaultdict(dict)
    for row in rows:
        point = (row.n_pp, row.n_mb, row.n_sites, row.latency, row.bandwidth, row.memory)
        assert row.schedule not in found[point], "a schedule has one row in a case"
        found[point][row.schedule] = row
    return found


def check_grid(rows: Iterable[SweepRow]) -> None:
    """Raises AssertionError, which names the row."""
    points = by_point(rows)
    for point, found in points.items():
        for row in found.values():
            _check_row(row)
        _check_greedy(found)
        _check_waves(found)
        _check_static(point, found, points)


def _check_row(row: SweepRow) -> None:
    assert row.makespan >= row.device_span >= row.stage0_span >= 3 * row.n_mb, row
    if "wave" not in row.schedule and STATIC.get(row.schedule, (None, 1))[1] == 1:
        crossings = 2 * (row.n_sites - 1)
        assert row.makespan >= 2 * row.n_pp + 1 + crossings * (row.latency + row.bandwidth), (row, "one there and back")
    assert row.makespan >= 3 * row.n_mb, row
    if row.schedule.startswith(("cross_", "compact_")):
        assert row.peak_activations <= row.memory * row.n_pp, row
    if not row.latency and not row.bandwidth and row.schedule in WITHOUT_DELAY:
        assert row.makespan == WITHOUT_DELAY[row.schedule](row.n_pp, row.n_mb), row


def _check_greedy(found: Mapping[str, SweepRow]) -> None:
    best = min(row.makespan for name, row in found.items() if name in ("cross_ud/1", "cross_ud/2", "cross_ud/4"))
    assert best <= found["1f1b"].makespan, found["1f1b"]
    assert best <= 1.05 * found["zb_h1"].makespan, found["zb_h1"]


def _check_waves(found: Mapping[str, SweepRow]) -> None:
    """ZB-V needs no more memory than 1F1B, and without delay no schedule is faster."""
    row = found["zb_v"]
    assert row.peak_activations <= row.n_pp, row
    if not row.latency and not row.bandwidth:
        assert row.makespan == min(other.makespan for other in found.values()), row


def _check_static(point: Point, found: Mapping[str, SweepRow], points: Mapping[Point, Mapping[str, SweepRow]]) -> None:
    """An order that knows no delays is never faster with longer ones, nor with other memory."""
    p, m, sites, latency, bandwidth, memory = point
    for other, rows in points.items():
        if other[:3] != (p, m, sites) or not (other[3] >= latency and other[4] >= bandwidth):
            continue
        for name in STATIC:
            if name in found:
                assert rows[name].makespan >= found[name].makespan, (found[name], rows[name])
                if other[3:5] == (latency, bandwidth):
                    assert rows[name].makespan == found[name].makespan, (memory, rows[name])
