"""The pictures of a comparison are drawn, also of runs that were lost."""

from __future__ import annotations

import math
from pathlib import Path

from support.compare_records import committed, push, record

from dips.lab.compare.pictures import draw_bars, draw_cosines, draw_curves, draw_norms

PNG = b"\x89PNG\r\n\x1a\n"
ROUNDS = (
    committed(1, push("a", 1), push("b", 1, excluded=True, bad=True, norm=30.0)),
    committed(2, push("a", 2), push("b", 2, excluded=True, bad=True, norm=None)),
    committed(3, push("b", 3, norm=math.nan), push("a", 3, norm=2.0)),
)


def test_pictures_are_written(tmp_path: Path) -> None:
    records = [record("dp"), record(judged=ROUNDS), record("async", loss=None)]
    draw_curves(tmp_path / "curves.png", [(one.method, one) for one in records], "tokens", "three")
    draw_norms(tmp_path / "norms.png", records)
    draw_cosines(tmp_path / "cosines.png", records)
    draw_bars(tmp_path / "bars.png", ["1", "10"], [("dips", [1.0, 2.0]), ("dp", [0.5, 0.6])], "x", "t")
    for name in ("curves", "norms", "cosines", "bars"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
