"""benchmarks/bench_sync.py: whose failure ends a measurement, and whose is only named."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.repository import ROOT

OPTIONS = argparse.Namespace(cycles=2, rounds=1, pause=0.0, directory=None, gate=0.0, foreign=0.3)


@pytest.fixture
def bench_sync(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_sync")


def failing(kind: type[Exception]) -> Callable[[Path], object]:
    def make(directory: Path) -> object:
        raise kind("c1 is off by 2.5e-05 from the outer step")

    return make


@pytest.mark.parametrize("kind", ["Failed", "Wrong"])
def test_others_failures_cost_their_cycles(bench_sync: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    series = [bench_sync.Series("hivemind", failing(getattr(bench_sync, kind)))]
    monkeypatch.setattr(bench_sync, "systems", lambda options: series)
    results, left_out = bench_sync.measure(OPTIONS)
    assert results == []
    assert left_out == [
        "cycle 1 of hivemind: c1 is off by 2.5e-05 from the outer step",
        "cycle 2 of hivemind: c1 is off by 2.5e-05 from the outer step",
    ]


def test_a_cycle_that_fails_leaves_nothing_behind(bench_sync: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds count from the third on. In the first cycle the third is measured, and the fourth fails."""
    monkeypatch.setattr(bench_sync, "_check", lambda party, turn, turns: None)
    took_s = {1: 99.0, 2: 3.0}
    cycles = 0

    def make(directory: Path) -> AbstractContextManager[Any]:
        nonlocal cycles
        cycles += 1
        cycle = cycles

        def turn(number: int, pause_s: float, gate: object) -> object:
            if (cycle, number) == (1, 3):
                raise bench_sync.Failed("c1 ended")
            return SimpleNamespace(took_s=(took_s[cycle],), cpu_s=1.0, peak_bytes=(5,), foreign=0.0)

        stages = [bench_sync.Stage("send", 3.0, {"clusters": 1.0})]
        party = SimpleNamespace(turn=turn, model_bytes=[2], resident_bytes=dict, stages=lambda turn: stages)
        return nullcontext(party)

    series = [bench_sync.Series("torchft", make)]
    monkeypatch.setattr(bench_sync, "systems", lambda options: series)
    (result,), left_out = bench_sync.measure(argparse.Namespace(**{**vars(OPTIONS), "rounds": 2}))
    assert (result.rounds, result.slowest_s, result.worker_beyond_model_bytes) == (2, 3.0, 3)
    assert left_out == ["cycle 1 of torchft: c1 ended"]


@pytest.mark.parametrize("name", ["dips", "dips, sync"])
def test_our_wrong_result_ends_the_measurement(
    bench_sync: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    series = [bench_sync.Series(name, failing(bench_sync.Wrong))]
    monkeypatch.setattr(bench_sync, "systems", lambda options: series)
    with pytest.raises(bench_sync.Wrong):
        bench_sync.measure(OPTIONS)
