"""What a checkpoint costs: the pause of the training thread, and the background write against a plain one.

The training thread copies parameters, base and the optimizer's moments into memory that is used again and again; the
first copy also allocates it, so it is shown apart. The floor of the pause is one copy of as many bytes. The writer
hashes, writes and flushes; its floor is a plain write and flush of as many bytes to the same directory. Floors and
measurements alternate, since both depend on who else uses memory and disk; nothing here judges a number.

    python benchmarks/bench_checkpoint.py [--megabytes N ...] [--repeats R] [--directory DIR] [--quick]
        [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dips.core.clock import SystemClock
from dips.core.ids import Incarnation, Version
from dips.core.observe.tape import Tape, read_tape
from dips.worker.checkpoint import Checkpointing
from dips.worker.checkpoint_files import CheckpointStore
from dips.worker.config import ClientConfig
from dips.worker.parallel.rank_state import TorchState
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.saved import SavedSession
from dips.worker.torch_model import TorchParameters
from dips.worker.vectors import Vectors

BYTES_PER_PARAMETER = 16
"""theta, theta_base and AdamW's two moments; theta_at_push (4 more) only while a push is undecided."""


@dataclass(frozen=True)
class Result:
    """Times are medians, seconds; spread: (slowest - fastest) / median of the pauses after the first."""

    n_bytes: int
    first_pause_s: float
    pause_s: float
    pause_spread: float
    copy_s: float
    write_s: float
    plain_write_s: float
    write_bytes_per_s: float
    ratio_to_plain_write: float


class _Standing:
    """A session that stands on a new version each time, so that theta_base is copied as after a pull."""

    def __init__(self, layout_hash: bytes) -> None:
        self._layout_hash = layout_hash
        self._v = 0

    def saved(self) -> SavedSession:
        self._v += 1
        return SavedSession("bench", "a", self._layout_hash, b"", Incarnation(1, 1), 1, Version(1, self._v), 0)


def measure(n_bytes: int, repeats: int, directory: Path) -> Result:
    """Checkpoints of about n_bytes, one after the other."""
    model = torch.nn.Linear(max(1, n_bytes // BYTES_PER_PARAMETER // 1024), 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    parameters = TorchParameters(model, optimizer)
    vectors, clock = Vectors(parameters.layout().n_elems), SystemClock()
    vectors.snapshot(parameters)
    config = ClientConfig(checkpoint_dir=directory / "checkpoints", checkpoint_every_s=0.0)
    session = cast(ClusterMachine, _Standing(parameters.layout().layout_hash))
    tape, floors = directory / "tape", []
    with Tape(tape, "bench", "a") as records:
        store = CheckpointStore(directory / "checkpoints", config.checkpoints_kept)
        checkpoints = Checkpointing(config, store, parameters, vectors, TorchState(model, optimizer), clock)
        checkpoints.begin(lambda event: None, records)
        for n in range(repeats + 1):
            checkpoints.take_if_due(session, "bench")
            while len(_checkpoints(tape)) <= n:
                time.sleep(0.002)
            floors.append(_floors(_checkpoints(tape)[-1]["bytes"], directory))
        checkpoints.close()
    return _result(_checkpoints(tape), floors[1:])


def _checkpoints(tape: Path) -> list[dict[str, Any]]:
    return [record for record in read_tape(tape) if record["kind"] == "checkpoint"]


def _floors(n_bytes: int, directory: Path) -> tuple[float, float]:
    """Seconds of one copy, and of one plain write and flush, of as many bytes."""
    one, two = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
    began_s = time.perf_counter()
    np.copyto(two, one)
    copied_s = time.perf_counter()
    with (directory / "plain").open("wb", buffering=0) as file:
        rest = two.data
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return copied_s - began_s, time.perf_counter() - copied_s


def _result(records: list[dict[str, Any]], floors: list[tuple[float, float]]) -> Result:
    pauses = [record["pause_s"] for record in records[1:]]
    n_bytes, pause_s = records[-1]["bytes"], statistics.median(pauses)
    write_s = statistics.median(record["write_s"] for record in records[1:])
    copy_s, plain_s = (statistics.median(times) for times in zip(*floors, strict=True))
    spread = (max(pauses) - min(pauses)) / pause_s
    return Result(
        n_bytes, records[0]["pause_s"], pause_s, spread, copy_s, write_s, plain_s, n_bytes / write_s, plain_s / write_s
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 160], help="sizes of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.repeats = [4], 2
    torch.set_num_threads(1)
    results = []
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            results.append(measure(megabytes * 1_000_000, arguments.repeats, Path(folder)))
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
        return 0
    print(" bytes      pause (first)  copy      write     plain     bytes/s   write against plain")
    for r in results:
        pause = f"{1e3 * r.pause_s:7.1f} ({1e3 * r.first_pause_s:.1f}) ms {1e3 * r.copy_s:6.1f} ms"
        write = f"{1e3 * r.write_s:7.0f} ms {1e3 * r.plain_write_s:6.0f} ms {r.write_bytes_per_s / 1e6:7.0f} MB/s"
        print(f"{r.n_bytes / 1e6:6.0f} MB {pause} {write}   {r.ratio_to_plain_write:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
