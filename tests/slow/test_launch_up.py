"""`dips up` and a person's own loop: whole runs, to their end."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.dips_command import children, dips, dips_started, end_at_a_limit, ended
from support.waiting import until

from dips.local.log_files import heldout_losses, tape_path

TEXT = Path(asyncio.__file__).parent
SLAVE = '[slave]\nmemory_bytes = "64 MiB"\n'


def write(folder: Path, text: str, slaves: int = 1, evaluate: bool = False) -> Path:
    file = folder / "run.toml"
    head = (
        f'[run]\nid = "mine"\ndirectory = "{folder / "run"}"\nslaves = {slaves}\nevaluate = {str(evaluate).lower()}\n'
    )
    file.write_text(head + SLAVE + text)
    return file


def scraped(run_dir: Path, name: str) -> dict[str, float]:
    """What Prometheus would hear of a process, whose address it reads in the run's directory; {} while it is not up."""
    try:
        [target] = json.loads((run_dir / "metrics" / f"{name}.json").read_text())
        labels = {"run": "mine", "role": "evaluator", "name": name, "instance": f"mine/{name}"}
        assert target["labels"] == labels
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, json.JSONDecodeError):  # the file is written in place, and Prometheus reads it again, too
        return {}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_up_runs_clusters_evaluates_ends_and_is_not_begun_twice(tmp_path: Path) -> None:
    text = (
        '[master]\nsync_every = 8\npreset = "steady"\nmin_clusters = 2\n'
        f'[train]\nlog_every_steps = 4\ndata = ["{TEXT}"]\nheldout_fraction = 0.2\n'
        '[[clusters]]\nid = "a"\n[[clusters]]\nid = "b"\ngap = 0.3\n'
    )
    file = write(tmp_path, text, slaves=2, evaluate=True)
    assert dips("up", file, "--check").returncode == 0
    assert not (tmp_path / "run").exists()
    log = tmp_path / "up.log"
    with dips_started("up", file, "--metrics", log=log) as up:
        until(lambda: len(children(up.pid)) == 6, "master, two slaves, two clusters, evaluator", log)
        until(lambda: "dips_worker_heldout_loss" in scraped(tmp_path / "run", "heldout"), "a measured loss", log)
        tape = tape_path(tmp_path / "run", "heldout")
        # A model that knows nothing of bytes has ln 256 = 5.5.
        until(lambda: any(point.loss < 5.0 for point in heldout_losses(tape)), "a model that has learned", log)
        end_at_a_limit(tmp_path / "run")
        assert ended(up, log) == 0, log.read_text()
    again = dips("up", file)
    assert again.returncode == 2
    assert "has ended after" in again.stderr


def test_a_run_that_its_clusters_left_goes_on_and_a_stopped_one_only_when_that_is_asked_for(tmp_path: Path) -> None:
    may_end = tmp_path / "may-end"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.1)"
    command = json.dumps([sys.executable, "-c", code])
    file = write(tmp_path, f'[[clusters]]\nid = "x"\ncommand = {command}\n')
    log = tmp_path / "up.log"
    with dips_started("up", file, log=log) as up:
        until(lambda: "x: start 1" in log.read_text(), "the cluster", log)
        asked = dips("stop", tmp_path / "run")
        assert asked.returncode == 0, asked.stderr
        may_end.touch()
        assert ended(up, log) == 0, log.read_text()
    assert "run mine ended before its first version" in log.read_text()
    refused = dips("up", file)
    assert refused.returncode == 2
    assert "give `dips up` --extend to continue it" in refused.stderr
    for options in (("--extend",), ()):
        left = dips("up", file, *options)
        assert left.returncode == 0, left.stderr
        assert f"`dips up {file}` continues it" in left.stdout
