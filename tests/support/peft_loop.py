"""A tiny Llama with a LoRA of peft: `train WRAPPED FOLDER` is a cluster's loop, `open FOLDER...` a fresh process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.three_facts import note, trained_parameters

import dips

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
BATCH, LENGTH = 8, 16


def tokens(n_rows: int) -> torch.Tensor:
    """Rows that count upwards: they can be learned."""
    return (torch.randint(64, (n_rows, 1)) + torch.arange(LENGTH)) % 64


@torch.no_grad()
def heldout(model: torch.nn.Module) -> float:
    torch.manual_seed(9)
    rows = tokens(32)
    return float(model.eval()(input_ids=rows, labels=rows).loss)


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def train(wrapped: bool, folder: Path) -> None:
    plain = base()
    plain.save_pretrained(folder / "base")
    before = heldout(plain)
    model: Any = peft.get_peft_model(plain, LORA)
    if wrapped:
        layers = plain.model.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    torch.manual_seed(1 + wrapped)
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH * LENGTH) as sync:
        while not sync.done:
            rows = tokens(BATCH)
            loss = model.train()(input_ids=rows, labels=rows).loss
            optimizer.zero_grad()
            loss.backward()
            sync.report(loss)
            optimizer.step()
    if not wrapped:
        save_file(peft.get_peft_model_state_dict(model), folder / "adapter.safetensors")
        note(folder, trained_parameters(model), [BATCH * LENGTH] * sync.steps)
    print("HELDOUT", repr(before), repr(heldout(model)), flush=True)


def opened(folder: Path) -> torch.nn.Module:
    if (folder / "config.json").exists():
        whole: torch.nn.Module = LlamaForCausalLM.from_pretrained(folder)
        return whole
    adapted: torch.nn.Module = peft.PeftModel.from_pretrained(base(), folder)
    return adapted


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        train(sys.argv[2] == "wrapped", Path(sys.argv[3]))
    else:
        print("HELDOUT", *(repr(heldout(opened(Path(folder)))) for folder in sys.argv[2:]))
