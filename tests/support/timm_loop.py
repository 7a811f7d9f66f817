"""A model of timm with its optimizer and its scheduler in a loop of one's own: `python timm_loop.py NAME FOLDER`.

The run stands in the environment. A model with batch norm has its running statistics averaged by the run.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.stand_ins import stand_ins
from support.three_facts import note, trained_parameters

import dips

with stand_ins("torchvision"):  # for data sets and transforms of images
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

BATCH, SIZE, CLASSES = 8, 32, 4
PER_EPOCH = 16


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones, each brighter in the quarter that its class names."""
    targets, pictures = torch.randint(CLASSES, (BATCH,)), torch.randn(BATCH, 3, SIZE, SIZE)
    half = SIZE // 2
    for picture, target in zip(pictures, targets.tolist(), strict=True):
        row, column = divmod(target, 2)
        picture[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1.0
    return pictures, targets


def train(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **({"img_size": SIZE} if "vit" in name else {}))
    statistics = {
        which: buffer for which, buffer in model.named_buffers() if which.endswith(("running_mean", "running_var"))
    }
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=20, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=PER_EPOCH
    )
    torch.manual_seed(zlib.crc32(os.environ["DIPS_CLUSTER"].encode()))
    tokens = []
    buffers = "average" if statistics else "own"
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH, state={"lr": scheduler}, buffers=buffers) as sync:
        while not sync.done:
            inputs, targets = images()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            sync.report(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step_update(sync.steps)
            tokens.append(len(inputs))
    note(folder, {**trained_parameters(model), **statistics}, tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], Path(sys.argv[2]))
