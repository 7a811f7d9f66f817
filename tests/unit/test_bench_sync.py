"""benchmarks/bench_sync.py: what a cycle that fails leaves in the numbers."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_sync
import pytest
from peers.party import Failed
from peers.stages import Stage

OPTIONS = argparse.Namespace(cycles=2, rounds=2, pause=0.0, directory=None, gate=0.0, foreign=0.3)


def test_a_cycle_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds count from the third on. In the first cycle the third is measured, and the fourth fails."""
    monkeypatch.setattr(bench_sync, "_check", lambda party, turn, turns: None)
    took_s = {1: 99.0, 2: 3.0}
    cycles = 0

    def make(directory: Path) -> Any:
        nonlocal cycles
        cycles += 1
        cycle = cycles

        def turn(number: int, pause_s: float, gate: object) -> object:
            if (cycle, number) == (1, 3):
                raise Failed("c1 ended")
            return SimpleNamespace(took_s=(took_s[cycle],), cpu_s=1.0, peak_bytes=(5,), foreign=0.0)

        stages = [Stage("send", 3.0, {"clusters": 1.0})]
        party = SimpleNamespace(turn=turn, model_bytes=[2], resident_bytes=dict, stages=lambda turn: stages)
        return nullcontext(party)

    series = [bench_sync.Series("torchft", make)]
    monkeypatch.setattr(bench_sync, "systems", lambda options: series)
    (result,), left_out = bench_sync.measure(OPTIONS)
    assert (result.rounds, result.slowest_s, result.worker_beyond_model_bytes) == (2, 3.0, 3)
    assert left_out == ["cycle 1 of torchft: c1 ended"]
