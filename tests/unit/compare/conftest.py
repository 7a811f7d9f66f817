"""A text of sixty files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n}.txt").write_text(f"file {n}\n" * 100)
    return folder
