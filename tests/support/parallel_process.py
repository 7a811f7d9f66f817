"""One rank of a cluster of any parallelism (support.parallel_models), as a child of support.fork_server or alone:

    python -m support.parallel_process KIND RANK FOLDER [options]

Options say what it does. Its record of the steps goes to FOLDER/rank-N.pt, a byte for each step that it
begins to FOLDER/steps-N, and it ends with the exit code of the error
that ended it. The environment names the run, as for every training program.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import parallel_models
from support.parallel_models import COORDINATES, Part, part_of, ranks_of
from support.waiting import until

import dips
from dips.core.errors import DipsError
from dips.core.observe.logs import configure_logging

TOKENS = 16
"""Of one step of a whole cluster."""


class Record:
    """What the full tensors of this rank's parameters were, by torch's own means, after each training step (`trained`)
    and after what dips.DiLoCo did then (`synced`, which begins with what they were as the loop was entered).
    """

    def __init__(self, part: Part, *, empty: bool = False) -> None:
        """empty: notes nothing, since that takes collectives of torch's own."""
        self._part = part
        self._empty = empty
        self.trained: list[dict[str, torch.Tensor]] = []
        self.synced: list[dict[str, torch.Tensor]] = []
        self.news: dict[str, object] = {}

    def note_trained(self) -> None:
        if not self._empty:
            self.trained.append(self._part.full_tensors())

    def note_synced(self) -> None:
        if not self._empty:
            self.synced.append(self._part.full_tensors())

    def save(self, path: Path) -> None:
        """With what the full tensors are now, in any case."""
        made = {"trained": self.trained, "synced": self.synced, "news": self.news, "last": [self._part.full_tensors()]}
        torch.save(made, path)


def wait_for(path: Path) -> None:
    until(path.exists, f"the test makes {path.name}")


def train(part: Part, record: Record, told: argparse.Namespace) -> None:
    optimizers = part.optimizers(told.number)
    optimizers[-1].after_update = record.note_trained
    for optimizer in optimizers:
        optimizer.spoiled_step = told.spoil
    part.evaluate()
    models: Any = part.wrapped if len(part.wrapped) > 1 else part.wrapped[0]
    given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
    tokens = TOKENS // COORDINATES.get(told.kind, 1)
    ranks = dips.Parallel(**part.arguments)
    with (
        (told.folder / f"steps-{told.rank}").open("wb", buffering=0) as steps_made,
        dips.DiLoCo(models, given, tokens_per_step=tokens, steps=told.steps, parallel=ranks) as sync,
    ):
        record.note_synced()
        (told.folder / f"entered-{told.rank}").touch()
        if told.gate:
            wait_for(told.gate)
        while not sync.done:
            part.evaluate()
            steps_made.write(b".")
            for optimizer in optimizers:
                optimizer.step()
            record.note_synced()
            time.sleep(told.step_s)
        record.news = {
            "steps": sync.steps, "version": str(sync.version), "progress": sync.progress, "ended": sync.run_ended,
            "resets": sum(optimizer.resets for optimizer in optimizers) / len(optimizers),
        }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(parallel_models.KINDS))
    parser.add_argument("rank", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=0, help="of the cluster, for the rule")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--gate", type=Path, help="wait for this file before the first step")
    parser.add_argument("--unrecorded", action="store_true", help="note no parameters")
    parser.add_argument("--spoil", type=int, default=0, help="the step that makes an element NaN")
    told = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    torch.set_num_threads(1)
    configure_logging("worker", f"{told.kind}-{told.rank}")
    n_ranks = ranks_of(told.kind)
    in_a_world = not told.kind.startswith("one")
    if in_a_world:
        store = f"file://{told.folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=told.rank, world_size=n_ranks)
    part = part_of(told.kind)
    record = Record(part, empty=told.unrecorded)
    try:
        train(part, record, told)
        record.save(told.folder / f"rank-{told.rank}.pt")
    except DipsError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    if in_a_world:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main(sys.argv[1:]))
