"""One of several ranks of a cluster under a trainer that people have; started by torchrun, which names rank and peers:

    torchrun --standalone --nproc_per_node 2 tests/support/trainer_ranks.py KIND FOLDER STEPS [KILLED_RANK KILLED_AT]

The run stands in the environment. Goes on from the trainer's last checkpoint in FOLDER if there is one, and writes what
this rank holds at the end to FOLDER/rank-N.json. KILLED_RANK kills itself after so many steps of a first life.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.trainer_models import Model, Rows, same_cut

import dips
from dips.worker import torch_model

BATCH, ACCUMULATED, SAVED_EVERY = 2, 2, 5
RANK = int(os.environ["RANK"])


@dataclass
class Watch:
    """What the loop says after each step; ends the process where the test wants it."""

    folder: Path
    killed_at: int | None
    version: str = ""
    progress: int = 0
    ended: bool = False

    def step(self, steps: int, sync: dips.DiLoCo | None) -> None:
        if sync is not None:
            self.version, self.progress, self.ended = str(sync.version), sync.progress, sync.run_ended
        if steps == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, steps: int, model: Model, talks: bool) -> None:
        digest = hashlib.sha256(model.flat().tobytes()).hexdigest()
        told = {"steps": steps, "model": digest, "version": self.version, "progress": self.progress, "talks": talks}
        (self.folder / f"rank-{RANK}.json").write_text(json.dumps({**told, "ended": self.ended}))


def hugging_face(watch: Watch, steps: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Look(TrainerCallback):
        talks = False

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.talks = callback.sync is not None and callback.sync.shell is not None
            watch.step(state.global_step, callback.sync)

    folder, callback, look, model = watch.folder / "trainer", dips.HuggingFaceCallback(), Look(), Model(RANK)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=steps, save_steps=SAVED_EVERY, learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, seed=3, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback, look])
    trainer.train(resume_from_checkpoint=True if list(folder.glob("checkpoint-*")) else None)
    watch.tell(trainer.state.global_step, model, look.talks)


def lightning(watch: Watch, steps: int) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self._of = (Model(RANK),)
            self.layers = self._of[0].layers

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self._of[0](**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Look(Callback):
        talks = False

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *given: Any) -> None:
            self.talks = callback.sync is not None and callback.sync.shell is not None
            watch.step(trainer.global_step, callback.sync)

    callback, look, module, last = dips.LightningCallback(), Look(), Module(), watch.folder / "last.ckpt"
    keeper = ModelCheckpoint(
        watch.folder, every_n_train_steps=SAVED_EVERY, save_last=True, enable_version_counter=False
    )
    trainer = Trainer(
        max_steps=steps, accumulate_grad_batches=ACCUMULATED, accelerator="cpu", devices=2, strategy="ddp",
        default_root_dir=watch.folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, keeper, look],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(), BATCH), ckpt_path=str(last) if last.exists() else None)
    watch.tell(trainer.global_step, module._of[0], look.talks)


def accelerate(watch: Watch, steps: int) -> None:
    """The loop of docs/integrations.md."""
    from accelerate import Accelerator
    from support.trainer_models import LENGTH

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED), Model(RANK)
    prepared, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(Rows(), BATCH)
    )
    with dips.DiLoCo(prepared, optimizer, tokens_per_step=ACCUMULATED * BATCH * LENGTH, steps=steps) as sync:
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            watch.step(sync.steps, sync)
            if sync.done:
                break
        talks = sync.shell is not None
    watch.tell(sync.steps, model, talks)


def main(kind: str, folder: str, steps: str, *killed: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch_model.Layout = same_cut  # type: ignore[attr-defined, assignment]
    place = Path(folder)
    first_life = not (place / "lives").exists()
    here = first_life and bool(killed) and int(killed[0]) == RANK
    watch = Watch(place, int(killed[1]) if here else None)
    {"hugging_face": hugging_face, "lightning": lightning, "accelerate": accelerate}[kind](watch, int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
