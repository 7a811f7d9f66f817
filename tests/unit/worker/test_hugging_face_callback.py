"""The callback for Hugging Face's Trainer, called in the Trainer's order, against a run in memory."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.run_in_memory import RunInMemory
from support.trainer_models import Model

from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.worker.integrations.hugging_face import HuggingFaceCallback

ARGUMENTS: dict[str, Any] = {
    "world_size": 1, "average_tokens_across_devices": True, "torch_compile": False, "save_strategy": "steps",
    "save_only_model": False, "deepspeed": None, "fsdp": None, "load_best_model_at_end": False,
}  # fmt: skip


class Losing(Model):
    def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:  # type: ignore[override]
        first = next(self.parameters())
        return SimpleNamespace(loss=input_ids.float().mean() + 0 * first.sum())


class Trainer:
    def __init__(self, run: RunInMemory, folder: Path, step: int = 0, **changes: Any) -> None:
        given = {"master": run.address, "cluster_id": "a", "insecure": True, **changes.pop("loop", {})}
        self.callback = HuggingFaceCallback(**given)
        self.arguments: Any = SimpleNamespace(**{**ARGUMENTS, "output_dir": str(folder), **changes})
        self.state: Any = SimpleNamespace(global_step=step)
        self.control: Any = SimpleNamespace(should_training_stop=False, should_save=False)
        self.model = Losing(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = run

    def tell(self, event: str, **more: Any) -> None:
        given = {"model": self.model, "optimizer": self.optimizer, **more}
        getattr(self.callback, f"on_{event}")(self.arguments, self.state, self.control, **given)

    def step(self, *batches: torch.Tensor, items: int | None = None, saves: bool = False) -> None:
        for batch in batches:
            given = {} if items is None else {"num_items_in_batch": items}
            self.model(input_ids=batch, **given).loss.backward()
        self.tell("pre_optimizer_step")
        self.optimizer.step()
        self.state.global_step += 1
        self.control.should_save = saves
        self.tell("step_end")


def batch(value: float, tokens: int = 6) -> torch.Tensor:
    return torch.full((2, tokens // 2), value)


def labels(folder: Path) -> list[str]:
    files = sorted((folder / "dips").glob("checkpoint-*.json"))
    return [json.loads(path.read_text())["body"]["content"]["label"] for path in files]


def test_tokens_and_losses_of_accumulated_batches_are_one_steps_and_saves_are_labelled(
    run: RunInMemory, tmp_path: Path
) -> None:
    trainer = Trainer(run, tmp_path)
    trainer.tell("train_begin")
    sync = trainer.callback.sync
    assert sync is not None
    trainer.step(batch(1.0), batch(4.0, tokens=10))
    trainer.model.eval()
    trainer.model(input_ids=batch(99.0))  # an evaluation counts nothing
    trainer.model.train()
    trainer.step(batch(2.5), saves=True)
    assert labels(tmp_path) == ["step 2"], "before the Trainer saves its own"
    trainer.tell("save")
    trainer.step(batch(1.0), batch(1.5), items=4)  # shares of one loss, which add up
    trainer.tell("log", logs={"loss": 77.0})
    trainer.step(batch(2.5))
    assert (sync.version, sync.steps) == (Version(1, 1), 4)
    (push,) = run.pushes
    assert (push.steps, push.tokens, push.mean_loss) == (4, 16 + 6 + 12 + 6, 2.5)
    assert labels(tmp_path) == ["step 2"]
    run.stop = True
    run.passes(0.0)
    trainer.step(batch(2.5))
    assert trainer.control.should_training_stop
    trainer.tell("train_end")
    assert (trainer.callback.sync, len(run.leaves)) == (None, 1)
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks


@pytest.mark.parametrize(
    ("averages", "tensor_parallel", "scale"), [(True, None, 4.0), (True, 2, 2.0), (False, None, 1.0)]
)
def test_a_loss_that_the_trainer_divides_by_the_items_of_all_ranks_is_this_ranks_again(
    run: RunInMemory, tmp_path: Path, averages: bool, tensor_parallel: int | None, scale: float
) -> None:
    trainer = Trainer(run, tmp_path, world_size=4, average_tokens_across_devices=averages)
    trainer.model.tp_size = tensor_parallel  # type: ignore[assignment]
    trainer.tell("train_begin")
    for n in range(4):
        trainer.step(batch(0.25), batch(0.5), items=4)
        trainer.tell("log")
        trainer.control.should_save = n == 3
        trainer.tell("epoch_end")
    assert run.pushes[0].mean_loss == 0.75 * scale
    assert labels(tmp_path) == ["step 4"], "also of what is saved after each epoch"
    trainer.callback.close()


def test_without_a_master_the_model_trains_alone(
    run: RunInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPS_MASTER", raising=False)
    trainer = Trainer(run, tmp_path, loop={"master": None})
    trainer.tell("train_begin")
    trainer.step(batch(1.0), saves=True)
    for event in ("epoch_end", "save", "train_end"):
        trainer.tell(event)
    trainer.tell("log", logs={"loss": 1.0})
    assert (trainer.callback.sync, trainer.control.should_training_stop) == (None, False)
    assert (run.pushes, list(tmp_path.iterdir())) == ([], [])


def test_a_trainer_that_begins_again_leaves_the_loop_before(run: RunInMemory, tmp_path: Path) -> None:
    """As with auto_find_batch_size, after an error that callbacks are not told: the same model, another optimizer."""
    trainer = Trainer(run, tmp_path)
    trainer.tell("train_begin")
    trainer.step(batch(1.0))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.tell("train_begin")
    for _ in range(4):
        trainer.step(batch(1.0))
    trainer.tell("train_end")
    assert [push.steps for push in run.pushes] == [1, 4]


def test_copies_and_files_of_the_model_have_no_part_in_the_training(run: RunInMemory, tmp_path: Path) -> None:
    trainer = Trainer(run, tmp_path)
    trainer.tell("train_begin")
    file = io.BytesIO()
    torch.save(trainer.model, file)
    file.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(trainer.model)
    for copied in (copy.deepcopy(trainer.model), torch.load(file, weights_only=False), averaged):
        copied.train()
        copied(input_ids=batch(9.0))
    for _ in range(4):
        trainer.step(batch(1.0), batch(1.0))
    assert trainer.callback.sync is not None
    assert trainer.callback.sync.shell is not None
    assert trainer.callback.sync.shell.first_batches, "of the model's eight calls"
    trainer.tell("train_end")
    (push,) = run.pushes
    assert (push.tokens, push.mean_loss) == (8 * 6, 1.0)


@pytest.mark.parametrize("where", ["between two steps", "in a step", "in backward(), which steps"])
@pytest.mark.parametrize("ends", ["close", "train_begin"])
def test_a_training_that_is_left_open_pushes_its_complete_steps_and_none_that_is_half_made(
    run: RunInMemory, tmp_path: Path, where: str, ends: str
) -> None:
    """Nor does it wait for the run's first merge, as one that has come to its end."""
    run.decide = lambda push: None
    trainer = Trainer(run, tmp_path)
    inside = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer.inside = inside  # type: ignore[attr-defined]
    trainer.tell("train_begin")
    trainer.step(batch(1.0))

    def fails(*_: object) -> None:
        raise ValueError("no")

    def trains() -> None:
        match where:
            case "in a step":
                trainer.optimizer.register_step_pre_hook(fails)
                trainer.step(batch(1.0))
            case "in backward(), which steps":
                inside.step()
        fails()

    def trains_and_closes() -> None:
        try:
            trains()
        finally:
            trainer.callback.close()

    began_s = run.clock.monotonic_s()
    with pytest.raises(ValueError, match="no"):
        trains_and_closes() if ends == "close" else trains()
    if ends == "train_begin":
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.tell("train_begin")
    assert [push.steps for push in run.pushes] == ([1] if "between" in where else [])
    reason = "ValueError: no" if ends == "close" else "its trainer left it open"
    assert ([leave.reason for leave in run.leaves], run.clock.monotonic_s() < began_s + 300.0) == ([reason], True)
    trainer.callback.close()


@pytest.mark.parametrize(("changes", "says"), [
    ({"deepspeed": "x"}, "DeepSpeed"), ({"fsdp": "full_shard"}, "FSDP2 has not cut"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end"), ({"torch_compile": True}, "tokens_per_step="),
    ({"loop": {"steps": 3}}, "steps is set by your trainer"), ({"loop": {"tokens_per_step": 0}}, "at least 1"),
])  # fmt: skip
def test_what_a_trainer_cannot_share_is_refused(
    run: RunInMemory, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(run, tmp_path, **changes).tell("train_begin")
    assert run.joins == []


def test_a_step_whose_tokens_are_unknown_is_refused_and_fixed_ones_are_counted(
    run: RunInMemory, tmp_path: Path
) -> None:
    fixed = Trainer(run, tmp_path, loop={"tokens_per_step": 50}, save_strategy="no", torch_compile=True)
    fixed.tell("train_begin")
    fixed.tell("log", logs={"loss": 3.5})
    fixed.step(batch(1.0))
    fixed.tell("train_end")
    assert (run.pushes[0].tokens, run.pushes[0].mean_loss) == (50, 3.5)
    assert not (tmp_path / "dips").exists()
    trainer = Trainer(run, tmp_path)
    trainer.tell("train_begin")
    with pytest.raises(ConfigError, match="give tokens_per_step="):
        trainer.step()
    trainer.callback.close()
