"""plan.csv as the ranks read it, and what they say to one that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.planner.run.links import parse_cells, read_cells


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0X0\n", "plan.csv: line 1, column 2: '0X0' is not an operation: write STAGE KIND MICROBATCH without"),
        ("0F0.1\n", "plan.csv has parts of blocks: write each as a stage of its own, as plan.csv has them"),
        ("0F0,0B0\n0F1,0B1\n", "plan.csv: stage 0 runs on devices 0 and 1: give it one"),
        ("0F0,0B0\n2F0,2B0\n", "plan.csv: no device runs stage 1: every stage needs one line"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", "plan.csv: the last stage runs forward passes in the order .1, 0."),
    ],
)
def test_what_is_no_schedule_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("'", "['\"]")):
        parse_cells(text, "plan.csv")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.csv cannot be read as a schedule: .*: name the plan\.csv of a plan"):
        read_cells(tmp_path / "plan.csv")
