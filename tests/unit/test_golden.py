"""Golden transcripts: a change of the protocol shows as a change of text in tests/golden.

`DIPS_REWRITE_GOLDEN=1 pytest tests/unit/test_golden.py` writes them again; then read the difference.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from support.golden_scenarios import SCENARIOS

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_transcript_is_the_golden_one(name: str) -> None:
    text = SCENARIOS[name]().text()
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("DIPS_REWRITE_GOLDEN"):
        path.write_text(text)
    golden = path.read_text() if path.exists() else ""
    difference = difflib.unified_diff(golden.splitlines(), text.splitlines(), path.name, "now", lineterm="")
    assert text == golden, "\n".join(["the protocol's transcript changed:", *difference])


def test_every_golden_text_has_its_scenario() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt") if path.stem != "pushed_block") == sorted(SCENARIOS)
