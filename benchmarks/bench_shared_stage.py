"""How much faster a pipeline is when a slow device helps a fast one with a stage (SpanTrain, Figure 7b).

Three stages on gloo ranks of this machine, run by torch's pipeline runtime in the order of 1F1B or ZB-H1. The one in
the middle is the longest. A row takes so long on a device: waits in the module's forward and backward pass, so that
ranks stand for devices of other speeds. Four ways to compute the middle stage: the fast device alone, one of half its
speed alone, both with equal parts of each microbatch, and both with 2:1. The bound is the middle stage alone: rows of
the slower member x its time.

    python benchmarks/bench_shared_stage.py [--repeats R] [--row-ms MS] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dips.planner.run.links import parse_cells
from dips.planner.run.share import StageHelper, StageShare
from dips.planner.run.step import PlannedPipeline
from dips.planner.schedules.fixed import one_f_one_b, zb_h1

CPU = torch.device("cpu")
WIDTH, MICROBATCHES, ROWS = 16, 6, 6
MIDDLE, HELPER, N_RANKS = 1, 3, 4
ORDERS = {"1f1b": one_f_one_b, "zb_h1": zb_h1}
WAYS: dict[str, tuple[tuple[int, int] | None, float]] = {
    "fast alone": (None, 1.0),
    "slow alone": (None, 2.0),
    "both, 1:1": ((1, 1), 1.0),
    "both, 2:1": ((2, 1), 1.0),
}
"""Parts of the leader and the helper; time of a row on the leader, in that on a fast device. The helper's is 2."""


class Waits(torch.autograd.Function):
    """Takes a time for each row, and the same twice in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_s: float) -> torch.Tensor:
        ctx.row_s = row_s
        time.sleep(row_s * len(x))
        return x.clone()  # torch cannot split the backward pass of a stage that returns a view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.row_s * len(gradient))
        return gradient, None


class Stage(nn.Module):
    """A small stage on a device with this speed."""

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self.linear, self._row_s = nn.Linear(WIDTH, WIDTH), row_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = Waits.apply(self.linear(x), self._row_s)  # type: ignore[no-untyped-call]
        return waited


def times_of_rank(rank: int, folder: Path, repeats: int, row_s: float) -> dict[str, list[float]]:
    """Iterations of each order and way, by the clock of this rank; the first of each is not counted."""
    store = dist.FileStore(str(folder / "store"), N_RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    pipeline_group, members = dist.new_group([0, 1, 2]), dist.new_group([MIDDLE, HELPER])
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    found = {}
    for order, make in ORDERS.items():
        cells = parse_cells(make(3, MICROBATCHES).to_csv(), order)
        for way, (parts, slowness) in WAYS.items():
            middle = row_s * (2.0 if rank == HELPER else slowness)
            stage = Stage(middle if rank in (MIDDLE, HELPER) else row_s / 2)
            share = StageShare(members, parts) if parts and rank in (MIDDLE, HELPER) else None
            if rank == HELPER:
                step: Callable[[], object] = StageHelper(stage, MIDDLE, share, CPU).step if share else _nothing
            else:
                shares = {MIDDLE: share} if share else None
                loss = nn.functional.mse_loss
                pipeline = PlannedPipeline(cells, {rank: stage}, loss, CPU, pipeline_group, shares=shares)
                step = partial(pipeline.step, batch, batch)
            found[f"{order}, {way}"] = [_timed(step) for _ in range(repeats + 1)][1:]
    dist.destroy_process_group()
    return found


def _nothing() -> None:
    """A helper that no one asks."""


def _timed(step: Callable[[], object]) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began_s


def bound_s(way: str, row_s: float) -> float:
    """The time of the middle stage alone."""
    parts, slowness = WAYS[way]
    leader, helper = parts or (1, 0)
    whole = leader + helper
    return 3 * MICROBATCHES * max(ROWS * leader / whole * slowness, ROWS * helper / whole * 2.0) * row_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed iterations (default 5)")
    parser.add_argument("--row-ms", type=float, default=5.0, help="forward pass of a row, fast device (default 5)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats = 2
    if arguments.rank is not None:
        times = times_of_rank(arguments.rank, arguments.folder, arguments.repeats, arguments.row_ms / 1e3)
        print(json.dumps(times))
        return
    numbers = [f"--repeats={arguments.repeats}", f"--row-ms={arguments.row_ms}"]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *numbers, f"--folder={folder}", f"--rank={rank}"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(N_RANKS)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(1)
    rows = []
    for name, times in json.loads(said[0]).items():
        bound = bound_s(name.partition(", ")[2], arguments.row_ms / 1e3)
        rows.append({"name": name, "median_s": statistics.median(times), "bound_s": bound})
    found = {"cpus": os.cpu_count(), "load_1min": os.getloadavg()[0], "rows": rows}
    print(json.dumps(found) if arguments.json else _table(found))


def _table(found: dict[str, Any]) -> str:
    head = f"{found['cpus']} processors, load {found['load_1min']:.1f}\n{'':<24}{'iteration':>12}{'bound':>12}"
    rows = (f"{row['name']:<24}{row['median_s']:>10.3f} s{row['bound_s']:>10.3f} s" for row in found["rows"])
    return "\n".join((head, *rows))


if __name__ == "__main__":
    main()
