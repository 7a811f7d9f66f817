"""Muon as the inner optimizer: of ranks that cut the matrices, over a kill and a resumption, and in a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.byte_model_ranks import NO_MERGE, WIDE, check_resumption, kill_ranks, losses, losses_of_one, start_alone
from support.dips_command import dips
from support.trainer_run import Processes

DOCS = Path(__file__).parents[2] / "docs"
MUON: dict[str, Any] = {"inner_optimizer": "muon"}
BFLOAT16_ROUNDING = 1e-3
"""Of a loss after some steps, whose products in bfloat16 are summed in the order of the processor at hand."""


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master(*NO_MERGE)


@pytest.mark.parametrize("kind", [pytest.param("pipeline=2", marks=pytest.mark.long), "fsdp=2,tensor=2"])
def test_ranks_that_cut_the_matrices_have_one_processs_losses(processes: Processes, tmp_path: Path, kind: str) -> None:
    """Muon needs whole matrices. Its products are in bfloat16, and are summed in another order: not to the bit."""
    expected = losses_of_one(tmp_path, **MUON)
    cut = losses(processes, start_alone(processes, kind, **MUON))
    assert cut == pytest.approx(expected, rel=BFLOAT16_ROUNDING)


@pytest.mark.parametrize(
    "clusters",
    [
        # Before each push the ranks are compared to the bit: replicas of a shard have made the same products.
        {"a": {"parallel": "data=2,tensor=2", **MUON}},
        {"a": MUON, "b": {}},
    ],
    ids=["ranks", "with AdamW"],
)
def test_clusters_with_muon_train_in_a_run(processes: Processes, clusters: dict[str, dict[str, str]]) -> None:
    address = processes.start_master(f"min_clusters={len(clusters)}", "slaves=1", "sync_every=2")
    processes.start_slaves(address, ["s0"])
    for name, changes in clusters.items():
        processes.start_cluster(address, name, WIDE.model_copy(update={"emulate_gap": 0.2, **changes}))
    processes.until_version(3)
    processes.stop_run(*clusters)
    for name in clusters:
        assert processes.records(name, "verdict"), processes.log(name)[-3000:]


def test_a_killed_cluster_makes_the_same_steps_again(processes: Processes, address: str, tmp_path: Path) -> None:
    check_resumption(processes, address, tmp_path, "", "", rounding=0.0, **MUON)


def test_ranks_go_on_from_the_state_of_others(processes: Processes, address: str, tmp_path: Path) -> None:
    check_resumption(processes, address, tmp_path, "fsdp=2", "tensor=2", rounding=BFLOAT16_ROUNDING, **MUON)


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ("", "the state of Muon and AdamW, and this loop has AdamW: resume"),
        ("data=2", "the state of Muon, this loop has AdamW: resume"),
    ],
)
def test_a_checkpoint_of_the_other_optimizer_is_refused_with_the_setting(
    processes: Processes, address: str, tmp_path: Path, parallel: str, sentence: str
) -> None:
    processes.start_slaves(address, ["s0"])
    client = ["--checkpoint-dir", str(tmp_path / "a"), "--checkpoint-every-s", "0", "--resume"]
    train = WIDE.model_copy(update={"parallel": parallel})
    processes.start_cluster(address, "a", train.model_copy(update=MUON), client)
    processes.until("a", lambda: len(processes.records("a", "checkpoint")) >= 2)
    kill_ranks(processes)
    processes.start_cluster(address, "a", train, client)
    assert processes.exit_code("a") in (1, 2)
    log = processes.log("a")
    assert sentence in log, log[-3000:]
    assert "(of `dips train`: the same --inner-optimizer), or without --resume" in log
    assert parallel or "Traceback" not in log, "torchrun prints its own"


def test_a_comparison_trains_with_it_by_every_kind_of_method(tmp_path: Path) -> None:
    setup = tmp_path / "short.toml"
    setup.write_text(
        "[run]\ntokens = 6_144\ninner_steps = 4\nevaluations = 2\nheldout_bytes = 4_096\n"
        "[inner]\nbatch_size = 2\nsequence_tokens = 64\nlr = 2e-3\nwarmup_tokens = 1_000\n"
    )
    found = {}
    for optimizer in ("adamw", "muon"):
        told = dips(
            "compare", "--setup", setup, "--methods", "dp,diloco-clip,dips", "--inner-optimizer", optimizer,
            "--data", DOCS, "--run-dir", tmp_path / "run", "--json",
        )  # fmt: skip
        assert told.returncode == 0, told.stderr[-3000:]
        found[optimizer] = json.loads(told.stdout)
        assert found[optimizer]["setup"]["inner"]["inner_optimizer"] == optimizer
    losses = [[method["seeds"]["1"]["loss"] for method in each["methods"].values()] for each in found.values()]
    assert all(2 < loss < 5.5 for each in losses for loss in each), losses
    assert all(one != two for one, two in zip(*losses, strict=True)), "kept runs of the other optimizer were not taken"
