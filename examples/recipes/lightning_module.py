"""Lightning's Trainer as one cluster of a run: only the callback is added, and an order of data of its own.

`python lightning_module.py` trains alone; as clusters of a run: README.md of this folder.
"""

import logging
import os
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

import dips

LENGTH, BATCH = 64, 8
LIBRARY = Path(textwrap.__file__).parent  # real text without a download: Python's own standard library
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def text_of(*modules: str) -> torch.Tensor:
    """The bytes of some modules, cut into sequences."""
    text = b"".join((LIBRARY / f"{name}.py").read_bytes() for name in modules)
    return torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)


class Batches:
    """Batches of text in the cluster's own order, which resume where a checkpoint was taken."""

    def __init__(self, cluster: str) -> None:
        self.rows = text_of("argparse", "inspect", "tarfile", "typing")
        self.seed, self.taken = zlib.crc32(cluster.encode()), 0

    def __len__(self) -> int:
        return 1000  # Lightning fetches ahead from a loader without a length, which then saves a position too far

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            chosen = torch.Generator().manual_seed(self.seed + self.taken)
            self.taken += 1
            rows = self.rows[torch.randint(len(self.rows), (BATCH,), generator=chosen)]
            yield {"input_ids": rows, "labels": rows}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Language(lightning.LightningModule):
    """A tiny Llama that guesses the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(CONFIG)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cluster = os.environ.get("DIPS_CLUSTER", "alone")
    folder = Path("out") / cluster
    keeper = ModelCheckpoint(folder, every_n_train_steps=25, save_last=True, enable_version_counter=False)
    trainer = lightning.Trainer(
        max_steps=2000, accumulate_grad_batches=2, gradient_clip_val=1.0, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=100, check_val_every_n_epoch=None,
        callbacks=[dips.LightningCallback(), keeper],
    )  # fmt: skip
    # A restarted process resumes from Lightning's last checkpoint, and from what the callback saved with it.
    last = folder / "last.ckpt"
    module, loader = Language(), Batches(cluster)  # the loader's seed is the cluster's
    held_out = [{"input_ids": rows, "labels": rows} for rows in text_of("textwrap").split(BATCH)]
    held_out = torch.utils.data.DataLoader(held_out, batch_size=None)
    trainer.fit(module, loader, held_out, ckpt_path=str(last) if last.exists() else None)
    torch.save(module.state_dict(), folder / "model.pt")  # after fit(): the run's last version


if __name__ == "__main__":
    main()
