"""The adapter's benchmark, and what docs/planner.md says of its numbers."""

from __future__ import annotations

import json
import subprocess
import sys

from support.repository import ROOT

from dips.planner.adapter.play import MONITOR_NS

FILE = ROOT / "benchmarks" / "bench_adapter.py"


def test_small_sizes_have_every_number() -> None:
    command = [sys.executable, str(FILE), "--pipelines", "12", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert 0 < found["observation_us"] < 10 * MONITOR_NS / 1e3, "ten times the time that is counted, on a busy machine"
    for row in found["traces"]:
        gains = [value for key, value in row.items() if key not in ("overhead_ms", "order", "message")]
        assert min(gains) > 0.999
        assert row["message"] < 1 or max(gains) > 1.05
    for row in found["random"]:
        assert row["faster"] >= 0.8 * row["late"] > 0
        assert row["beyond_stated_cost"] == 0
