"""TRL's SFTTrainer with a LoRA of peft as one cluster of a run: only the callback is added, and an order of its own.

`python trl_lora.py MODEL TEXTS.jsonl` trains alone; as clusters of a run: README.md of this folder. MODEL is a name of
the Hugging Face hub or a folder, the same in each cluster; TEXTS.jsonl has a `text` or `messages` in each line.
"""

import os
import sys
import zlib
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import dips


def main(model: str, texts: str) -> None:
    cluster = os.environ.get("DIPS_CLUSTER", "alone")
    folder = Path("out") / cluster
    arguments = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2000,
        max_length=64, learning_rate=3e-3, report_to=[], disable_tqdm=True,
        data_seed=zlib.crc32(cluster.encode()),  # each cluster reads the texts in its own order
    )  # fmt: skip
    trainer = SFTTrainer(
        model, arguments, train_dataset=load_dataset("json", data_files=texts, split="train"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        callbacks=[dips.HuggingFaceCallback()],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "adapter"))  # after train(): the run's last version


if __name__ == "__main__":
    main(*sys.argv[1:])
