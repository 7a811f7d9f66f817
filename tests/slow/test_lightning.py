"""The callback in Lightning's own Trainer, over real sockets: a signal, tokens as the user counts them, and a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from support.run_for_workers import RunForWorkers
from support.trainer_models import ACCUMULATED, BATCH, Killed, Model, Rows, applied_tokens, check_resumed, kill

import dips

pytestmark = [pytest.mark.usefixtures("one_thread")] + [
    pytest.mark.filterwarnings(reason)
    for reason in (
        # Lightning's advice, on what may be meant: loaders without workers, a module without validation.
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
        "ignore:.*isinstance.treespec, LeafSpec.*",  # Lightning's own, with the torch of today
        "ignore:Checkpoint directory .* exists and is not empty.*",
    )
]


class KillAt(Callback):
    """Ends a training after a step as if its process had been killed."""

    def __init__(self, step: int, ours: dips.LightningCallback) -> None:
        self._step, self._ours = step, ours

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *given: Any) -> None:
        if trainer.global_step == self._step:
            kill(self._ours)


class Module(LightningModule):
    """The layers stand where the fake run's layout has them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        model = Model(seed)
        self.layers = model.layers
        self._run = (model,)  # not a submodule a second time

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self._run[0](**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def flat(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._run[0].flat()


class Batches:
    """Goes on where a checkpoint was taken."""

    def __init__(self) -> None:
        self.rows, self.taken = Rows().rows, 0

    def __len__(self) -> int:
        return 1000  # Lightning fetches ahead of a loader without a length, which then saves a place too far

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            start = self.taken * BATCH % len(self.rows)
            self.taken += 1
            yield {"input_ids": self.rows[start : start + BATCH]}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


@pytest.fixture
def run(new_run: Callable[[], RunForWorkers]) -> RunForWorkers:
    return new_run()


def trainer(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_steps": 10, "accumulate_grad_batches": ACCUMULATED, "accelerator": "cpu", "default_root_dir": folder,
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "log_every_n_steps": 2, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **given | changes)


def saving(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    """One that saves after every 5 steps."""
    keeper = ModelCheckpoint(folder, every_n_train_steps=5, save_last=True, enable_version_counter=False)
    return trainer(folder, *callbacks, keeper, enable_checkpointing=True, **changes)


class TermAt(Callback):
    """SIGTERM after a batch."""

    def __init__(self, index: int) -> None:
        self._index = index

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **given: Any) -> None:
        if args[2] == self._index:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_pushes_the_last_steps_and_is_told_in_the_exit_code(run: RunForWorkers, tmp_path: Path) -> None:
    ours = trainer(tmp_path, dips.LightningCallback(), TermAt(2 * ACCUMULATED))
    with pytest.raises(SystemExit) as ended:
        ours.fit(Module(1), Batches())
    assert ended.value.code == 143
    assert [push.steps for push in run.pushes] == [0, 2]
    assert len(run.leaves) == 1


def test_batches_of_another_kind_are_counted_as_the_user_says(run: RunForWorkers, tmp_path: Path) -> None:
    callback = dips.LightningCallback(tokens_of=lambda batch: 5)
    trainer(tmp_path, callback, max_steps=4).fit(Module(1), Batches())
    assert applied_tokens(run) == [0, 4 * ACCUMULATED * 5]


@pytest.mark.parametrize("killed_at", [6, 9])
def test_a_killed_training_goes_on(tmp_path: Path, new_run: Callable[[], RunForWorkers], killed_at: int) -> None:
    """At 6 inside of a round; at 9 a round further than the checkpoint (of 5): what was not saved is made again."""
    models, tokens = [], []
    for name in ("whole", "killed"):
        run = new_run()
        folder, callback, module = tmp_path / name, dips.LightningCallback(), Module(1)
        seed_everything(3, verbose=False)
        if name == "killed":
            with pytest.raises(Killed):
                saving(folder, callback, KillAt(killed_at, callback), max_steps=18).fit(module, Batches())
            assert run.leaves == []
            module = Module(99)
            again = saving(folder, dips.LightningCallback(), max_steps=18)
            again.fit(module, Batches(), ckpt_path=str(folder / "last.ckpt"), weights_only=True)
            assert again.global_step == 18
        else:
            saving(folder, callback, max_steps=18).fit(module, Batches())
        models.append(module.flat())
        tokens.append(run.tokens)
    check_resumed(killed_at, models, tokens)
