"""The planner's benchmark runs, and what it says of its numbers follows from them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from typing import Any

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


def test_each_number_is_kept_or_missed() -> None:
    judged = runpy.run_path(str(FILE))["judged"]
    optimal = {"longest_proof_s": 2.0, "greedy_over_bound_most": 1.06}
    found: dict[str, Any] = {
        "simulate": [{"ops_per_s": 400_000}, {"ops_per_s": 299_999}],
        "greedy": {"median_s": 1.9}, "plan": {"median_s": 10.5}, "optimal": optimal, "all_systems": {"median_s": 29.0},
        "spantrain": {"median_s": 9.5},
    }  # fmt: skip
    kept = {name: row["kept"] for name, row in judged(found).items()}
    assert kept == {
        "simulate_ops_per_s": False, "greedy_s": True, "plan_s": False, "all_systems_s": True, "spantrain_s": True,
        "proof_s": True,
        "greedy_over_bound": False,
    }  # fmt: skip
