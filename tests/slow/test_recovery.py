"""The benchmark of recoveries runs, and its faults are got over; how fast is for docs/evidence.md, not for a busy
machine of tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.repository import ROOT

VERDICT_WAIT_S = 30.0
"""What nobody may have waited for: the most that a wait could be, if it did not go by what exchanges took before."""


@pytest.mark.timeout(300)
def test_a_killed_slave_is_back_and_nobody_waited_for_it() -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "bench_recovery.py"),
        "--quick", "--json", "--faults", "slave", "--elems", "20000",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    rows = {row["kind"]: row for row in found["rows"]}
    assert list(rows) == ["slave"]
    for row in rows.values():
        assert row["n"] == 1
        assert 0 < row["median_s"] < 60
        assert 0 < row["gap_s"] < VERDICT_WAIT_S / 2
    assert rows["slave"]["load_s"] > 0


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_recovery.py"), "--faults", "flood"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "slave, master, cluster, silent, hung" in done.stderr
