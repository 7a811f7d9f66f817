"""The examples of docs/integrations.md as a person starts them: two clusters, a run, and the folder that it gives."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.dips_command import ROOT, dips, ended, operator_of, pid_of, started
from support.waiting import until

from dips.local.operator_client import OperatorClient


def run_directory(folder: Path) -> Path | None:
    return next(iter((folder / "runs").glob("*/")), None) if (folder / "runs").is_dir() else None


def assert_it_passed(said: str) -> None:
    """Losses fell (the example checks it), and the opened folder has the very loss that the clusters ended with."""
    told = re.search(r"held-out loss: ([\d.]+) in cluster a, ([\d.]+) in b, ([\d.]+) in runs/\S+/model", said)
    assert told, said[-3000:]
    losses = [float(loss) for loss in told.groups()]
    assert losses == [pytest.approx(losses[0], abs=1e-5)] * 3
    assert losses[0] < 3.5, "a model that has learned nothing has 5.5 nats per byte"


def test_lightning(tmp_path: Path) -> None:
    log = tmp_path / "example.log"
    with started(sys.executable, ROOT / "examples" / "lightning_loop.py", log=log, cwd=tmp_path) as example:
        assert ended(example, log) == 0, log.read_text()[-3000:]
    assert_it_passed(log.read_text())


def test_hugging_face_with_a_cluster_that_is_killed_and_an_export_on_the_way(tmp_path: Path) -> None:
    log = tmp_path / "example.log"
    with started(sys.executable, ROOT / "examples" / "hf_trainer.py", log=log, cwd=tmp_path) as example:
        until(lambda: saved(tmp_path) or example.poll() is not None, "a checkpoint", log)
        run = run_directory(tmp_path)
        assert run is not None
        with operator_of(run) as master:
            master.pause("a cluster is killed")  # so that the others do not end the run before it is back
            os.kill(pid_of(run, "a"), signal.SIGKILL)
            live = dips("export", run, "--to", tmp_path / "live", "--json")
            assert live.returncode == 0, live.stderr
            until(lambda: lives(master, "a") > 1, "a's next life has joined", log)
            master.resume("it is back")
        assert ended(example, log) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert_it_passed(said)
    assert "a: start 2" in said
    told, last = json.loads(live.stdout), json.loads((run / "model" / "dips_version.json").read_text())
    assert told["version"] < int(last["version"].partition(":")[2])
    assert json.loads((tmp_path / "live" / "config.json").read_text())["model_type"] == "llama"
    assert "resumed from checkpoint" in (run / "logs" / "a.log").read_text()
    verified = dips("verify", run)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def saved(folder: Path) -> bool:
    """Both clusters have a checkpoint that is whole."""
    run = run_directory(folder)
    made = {path.parts[-3] for path in run.glob("trainers/*/checkpoint-*/trainer_state.json")} if run else set()
    return made == {"a", "b"}


def lives(master: OperatorClient, name: str) -> int:
    """The number of the cluster's incarnation."""
    incarnation = next(cluster.incarnation for cluster in master.status().clusters if cluster.cluster_id == name)
    assert incarnation is not None
    return incarnation.n
