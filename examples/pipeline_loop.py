"""A model in two stages of a pipeline, as one cluster of a run; without DIPS_MASTER it is ordinary training.

Alone:            torchrun --standalone --nproc_per_node 2 examples/pipeline_loop.py
As two clusters:  dips up examples/server.toml       (a master and a slave; leave it running)
and in two more terminals, each with the keys that `dips up` made for it:
    export DIPS_MASTER=127.0.0.1:29400
    DIPS_CLUSTER=a DIPS_KEYS=runs/own-loop/keys/a torchrun --standalone --nproc_per_node 4 examples/fsdp_loop.py
    DIPS_CLUSTER=b DIPS_KEYS=runs/own-loop/keys/b torchrun --standalone --nproc_per_node 2 examples/pipeline_loop.py

Each rank pushes and pulls its own stage (docs/integrations.md). The first cluster is the same model under FSDP2; it may
as well be this program again.
"""

import logging

import torch
import torch.distributed as dist
from fsdp_loop import BATCH, LENGTH, STEPS, NextByte, batch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import dips


class Stage(nn.Module):
    """A half of NextByte. Its modules have their names in the full model, by which a run knows what this rank holds."""

    def __init__(self, full: NextByte, number: int) -> None:
        super().__init__()
        self.embedding = full.embedding if number == 0 else None
        self.layers = nn.ModuleDict({str(number): full.layers[number]})
        self.guess = full.guess if number == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        unseen = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers.values():
            x = layer(x, src_mask=unseen, is_causal=True)
        return x if self.guess is None else self.guess(x.flatten(0, 1))


def loss_of(guessed: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(guessed, text.flatten())


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "nccl" where there are GPUs
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Stage(NextByte(), rank)
    schedule = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device("cpu")), n_microbatches=2, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)  # the same data on both ranks: one needs what goes in, the other what should come out
    # Tokens of the batch, which both ranks see: they are counted once.
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH * LENGTH, steps=STEPS) as sync:
        while not sync.done:
            text, losses = batch(), []
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(text[:, :-1])
            else:
                schedule.step(target=text[:, 1:], losses=losses)
                sync.report(torch.stack(losses).mean())  # only the last stage knows it
            optimizer.step()
            if losses and sync.steps % 20 == 0:
                print(f"step {sync.steps}: loss {losses[-1].item():.3f}, version {sync.version}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
