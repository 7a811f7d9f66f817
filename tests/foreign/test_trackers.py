"""Each tracker itself: `dips track` is killed and started again, and the tracker's own reader finds each round once."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
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


def of_mlflow(folder: Path) -> Rows:
    from mlflow import MlflowClient

    try:  # MLflow itself would make the tables, beside the process that makes them
        with sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True) as database:
            if not database.execute("select 1 from metrics").fetchone():
                return []
    except sqlite3.OperationalError:
        return []
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    project = client.get_experiment_by_name("curves")
    runs = client.search_runs([project.experiment_id]) if project is not None else []
    return [
        (metric.step, metric.value) for run in runs for metric in client.get_metric_history(run.info.run_id, "loss")
    ]


def of_trackio(folder: Path) -> Rows:
    if not (folder / "curves.db").exists():
        return []
    with sqlite3.connect(folder / "curves.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    return [(step, json.loads(metrics)["loss"]) for step, metrics in rows]


def of_wandb(folder: Path) -> Rows:
    return [(step, values["loss"]) for path in folder.rglob("*.wandb") for step, values in wandb_points(path)]


@pytest.mark.parametrize(
    ("to", "read"),
    [("tensorboard", of_tensorboard), ("mlflow", of_mlflow), ("trackio", of_trackio), ("wandb", of_wandb)],
)
def test_each_round_is_there_once_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, read: Callable[[Path], Rows]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tape, folder = TrackedTape(tmp_path), tmp_path / "kept"
    command = ("track", tmp_path, "--to", to, "--dir", folder, "--project", "curves")
    tape.rounds(0, 9)
    words = [sys.executable, "-m", "dips.cli", *map(str, command)]
    log = tmp_path / "first.log"
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out, env=environment(), cwd=ROOT) as first:
        for v in range(10, 40):  # killed while it writes, with some of them there
            tape.rounds(v, v)
            time.sleep(0.05)
        until(lambda: len(read(folder)) >= 10, "the first points", log)
        first.kill()
    time.sleep(5)  # wandb's own process writes what it has
    tape.rounds(40, 44)
    tape.end()
    done = dips(*command)
    assert done.returncode == 0, done.stderr
    assert sorted(read(folder)) == [(v, pytest.approx(1 / (v + 1), rel=1e-6)) for v in range(45)]
