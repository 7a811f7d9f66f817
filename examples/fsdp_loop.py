"""A model that FSDP2 has cut into shards, as one cluster of a run; without DIPS_MASTER it is ordinary training.

Alone:            torchrun --standalone --nproc_per_node 2 examples/fsdp_loop.py
As two clusters:  dips up examples/server.toml       (a master and a slave; leave it running)
and in two more terminals, each with the keys that `dips up` made for it and with any number of ranks:
    export DIPS_MASTER=127.0.0.1:29400
    DIPS_CLUSTER=a DIPS_KEYS=runs/own-loop/keys/a torchrun --standalone --nproc_per_node 4 examples/fsdp_loop.py
    DIPS_CLUSTER=b DIPS_KEYS=runs/own-loop/keys/b torchrun --standalone --nproc_per_node 2 examples/pipeline_loop.py

Each rank pushes and pulls its own part of the model (docs/integrations.md). The second cluster is the same model in
two stages of a pipeline; it may as well be this program again.
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dips

BATCH, LENGTH, STEPS = 8, 32, 200
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # any text: here, a file of Python's own library


class NextByte(nn.Module):
    """Guesses the next byte of a text from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.guess = nn.Linear(64, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        unseen = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=unseen, is_causal=True)
        return self.guess(x.flatten(0, 1))


def batch() -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1))
    return TEXT[starts + torch.arange(LENGTH + 1)]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "nccl" where there are GPUs
    torch.manual_seed(0)  # the same model on every rank, before it is cut
    model = NextByte()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(dist.get_rank())  # other data on every rank
    # Tokens of this rank's own batch: FSDP2's mesh says that every rank has data of its own, and they are added up.
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH * LENGTH, steps=STEPS) as sync:
        while not sync.done:
            text = batch()
            loss = nn.functional.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            sync.report(loss)
            optimizer.step()
            if sync.steps % 20 == 0 and dist.get_rank() == 0:
                print(f"step {sync.steps}: loss {loss.item():.3f}, version {sync.version}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
