"""The planner's benchmark runs."""

from __future__ import annotations

import json
import subprocess
import sys

from support.repository import ROOT

FILE = ROOT / "benchmarks" / "bench_planner.py"


def test_small_sizes_have_every_number() -> None:
    command = [sys.executable, str(FILE), "--quick", "--repeats", "1", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert [row["schedule"] for row in found["simulate"]] == ["zb_h1", "interleaved_1f1b"]
    assert 0 < found["simulate"][0]["ops_per_s"] < found["floor"]["ops_per_s"]
    assert found["greedy"]["median_s"] > 0
    assert found["plan"]["setup"] == found["all_systems"]["setup"] == "crosspipe-m8"
    assert found["spantrain"]["devices"] == 22
    assert 0 < found["spantrain"]["candidates"] < found["spantrain"]["teams"]
    assert found["optimal"]["proved"] == found["optimal"]["cases"] == 2
    assert 1 <= found["optimal"]["greedy_over_bound_most"] <= 1.05
    assert "wanted" not in found, "sizes are not those that something is wanted of"
