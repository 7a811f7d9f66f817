"""Pulls as differences through real processes: what slaves publish, and what clusters hold, is one and the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.diloco import diloco, trained
from support.dips_command import dips
from support.trainer_run import records
from support.whole_run import F32, LAYOUT, LEASED, NumpyCluster, WholeRun, wait_until

from dips.core.math import wire_numpy as reference
from dips.core.net.security import INSECURE
from dips.core.wire import RESIDUAL_CODEC, WIRE_DTYPES, Codec, encoded_bytes
from dips.judge.verify import verify_run
from dips.local.operator_client import OperatorClient
from dips.worker.reader import fetch_version
from dips.worker.vectors import chunk_spans

ROUNDS = 4
TOKENS = 10 * 4  # of one push: sync_every steps of 10 tokens
SPANS = chunk_spans(LAYOUT, 1 << 20)


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


def installs(cluster: NumpyCluster, directory: Path) -> list[str]:
    """How it fetched each version that it installed, from its tape."""
    return [record["wire"] for record in records(directory / f"{cluster.name}.jsonl", "installed")]


@pytest.mark.parametrize("pull_wire", ["bfloat16", "int8", "int4"])
def test_rounds_equal_the_reference_to_the_last_bit(pull_wire: str, tmp_path: Path) -> None:
    limit = ROUNDS * 2 * TOKENS
    with WholeRun(
        tmp_path, tk_max=limit, grace_s=20, min_clusters=2, clip_norm=1e6, pull_wire=pull_wire, preset="safe",
        overlap="none",
    ) as run:  # fmt: skip
        clusters = [run.cluster("a", 1), run.cluster("b", 2)]
        for cluster in clusters:
            cluster.join()
        assert run.status().rounds_merged == ROUNDS
    codec = WIRE_DTYPES[pull_wire]
    theta, momentum = clusters[0].model.installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    pushes, publisher = [trained(cluster)[:ROUNDS] for cluster in clusters], Publisher(codec)
    for n in range(ROUNDS):
        stepped, momentum = diloco(theta, momentum, [pushed[n] for pushed in pushes])
        theta = publisher.published(stepped, theta)
        assert not np.array_equal(theta, stepped), "rounding left something"
        for cluster in clusters:
            assert np.array_equal(theta, cluster.model.installed[n + 1]), f"cluster {cluster.name}, round {n + 1}"
    for cluster in clusters:
        ways = installs(cluster, tmp_path)
        assert ways[: ROUNDS + 1] == [Codec.F32.name] + [codec.name] * ROUNDS


def test_a_killed_slave_and_a_late_cluster_go_on_with_the_same_versions(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, plan=LEASED, pull_wire="int8", overlap="none")
    run.slave = {"record_pushes": True}
    with run:
        clusters = [run.cluster("a", 1, step_s=0.01), run.cluster("b", 2, step_s=0.01)]
        run.wait_for_version(3)
        run.kill("s1")
        wait_until(lambda: "s1" in run.status().waiting_slaves, "nobody noticed")
        run.start_slave("s1")
        run.wait_for_version(run.version() + 2)
        late = run.cluster("c", 3, step_s=0.01)
        wait_until(lambda: len(late.model.installed) >= 4, "the late cluster follows")
        with OperatorClient(run.address, security=INSECURE) as client:
            client.stop("enough")
        for cluster in (*clusters, late):
            cluster.join()
        fetched = fetch_version(run.address, None, "check", INSECURE)
        for cluster in (*clusters, late):
            assert np.array_equal(fetched.flat, cluster.model.theta)
    for cluster in (*clusters, late):
        ways = installs(cluster, tmp_path)
        assert ways[0] == "F32", "it joined"
        assert ways[1:].count("INT8") >= 2
    assert [str(violation) for violation in verify_run(tmp_path).violations] == []
    told = dips("verify", tmp_path, "--replay", "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    replayed = json.loads(told.stdout)["replayed"]
    assert replayed["wrong"] == replayed["skipped"] == []
    assert replayed["versions"] >= 6


def test_both_directions_in_fewer_bits_end_in_one_model(tmp_path: Path) -> None:
    with WholeRun(tmp_path, tk_max=ROUNDS * 2 * TOKENS, min_clusters=2, pull_wire="int4") as run:
        run.client["wire_dtype"] = "int4"
        clusters = [run.cluster("a", 1), run.cluster("b", 2)]
        for cluster in clusters:
            cluster.join()
        assert np.array_equal(clusters[0].model.installed[-1], clusters[1].model.installed[-1])
    assert "INT4" in installs(clusters[0], tmp_path)
