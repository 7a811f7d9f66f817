"""The calibration's benchmark runs real ranks, and what it says of its numbers follows from them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.repository import ROOT

FILE = ROOT / "benchmarks" / "bench_calibration.py"


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (["--operation-ms", "20"], ["1f1b 4 mb", "zb_h1 2 mb"]),
        pytest.param(["--layers"], ["2 ranks"], marks=pytest.mark.long),
    ],
)
def test_small_sizes_have_every_number(options: list[str], others: list[str]) -> None:
    command = [sys.executable, str(FILE), "--quick", "--repeats", "2", *options, "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    rows, whole = found["others"], found["summary"]
    assert [row["setting"].split(",")[0] for row in rows] == others
    assert whole["overhead_per_op_s"] >= 0
    assert whole["overhead_per_message_s"] >= 0
    for row in (found["calibrated_on"], *rows):
        assert row["calibrated_s"] >= row["uncalibrated_s"] > 0
        assert row["calibrated_error"] == pytest.approx(row["measured_s"] / row["calibrated_s"] - 1)
        assert row["in_interval"] == (abs(row["calibrated_error"]) <= whole["error"])
    assert whole["settings"] == len(rows)
    errors = [abs(row["calibrated_error"]) for row in rows]
    assert whole["mean_calibrated_error"] == pytest.approx(sum(errors) / len(rows))
    assert whole["most_calibrated_error"] == max(errors)
