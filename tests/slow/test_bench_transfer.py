"""The benchmark of transfers runs and measures what it says; its numbers are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.repository import ROOT

from dips.core.threads import usable_processors


def report(*options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_transfer.py"), "--quick", "--json"]
    sizes = ["--mib", "4", "--repeats", "1", "--tensors", "3"]
    done = subprocess.run([*command, *sizes, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_way_is_measured_in_the_same_run() -> None:
    found = report()
    rows = {row["name"]: row for row in found["results"]}
    two = usable_processors() > 1
    assert rows.keys() == {
        *("tcp", "tcp_copy", "grpc_bytes", "grpc_protobuf", "pickle"),
        *(("tcp_pinned", "tcp_copy_pinned") if two else ()),
        *("push", "push_copy", "push_live", "push_python", "push_placed", "push_copy_placed", "push_without_checksum"),
        *("push_curve", "push_curve_python"),
        *("pull", "pull_python", "pull_placed", "pull_without_checksum", "pull_curve", "pull_curve_python"),
    }
    for row in rows.values():
        assert row["gbytes_per_s"] > 0
        assert row["samples"] == len(row["each"]) == 1
        assert (row["of_tcp_pinned"] is not None) == two
    rates = {name: row["gbytes_per_s"] for name, row in rows.items()}
    assert rows["push"]["of_tcp"] == pytest.approx(rates["push"] / rates["tcp"])
    assert rows["pull"]["of_tcp"] == pytest.approx(rates["pull"] / rates["tcp"])
    assert rows["push_copy"]["of_tcp"] == pytest.approx(rates["push_copy"] / rates["tcp_copy"])
    assert found["ratios"]["push_curve_ratio_to_push"] == rates["push_curve"] / rates["push"]
    assert found["ratios"]["pull_ratio_to_grpc_bytes"] == rates["pull"] / rates["grpc_bytes"]
    assert found["ratios"]["push_curve_ratio_to_push_curve_python"] == rates["push_curve"] / rates["push_curve_python"]
    for name in ("push", "push_python", "tcp"):
        assert found["ratios"][f"compute_kept_beside_{name}"] > 0
    assert found["ratios"]["push_kept_while_scraped"] > 0
    assert 0 < found["ratios"]["scrape_cpu_s"] < 1
    assert found["setting"]["mib"] == 4
    assert found["setting"]["floor"] == ("tcp_pinned" if two else "tcp")
    assert "data_cpu = own" in found["setting"]["tuned"]


def test_rows_are_chosen_and_the_floors_stay() -> None:
    found = report("--rows", "pull", "--without-spells", "--window-chunks", "32")
    floors = ["tcp", "tcp_pinned"] if usable_processors() > 1 else ["tcp"]
    assert [row["name"] for row in found["results"]] == [*floors, "pull"]
    assert found["ratios"] == {}
    assert found["setting"]["tuned"] == "--window-chunks 32 (usually 64) on the command line"


@pytest.mark.parametrize(("loop", "serves"), [("compiled", "compiled"), ("python", "in Python")])
def test_both_loops_are_measured(loop: str, serves: str) -> None:
    found = report("--rows", "push,push_curve,pull,push_python", "--without-spells", "--loop", loop)
    assert found["setting"]["slave_serves"] == serves
    assert {"push", "push_curve", "pull", "push_python"} < {row["name"] for row in found["results"]}
