"""Two processes under DistributedDataParallel that are one cluster, and loops that Accelerate prepared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from support.dips_command import ROOT, environment
from support.run_for_workers import RunForWorkers
from support.trainer_models import LENGTH, Model, Rows, applied_tokens, same_cut
from torch.utils.data import DataLoader

import dips
from dips.core.errors import ConfigError, FatalError
from dips.worker import loop, torch_model
from dips.worker.parallel import ranks
from dips.worker.parallel.ranks import StepNews
from dips.worker.torch_model import TorchParameters, plain_model, plain_optimizer

STEPS = 10
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
    started = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(folder / "store"), *kinds], cwd=folder, text=True,
            env=environment(of(run)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0].splitlines() for rank in started]
    return [(rank.returncode, out) for rank, out in zip(started, said, strict=True)]


def test_two_ranks_are_one_cluster_with_the_tokens_of_both(run: RunForWorkers, tmp_path: Path) -> None:
    (code, ours), (other_code, theirs) = both_ranks(run, tmp_path, "own", "ddp", "sigterm")
    assert (code, other_code) == (143, 143), (ours, theirs)
    for out, name, version in ((slice(0, 2), "layers.0.w", "1:2"), (slice(2, 4), "layers.4.w", "1:5")):
        (line, words), (other_line, other_words) = ours[out], theirs[out]
        assert line == other_line
        assert line.startswith(f"parameter '{name}' has other values on rank 1 than on rank 0: these ranks are repl")
        first, second = json.loads(words), json.loads(other_words)
        assert (first.pop("talks"), second.pop("talks")) == (True, False)
        assert first == second, "parameters to the bit, steps, version and progress"
        assert (first["steps"], first["version"], first["active"]) == (STEPS, version, True)
    a_step, pushed = 3 * LENGTH, [4, 4, 2, 4, 4, 2, 4, 3]
    assert applied_tokens(run) == [0, *(steps * a_step for steps in pushed)], "with the last steps of each cluster"
    assert first["progress"] == 2 * STEPS * a_step
    assert len(run.joins) == 3
    assert [leave.reason for leave in run.leaves][1:] == ["the training loop has ended", "SIGTERM"]
    last = "SIGTERM: this cluster has left the run, and this process ends with exit code 143"
    assert (ours[-1], theirs[-1]) == (last, last), "one rank was signalled, at its seventh step all of them leave"


def test_ranks_that_hold_shards_are_refused_on_every_rank_and_none_is_overwritten(
    run: RunForWorkers, tmp_path: Path
) -> None:
    ended = both_ranks(run, tmp_path, "shards", "shapes", "group", "seed")
    assert [code for code, _ in ended] == [ConfigError.exit_code] * 2, ended
    said, other_said = (out for _, out in ended)
    assert said.pop(3).startswith("leaving (ConfigError) without 3 steps with "), "rank 0, which talks to the master"
    assert said == other_said
    assert [line.partition(":")[0] for line in said[:3]] == [
        "parameter 'layers.0.w' has other values on rank 1 than on rank 0",
        "parameter 'layers.3.w' is float32 of shape [100] on cpu on rank 1, and float32 of shape [6000] on cpu on "
        "rank 0",
        "parameter 'layers.0.w' has other values on rank 1 than on rank 0",
    ]
    assert said[3].startswith("ConfigError: parameter 'layers.0.w' of rank 1 is no longer equal to rank 0's")
    assert len(said) == 4, "one sentence each"
    assert len(run.joins) == 1, "shards of one seed are equal until a step is made"
    assert applied_tokens(run) == [0], "the seed, which is the model that both ranks had; no step was pushed"
    assert len(run.leaves) == 1


class FirstOfTwo:
    """Rank 0 with a partner that is not there; keeps what it would tell."""

    is_first = True

    def __init__(self) -> None:
        self.told: list[StepNews | None] = []
        self.compared = 0

    def agree(self, parameters: TorchParameters | Exception, *, replicas: bool) -> None:
        """They do."""

    def compare(self, parameters: TorchParameters) -> None:
        self.compared += 1

    def tell(self, told: StepNews | None) -> StepNews:
        self.told.append(told)
        return told or StepNews()

    def close(self) -> None:
        """There is no group."""


def test_the_other_ranks_are_told_when_the_first_cannot_take_part(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FirstOfTwo()
    monkeypatch.setattr(loop, "ranks_here", lambda: first)
    enter(monkeypatch, run)
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="sync_every"):
        dips.DiLoCo(model, optimizer, tokens_per_step=1, sync_every=5).__enter__()
    assert first.told == [StepNews(failed=True)]


def test_a_rank_ends_when_the_first_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(numbers: torch.Tensor, source: int, group: object) -> None:
        numbers.copy_(torch.tensor([int(value) for value in vars(StepNews(failed=True)).values()]))

    monkeypatch.setattr(dist, "new_group", lambda **given: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    with pytest.raises(FatalError, match="rank 0 of this cluster has failed"):
        ranks.Ranks().tell(None)


class SecondOfTwo(FirstOfTwo):
    """Rank 1, whose first has entered with a resumed session that begins with a reset of the inner optimizer."""

    is_first = False

    def tell(self, told: StepNews | None) -> StepNews:
        self.told.append(told)
        return StepNews(resets=1, timeline=1, version=3)

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """They are those of rank 0 already."""

    def meet(
        self, tokens: int, may_push: bool, *, leaves: bool = False, wants_to_leave: bool = False
    ) -> tuple[int, bool, bool]:
        return 2 * tokens, True, wants_to_leave


def test_a_rank_forgets_its_momentum_where_the_first_did_so_as_it_entered(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas whose optimizers differ are no longer replicas after the next step."""
    monkeypatch.setattr(loop, "ranks_here", SecondOfTwo)
    enter(monkeypatch, run)
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, LENGTH))["loss"].backward()
    optimizer.step()
    assert optimizer.state
    with dips.DiLoCo(model, optimizer, tokens_per_step=1) as sync:
        assert not optimizer.state
        assert str(sync.version) == "1:3"
        optimizer.step()
        assert optimizer.state, "followed once"


def test_several_ranks_keep_their_checkpoints_with_a_trainer(
    run: RunForWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ranks_here", FirstOfTwo)
    enter(monkeypatch, run)
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="use the callback for your trainer"):
        dips.DiLoCo(model, optimizer, tokens_per_step=1, checkpoint_dir=tmp_path).__enter__()
    assert run.joins == []


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


def test_a_sharded_optimizer_is_refused(run: RunForWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Has its name alone."""

    enter(monkeypatch, run)
    model = Model(1)
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer cuts the model"):
        dips.DiLoCo(model, ZeroRedundancyOptimizer(model.parameters(), lr=0.1), tokens_per_step=1).__enter__()
    assert run.joins == []


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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_trainer_names_the_extra() -> None:
    said = said_by(WITHOUT)
    assert "needs transformers: pip install 'dips-training[huggingface]'" in said
    assert "pip install 'dips-training[lightning]'" in said


def test_a_loop_of_ones_own_loads_no_trainer() -> None:
    assert said_by(LAZY) == "[]\n"
