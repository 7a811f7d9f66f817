"""The benchmark of storms, small: nobody is lost, nothing fails, and the status is answered meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from support.repository import ROOT

WAIT_S = 300
BUSY_MS = 10_000
"""The benchmark's target is one second, on a machine that does nothing else."""


def storm(name: str) -> dict[str, Any]:
    command = [sys.executable, "benchmarks/bench_storm.py", "--quick", "--json", "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout)["results"]
    found: dict[str, Any] = row
    assert found["failed_calls"] == 0, found["first_failure"]
    assert found["calls"] > 0
    assert found["status_storm_ms"]["longest"] < BUSY_MS
    return found


def test_clusters_that_join_at_once_are_all_let_in() -> None:
    row = storm("joins")
    assert row["joined"] == row["alive_at_the_end"] == 20


def test_garbage_connections_are_dropped_and_counted() -> None:
    row = storm("garbage")
    assert row["alive"]
    for name in ("master", "slave"):
        assert row[name]["connected"] == 500
        assert row[name]["files_afterwards"] < 100
    assert row["slave_counted"] > 0


def test_a_link_at_one_percent_costs_no_beat() -> None:
    row = storm("link")
    assert row["incarnations"] == 1
    assert row["pushes_applied"] >= 1
    assert row["longest_gap_between_beats_s"] < row["evicted_after_s"]
