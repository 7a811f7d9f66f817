"""Whoever is killed while slaves are added and removed, nothing is lost, and every bit is where it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.waiting import until
from support.whole_run import LEASED, NumpyCluster, WholeRun

from dips.core.errors import RetryLater
from dips.core.net.security import INSECURE
from dips.judge.verify import verify_run
from dips.worker.reader import fetch_version


def recorded(directory: Path) -> WholeRun:
    """A run of two slaves that keep what they merge, so that it can be computed again."""
    run = WholeRun(directory, plan=LEASED)
    run.slave = {"record_pushes": True}
    return run


def placed(run: WholeRun) -> list[str]:
    """Slaves that hold blocks and are ready; none while the master does not answer."""
    try:
        return [slave.slave_id for slave in run.status().slaves if slave.phase == "READY"]
    except RetryLater:
        return []


def check_run(directory: Path, run: WholeRun, clusters: list[NumpyCluster]) -> None:
    """Tokens add up, every version is what its pushes make it, bit for bit, and clusters stand on the last one."""
    run.wait_for_version(run.version() + 2)
    run.stop(*clusters)
    status = run.status()
    assert status.tokens == sum(c.tokens_applied for c in status.clusters)
    fetched = fetch_version(run.address, None, "check", INSECURE)
    assert np.array_equal(fetched.flat, clusters[0].model.theta)
    report = verify_run(directory, replay=True)
    assert report.verdict == "ok", report.violations
    assert report.replayed is not None
    assert report.replayed.versions == 1 + status.rounds_committed + 1
    assert not report.replayed.skipped


@pytest.mark.parametrize("victim", ["master", "s1", "s2"])
def test_whoever_is_killed_while_blocks_move_the_reshard_is_done_in_the_end(tmp_path: Path, victim: str) -> None:
    with recorded(tmp_path) as run:
        clusters = [run.cluster("a", 1, step_s=0.004), run.cluster("b", 2, step_s=0.006)]
        run.wait_for_version(2)
        with run.operator() as client:
            client.reshard(("s2",), ("s0",), "test")
        run.start_slave("s2")
        until(lambda: _tape_says(tmp_path / "s2", "prepared"), "nothing moved")
        run.kill(victim)
        if victim == "master":
            run.start_master()
        else:
            run.start_slave(victim)
        until(lambda: placed(run) == ["s1", "s2"], "the RESHARD was not done")
        check_run(tmp_path, run, clusters)


def _tape_says(slave: Path, kind: str) -> bool:
    tape = slave / "tape.jsonl"
    lines = tape.read_text().splitlines() if tape.exists() else []
    return any(json.loads(line)["kind"] == kind for line in lines if line.endswith("}"))
