"""benchmarks/bench_sync.py: whose failure ends a measurement, and whose is only named."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.repository import ROOT

OPTIONS = argparse.Namespace(cycles=2, rounds=1, pause=0.0, directory=None)


@pytest.fixture
def bench_sync(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_sync")


def failing(kind: type[Exception]) -> Callable[[Path], object]:
    def make(directory: Path) -> object:
        raise kind("c1 is off by 2.5e-05 from the outer step")

    return make


@pytest.mark.parametrize("kind", ["Failed", "Wrong"])
def test_another_system_that_does_not_do_the_work_costs_its_own_cycles_alone(
    bench_sync: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    series = [bench_sync.Series("hivemind", failing(getattr(bench_sync, kind)))]
    monkeypatch.setattr(bench_sync, "systems", lambda options: series)
    results, left_out = bench_sync.measure(OPTIONS)
    assert results == []
    assert left_out == [
        "cycle 1 of hivemind: c1 is off by 2.5e-05 from the outer step",
        "cycle 2 of hivemind: c1 is off by 2.5e-05 from the outer step",
    ]


@pytest.mark.parametrize("name", ["dips", "dips, sync"])
def test_our_own_wrong_result_ends_the_measurement(
    bench_sync: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    series = [bench_sync.Series(name, failing(bench_sync.Wrong))]
    monkeypatch.setattr(bench_sync, "systems", lambda options: series)
    with pytest.raises(bench_sync.Wrong):
        bench_sync.measure(OPTIONS)
