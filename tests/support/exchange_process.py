"""One rank of an exchange: `python -m support.exchange_process RANK N_RANKS FOLDER KIND...`.

Collects the share of a model whose elements follow a rule, and spreads another model, for each kind of parallelism in
turn. Prints a line for each: what this rank owns and sends. destroy: torch's groups are destroyed before the kinds that
follow.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.parallel_models import DEVICE, group_of_ranks
from support.pieces import Held, cut, ddp, fsdp, pipeline, tensor_parallel, transformer, twice, whole

from dips.core.layout import Layout, Parameter, Share
from dips.worker.parallel.exchange import Exchange
from dips.worker.parallel.ownership import Piece, shares_of_ranks

F32 = NDArray[np.float32]
UNIT_BYTES = 2048
BUCKET_BYTES = 64 << 10
"""So small that there are many rounds."""


def model(layout: Layout, seed: int, *, bits: int) -> F32:
    """Any bits, signs of zeros, infinities and NaN among them; in 16 bits those of finite bfloat16 values."""
    rng = np.random.default_rng(seed)
    if bits == 32:
        return rng.integers(0, 1 << 32, layout.n_elems, np.uint32).view(np.float32)
    return (rng.standard_normal(layout.n_elems).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def box(layout: Layout, flat: F32, piece: Piece) -> F32:
    span = layout.spans[piece.parameter]
    full = flat[span.start_elem : span.stop_elem].reshape(span.parameter.shape)
    return np.array(full[tuple(slice(a, a + n) for a, n in zip(piece.starts, piece.sizes, strict=True))])


def part(flat: F32, share: Share) -> F32:
    return np.concatenate([np.empty(0, np.float32), *(flat[start:stop] for start, stop in share.runs())])


def irregular(n: int) -> tuple[Layout, Held]:
    """Tensors of 0, 1, 3 and 4 dimensions: cut in the middle, unevenly, with empty pieces, whole and cut at once."""
    shapes: list[tuple[int, ...]] = [(), (7,), (3, 50, 40), (2, 3, 40, 64), (1, 9), (5000,), (11, 13, 17)]
    rows = [Parameter(f"w.{i}.a", shape, "float32", f"w.{i // 2}") for i, shape in enumerate(shapes)]
    rows.append(Parameter("mean", (300,), "float32", "averaged", averaged=True))
    layout = Layout(tuple(rows), 4096)
    held: Held = [[] for _ in range(n)]
    for rank in range(n):
        held[rank] += [whole(layout, 0), cut(layout, 1, 0, n)[rank], cut(layout, 2, 1, n)[rank]]
        held[rank] += [cut(layout, 3, 3, n, 9)[rank], cut(layout, 4, 0, n)[rank], cut(layout, 6, 1, n)[rank]]
        held[rank].append(whole(layout, 7))
    held[n - 1] += [whole(layout, 5), whole(layout, 6)]
    return layout, held


def cluster(kind: str, n: int) -> tuple[Layout, Held]:
    layout = transformer()
    kinds = {
        "ddp": lambda: ddp(layout, n), "fsdp": lambda: fsdp(layout, n), "tp": lambda: tensor_parallel(layout, n),
        "pp": lambda: pipeline(layout, n, ddp(layout, 1)), "hsdp": lambda: twice(fsdp(layout, n // 2)),
        "dpxtp": lambda: twice(tensor_parallel(layout, n // 2)),
        "ppxtp": lambda: pipeline(layout, 2, tensor_parallel(layout, n // 2)),
        "idle": lambda: [*fsdp(layout, n - 1), []],
    }  # fmt: skip
    return irregular(n) if kind == "irregular" else (layout, kinds[kind]())


def check(kind: str, n: int, group: dist.ProcessGroup, *, bits: int) -> dict[str, object]:
    """Collect and spread, twice each. Raises AssertionError where a bit differs."""
    layout, held = cluster(kind, n)
    rank, shares = group.rank(), shares_of_ranks(layout, held, UNIT_BYTES)
    exchange = Exchange(layout, held, shares, group, bucket_bytes=BUCKET_BYTES)
    dtype = torch.float32 if bits == 32 else torch.bfloat16
    for turn in range(2):
        now, then = model(layout, turn, bits=bits), model(layout, 10 + turn, bits=bits)
        # Every other tensor is not contiguous in memory. Copies of a buffer differ: the lowest holder's counts.
        tensors = [torch.from_numpy(box(layout, now, piece)).to(DEVICE, dtype) for piece in held[rank]]
        tensors = [t.t().contiguous().t() if i % 2 and t.ndim == 2 else t for i, t in enumerate(tensors)]
        for piece, tensor in zip(held[rank], tensors, strict=True):
            if layout.spans[piece.parameter].parameter.averaged and rank:
                tensor.fill_(rank)
        flat = np.full(shares[rank].n_elems, -1, np.float32)
        exchange.collect(tensors, flat)
        assert flat.tobytes() == part(now, shares[rank]).tobytes(), "collect"
        exchange.spread(part(then, shares[rank]), tensors)
        for piece, tensor in zip(held[rank], tensors, strict=True):
            assert tensor.float().contiguous().cpu().numpy().tobytes() == box(layout, then, piece).tobytes(), piece
    return {"owned": shares[rank].n_elems, "sent": exchange.bytes_sent}


def main(rank: int, n_ranks: int, folder: str, *kinds: str) -> None:
    with group_of_ranks(rank, n_ranks, folder) as group:
        for kind in kinds:
            if kind == "destroy":
                dist.destroy_process_group()
                continue
            name, _, bits = kind.partition(":")
            print(json.dumps(check(name, n_ranks, group, bits=int(bits or 32))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
