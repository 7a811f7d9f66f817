"""The benchmark of shaped links works where namespaces can be made, and says why not where they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_POSSIBLE = 2


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_links.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)


def test_a_transfer_over_a_long_way_is_measured_beside_tcp() -> None:
    done = bench("--parts", "far", "--far-mib", "8", "--far-mbit", "100", "--delay-ms", "5", "--repeats", "1", "--json")
    if done.returncode == NOT_POSSIBLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {"tcp", "push", "pull"}
    for row in rows.values():
        assert 0.0 < row["ratios"]["payload_of_the_link"] < row["ratios"]["of_the_link"] < 1.1


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    done = bench("--parts", "near")
    assert done.returncode == NOT_POSSIBLE
    assert "far, slow, narrow, mixed" in done.stderr
