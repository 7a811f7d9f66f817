"""Pushes as differences through real processes: master, slaves and clusters agree on every bit, and survive a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.diloco import diloco, trained
from support.trainer_run import records
from support.whole_run import F32, LAYOUT, LEASED, NumpyCluster, WholeRun, wait_until

from dips.core.math import wire_numpy as reference
from dips.core.net.security import INSECURE
from dips.core.wire import WIRE_DTYPES, Codec, encoded_bytes
from dips.worker.reader import fetch_version
from dips.worker.vectors import chunk_spans

CHUNK_BYTES = 1 << 20
ROUNDS = 4
TOKENS = 10 * 4  # of one push: sync_every steps of 10 tokens


class Sender:
    """What slaves make of a cluster's pushes, computed with the reference."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residual: F32 = np.zeros(LAYOUT.n_elems, np.float32)

    def landed(self, now: F32, base: F32) -> F32:
        """The push as float32; its residual advances."""
        out = np.empty_like(now)
        for start, stop in chunk_spans(LAYOUT, CHUNK_BYTES):
            here = slice(start, stop)
            payload = np.empty(encoded_bytes(self.codec, stop - start), np.uint8)
            reference.encode(self.codec, now[here], base[here], self.residual[here], payload)
            reference.decode(self.codec, base[here], payload, out[here])
            reference.keep_residual(self.codec, now[here], base[here], self.residual[here])
        return out


def wires_of(cluster: NumpyCluster, directory: Path) -> list[str]:
    """How it sent its pushes, from its tape."""
    return [record["wire"] for record in records(directory / f"{cluster.name}.jsonl", "push_sent")]


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "int8", "int4"])
def test_rounds_of_differences_equal_the_reference_to_the_last_bit(wire_dtype: str, tmp_path: Path) -> None:
    limit = ROUNDS * 2 * TOKENS
    with WholeRun(tmp_path, tk_max=limit, grace_s=20, min_clusters=2, clip_norm=1e6) as run:
        run.client["wire_dtype"] = wire_dtype
        clusters = [run.cluster("a", 1), run.cluster("b", 2)]
        for cluster in clusters:
            cluster.join()
        assert run.status().rounds_merged == ROUNDS
    codec = WIRE_DTYPES[wire_dtype]
    theta, momentum = clusters[0].model.installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    pushes = [trained(cluster)[:ROUNDS] for cluster in clusters]
    senders = [Sender(codec) for _ in clusters]
    for n in range(ROUNDS):
        landed = [sender.landed(pushed[n], theta) for sender, pushed in zip(senders, pushes, strict=True)]
        assert not np.array_equal(landed[0], pushes[0][n]), "rounding left something"
        theta, momentum = diloco(theta, momentum, landed)
        for cluster in clusters:
            assert np.array_equal(theta, cluster.model.installed[n + 1]), f"cluster {cluster.name}, round {n + 1}"
    for cluster in clusters:
        sent = wires_of(cluster, tmp_path)
        assert sent[-ROUNDS:] == [codec.name] * ROUNDS
        assert set(sent[:-ROUNDS]) <= {"F32"}, "only a seed"


def test_a_slave_that_is_killed_comes_back_and_every_token_counts(tmp_path: Path) -> None:
    with WholeRun(tmp_path, plan=LEASED, tk_max=60_000) as run:
        run.client["wire_dtype"] = "int8"
        clusters = [run.cluster("a", 1, step_s=0.005), run.cluster("b", 2, step_s=0.008)]
        run.wait_for_version(3)
        run.kill("s1")
        wait_until(lambda: "s1" in run.status().waiting_slaves, "nobody noticed")
        run.start_slave("s1")
        for cluster in clusters:
            cluster.join()
        status = run.status()
        assert status.stopped
        assert status.tokens >= 60_000
        assert status.tokens == sum(c.tokens_applied for c in status.clusters)
        fetched = fetch_version(run.address, None, "check", INSECURE)
        assert np.array_equal(fetched.flat, clusters[0].model.theta)
    for cluster in clusters:
        assert "INT8" in wires_of(cluster, tmp_path)


def test_clusters_of_one_run_choose_each_for_itself(tmp_path: Path) -> None:
    with WholeRun(tmp_path, tk_max=2 * ROUNDS * 2 * TOKENS, min_clusters=2) as run:
        plain = run.cluster("a", 1)
        run.client["wire_dtype"] = "int4"
        written = run.cluster("b", 2)
        for cluster in (plain, written):
            cluster.join()
        assert np.array_equal(plain.model.installed[-1], written.model.installed[-1])
    assert set(wires_of(plain, tmp_path)) == {"F32"}
    assert "INT4" in wires_of(written, tmp_path)
