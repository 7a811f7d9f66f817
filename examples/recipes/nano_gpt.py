"""A script as many people have one: a small GPT of bytes, and a loop that accumulates gradients.

`python nano_gpt.py` trains alone; as clusters of a run: README.md of this folder, which names the added lines.
"""

import inspect
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import dips

n_layer, n_head, n_embd, dropout = 2, 4, 64, 0.1
batch_size, block_size, accumulate = 4, 64, 4
max_lr, min_lr, warmup_steps, decay_steps = 3e-3, 3e-4, 20, 400
weight_decay, clip = 0.1, 1.0
eval_every, eval_batches = 10, 4
cluster = os.environ.get("DIPS_CLUSTER", "alone")
out_dir = Path("out") / cluster
seed = 1234
seed += zlib.crc32(cluster.encode())  # other batches in each cluster
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n_rows, length, _ = x.shape
        q, k, v = (part.view(n_rows, length, n_head, -1).transpose(1, 2) for part in self.qkv(x).split(n_embd, dim=2))
        drop = dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(n_rows, length, n_embd))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(n_embd), Attention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        y: torch.Tensor = x + self.mlp(self.norm_2(x))
        return y


class Gpt(nn.Module):
    """Of bytes; the embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(n_layer)), nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, 256, bias=False)
        self.tokens.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizer(self) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = {"fused": True} if "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
        return torch.optim.AdamW(groups, lr=max_lr, betas=(0.9, 0.95), **fused)


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(out_dir / f"{split}.bin", dtype=np.uint8, mode="r")
    places = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    rows = np.stack([data[place : place + block_size + 1].astype(np.int64) for place in places])
    both = torch.from_numpy(rows).to(device)
    return both[:, :-1], both[:, 1:]


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    model.eval()
    found = {}
    for split in ("train", "val"):
        losses = [model(*get_batch(split))[1].item() for _ in range(eval_batches)]
        found[split] = sum(losses) / len(losses)
    model.train()
    return found


def get_lr(step: int) -> float:
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / (decay_steps - warmup_steps))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (max_lr - min_lr)


def prepare() -> None:
    """Any text: here, some modules of Python's own library."""
    text = b"".join(page.read_bytes() for page in sorted(Path(inspect.__file__).parent.glob("[a-d]*.py")))
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "train.bin").write_bytes(text[: len(text) * 9 // 10])
    (out_dir / "val.bin").write_bytes(text[len(text) * 9 // 10 :])


if __name__ == "__main__":
    prepare()
    torch.manual_seed(seed)
    model = Gpt().to(device)
    optimizer = model.configure_optimizer()
    X, Y = get_batch("train")
    tokens_per_step = accumulate * batch_size * block_size
    with dips.DiLoCo(model, optimizer, tokens_per_step=tokens_per_step, steps=5000) as sync:
        while not sync.done:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(sync.steps)
            if sync.steps % eval_every == 0:
                losses = estimate_loss()
                print(f"step {sync.steps}: train {losses['train']:.4f}, val {losses['val']:.4f}", flush=True)
            for _ in range(accumulate):
                _, loss = model(X, Y)
                sync.report(loss)
                X, Y = get_batch("train")
                (loss / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.save(model.state_dict(), out_dir / "model.pt")  # after the block: the run's last version
