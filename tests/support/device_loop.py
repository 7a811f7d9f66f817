"""One rank of a cluster with a loop of its own on its CUDA device: `python -m support.device_loop MASTER CLUSTER`,
under torchrun. NCCL computes, FSDP2 cuts the model, steps run in bfloat16 under autocast and torch.compile.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dips

WIDTH, BATCH = 256, 32


def main(master: str, cluster: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    compiled = torch.compile(model)
    dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects here, not in the first step
    target = torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5
    noise = torch.Generator(device).manual_seed(sum(map(ord, cluster)) * 1000 + dist.get_rank())
    tokens = BATCH * WIDTH
    losses = []
    with dips.DiLoCo(
        model, optimizer, tokens_per_step=tokens, master=master, cluster_id=cluster, insecure=True
    ) as sync:
        while not sync.done:
            x = torch.randn(BATCH, WIDTH, device=device, generator=noise)
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(compiled(x), x @ target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    dist.destroy_process_group()
    print(f"{len(losses)} steps: {losses[0].item():.4f} to {losses[-1].item():.4f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
