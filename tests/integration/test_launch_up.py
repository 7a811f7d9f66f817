"""`dips up` and a person's own loop: whole runs, to their end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file
from support.dips_command import ROOT, children, dips, dips_started, ended, environment, master_file, started, until

from dips.launch.tapes import heldout_losses, tape_path

OWN_LOOP = ROOT / "examples" / "own_loop.py"
TEXT = Path(asyncio.__file__).parent
SLAVE = '[slave]\nmemory_bytes = "64 MiB"\n'


def write(folder: Path, text: str, slaves: int = 1, evaluate: bool = False, keys_for: Sequence[str] = ()) -> Path:
    file = folder / "run.toml"
    head = (
        f'[run]\nid = "mine"\ndirectory = "{folder / "run"}"\nslaves = {slaves}\nevaluate = {str(evaluate).lower()}\n'
        f"keys_for = {json.dumps(keys_for)}\n"
    )
    file.write_text(head + SLAVE + text)
    return file


def scraped(run_dir: Path, name: str) -> dict[str, float]:
    """What Prometheus would hear of a process, whose address it reads in the run's directory; {} while it is not up."""
    try:
        [target] = json.loads((run_dir / "metrics" / f"{name}.json").read_text())
        assert target["labels"] == {"run": "mine", "role": "evaluator", "name": name}
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, json.JSONDecodeError):  # the file is written in place, and Prometheus reads it again, too
        return {}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_example_is_short() -> None:
    assert len(OWN_LOOP.read_text().splitlines()) <= 60


def test_own_loop_without_a_master_is_ordinary_training(tmp_path: Path) -> None:
    log = tmp_path / "loop.log"
    with started(sys.executable, OWN_LOOP, log=log, cwd=tmp_path) as loop:
        assert ended(loop, 100, log) == 0
    losses = [
        float(line.partition("loss ")[2].partition(",")[0]) for line in log.read_text().splitlines() if "loss" in line
    ]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.3  # unseeded: it falls by 1.0 give or take 0.1
    assert list(tmp_path.iterdir()) == [log]


def test_own_loop_as_two_clusters_while_master_and_slave_get_sigterm(tmp_path: Path) -> None:
    text = '[master]\nsync_every = 8\nmin_clusters = 2\ntk_max = "200k"\n'
    file = write(tmp_path, text, keys_for=("a", "b"))
    log, run_dir = tmp_path / "up.log", tmp_path / "run"
    logs = {name: tmp_path / f"{name}.log" for name in "ab"}
    with dips_started("up", file, log=log) as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log=log)
        there = {"DIPS_MASTER": master_file(run_dir)["address"]}
        of = {name: {**there, "DIPS_CLUSTER": name, "DIPS_KEYS": str(run_dir / "keys" / name)} for name in "ab"}
        with (
            started(sys.executable, OWN_LOOP, log=logs["a"], cwd=tmp_path, **of["a"]) as a,
            started(sys.executable, OWN_LOOP, log=logs["b"], cwd=tmp_path, **of["b"]) as b,
        ):
            until(lambda: "version 1:" in logs["a"].read_text(), "a version", log=logs["a"])
            for name in ("s0", "master"):  # not sent by their supervisor: it starts them again
                os.kill(int(re.findall(rf"{name}: life 1, pid ([0-9]+)", log.read_text())[0]), signal.SIGTERM)
            assert ended(a, 100, logs["a"]) == 0
            assert ended(b, 100, logs["b"]) == 0
        assert ended(up, 60, log) == 0, log.read_text()
    assert log.read_text().count("was ended by SIGTERM (exit code 143), is started again") == 2
    for name in "ab":
        assert "the run has ended" in logs[name].read_text()
        assert "version 1:" in logs[name].read_text()
    assert "DIPS_CLUSTER=a DIPS_KEYS=" in log.read_text()
    told = dips("export", tmp_path / "m.safetensors", "--run-dir", run_dir, "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["tokens"] >= 200_000
    assert load_file(tmp_path / "m.safetensors")["embedding.weight"].shape == (256, 64)


def test_up_runs_clusters_evaluates_ends_and_is_not_begun_twice(tmp_path: Path) -> None:
    text = (
        '[master]\nsync_every = 8\npreset = "dynamic"\nmin_clusters = 2\ntk_max = "150k"\n'
        f'[train]\nlog_every_steps = 4\ndata = ["{TEXT}"]\nheldout_fraction = 0.2\n'
        '[[clusters]]\nid = "a"\n[[clusters]]\nid = "b"\ngap = 0.3\n'
    )
    file = write(tmp_path, text, slaves=2, evaluate=True)
    assert dips("up", file, "--check").returncode == 0
    assert not (tmp_path / "run").exists()
    log = tmp_path / "up.log"
    with dips_started("up", file, "--metrics", log=log) as up:
        until(lambda: len(children(up.pid)) == 6, "master, two slaves, two clusters, evaluator", log=log)
        until(lambda: "dips_worker_heldout_loss" in scraped(tmp_path / "run", "heldout"), "a measured loss", log=log)
        assert ended(up, 110, log) == 0, log.read_text()
    points = heldout_losses(tape_path(tmp_path / "run", "heldout"))
    assert points[-1].tokens >= 150_000
    assert points[-1].loss < 5.0, "a model that knows nothing of bytes has ln 256 = 5.5"
    again = dips("up", file)
    assert again.returncode == 2
    assert "has ended after" in again.stderr


def test_a_data_path_that_does_not_exist_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    text = '[train]\ndata = ["/nowhere/at/all"]\n[[clusters]]\nid = "a"\n'
    told = dips("up", write(tmp_path, text))
    assert told.returncode == 2
    assert "a refused its configuration" in told.stderr
    assert "/nowhere/at/all" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_cluster_command_of_ones_own_is_told_where_the_run_is(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    code = (
        "import json, os, pathlib; found = {k: v for k, v in os.environ.items() if k.startswith('DIPS_')}; "
        f"pathlib.Path({str(seen)!r}).write_text(json.dumps(found))"
    )
    command = json.dumps([sys.executable, "-c", code])
    told = dips("up", write(tmp_path, f'[[clusters]]\nid = "x"\ncommand = {command}\n'))
    assert told.returncode == 0, told.stderr  # the only cluster has ended, so the run is stopped
    found = json.loads(seen.read_text())
    assert (found["DIPS_CLUSTER"], found["DIPS_RUN"]) == ("x", "mine")
    assert found["DIPS_MASTER"].startswith("127.0.0.1:")
    assert found["DIPS_KEYS"] == str(tmp_path / "run" / "keys" / "x")


@pytest.mark.parametrize("variable", ["DIPS_MASTER", "DIPS_RUN", "DIPS_KEYS", "DIPS_INSECURE"])
def test_tests_do_not_inherit_a_run_of_the_person_who_runs_them(variable: str) -> None:
    assert variable not in environment()
