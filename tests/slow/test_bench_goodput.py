"""The benchmark of goodput runs, and keeps what it has measured; only the form of its numbers is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT

NOT_POSSIBLE = 2
WAIT_S = 300


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_goodput.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)


def measured(results: Path, *arguments: object) -> dict[tuple[str, str], dict[str, Any]]:
    """The cells by system and condition."""
    done = bench("--quick", "--json", "--results", results, *arguments)
    if done.returncode == NOT_POSSIBLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return {(cell["system"], cell["condition"]): cell for cell in json.loads(done.stdout)["cells"]}


def test_clusters_are_measured_in_calm_and_after_a_kill(tmp_path: Path) -> None:
    """Each cell starts real processes, which takes some twenty seconds of a processor."""
    cells = measured(tmp_path, "--systems", "plain", "--conditions", "a")
    cells |= measured(tmp_path, "--systems", "dips", "--conditions", "d")
    for (system, condition), cell in cells.items():
        score = cell["score"]
        assert 0 < score["share"] <= 1.01, (system, condition)
        assert (score["share_after_kill"] is None) == (condition == "a")
        assert score["counted_twice"] == 0
        assert score["own_count"] == score["counted"] > 0
        assert score["link_bytes"].keys() == {"c0", "c1"}
    figure = tmp_path / "shares.png"
    done = bench("--quick", "--results", tmp_path, "--systems", "plain", "--conditions", "a", "--figure", figure)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # it was kept
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_what_a_system_cannot_do_is_said_and_what_was_measured_otherwise_is_not_taken(tmp_path: Path) -> None:
    cell = "--systems", "hivemind", "--conditions", "e"
    assert measured(tmp_path, *cell)["hivemind", "e"]["cannot"] == "it has no server process"
    other = bench("--results", tmp_path, *cell, "--inner-steps", 16)
    assert other.returncode == 1
    assert "delete it" in other.stderr


def test_an_unknown_system_is_refused_with_the_known_ones() -> None:
    done = bench("--systems", "fastest")
    assert done.returncode == NOT_POSSIBLE
    assert "torchft-streaming" in done.stderr
