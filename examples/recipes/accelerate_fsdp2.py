"""A loop of Accelerate whose model FSDP2 cuts, as one cluster of a run; each rank exchanges its own part.

`torchrun --standalone --nproc_per_node 2 accelerate_fsdp2.py` trains alone; as clusters of a run: README.md of this
folder.
"""

import itertools
import logging
import os
import textwrap
import zlib
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import dips

LENGTH, BATCH, ACCUMULATED = 64, 4, 2
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cluster = os.environ.get("DIPS_CLUSTER", "alone")
    text = b"".join(page.read_bytes() for page in sorted(Path(textwrap.__file__).parent.glob("[a-d]*.py")))
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)  # any text: Python's own library
    own = torch.Generator().manual_seed(zlib.crc32(cluster.encode()))  # each cluster reads it in its own order
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, fsdp_plugin=plugin)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rows, BATCH, shuffle=True, generator=own, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    tokens_per_step = ACCUMULATED * BATCH * LENGTH  # of this rank: those of the ranks are added up
    with dips.DiLoCo(model, optimizer, tokens_per_step=tokens_per_step, steps=2000) as sync:
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                sync.report(loss)
                optimizer.step()
                optimizer.zero_grad()
            if sync.done:
                break
    accelerator.save_model(model, str(Path("out") / cluster))  # after the block: the run's last version
    accelerator.end_training()


if __name__ == "__main__":
    main()
