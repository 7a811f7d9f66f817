"""The benchmarks run, small, and measure what they say. How much is measured is not for a busy machine of tests."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import live
from support.dips_command import run_python
from support.rank_script import PATHS
from support.repository import ROOT

BENCHMARKS = ROOT / "benchmarks"
NOT_POSSIBLE = 2

SMALL: dict[str, tuple[tuple[str, ...], str]] = {
    "ablation": (("--quick", "--rows", "receipts", "--streams", "1", "2"), "push_s"),
    "adapter": (("--pipelines", "12"), "observation_us"),
    "calibration": (("--quick", "--repeats", "2", "--operation-ms", "20"), "measured_s"),
    "checkpoint": (("--quick",), "write_s"),
    "ends": (("--quick",), "cpu_s_per_gb"),
    "exchange": (("--quick",), "exchange_s"),
    "goodput": (("--quick", "--systems", "plain,dips", "--conditions", "a"), "share"),
    "links": (
        ("--parts", "far", "--far-mib", "8", "--far-mbit", "100", "--delay-ms", "5", "--repeats", "1"),
        "payload_of_the_link",
    ),
    "planner": (("--quick", "--repeats", "1"), "ops_per_s"),
    "ranks": (("--quick",), "push_s"),
    "recovery": (("--quick", "--faults", "slave", "--elems", "20000"), "median_s"),
    "scaling": (("--quick", "--kinds", "even"), "share_of_ideal"),
    "schedule": (("--quick",), "mean"),
    "shared_stage": (("--repeats", "1", "--row-ms", "1"), "median_s"),
    "simulation": (("--quick",), "efficiency"),
    "snapshot": (("--quick",), "prepare_s"),
    "storm": (("--quick",), "calls"),
    "sync": (("--quick", "--peers", "tcp,plain", "--only-async"), "best_s"),
    "take_over": (("--quick",), "published_s"),
    "transfer": (("--quick", "--mib", "4", "--repeats", "1", "--tensors", "3"), "gbytes_per_s"),
    "update": (("--quick",), "median_s"),
}
"""The options of a small one, and a number of its report that is more than none."""

RARE = {"ablation", "ranks"}


def bench(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    with live.run(live.HEAVY):
        return run_python(BENCHMARKS / f"bench_{name}.py", *options, PYTHONPATH=PATHS)


def report(name: str, folder: Path) -> dict[str, Any]:
    kept = {"goodput": ("--results", folder), "simulation": ("--setups", folder)}.get(name, ())
    done = bench(name, *SMALL[name][0], *kept, "--json")
    if done.returncode == NOT_POSSIBLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def leaves(found: object, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict):
        for name, value in found.items():
            yield from leaves(value, name)
    elif isinstance(found, list):
        for value in found:
            yield from leaves(value, key)
    else:
        yield key, found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in RARE else []) for name in SMALL]
)
def test_a_small_one_runs_and_measures(name: str, tmp_path: Path) -> None:
    found = report(name, tmp_path)
    numbers = [value for key, value in leaves(found) if key == SMALL[name][1]]
    assert numbers
    assert all(value > 0 for value in numbers)
    assert all(math.isfinite(value) for _, value in leaves(found) if isinstance(value, float))
