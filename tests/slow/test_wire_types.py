"""Pushes and pulls in fewer bits through real processes: all bits are the reference's, also after a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.trainer_run import records
from support.waiting import until
from support.whole_run import LEASED, NumpyCluster, WholeRun

from dips.core.net.security import INSECURE
from dips.judge.verify import verify_run
from dips.worker.reader import fetch_version


def wires(cluster: NumpyCluster, directory: Path, kind: str) -> list[str]:
    """How it sent its pushes ("push_sent") or fetched its versions ("installed"), from its tape."""
    return [record["wire"] for record in records(directory / f"{cluster.name}.jsonl", kind)]


def test_a_killed_slave_and_a_late_cluster_go_on_with_the_same_versions(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, plan=LEASED, pull_wire="int8", overlap="push")
    run.slave, run.client = {"record_pushes": True}, {"wire_dtype": "int8"}
    with run:
        clusters = [run.cluster("a", 1, step_s=0.01), run.cluster("b", 2, step_s=0.01)]
        run.wait_for_version(3)
        run.kill("s1")
        until(lambda: "s1" in run.status().waiting_slaves, "the master misses s1")
        run.start_slave("s1")
        run.wait_for_version(run.version() + 2)
        clusters.append(run.cluster("c", 3, step_s=0.01))
        until(lambda: len(clusters[-1].model.installed) >= 4, "the late cluster follows")
        run.stop(*clusters)
        status = run.status()
        assert status.tokens == sum(cluster.tokens_applied for cluster in status.clusters) > 0
        fetched = fetch_version(run.address, None, "check", INSECURE)
        for cluster in clusters:
            assert np.array_equal(fetched.flat, cluster.model.theta)
    for cluster in clusters:
        ways = wires(cluster, tmp_path, "installed")
        assert ways[0] == "F32", "it joined"
        assert ways[1:].count("INT8") >= 2
        assert "INT8" in wires(cluster, tmp_path, "push_sent")
    report = verify_run(tmp_path, replay=True)
    assert report.ok, report.violations
    assert report.replayed is not None
    assert report.replayed.versions >= 6
    assert not report.replayed.skipped
