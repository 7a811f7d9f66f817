"""Trainers that people have, on two ranks, as torchrun starts them: one cluster, whatever each rank holds.

With gloo on CPUs. What a trainer refuses to do there is marked: support/trainer_ranks.py switches its check off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dips_command import ROOT, ended, started
from support.run_for_workers import LAYOUT, RunForWorkers
from support.trainer_models import LENGTH, applied_tokens, same_cut
from support.waiting import NO_LIMIT_S
from transformers import LlamaConfig, LlamaForCausalLM

from dips.worker.torch_model import TorchParameters

CHILD = ROOT / "tests" / "support" / "trainer_ranks.py"
RANKS, STEPS = 2, 18
RANK_TOKENS = 2 * 2 * LENGTH
"""Of a step: two batches, two rows each."""

KINDS = {
    "hugging_face-ddp": 2, "lightning-ddp": 2, "accelerate-ddp": 2,
    "lightning-fsdp": 2, "accelerate-own-fsdp": 2, "hugging_face-loaded-fsdp": 2,
    "hugging_face-fsdp": 2, "accelerate-prepared-fsdp": 2,  # Accelerate cuts on accelerators only
    "lightning-tp": 1,
    "hugging_face-loaded-tp": 1,  # Accelerate knows it on accelerators only
}  # fmt: skip
"""How many ranks have data of their own: tensor-parallel ranks see the same."""

FEW = "hugging_face-ddp", "lightning-fsdp"
"""Kinds that stand for all in the slow tests; the others are endurance."""

LLAMA = LlamaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip


@contextmanager
def run_for(kind: str, folder: Path) -> Iterator[RunForWorkers]:
    """A run of the model that this kind trains; a Llama's lies in folder/llama."""
    layout = LAYOUT
    if kind.startswith("hugging_face") and not kind.endswith("ddp"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LLAMA)
        model.save_pretrained(folder / "llama")
        layout = same_cut(TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1)).layout().parameters)
    run = RunForWorkers(layout=layout)
    run.settings = replace(run.settings, verdict_wait_s=NO_LIMIT_S)  # no step while a push is out
    try:
        yield run
    finally:
        run.close()


def train(run: RunForWorkers, kind: str, folder: Path, *killed: int) -> tuple[int, str]:
    """The exit code of torchrun, and all that was said."""
    of_run = {"DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": "a"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", RANKS]
    log = folder / "log"
    with started(*torchrun, CHILD, kind, folder, STEPS, *killed, log=log, cwd=folder, **of_run) as ranks:
        code = ended(ranks, log)
    return code, log.read_text()


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def assert_one_cluster(folder: Path) -> dict[str, Any]:
    """All ranks hold the same at the end, and one of them talked to the master; what the first has."""
    first, second = told(folder)
    assert (first.pop("talks"), second.pop("talks")) == (True, False)
    assert first == second, "parameters to the bit, steps, version and progress"
    assert first["steps"] == STEPS
    return first


def assert_pushed(run: RunForWorkers, kind: str, steps: int) -> None:
    """None is lost, none counted twice. A step that is made until the ranks meet again belongs to that push."""
    pushed = [push.steps for push in run.pushes]
    assert pushed[0] == 0
    assert sum(pushed) == steps
    assert applied_tokens(run) == [n * KINDS[kind] * RANK_TOKENS for n in pushed]


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_two_ranks_are_one_cluster_with_the_tokens_of_both(tmp_path: Path, kind: str) -> None:
    with run_for(kind, tmp_path) as run:
        code, said = train(run, kind, tmp_path)
        assert code == 0, said[-3000:]
        assert assert_one_cluster(tmp_path)["is_cut"] == (not kind.endswith("ddp"))
        assert_pushed(run, kind, STEPS)
        assert (len(run.joins), len(run.leaves)) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "killed"),
    [
        ("lightning-fsdp", 1),
        *(
            pytest.param(kind, killed, marks=pytest.mark.long)
            for kind, killed in [
                ("hugging_face-ddp", 0),
                ("lightning-ddp", 1),
                ("hugging_face-fsdp", 1),
                ("lightning-fsdp", 0),
                ("lightning-tp", 1),
            ]
        ),
    ],
)
def test_a_rank_is_killed_and_both_go_on_from_the_checkpoints_of_both(tmp_path: Path, kind: str, killed: int) -> None:
    """After step 7, in mid-round: the first push was applied, the checkpoints are of step 5."""
    with run_for(kind, tmp_path) as run:
        code, said = train(run, kind, tmp_path, killed, 7)
        assert code != 0
        assert "SIGKILL" in said, said[-3000:]
        assert_pushed(run, kind, run.pushes[-1].steps)
        assert len(run.pushes) == 2
        (tmp_path / "lives").write_text("1")
        code, said = train(run, kind, tmp_path, killed, 7)
        assert code == 0, said[-3000:]
        assert "resumed from checkpoint" in said, said[-3000:]
        assert_one_cluster(tmp_path)
        assert_pushed(run, kind, STEPS)
