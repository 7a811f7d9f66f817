"""One rank that loads a torch.distributed.checkpoint: `python -m support.load_process RANK N_RANKS FOLDER KIND...`.

FOLDER/checkpoint is what `dips export --format dcp` wrote. For each kind of support.parallel_models it builds this
rank's part, loads it, writes the full tensors to FOLDER/KIND-RANK.safetensors, and prints the loss of a batch if the
model has all of its stages here. A kind with `=` is a --parallel of `dips train`, and cuts the byte model.
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

from dips.core.messages import DataRange
from dips.trainer.cut_model import CutModel
from dips.trainer.data import Batch
from dips.trainer.model import ByteModel
from dips.trainer.parallelism import Parallelism
from dips.trainer.sizes import SIZES


def loss_of(model: torch.nn.Module) -> float:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def byte_batch() -> Batch:
    text = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(2))
    return Batch(text[:, :-1], text[:, 1:], (DataRange(0, 0, 0, 0, 64),))


def load_byte_model(parallel: str, folder: Path) -> tuple[ByteModel, float]:
    """The whole model again, and the loss that all ranks compute together."""
    batch = byte_batch()
    cut = CutModel(ByteModel(SIZES["wide"], seed=9), Parallelism.parse(parallel), *batch.inputs.shape)
    load(dict(cut.module.named_parameters()), checkpoint_id=folder / "checkpoint")
    optimizers = [torch.optim.SGD(cut.module.parameters(), lr=0.0)]
    return cut.whole(optimizers), cut.step(optimizers, batch, 1.0)


def main(rank: int, n_ranks: int, folder: Path, *kinds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    for kind in kinds:
        if "=" in kind:
            whole, loss = load_byte_model(kind, folder)
            save_file(dict(whole.named_parameters()), folder / f"{kind}-{rank}.safetensors")
            print(f"loss {kind} {loss!r}", flush=True)
            continue
        part = part_of(kind)
        load(dict(part.parameters), checkpoint_id=folder / "checkpoint")  # each rank what it holds, in place
        save_file(part.full_tensors(), folder / f"{kind}-{rank}.safetensors")
        (model,) = part.models
        if model.is_first and model.is_last:
            print(f"loss {kind} {loss_of(part.wrapped[0])!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
