"""One rank of a loop of one's own that keeps checkpoints, with a model cut in several ways:

    python -m support.own_loop_ranks RANK N_RANKS FOLDER MASTER KIND STEPS [KILLED FAILPOINT]

KIND: fsdp, tensor, pipeline, data or one (process). Checkpoints are in FOLDER/../kept. The rank KILLED
is killed at the FAILPOINT once two checkpoints were made, or, with `step`, after a step. Writes what it holds at the
end to FOLDER/rank-N.pt. The parameters after so many steps are the same to the bit, however the model is cut.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.parallel_models import local
from support.run_for_workers import LAYOUT
from support.trainer_models import same_cut
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dips
from dips.core.errors import DipsError
from dips.core.observe.failpoints import set_failpoints
from dips.worker import torch_model
from dips.worker.parallel import agreement

TOKENS, LAYERS = 16, 5


class Net(torch.nn.Module):
    """Some of the layers of the model. Each element goes its own way, so that a sum's order changes no bit."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(number): torch.nn.Module() for number in layers})
        for number, layer in self.layers.items():
            start = torch.randn(6000, generator=torch.Generator().manual_seed(int(number)))
            layer.w = torch.nn.Parameter(start)
            layer.register_buffer("seen", torch.zeros(3))

    def forward(self, step: int) -> torch.Tensor:
        losses = []
        for layer in self.layers.values():
            layer.get_buffer("seen").add_(step)
            losses.append((layer.get_parameter("w") - math.sin(step)).square().sum())
        return torch.stack(losses).sum()


def made(kind: str, rank: int, n_ranks: int) -> tuple[Net, int]:
    """This rank's model, and the tokens of its own batch."""
    if kind == "pipeline":
        first = LAYERS * rank // n_ranks
        return Net(range(first, LAYERS * (rank + 1) // n_ranks)), TOKENS
    net = Net(range(LAYERS))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (n_ranks,))
        for layer in net.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net, TOKENS // n_ranks
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (n_ranks,))
        for layer in net.layers.values():
            layer.w = torch.nn.Parameter(distribute_tensor(layer.get_parameter("w").detach(), mesh, [Shard(0)]))
    return net, TOKENS // n_ranks if kind == "data" else TOKENS


def optimizer_of(net: Net) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    early = [p for name, p in net.named_parameters() if int(name.split(".")[1]) < 2]
    late = [p for name, p in net.named_parameters() if int(name.split(".")[1]) >= 2]
    groups = [{"params": early, "weight_decay": 0.5}, {"params": late, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def step(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    net(number).backward()
    optimizer.step()


def main(rank: int, n_ranks: int, folder: Path, master: str, kind: str, steps: int, failpoint: str) -> int:
    """failpoint: empty: this rank lives."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch_model.Layout = agreement.Layout = same_cut  # type: ignore[attr-defined, assignment]
    if kind != "one":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    kept = folder.parent / "kept"
    net, tokens = made(kind, rank, n_ranks)
    optimizer, scheduler = optimizer_of(net)
    seen: set[Path] = set(kept.glob("checkpoint-*.json"))
    made_here: set[Path] = set()
    try:
        with dips.DiLoCo(
            net, optimizer, tokens_per_step=tokens, steps=steps, checkpoint_dir=kept, checkpoint_every_s=0.0,
            resume=True, master=master, cluster_id="a", insecure=True, state={"scheduler": scheduler},
            parallel=dips.Parallel(replicas=kind == "data"),
        ) as sync:  # fmt: skip
            while not sync.done:
                step(net, optimizer, sync.steps)
                scheduler.step()
                time.sleep(0.02)  # so that checkpoints are written between its steps
                made_here |= set(kept.glob("checkpoint-*.json")) - seen
                if failpoint and len(made_here) > 1:
                    if failpoint == "step":
                        os.kill(os.getpid(), signal.SIGKILL)
                    set_failpoints(f"{failpoint}=kill")
    except DipsError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    parameters = {name: local(p).clone() for name, p in net.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.save(
        {"steps": sync.steps, "parameters": parameters, "buffers": buffers, "rates": rates}, folder / f"rank-{rank}.pt"
    )
    if kind != "one":
        dist.destroy_process_group()
    return 0


assert LAYOUT.n_elems == LAYERS * 6000

if __name__ == "__main__":
    rank, n_ranks, folder, master, kind, steps, *killed = sys.argv[1:]
    failpoint = killed[1] if killed and killed[0] == rank else ""
    raise SystemExit(main(int(rank), int(n_ranks), Path(folder), master, kind, int(steps), failpoint))
