"""The benchmarks of whole rounds run, and measure what they say: small ones, of which only the form is judged."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.papers import SOURCES_OF_DI_PS
from support.repository import ROOT

BENCHMARKS = ROOT / "benchmarks"
WAIT_S = 500
NOT_POSSIBLE = 2
WORK = runpy.run_path(str(BENCHMARKS / "peers" / "work.py"))
SWITCHES = runpy.run_path(str(BENCHMARKS / "peers" / "switches.py"))["ROWS"]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def results(name: str, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(str(BENCHMARKS / name), "--quick", "--json", *options))
    return found


def test_a_round_beside_a_plain_server_and_raw_tcp() -> None:
    """Each result stands for rounds whose outcome the benchmark has compared with the closed form."""
    found = results("bench_sync.py", "--peers", "tcp,plain", "--only-async")
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == ["dips", "tcp", "plain"]
    assert not found["left_out"]
    for row in rows.values():
        assert row["rounds"] == 2
        assert 0 < row["best_s"] <= row["slowest_s"]
        assert row["fastest_s"] <= row["slowest_s"]
        assert row["resident_bytes"].keys() >= {"c0", "c1", "s0", "s1"}
        assert row["measured"] == 2
        assert all(stage["wall_s"] >= 0 for stage in row["stages"])
        assert sum(stage["wall_s"] for stage in row["stages"]) > 0.999 * row["best_s"]
        assert row["stages"][0]["cpu_s"].keys() == {"clusters", "slaves", "others"}
    assert rows["dips"]["ratio"] == 1.0
    assert [stage["name"] for stage in rows["dips"]["stages"]][:3] == [
        *("copy out of the model", "begin push (call)", "send")
    ]
    assert [stage["name"] for stage in rows["plain"]["stages"]] == ["the whole round"]
    assert found["ratios"].keys() == {"dips: time of tcp's", "dips: cpu of tcp's"}


def test_scaling_counts_steps_and_merged_pushes() -> None:
    (row,) = results("bench_scaling.py", "--kinds", "even")["results"]
    assert row["clusters"] == 2
    assert row["rounds"] >= 1
    assert 0 < row["share_of_ideal"] <= 1.001
    assert 0 < row["applied"] <= 1


def test_several_ends_are_compared_with_one_pair() -> None:
    rows = results("bench_ends.py")["results"]
    assert [(row["way"], row["slaves"], row["clusters"]) for row in rows] == [("push", 2, 2), ("pull", 2, 2)]
    assert all(row["cpu_s_per_gb"] > 0 and row["of_one_pair"] > 0 and row["gbytes_per_s"] > 0 for row in rows)


def test_exchanges_of_two_ranks_are_compared_with_memory_and_gloo() -> None:
    found = results("bench_exchange.py")
    rows = {(row["kind"], row["way"]): row for row in found["results"]}
    assert list(rows) == [(kind, way) for kind in ("ddp", "fsdp", "tp") for way in ("collect", "spread")]
    assert all(row["exchange_s"] > 0 and row["of_floor"] > 0 for row in rows.values())
    assert rows["ddp", "collect"]["sent"] == 0
    assert rows["ddp", "spread"]["sent"] == 1
    assert all(1 <= plan["largest"] < 1.5 and plan["n_copies"] > 0 for plan in found["plans"])


@pytest.mark.long
def test_ranks_have_links_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_ranks.py"), "--quick", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    if done.returncode == NOT_POSSIBLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {finding.place for finding in SOURCES_OF_DI_PS["ranks"].findings(found)} == {"Table 2"}
    one, two = found["results"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for row in (one, two):
        assert row["rounds"] == 2
        assert row["push_s"] > 0
        assert row["pull_s"] > 0
        assert 0 < row["added_bytes"] < row["alone_bytes"]
    assert one["push_faster"] == one["pull_faster"] == 1
    assert two["push_faster"] > 0
    assert two["model_bytes"] < one["model_bytes"]


@pytest.mark.long
def test_an_ablation_has_flows_and_rounds() -> None:
    found = results("bench_ablation.py", "--rows", "receipts", "--streams", "1", "2")
    assert {(flow["way"], flow["streams"]) for flow in found["flows"]} == {
        (way, streams) for way in ("gRPC", "ZeroMQ") for streams in (1, 2)
    }
    assert [row["off"] for row in found["rounds"]] == ["all on", "receipts"]
    assert all(row["push_s"] > 0 and row["pull_s"] > 0 for row in found["rounds"])


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_switch_replaces_is_there(name: str) -> None:
    assert run(str(BENCHMARKS / "peers" / "switches.py"), name, "--version").strip()


# ---- the work that is compared ----


@pytest.mark.parametrize("n_params", [1, 767, 1_000_000, 100_000_000])
def test_the_model_has_exactly_as_many_parameters(n_params: int) -> None:
    shapes = WORK["shapes"](n_params)
    assert sum(torch.Size(shape).numel() for shape in shapes) == n_params


def test_the_closed_form_is_torchs_outer_step() -> None:
    move, clusters, turns = WORK["move"], 3, 5
    first, tensor_of = [0.5, -0.25, 0.0], [0, 0, 4]
    theta = torch.nn.Parameter(torch.tensor(first, dtype=torch.float64))
    outer = torch.optim.SGD([theta], lr=WORK["OUTER_LR"], momentum=WORK["OUTER_MOMENTUM"], nesterov=True)
    for turn in range(turns):
        pushed = [
            theta.detach() + torch.tensor([move(c, turn, t) for t in tensor_of], dtype=torch.float64)
            for c in range(clusters)
        ]
        theta.grad = theta.detach() - torch.stack(pushed).mean(0)
        outer.step()
    wanted = WORK["expected"](first, tensor_of, clusters, turns)
    assert theta.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name", ["checkpoint", "schedule", "snapshot", "update"])
def test_small_sizes_are_measured(name: str) -> None:
    """Every measured time, and every slowdown, is more than none."""
    measured = {"median_s", "pause_s", "write_s", "prepare_s", "commit_s", "mean", "worst"}
    numbers = [value for key, value in leaves(results(f"bench_{name}.py")) if key in measured]
    assert numbers
    assert all(value > 0 for value in numbers)


def leaves(found: object, key: str = "") -> list[tuple[str, Any]]:
    if isinstance(found, dict):
        return [leaf for name, value in found.items() for leaf in leaves(value, name)]
    if isinstance(found, list):
        return [leaf for value in found for leaf in leaves(value, key)]
    return [(key, found)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_device.py"), "--quick"], capture_output=True, text=True, check=False
    )
    assert done.returncode == NOT_POSSIBLE
    assert done.stderr == "bench_device cannot run here: PyTorch finds no CUDA device\n"
