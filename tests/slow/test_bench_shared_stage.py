"""The benchmark of a shared stage runs real ranks; a stage takes at least the time of its slowest member."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.dips_command import environment
from support.rank_script import PATHS
from support.repository import ROOT

FILE = ROOT / "benchmarks" / "bench_shared_stage.py"


def test_every_way_is_measured() -> None:
    command = [sys.executable, str(FILE), "--repeats", "1", "--row-ms", "1", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment({"PYTHONPATH": PATHS})
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert len(rows) == 2 * 4
    assert all(row["median_s"] >= row["bound_s"] for row in rows.values())
    bounds = [rows[f"zb_h1, {way}"]["bound_s"] for way in ("fast alone", "slow alone", "both, 1:1", "both, 2:1")]
    assert [bound / bounds[0] for bound in bounds] == pytest.approx([1, 2, 1, 2 / 3])
