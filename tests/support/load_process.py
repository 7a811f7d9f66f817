"""One rank that loads a torch.distributed.checkpoint: `python -m support.load_process RANK N_RANKS FOLDER KIND...`.

FOLDER/checkpoint is what `dips export --format dcp` wrote. For each kind of support.parallel_models it builds this
rank's part, loads it, writes the full tensors to FOLDER/KIND-RANK.safetensors, and prints the loss of a batch if the
model has all of its stages here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.parallel_models import BATCH, LENGTH, VOCABULARY, part_of
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor


def loss_of(model: torch.nn.Module) -> float:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def main(rank: int, n_ranks: int, folder: Path, *kinds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    for kind in kinds:
        part = part_of(kind)
        load(dict(part.parameters), checkpoint_id=folder / "checkpoint")  # each rank what it holds, in place
        save_file(part.full_tensors(), folder / f"{kind}-{rank}.safetensors")
        (model,) = part.models
        if model.is_first and model.is_last:
            print(f"loss {kind} {loss_of(part.wrapped[0])!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
