"""The pictures of a comparison hold what the records hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.compare_records import committed, push, record

from dips.lab.compare.pictures import draw_bars, draw_cosines, draw_curves, draw_norms
from dips.lab.compare.record import RunRecord

PNG = b"\x89PNG\r\n\x1a\n"
ROUNDS = (
    committed(1, push("a", 1), push("b", 1, excluded=True, bad=True, norm=30.0)),
    committed(2, push("a", 2), push("b", 2, excluded=True, bad=True, norm=None)),
    committed(3, push("b", 3, norm=math.nan), push("a", 3, norm=2.0)),
)


def named(records: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    return [(record.method, record) for record in records]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Instead of being written, figures are kept here."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_args, **_options: figures.append(self))
    return figures


def test_pictures_are_written(tmp_path: Path) -> None:
    records = [record("dp"), record(judged=ROUNDS), record("async", loss=None)]
    draw_curves(tmp_path / "curves.png", named(records), "tokens", "three")
    draw_norms(tmp_path / "norms.png", records)
    draw_cosines(tmp_path / "cosines.png", records)
    draw_bars(tmp_path / "bars.png", ["1", "10"], [("dips", [1.0, 2.0]), ("dp", [0.5, 0.6])], "x", "t")
    for name in ("curves", "norms", "cosines", "bars"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_a_curve_holds_the_evaluated_versions_of_one_run(drawn: list[Figure]) -> None:
    records = [record("dips", 1), record("dips", 2), record("dp", 1, 2.2)]
    draw_curves(Path("x.png"), named(records), "virtual_s", "t")
    axes = drawn[0].axes[0]
    assert [line.get_label() for line in axes.get_lines()][::2] == ["dips", "dp"]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["dips", "dp"]
    first, second, _ = axes.get_lines()
    assert np.asarray(first.get_xdata()).tolist() == [point.virtual_s for point in records[0].curve]
    assert np.asarray(first.get_ydata()).tolist() == [point.loss for point in records[0].curve]
    assert first.get_color() == second.get_color()
    assert "virtual seconds" in axes.get_xlabel()
    assert "nats per byte" in axes.get_ylabel()
