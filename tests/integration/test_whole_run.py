"""Real master and slaves, real sockets: what users are promised, seen from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.diloco import diloco, trained
from support.whole_run import LAYOUT, LEASED, NumpyCluster, WholeRun, wait_until

from dips.core.messages import VerdictKind
from dips.core.net.security import INSECURE
from dips.worker.reader import fetch_version

TOKENS = 10 * 4  # of one push: sync_every steps of 10 tokens


def train(directory: Path, n_slaves: int, rounds: int) -> list[NumpyCluster]:
    """Two clusters in step, each round merging both with equal tokens; the clip never acts."""
    limit = rounds * 2 * TOKENS
    with WholeRun(directory, n_slaves, tk_max=limit, grace_s=20, min_clusters=2, clip_norm=1e6) as run:
        clusters = [run.cluster("a", 1), run.cluster("b", 2)]
        for cluster in clusters:
            cluster.join()
        assert run.status().rounds_merged == rounds
        assert run.status().tokens == limit
    return clusters


def test_round_with_all_clusters_equals_diloco_in_plain_torch_to_the_last_bit(tmp_path: Path) -> None:
    rounds = 5
    a, b = train(tmp_path, 2, rounds)
    theta, momentum = a.model.installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    pairs = zip(trained(a)[:rounds], trained(b)[:rounds], strict=True)
    for n, (one, other) in enumerate(pairs, start=1):
        theta, momentum = diloco(theta, momentum, [one, other])
        assert np.array_equal(theta, a.model.installed[n]), f"round {n}"
        assert np.array_equal(theta, b.model.installed[n]), f"round {n}"
    assert np.array_equal(theta, a.model.theta)


def test_one_slave_and_four_slaves_give_the_same_bits(tmp_path: Path) -> None:
    one = train(tmp_path / "one", 1, 4)
    four = train(tmp_path / "four", 4, 4)
    for left, right in zip(one, four, strict=True):
        assert np.array_equal(left.model.theta, right.model.theta)


def test_slave_killed_in_the_middle_comes_back_and_the_run_ends_with_every_token_counted(tmp_path: Path) -> None:
    with WholeRun(tmp_path, plan=LEASED, tk_max=300_000, preset="dynamic", overlap="full") as run:
        clusters = [run.cluster("a", 1, step_s=0.005), run.cluster("b", 2, step_s=0.008)]
        run.wait_for_version(3)
        run.kill("s1")
        wait_until(lambda: "s1" in run.status().waiting_slaves, "nobody noticed")
        steps = clusters[0].steps_made
        wait_until(lambda: clusters[0].steps_made > steps, "the clusters stopped training")
        run.start_slave("s1")
        for cluster in clusters:
            cluster.join()
        status = run.status()
        assert status.stopped
        assert status.tokens >= 300_000
        assert status.tokens == sum(c.tokens_applied for c in status.clusters)
        assert status.slaves[1].incarnations == 2
        fetched = fetch_version(run.address, None, "check", INSECURE)
        assert np.array_equal(fetched.flat, clusters[0].model.theta)
        assert fetched.tokens == status.tokens


def test_master_killed_in_the_middle_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    with WholeRun(tmp_path, plan=LEASED, tk_max=300_000, preset="dynamic", overlap="full") as run:
        clusters = [run.cluster("a", 1, step_s=0.005), run.cluster("b", 2, step_s=0.008)]
        run.wait_for_version(3)
        before = run.status()
        run.kill("master")
        run.start_master()
        for cluster in clusters:
            cluster.join()
        status = run.status()
        assert status.epoch == before.epoch + 1
        assert status.tokens >= 300_000
        assert status.tokens == sum(c.tokens_applied for c in status.clusters)
        assert all(c.incarnations >= 2 for c in status.clusters)


def test_cluster_that_diverges_is_excluded_and_dropped_back_to_the_published_model(tmp_path: Path) -> None:
    with WholeRun(tmp_path, preset="dynamic", overlap="full") as run:
        good, bad = run.cluster("a", 1, step_s=0.01), run.cluster("b", 2, step_s=0.01)
        run.wait_for_version(2)
        bad.model.target[:] = np.nan
        wait_until(lambda: any(v.kind is VerdictKind.EXCLUDED for v in bad.verdicts), "NaN went unnoticed")
        bad.model.target[:] = 0
        excluded = len(bad.verdicts)
        wait_until(
            lambda: any(v.kind is VerdictKind.APPLIED for v in bad.verdicts[excluded:]), "it never came back", 30
        )
        for cluster in (good, bad):
            cluster.driver.request_stop()
            cluster.join()
        assert bad.model.resets >= 1
        assert np.isfinite(fetch_version(run.address, None, "check", INSECURE).flat).all()
