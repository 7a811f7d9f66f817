"""What is read from the Di-PS paper's commands, in the form in which their own code writes it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import bench_ablation
import bench_links
import bench_scaling
import bench_simulation
import pytest
from flows.simulated import TransferMethod
from papers.findings import Finding, Kind
from support.papers import SOURCES_OF_DI_PS

from dips.master.state.schedule import Way

CLUSTERS = ("a", "b", "c", "d")


def found(name: str, told: Any) -> Sequence[Finding]:
    return list(SOURCES_OF_DI_PS[name].findings(told))


def links(rows: Sequence[bench_links.Row], repeats: int) -> dict[str, Any]:
    return {"options": {"repeats": repeats}, "rows": [asdict(row) for row in rows]}


def mixed(*ring_s: float) -> list[bench_links.Row]:
    """A push and a pull of one second, and a ring that takes longer as the fourth link gets slower."""
    ours = dict.fromkeys(CLUSTERS, 1.0)
    rows = []
    for part, seconds in zip(bench_links.MIXED_PARTS, ring_s, strict=True):
        ratios = bench_links._paper(ours, dict.fromkeys(CLUSTERS, seconds), 4.0)
        rows.append(bench_links.Row("mixed", f"push + pull, fourth link {part:g}", ours, 0.1, ratios))
    return rows


def test_a_ring_beside_push_and_pull() -> None:
    first, *_, statement, sync, alone, spent = found("links", links(mixed(0.5, 1.0, 2.0, 4.0), 3))
    assert (first.what, first.ours) == (
        "a ring's time over the mean of push and pull, fourth link 1 of the others'",
        0.5,
    )
    assert (first.spread, statement.ours) == (0.1, "it does")
    assert (sync.place, alone.place, spent.place) == ("Figure 9", "Figure 9", "Figure 11")
    assert spent.published == (1.06, 3.07)
    assert found("links", links(mixed(2.0, 1.0, 2.0, 4.0), 3))[4].ours == "it does not"


def test_what_was_measured_once_has_no_spread() -> None:
    assert {finding.spread for finding in found("links", links(mixed(0.5, 1.0, 2.0, 4.0), 1))} == {None}


def test_the_order_of_transfers() -> None:
    rows = [
        bench_links.Row("slow", f"{way.value} {method.value}", {}, 0.2, {"fast_mean": 2.0, "fast_max": 3.0})
        for way in Way
        for method in TransferMethod
    ]
    assert [finding.ours for finding in found("order", links(rows, 3))] == [2.0] * 4


def test_threads_and_pipelining() -> None:
    flows = [
        bench_ablation.Flow(way, 16, streams, rate, 0.1, rate)
        for way, streams, rate in (("gRPC", 1, 1.0), ("gRPC", 2, 1.5), ("ZeroMQ", 1, 2.0), ("ZeroMQ", 2, 3.0))
    ]
    names = bench_ablation.variants(argparse.Namespace(params=1, rows=None))
    rows = [bench_ablation.Row(name, "less", 2, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 1.0, 1.25) for name in names]
    told = {"flows": [asdict(flow) for flow in flows], "rounds": [asdict(row) for row in rows]}
    one, more, *rounds = found("ablation", told)
    assert (one.ours, more.ours) == (2.0, 1.5)
    assert [finding.published for finding in rounds] == [1.49, 1.41, 1.16, None, None]
    assert {finding.ours for finding in rounds} == {1.25}


@pytest.mark.parametrize(("repeats", "spread"), [(1, None), (2, 0.2)])
def test_shares_as_clusters_are_added(repeats: int, spread: float | None) -> None:
    rows = [
        bench_scaling.Result("even", clusters, share, 0.2, 1.0, 1.0, 2, 0.1, 1.0)
        for clusters, share in ((1, 1.0), (2, 0.99), (4, 0.97))
    ]
    setting = {"sync_every": 64, "step_ms": 125.0, "repeats": repeats, "cpus": 2}
    (only,) = found("scaling", {"setting": setting, "results": [asdict(row) for row in rows]})
    assert (only.ours, only.spread) == ((0.97, 0.99), spread)
    assert only.what == "2 to 4 clusters that wait for each exchange, of ideal, preset safe (as the paper describes)"


@pytest.mark.parametrize(("shares", "spread"), [([0.98], None), ([0.97, 0.99, 0.98], pytest.approx(0.02 / 0.98))])
def test_a_run_beside_its_simulation(shares: Sequence[float], spread: float | None) -> None:
    case = SOURCES_OF_DI_PS["calibration"].full[-1].split(",")[0]
    assert case in bench_simulation.CASES
    runs = [bench_simulation.Score(30.0, share, 1.0, 0.1, 1.0, 4.0, 0.0) for share in shares]
    rows = bench_simulation.rows_of(runs, bench_simulation.Score(31.0, 0.9898, 1.0, 0.1, 1.0, 4.0, 0.0))
    cell = {"case": case, "rows": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}
    real, simulated = found("calibration", {"setting": {"clusters": 4}, "cells": [cell]})
    assert (real.ours, real.spread, real.kind) == (0.98, spread, None)
    assert simulated.ours == pytest.approx(1.01)
    assert simulated.kind is Kind.SIMULATED
