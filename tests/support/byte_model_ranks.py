"""The byte model trained by one process or several ranks: its losses alone, and after a kill and a resumption."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.trainer_run import TRAIN, Processes

WIDE = TRAIN.model_copy(update={"model_size": "wide", "warmup_tokens": 1000, "log_every_steps": 1})
STEPS = 8
ROUNDING = 1e-4
"""Of a loss after some steps, whose sums are made in another order."""


def start_alone(processes: Processes, parallel: str = "", **changes: object) -> str:
    train = WIDE.model_copy(update={"parallel": parallel, "steps": STEPS, "chunk_tokens": 1000, **changes})
    name = parallel or "one"
    processes.start_train(name, train)
    return name


def losses(processes: Processes, name: str) -> list[float]:
    assert processes.exit_code(name) == 0, processes.log(name)[-3000:]
    (heldout,) = processes.records(name, "heldout")
    return [record["loss"] for record in (*processes.records(name, "step"), heldout)]


def losses_of_one(folder: Path, **changes: object) -> list[float]:
    """Of one process, which the ranks of every kind are compared with; its files are in `folder`."""
    with Processes(folder) as processes:
        found = losses(processes, start_alone(processes, "", **changes))
    assert len(found) == STEPS + 1
    return found


LAST = 4
NO_MORE = f"worker.checkpoint.before_manifest={LAST}*off->error(enough of them)"
"""So many checkpoints are written, and all later ones fail: it is known from which one the next life goes on."""

NO_MERGE = ("slaves=1", "min_clusters=1", "sync_every=5000")
"""Settings of a master with so many steps in a round that nothing is merged in these runs."""


def check_resumption(
    processes: Processes, address: str, folder: Path, before: str, after: str, *, rounding: float = ROUNDING,
    **changes: object,
) -> None:  # fmt: skip
    """Ranks of kind `before` are killed, and those of kind `after` make the same steps again, and go on."""
    processes.start_slaves(address, ["s0"])
    _start(processes, address, folder, before, changes)
    processes.until("a", lambda: len(processes.records("a", "checkpoint")) == LAST)
    made = len(processes.records("a", "step"))
    processes.until("a", lambda: len(processes.records("a", "step")) >= made + 20)
    processes.until("a", lambda: "enough of them" in processes.log("a"))  # a checkpoint that fails is said
    kill_ranks(processes)
    first = _lives(processes)[0]

    _start(processes, address, folder, after, changes)
    processes.until("a", lambda: len(_lives(processes)) == 2 and max(_lives(processes)[1], default=0) > max(first))
    kill_ranks(processes)
    second = _lives(processes)[1]
    again = sorted(set(first) & set(second))[:20]  # rounding grows with the steps, of which a fast machine makes many
    assert len(again) >= 10
    assert min(second) > 1, "it went on, and did not begin again"
    assert [second[step] for step in again] == pytest.approx([first[step] for step in again], rel=rounding)
    assert max(first) + 1 in second, "and goes on beyond"
    (resumed,) = processes.records("a", "resumed")
    assert resumed["number"] == LAST


def _start(processes: Processes, address: str, folder: Path, kind: str, changes: Mapping[str, object]) -> None:
    client = ["--checkpoint-dir", str(folder / "a"), "--checkpoint-every-s", "0", "--resume"]
    failpoints = {"DIPS_FAILPOINTS": NO_MORE, "DIPS_FAILPOINTS_ENABLED": "1"}
    processes.start_cluster(address, "a", WIDE.model_copy(update={"parallel": kind, **changes}), client, **failpoints)


def kill_ranks(processes: Processes) -> None:
    """With SIGKILL, of cluster a: torchrun, if it was started with that, and its ranks; else its process."""
    ranks = processes.ranks("a")
    processes.kill("a")
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)


def _lives(processes: Processes) -> list[dict[int, float]]:
    records = [*processes.records("a", "step"), *processes.records("a", "joined")]
    made: list[dict[int, float]] = []
    for record in sorted(records, key=lambda record: record["wall_s"]):
        if record["kind"] == "joined":
            made.append({})
        else:
            made[-1][record["steps"]] = record["loss"]
    return made
