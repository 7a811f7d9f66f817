"""Each tracker itself: `dips track` is killed and started again, and each round is there once."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.dips_command import ROOT, dips, environment
from support.tracked_tape import TrackedTape
from support.waiting import until

from dips.local.tracking import wandb_points

Rows = list[tuple[int, float]]
"""Steps, and the loss of each."""


def of_tensorboard(folder: Path) -> Rows:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(folder.rglob("events.out.tfevents.*"))
    events = [event for path in files for event in EventFileLoader(str(path)).Load()]
    return [(e.step, v.tensor.float_val[0]) for e in events for v in e.summary.value if v.tag == "loss"]


def of_database(name: str, query: str) -> Callable[[Path], Rows]:
    """The tracker's own package would make the tables, beside the process that makes them."""

    def read(folder: Path) -> Rows:
        if not (folder / name).exists():
            return []
        with closing(sqlite3.connect(folder / name)) as database:
            try:
                return database.execute(query).fetchall()
            except sqlite3.OperationalError:  # no such table yet
                return []

    return read


def of_wandb(folder: Path) -> Rows:
    return [(step, values["loss"]) for path in folder.rglob("*.wandb") for step, values in wandb_points(path)]


def living(mark: str) -> list[str]:
    """Processes that were started with this text in their environment, trackers' own ones as well."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return found


MLFLOW = "select step, value from metrics where key = 'loss'"
TRACKIO = "select step, json_extract(metrics, '$.loss') from metrics"


@pytest.mark.parametrize(
    ("to", "read"),
    [
        ("tensorboard", of_tensorboard),
        ("mlflow", of_database("mlflow.db", MLFLOW)),
        ("trackio", of_database("curves.db", TRACKIO)),
        ("wandb", of_wandb),
    ],
)
def test_each_round_is_there_once_after_a_kill(tmp_path: Path, to: str, read: Callable[[Path], Rows]) -> None:
    tape, folder, log = TrackedTape(tmp_path), tmp_path / "kept", tmp_path / "first.log"
    command = ("track", tmp_path, "--to", to, "--dir", folder, "--project", "curves")
    quiet = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
    tape.rounds(0, 99)
    words, env = [sys.executable, "-m", "dips.cli", *map(str, command)], environment({**quiet, "MARK": str(tmp_path)})
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out, env=env, cwd=ROOT) as first:
        try:
            until(lambda: len(read(folder)) >= 10 or first.poll() is not None, "the first points", log)
        finally:
            first.kill()
    until(lambda: not living(f"MARK={tmp_path}"), "the end of it and of what it started", log)
    tape.rounds(100, 104)
    tape.end()
    done = dips(*command, **quiet)
    assert done.returncode == 0, done.stderr
    rows = sorted(read(folder))
    assert [step for step, _ in rows] == list(range(105))
    assert [loss for _, loss in rows] == pytest.approx([1 / (v + 1) for v in range(105)], rel=1e-6)
