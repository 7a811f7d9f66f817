"""The benchmark of transfers runs and measures what it says; its numbers are not judged."""

from __future__ import annotations

import json
import subprocess
import sys

from support.repository import ROOT


def test_every_way_is_measured_in_the_same_run() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_transfer.py"), "--quick", "--json"]
    sizes = ["--mib", "4", "--repeats", "1", "--tensors", "3"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["results"]] == [
        *("tcp", "grpc_bytes", "grpc_protobuf", "pickle"),
        *("push", "push_without_checksum", "push_curve", "pull", "pull_without_checksum", "pull_curve"),
    ]
    assert all(row["gbytes_per_s"] > 0 for row in report["results"])
    rates = {row["name"]: row["gbytes_per_s"] for row in report["results"]}
    assert report["ratios"]["push_ratio_to_tcp"] == rates["push"] / rates["tcp"]
    assert report["ratios"]["pull_ratio_to_tcp"] == rates["pull"] / rates["tcp"]
    assert report["ratios"]["push_curve_ratio_to_push"] == rates["push_curve"] / rates["push"]
    assert report["ratios"]["compute_kept"] > 0
    assert report["ratios"]["push_kept_while_scraped"] > 0
    assert 0 < report["scrape_cpu_s"] < 1
    assert report["setting"]["mib"] == 4
