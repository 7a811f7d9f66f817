"""The report of the papers keeps what it made of each of its two forms apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from papers import source as module
from papers.source import Picture, Runner, Source


def test_a_quick_report_leaves_the_pictures_of_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(told: Any, folder: Path) -> None:
        (folder / "it.png").write_text(told["n"])

    monkeypatch.setattr(module, "BENCHMARKS", tmp_path)
    (tmp_path / "bench_own.py").write_text("import json, sys; print(json.dumps({'n': sys.argv[1]}))")
    pictures = (Picture("Figure 9", "it.png", "Speed"),)
    source = Source(
        "links", ("bench_own.py",), lambda told: [], (), ("q",), ("f",), pictures=pictures, draw=draw
    )  # fmt: skip
    quick = Runner(tmp_path / "results", True, lambda line: None)
    full = replace(quick, quick=False)
    for one in (full, quick, full):
        (outcome,) = one.run([source])
        assert (one.files(source) / "it.png").read_text() == outcome.told["n"]
    assert (outcome.told, quick.run([source])[0].told) == ({"n": "f"}, {"n": "q"})
