"""Pushes and pulls in fewer bits through real processes: all bits are the reference's, also after a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.diloco import diloco, trained
from support.trainer_run import records
from support.waiting import until
from support.whole_run import F32, LAYOUT, LEASED, NumpyCluster, WholeRun

from dips.core.math import wire_numpy as reference
from dips.core.net.security import INSECURE
from dips.core.wire import RESIDUAL_CODEC, WIRE_DTYPES, Codec, encoded_bytes
from dips.judge.verify import verify_run
from dips.worker.reader import fetch_version
from dips.worker.vectors import chunk_spans

ROUNDS = 4
SPANS = chunk_spans(LAYOUT, 1 << 20)


class Sender:
    """What slaves make of a cluster's pushes, computed with the reference."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residual: F32 = np.zeros(LAYOUT.n_elems, np.float32)

    def landed(self, now: F32, base: F32) -> F32:
        """The push as float32; its residual advances."""
        if self.codec is Codec.F32:
            return now
        out = np.empty_like(now)
        for start, stop in SPANS:
            here = slice(start, stop)
            payload = np.empty(encoded_bytes(self.codec, stop - start), np.uint8)
            reference.encode(self.codec, now[here], base[here], self.residual[here], payload)
            reference.decode(self.codec, base[here], payload, out[here])
            reference.keep_residual(self.codec, now[here], base[here], self.residual[here])
        return out


class Publisher:
    """What slaves publish of each version, computed with the reference."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lost = [np.zeros(encoded_bytes(RESIDUAL_CODEC, stop - start), np.uint8) for start, stop in SPANS]

    def published(self, now: F32, base: F32) -> F32:
        """The version that follows `base`, of which a step gives `now`; the residual advances."""
        out = now.copy()
        for index, (start, stop) in enumerate(SPANS):
            payload = np.empty(encoded_bytes(self._codec, stop - start), np.uint8)
            lost = np.empty_like(self._lost[index])
            reference.publish(self._codec, out[start:stop], base[start:stop], self._lost[index], payload, lost)
            self._lost[index] = lost
        return out


def wires(cluster: NumpyCluster, directory: Path, kind: str) -> list[str]:
    """How it sent its pushes ("push_sent") or fetched its versions ("installed"), from its tape."""
    return [record["wire"] for record in records(directory / f"{cluster.name}.jsonl", kind)]


@pytest.mark.parametrize(
    ("of_a", "of_b", "pull_wire"),
    [("bfloat16", "bfloat16", "bfloat16"), ("int8", "float32", "int8"), ("int4", "int8", "int4")],
)
def test_rounds_equal_the_reference_to_the_last_bit(of_a: str, of_b: str, pull_wire: str, tmp_path: Path) -> None:
    """Clusters of one run choose each for itself how they push."""
    with WholeRun(tmp_path, min_clusters=2, clip_norm=1e6, pull_wire=pull_wire) as run:
        clusters = []
        for seed, wire_dtype in enumerate((of_a, of_b), start=1):
            run.client["wire_dtype"] = wire_dtype
            clusters.append(run.cluster("ab"[seed - 1], seed))
        run.wait_for_version(ROUNDS)
        run.stop(*clusters)
    theta, momentum = clusters[0].model.installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    pushes, publisher = [trained(cluster) for cluster in clusters], Publisher(WIRE_DTYPES[pull_wire])
    senders = [Sender(WIRE_DTYPES[wire]) for wire in (of_a, of_b)]
    for n in range(ROUNDS):
        landed = [sender.landed(pushed[n], theta) for sender, pushed in zip(senders, pushes, strict=True)]
        assert not np.array_equal(landed[0], pushes[0][n]), "rounding left something"
        stepped, momentum = diloco(theta, momentum, landed)
        theta = publisher.published(stepped, theta)
        assert not np.array_equal(theta, stepped), "rounding left something"
        for cluster in clusters:
            assert np.array_equal(theta, cluster.model.installed[n + 1]), f"cluster {cluster.name}, round {n + 1}"
    for cluster, wire in zip(clusters, (of_a, of_b), strict=True):
        sent = wires(cluster, tmp_path, "push_sent")
        assert set(sent) - {"F32"} == {WIRE_DTYPES[wire].name} - {"F32"}, "a seed has full width"
        ways = [Codec.F32.name] + [WIRE_DTYPES[pull_wire].name] * ROUNDS
        assert wires(cluster, tmp_path, "installed")[: ROUNDS + 1] == ways


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
