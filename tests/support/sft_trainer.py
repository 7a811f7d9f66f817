"""trl's SFTTrainer as a cluster's program: `python sft_trainer.py FOLDER`; the run stands in the environment.

Everything is as trl's own defaults have it (mixed precision, checkpointed activations, checkpoints, batches that are
padded to their longest row); only the callback is added. Model and tokenizer are made here, the text is this
repository's own.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.byte_tokenizer import END, PAD, byte_tokenizer
from support.dips_command import ROOT
from support.three_facts import note, trained_parameters

import dips

PAGES = ("README.md", "docs/algorithm.md")
BATCH, ACCUMULATED, LENGTH = 4, 2, 64


def paragraphs() -> Dataset:
    texts = "\n\n".join((ROOT / page).read_text() for page in PAGES).split("\n\n")
    return Dataset.from_dict({"text": texts})


class Counted(SFTTrainer):  # type: ignore[misc]
    """Counts the elements of each batch that it trains on."""

    of_batches = 0

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any, **named: Any) -> torch.Tensor:
        self.of_batches += inputs["input_ids"].numel()
        loss: torch.Tensor = super().training_step(model, inputs, *more, **named)
        return loss


class Steps(TrainerCallback):
    """The tokens of each step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.tokens.append(trainer.of_batches - sum(self.tokens))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, steps = Path(sys.argv[1]), Steps()
    text = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END, pad_token=PAD)
    config = LlamaConfig(
        vocab_size=len(text), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, eos_token_id=text.eos_token_id, bos_token_id=None,
        pad_token_id=text.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    arguments = SFTConfig(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=100_000, max_length=LENGTH, learning_rate=3e-3, report_to=[], use_cpu=True, disable_tqdm=True,
        data_seed=zlib.crc32(os.environ["DIPS_CLUSTER"].encode()),  # each cluster reads the text in its own order
    )  # fmt: skip
    trainer = Counted(
        model, arguments, train_dataset=paragraphs(), processing_class=text,
        callbacks=[dips.HuggingFaceCallback(), steps],
    )  # fmt: skip
    trainer.train()
    note(folder, trained_parameters(model), steps.tokens)
