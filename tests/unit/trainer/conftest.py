"""A small text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        words = np.random.default_rng(number).choice(["if ", "else ", "for x in y:\n", "    "], 600)
        (folder / f"{number}.txt").write_text("".join(words))
    return folder
