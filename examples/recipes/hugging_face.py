"""Hugging Face's Trainer as one cluster of a run: only the callback is added, and an order of data of its own.

`python hugging_face.py` trains alone; as clusters of a run: README.md of this folder.
"""

import logging
import os
import textwrap
import zlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dips

LENGTH, BATCH = 64, 8
LIBRARY = Path(textwrap.__file__).parent  # real text without a download: Python's own standard library
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class Bytes(torch.utils.data.Dataset):
    """The bytes of some modules, cut into sequences."""

    def __init__(self, *modules: str) -> None:
        text = b"".join((LIBRARY / f"{name}.py").read_bytes() for name in modules)
        self.rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cluster = os.environ.get("DIPS_CLUSTER", "alone")
    folder = Path("out") / cluster
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, max_steps=2000,
        learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=10, save_steps=25, save_total_limit=2,
        eval_strategy="steps", eval_steps=50, report_to=[], disable_tqdm=True,
        data_seed=zlib.crc32(cluster.encode()),  # each cluster reads the text in its own order
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(CONFIG), arguments, train_dataset=Bytes("argparse", "inspect", "tarfile", "typing"),
        eval_dataset=Bytes("textwrap"), callbacks=[dips.HuggingFaceCallback()],
    )  # fmt: skip
    # A restarted process resumes from the Trainer's last complete checkpoint, and from what the callback saved with it.
    saved = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)  # what the Trainer writes last
    trainer.train(resume_from_checkpoint=str(saved[-1].parent) if saved else None)
    trainer.save_model(str(folder / "model"))  # after train(): the run's last version


if __name__ == "__main__":
    main()
