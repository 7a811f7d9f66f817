"""`dips demo --parallel`: four clusters with four parallelisms, of which one of two ranks is killed, and a replay."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.dips_command import dips

from dips.local.log_files import tape_path, training_losses

TEXT = Path(asyncio.__file__).parent


@pytest.mark.long
def test_clusters_of_four_parallelisms_train_one_model_through_kills(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Long enough for two ranks that are killed after a third of it to start again on a busy machine.
    told = dips("demo", "--parallel", "--run-dir", run, "--minutes", 1.2, "--data", TEXT, "--json")
    assert told.returncode == 0, told.stderr[-4000:]
    report = json.loads(told.stdout)
    assert set(report["checks"].values()) == {True}
    kinds = {name: cluster["parallel"] for name, cluster in report["clusters"].items()}
    assert kinds == {"a": "", "b": "fsdp=2", "c": "tensor=2", "d": "pipeline=2"}
    assert [fault["target"] for fault in report["faults"]] == ["b", "s1"]
    assert report["clusters"]["b"]["incarnations"] >= 2
    assert report["verified"]["I14"] > 0, "versions were computed again"
    losses = [loss for _, loss in report["heldout_loss"]]
    assert losses[-1] < losses[0]
    assert all(training_losses(tape_path(run, name)) for name in kinds)
    replayed = dips("verify", run, "--replay")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
