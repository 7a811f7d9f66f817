"""The benchmark of the simulation's times runs both ways; only the form of its numbers is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

from dips.sim.scale.scenario import load_scenario

NOT_POSSIBLE = 2
WAIT_S = 300
MEASURES = ["tokens_per_s", "share_of_ideal", "push_s", "wait_s", "pull_s", "merged", "staleness"]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_simulation.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)


def test_a_run_is_measured_and_simulated_from_the_set_up_that_is_written(tmp_path: Path) -> None:
    done = bench("--quick", "--json", "--setups", tmp_path)
    if done.returncode == NOT_POSSIBLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    (cell,) = json.loads(done.stdout)["cells"]
    rows = {row["measure"]: row for row in cell["rows"]}
    assert list(rows) == MEASURES
    for way in ("real", "simulated"):
        assert all(row[way] > 0 for name, row in rows.items() if name != "staleness")
        assert rows["share_of_ideal"][way] <= 1.01
        assert 1 <= rows["merged"][way] <= 2
    assert 0.5 < cell["inputs"]["efficiency"] <= 1
    scenario = load_scenario(tmp_path / "equal-waiting.toml")
    assert [cluster.id for cluster in scenario.clusters] == ["c0", "c1"]


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    done = bench("--cases", "fastest")
    assert done.returncode == NOT_POSSIBLE
    assert "slow-defaults" in done.stderr
