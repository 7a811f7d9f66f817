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
from support.fake_services import FakeRun
from support.trainer_models import LENGTH, Model, Rows, applied_tokens, same_cut
from torch.utils.data import DataLoader

import dips
from dips.core.errors import ConfigError, FatalError
from dips.worker import loop, ranks, torch_parameters
from dips.worker.ranks import Told
from dips.worker.wrapped import plain_model, plain_optimizer

STEPS = 10
CHILD = ROOT / "tests" / "support" / "rank_process.py"


@pytest.fixture
def run() -> Iterator[FakeRun]:
    run = FakeRun()
    yield run
    run.close()


def of(run: FakeRun) -> dict[str, str]:
    return {"DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": "a"}


def enter(monkeypatch: pytest.MonkeyPatch, run: FakeRun) -> None:
    """Loops of this process take part in the run."""
    monkeypatch.setattr(torch_parameters, "Layout", same_cut)
    for name, value in of(run).items():
        monkeypatch.setenv(name, value)


def both_ranks(run: FakeRun, folder: Path) -> list[tuple[int, str]]:
    """Exit code and last words of each."""
    started = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(folder / "store")], cwd=folder, text=True,
            env=environment(of(run)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0].strip() for rank in started]
    return [(rank.returncode, out.splitlines()[-1] if out else "") for rank, out in zip(started, said, strict=True)]


def test_two_ranks_are_one_cluster_with_the_tokens_of_both(run: FakeRun, tmp_path: Path) -> None:
    ended = both_ranks(run, tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    first, second = (json.loads(words) for _, words in ended)
    assert (first.pop("driver"), second.pop("driver")) == (True, False)
    assert first == second, "parameters to the bit, steps, version and progress"
    assert (first["steps"], first["version"], first["active"]) == (STEPS, "1:2", True)
    assert applied_tokens(run) == [0, 4 * 3 * LENGTH, 4 * 3 * LENGTH]
    assert first["progress"] == STEPS * 3 * LENGTH
    assert len(run.joins) == 1
    assert len(run.leaves) == 1


class FirstOfTwo:
    """Rank 0 with a partner that is not there; keeps what it would tell."""

    is_first = True

    def __init__(self) -> None:
        self.told: list[Told | None] = []

    def tell(self, told: Told | None) -> Told:
        self.told.append(told)
        return told or Told()


def test_the_other_ranks_are_told_when_the_first_cannot_take_part(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FirstOfTwo()
    monkeypatch.setattr(loop, "ranks_here", lambda: first)
    enter(monkeypatch, run)
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="sync_every"):
        dips.DiLoCo(model, optimizer, tokens_per_step=1, sync_every=5).__enter__()
    assert first.told == [Told(failed=True)]


def test_a_rank_ends_when_the_first_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(numbers: torch.Tensor, source: int, group: object) -> None:
        numbers.copy_(torch.tensor([int(value) for value in vars(Told(failed=True)).values()]))

    monkeypatch.setattr(dist, "new_group", lambda **given: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    with pytest.raises(FatalError, match="rank 0 of this cluster has failed"):
        ranks.Ranks().tell(None)


class SecondOfTwo(FirstOfTwo):
    """Rank 1, whose first has entered with a resumed session that begins with a reset of the inner optimizer."""

    is_first = False

    def tell(self, told: Told | None) -> Told:
        self.told.append(told)
        return Told(resets=1, timeline=1, version=3)

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """They are those of rank 0 already."""

    def total(self, tokens: int) -> int:
        return 2 * tokens

    def close(self) -> None:
        """There is no group."""


def test_a_rank_forgets_its_momentum_where_the_first_did_so_as_it_entered(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
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
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ranks_here", FirstOfTwo)
    enter(monkeypatch, run)
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="use the callback for your trainer"):
        dips.DiLoCo(model, optimizer, tokens_per_step=1, checkpoint_dir=tmp_path).__enter__()
    assert run.joins == []


def test_a_loop_that_accelerate_prepared(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_sharded_optimizer_is_refused(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
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
import dips.worker.loop, dips.launch.model_folder
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
