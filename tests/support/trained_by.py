"""A small Llama under a trainer that people have, as a cluster's program: `python trained_by.py TRAINER FOLDER`.

TRAINER is a name of TRAINERS; the run stands in the environment. Each cluster has batches of its own. Under torchrun
each rank is this program, the first one writes what the cluster holds.
"""

from __future__ import annotations

import itertools
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.dips_command import ROOT
from support.three_facts import note, trained_parameters

import dips

BATCH, ACCUMULATED, LENGTH = 4, 2, 32
STEP_TOKENS = ACCUMULATED * BATCH * LENGTH


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Pieces of this repository's README, in an order of this cluster's own: whole steps, also on two ranks."""

    def __init__(self) -> None:
        text = torch.tensor(list((ROOT / "README.md").read_bytes()))
        rows = text[: len(text) // (2 * STEP_TOKENS) * 2 * STEP_TOKENS].reshape(-1, LENGTH)
        own = torch.Generator().manual_seed(zlib.crc32(os.environ["DIPS_CLUSTER"].encode()))
        self.rows = rows[torch.randperm(len(rows), generator=own)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def hugging_face(folder: Path) -> None:
    """Evaluation, logging, checkpoints, gradient clipping and a scheduler, as its defaults have them."""
    model, of_steps = llama(), list[int]()

    class Counted(Trainer):
        of_batches = 0

        def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any) -> torch.Tensor:
            self.of_batches += inputs["input_ids"].numel()
            return super().training_step(model, inputs, *more)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            of_steps.append(trainer.of_batches - sum(of_steps))

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=100_000, learning_rate=3e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=20,
        eval_strategy="steps", eval_steps=10,
    )  # fmt: skip
    trainer = Counted(
        model, arguments, train_dataset=Texts(), eval_dataset=torch.utils.data.Subset(Texts(), range(8)),
        callbacks=[dips.HuggingFaceCallback(), Steps()],
    )  # fmt: skip
    trainer.train()
    note(folder, trained_parameters(model), of_steps)


def lightning(folder: Path) -> None:
    """Automatic optimization, with callbacks of Lightning's own next to ours."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, Timer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama, self.of_batches, self.of_steps = llama(), 0, list[int]()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            self.of_batches += batch["input_ids"].numel()
            loss: torch.Tensor = self.llama(**batch).loss
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.llama(**batch)

        def on_train_batch_end(self, *given: Any) -> None:
            if self.trainer.global_step > len(self.of_steps):
                self.of_steps.append(self.of_batches - sum(self.of_steps))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    module = Module()
    keeper = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=20)
    trainer = LightningTrainer(
        max_steps=100_000, accelerator="cpu", gradient_clip_val=1.0, default_root_dir=folder, logger=False,
        val_check_interval=10, check_val_every_n_epoch=None, limit_val_batches=2, enable_progress_bar=False,
        callbacks=[dips.LightningCallback(), GradientAccumulationScheduler({0: ACCUMULATED}), Timer(), keeper],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Texts(), BATCH, shuffle=True), DataLoader(Texts(), BATCH))
    note(folder, trained_parameters(module), module.of_steps)


def accelerate(folder: Path) -> None:
    """The loop of docs/integrations.md; several ranks under FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin, n_ranks = None, int(os.environ.get("WORLD_SIZE", "1"))
    if n_ranks > 1:
        from support.trainer_ranks import accelerate_cuts_on_a_cpu

        accelerate_cuts_on_a_cpu()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, fsdp_plugin=plugin)
    model, of_steps, of_batches = llama(), list[int](), 0
    optimizer, loader = torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(Texts(), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with dips.DiLoCo(model, optimizer, tokens_per_step=STEP_TOKENS) as sync:
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                sync.report(loss)
                optimizer.step()
                optimizer.zero_grad()
            of_batches += batch["input_ids"].numel() * n_ranks
            if accelerator.sync_gradients:
                of_steps.append(of_batches - sum(of_steps))
            if sync.done:
                break
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        note(folder, {name: t for name, t in whole.items() if isinstance(t, torch.Tensor)}, of_steps)


TRAINERS = {"hugging_face": hugging_face, "lightning": lightning, "accelerate": accelerate}

if __name__ == "__main__":
    torch.set_num_threads(1)
    TRAINERS[sys.argv[1]](Path(sys.argv[2]))
