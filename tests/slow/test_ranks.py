"""Two processes under DistributedDataParallel that are one cluster, and loops that Accelerate prepared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.dips_command import ROOT, environment
from support.run_for_workers import RunForWorkers
from support.trainer_models import LENGTH, Model, Rows, applied_tokens, same_cut
from torch.utils.data import DataLoader

import dips
from dips.core.errors import ConfigError
from dips.worker import torch_model
from dips.worker.torch_model import plain_model, plain_optimizer

STEPS = 10
LEFT = "SIGTERM: this cluster has left the run, and this process ends with exit code 143"
CHILD = ROOT / "tests" / "support" / "rank_process.py"


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers()
    yield run
    run.close()


def of(run: RunForWorkers) -> dict[str, str]:
    return {"DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": "a"}


def enter(monkeypatch: pytest.MonkeyPatch, run: RunForWorkers) -> None:
    """Loops of this process take part in the run."""
    monkeypatch.setattr(torch_model, "Layout", same_cut)
    for name, value in of(run).items():
        monkeypatch.setenv(name, value)


def both_ranks(run: RunForWorkers, folder: Path, *kinds: str) -> list[tuple[int, list[str]]]:
    """Exit code and output of each rank of these clusters."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(folder / "store"), *kinds], cwd=folder, text=True,
            env=environment(of(run)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate()[0].splitlines() for rank in ranks]
    return [(rank.returncode, out) for rank, out in zip(ranks, said, strict=True)]


def test_two_ranks_are_one_cluster_with_the_tokens_of_both(run: RunForWorkers, tmp_path: Path) -> None:
    (code, ours), (other_code, theirs) = both_ranks(run, tmp_path, "own", "ddp", "sigterm")
    assert (code, other_code) == (143, 143), (ours, theirs)
    given = "parameter {!r} has other values on rank 1 than on rank 0: these ranks are replicas, and get rank 0's"
    assert ours.pop(0).startswith(given.format("layers.0.w"))
    assert ours.pop(1).startswith(given.format("layers.4.w"))
    for words, other_words, version in zip(ours, theirs, ("1:2", "1:5"), strict=False):
        first, second = json.loads(words), json.loads(other_words)
        assert (first.pop("talks"), second.pop("talks")) == (True, False)
        assert first == second, "parameters to the bit, steps, version and progress"
        assert (first["steps"], first["version"], first["active"]) == (STEPS, version, True)
    a_step, pushed, applied = 3 * LENGTH, [4, 4, 2, 4, 4, 2, 4], applied_tokens(run)
    assert applied.pop() in (3 * a_step, 4 * a_step), "until the ranks met after the SIGTERM"
    assert applied == [0, *(steps * a_step for steps in pushed)], "with the last steps of each cluster"
    assert (2 * STEPS - 2) * a_step <= first["progress"] <= 2 * STEPS * a_step, "as it was when the ranks met last"
    assert len(run.joins) == 3
    assert [leave.reason for leave in run.leaves][1:] == ["the training loop has ended", "SIGTERM"]
    assert (ours[-1], theirs[-1]) == (LEFT, LEFT), "one rank was signalled, and where they meet next all of them leave"


def test_ranks_that_hold_shards_are_refused_and_none_is_overwritten(run: RunForWorkers, tmp_path: Path) -> None:
    ended = both_ranks(run, tmp_path, "shards", "shapes", "group", "seed")
    assert [code for code, _ in ended] == [ConfigError.exit_code] * 2, ended
    # A slave that answers late on a busy machine is another matter.
    said, other_said = ([line for line in out if not line.endswith("trying again")] for _, out in ended)
    assert said.pop(3).startswith("leaving (ConfigError) without 4 steps with "), "rank 0, which talks to the master"
    assert said == other_said
    assert [line.partition(":")[0] for line in said[:3]] == [
        "parameter 'layers.0.w' has other values on rank 1 than on rank 0",
        "parameter 'layers.3.w' is float32 of shape [100] on rank 1, and float32 of shape [6000] on rank 0",
        "parameter 'layers.0.w' has other values on rank 1 than on rank 0",
    ]
    assert said[3].startswith("ConfigError: parameter 'layers.0.w' of rank 1 is no longer equal to rank 0's")
    assert len(said) == 4, "one sentence each"
    assert len(run.joins) == 1, "shards of one seed are equal until a step is made"
    assert len(run.verdicts) == 1, "the seed, which is the model that both ranks had; no step was pushed"
    assert len(run.leaves) == 1


def test_a_loop_that_accelerate_prepared(run: RunForWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of docs/integrations.md."""
    enter(monkeypatch, run)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), 2))
    assert plain_model(torch.nn.DataParallel(prepared)) is model
    assert isinstance(plain_optimizer(optimizer), torch.optim.AdamW)
    with dips.DiLoCo(prepared, optimizer, tokens_per_step=4 * LENGTH, steps=8) as sync:
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if sync.done:
                break
    assert sync.steps == 8, "accumulated batches are no steps"
    assert applied_tokens(run) == [0, 16 * LENGTH, 16 * LENGTH]
    assert np.array_equal(model.flat(), run.theta_of(next(reversed(run.verdicts))))


WITHOUT = """
import sys
sys.modules["transformers"] = sys.modules["lightning.pytorch"] = sys.modules["lightning"] = None
import dips
from dips.core.errors import ConfigError
for name in ("HuggingFaceCallback", "LightningCallback"):
    try:
        getattr(dips, name)
    except ConfigError as error:
        print(error)
"""

LAZY = """
import sys
import dips.worker.loop, dips.local.model_folder
heavy = {"transformers", "accelerate", "lightning", "pytorch_lightning"} & set(sys.modules)
print(sorted(heavy))
import dips
assert "torch" in sys.modules
"""


def said_by(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_trainer_names_the_extra_and_none_is_loaded() -> None:
    said = said_by(WITHOUT)
    assert "needs transformers: pip install '.[huggingface]'" in said
    assert "pip install '.[lightning]'" in said
    assert said_by(LAZY) == "[]\n"


def test_a_rank_says_its_error_through_the_hook_of_torch_distributed(tmp_path: Path) -> None:
    """init_process_group() puts a hook around the one that was there, and prints what that one has, if it returns."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import torch, torch.distributed as dist, dips\n"
        "loop, model = dips.DiLoCo, torch.nn.Linear(2, 2)\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "loop(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens_per_step=0)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], env=environment({}), capture_output=True, text=True)
    assert ended.returncode == ConfigError.exit_code
    assert ended.stderr.startswith("dips: tokens_per_step is 0")
    assert ended.stderr.endswith("(rank.py, line 4)\n")
