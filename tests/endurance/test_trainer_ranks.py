"""Trainers that people have, on two ranks under DistributedDataParallel, as torchrun starts them: one cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import ROOT, ended, started
from support.run_for_workers import RunForWorkers
from support.trainer_models import LENGTH, applied_tokens

pytestmark = [pytest.mark.timeout(500), pytest.mark.endurance]

CHILD = ROOT / "tests" / "support" / "trainer_ranks.py"
RANKS, STEPS = 2, 18
STEP_TOKENS = RANKS * 2 * 2 * LENGTH
"""Two ranks, two batches a step, two rows each."""

TRAIN_S = 60.0
KINDS = ["hugging_face", "lightning", "accelerate"]

PUSHED_STEPS = (0, *(4,) * (STEPS // 4), STEPS % 4)
"""Of each push: the seed, every four steps, and what is left when the loop ends."""


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers()
    yield run
    run.close()


def train(run: RunForWorkers, kind: str, folder: Path, *killed: int) -> tuple[int, str]:
    """The exit code of torchrun, and all that was said."""
    of_run = {"DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": "a"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", RANKS]
    log = folder / "log"
    with started(*torchrun, CHILD, kind, folder, STEPS, *killed, log=log, cwd=folder, **of_run) as ranks:
        code = ended(ranks, TRAIN_S, log)
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


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_one_cluster_with_the_tokens_of_both(run: RunForWorkers, tmp_path: Path, kind: str) -> None:
    code, said = train(run, kind, tmp_path)
    assert code == 0, said[-3000:]
    assert_one_cluster(tmp_path)
    assert applied_tokens(run) == [steps * STEP_TOKENS for steps in PUSHED_STEPS]
    assert tuple(push.steps for push in run.pushes) == PUSHED_STEPS
    assert (len(run.joins), len(run.leaves)) == (1, 1)


@pytest.mark.parametrize(("kind", "killed"), [("hugging_face", 0), ("lightning", 1)])
def test_a_rank_is_killed_and_both_go_on_from_the_checkpoints_of_both(
    run: RunForWorkers, tmp_path: Path, kind: str, killed: int
) -> None:
    """After step 7, in mid-round: a push of 4 steps was applied, the checkpoints are of step 5."""
    code, said = train(run, kind, tmp_path, killed, 7)
    assert code != 0
    assert "SIGKILL" in said, said[-3000:]
    assert applied_tokens(run) == [0, 4 * STEP_TOKENS]
    (tmp_path / "lives").write_text("1")
    code, said = train(run, kind, tmp_path, killed, 7)
    assert code == 0, said[-3000:]
    assert "resumed from checkpoint" in said, said[-3000:]
    assert_one_cluster(tmp_path)
    assert applied_tokens(run) == [steps * STEP_TOKENS for steps in PUSHED_STEPS], "none is lost, none counted twice"
