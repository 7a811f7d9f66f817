"""Your own model and your own loop, as one cluster of a run; without DIPS_MASTER it is ordinary training.

Alone:            python examples/own_loop.py
As two clusters:  dips up examples/server.toml       (a master and a slave; leave it running)
and in two more terminals, each with the keys that `dips up` made for it:
                  DIPS_MASTER=127.0.0.1:29400 DIPS_CLUSTER=a DIPS_KEYS=runs/own-loop/keys/a python examples/own_loop.py
                  DIPS_MASTER=127.0.0.1:29400 DIPS_CLUSTER=b DIPS_KEYS=runs/own-loop/keys/b python examples/own_loop.py
"""

import argparse
import logging
from pathlib import Path

import torch
from torch import nn

import dips

BATCH, LENGTH = 16, 64
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # any text: here, a file of Python's own library


class NextByte(nn.Module):
    """Guesses the next byte of a text from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.memory = nn.GRU(64, 128, batch_first=True)
        self.guess = nn.Linear(128, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.guess(self.memory(self.embedding(text))[0])


def batch() -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1))
    return TEXT[starts + torch.arange(LENGTH + 1)]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH * LENGTH, steps=200) as sync:
        while not sync.done:
            text = batch()
            logits = model(text[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            sync.report(loss)
            optimizer.step()
            if sync.steps % 20 == 0:
                print(f"step {sync.steps}: loss {loss.item():.3f}, version {sync.version}", flush=True)


if __name__ == "__main__":
    main()
