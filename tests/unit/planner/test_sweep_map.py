"""Maps of a sweep: which schedule is best where, as a picture and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image
from support.plan_command import told
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.planner import sweep

RATIOS = [0, 0.5, 2]


@pytest.fixture(scope="module")
def rows() -> list[sweep.SweepRow]:
    return [row for case in sweep.cases([4], [8], [2], RATIOS, RATIOS, [1, 2]) for row in sweep.rows_of(case)]


def cell(panel: sweep.Panel, latency: float, bandwidth: float) -> tuple[str, float, float]:
    found = panel.cells[panel.latencies.index(latency)][panel.bandwidths.index(bandwidth)]
    return found.schedule, found.makespan, round(found.times_faster, 4)


def test_the_best_is_the_shortest_that_fits_and_of_equal_ones_the_first(rows: list[sweep.SweepRow]) -> None:
    for panel in sweep.panels(rows, over="zb_h1"):
        for latency in RATIOS:
            for bandwidth in RATIOS:
                here = [r for r in rows if (r.latency, r.bandwidth, r.memory) == (latency, bandwidth, panel.memory)]
                fitting = [r for r in here if r.peak_activations <= r.memory * r.n_pp]
                least = min(r.makespan for r in fitting)
                name = next(r.schedule for r in fitting if r.makespan == least)
                other = next(r.makespan for r in here if r.schedule == "zb_h1")
                assert cell(panel, latency, bandwidth) == (name, least, round(other / least, 4))
    gpipe = [r for r in rows if r.schedule == "gpipe"]
    assert {r.peak_activations for r in gpipe} == {8}, "it would not fit memory 1, where it would be the best"


def test_what_is_compared_with_may_not_fit_but_must_be_there(rows: list[sweep.SweepRow]) -> None:
    small, large = sweep.panels(rows, over="gpipe")
    assert (small.over_fits, large.over_fits) == (False, True)
    grid = [sweep.GridPoint(4, 8, 2, 0, 0, 1), sweep.GridPoint(4, 9, 2, 0, 0, 1)]
    sweep.check_compared(grid, "zb_v", optimal=False)
    sweep.check_compared(grid, sweep.OPTIMAL[0], optimal=True)
    with pytest.raises(ConfigError, match=r"'interleaved_1f1b' is not a schedule that 4 stages and 9 microbatches can"):
        sweep.check_compared(grid, "interleaved_1f1b", optimal=False)
    with pytest.raises(ConfigError, match="choose one of gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, cross_ud/1"):
        sweep.check_compared(grid, sweep.OPTIMAL[0], optimal=False)


def test_rows_have_the_names_that_are_promised() -> None:
    for case in (sweep.GridPoint(4, 8, 2, 0, 0, 1), sweep.GridPoint(4, 9, 2, 0, 0, 1)):
        assert [row.schedule for row in sweep.rows_of(case)] == sweep.names_of(case)


def test_rows_without_the_compared_schedule_are_refused(rows: list[sweep.SweepRow]) -> None:
    with pytest.raises(ConfigError, match="no schedule 'zbh1' of 4 stages and 8 microbatches to compare with"):
        sweep.panels(rows, over="zbh1")


def test_the_picture_names_each_best_schedule_each_time(rows: list[sweep.SweepRow], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.svg", "map.png", "two.svg")]
    maps = sweep.panels(rows)[1:]
    sweep.draw_maps(maps, files[:2])
    sweep.draw_maps(maps, files[2:])
    assert files[0].read_bytes() == files[2].read_bytes()
    comments = files[0].read_text()
    assert ElementTree.fromstring(comments).tag.endswith("svg")
    words = "zb_v", "cross_ud/1", "2.10x", "2 sites, 2 x the memory of 1F1B", "times faster than 1f1b"
    axes = "time of a message on the link,", "latency of the link,", "in forward passes (T_F)"
    for word in (*words, *axes):
        assert f"<!-- {word}" in comments or word in comments, word
    pixels = image.imread(files[1])
    assert pixels.shape[0] > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


GRID: Sequence[str] = ("--latency", "0,2", "--bandwidth", "0,2")


def test_the_map_in_the_terminal_has_the_longest_latency_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys, "sweep", *GRID, "--map")
    assert (code, error) == (0, "")
    *lines, last = [line.split() for line in out.splitlines() if line.strip()]
    assert last[0] == "uncalibrated:"
    assert out.startswith("4 stages, 8 microbatches, 2 sites, memory 1: the best, and how many times faster than 1f1b")
    assert lines[1] == ["latency", "\\", "bandwidth", "0", "2"]
    assert lines[3:] == [
        ["2", "cross_wave", "1.38x", "cross_ud/1", "1.51x"],
        ["0", "zb_v", "1.29x", "compact_zb", "1.40x"],
    ]
    whole = told(capsys, "sweep", *GRID)[1]
    assert whole.endswith(out)
    assert "activations" in whole


def test_the_documents_picture_is_what_its_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "planner.md").read_text()
    (line,) = [
        line for line in text.splitlines() if line.startswith("dips plan sweep") and "--map --out runs/map" in line
    ]
    words = line.removeprefix("dips plan sweep ").replace("runs/map", str(tmp_path)).split()
    assert told(capsys, "sweep", *words)[0] == 0
    assert {file.name for file in tmp_path.iterdir()} == {"rows.json", "map.svg", "map.png"}
    drawn, shown = image.imread(tmp_path / "map.png"), image.imread(ROOT / "docs" / "pictures" / "planner-map.png")
    assert drawn.shape == shown.shape
    assert np.abs(drawn - shown).mean() < 0.02  # another matplotlib may draw letters a little otherwise
