"""A small text, and torch's threads as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        words = np.random.default_rng(number).choice(["if ", "else ", "for x in y:\n", "    "], 600)
        (folder / f"{number}.txt").write_text("".join(words))
    return folder
