"""Real master and slaves, real sockets: what users are promised, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.diloco import diloco, trained
from support.fork_server import ForkServer
from support.tracked_tape import Held
from support.trainer_run import records
from support.waiting import until
from support.whole_run import LAYOUT, LEASED, WholeRun

from dips.core.messages import VerdictKind
from dips.core.net.security import INSECURE
from dips.judge.story import tell_story
from dips.judge.verify import verify_run
from dips.local.tracking import Tracking, TrackKnobs
from dips.worker.reader import fetch_version

ROUNDS = 5


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """Its processes need not import everything, which takes most of the time of these runs."""
    with ForkServer() as fork_server:
        yield fork_server


@pytest.mark.parametrize("n_slaves", [1, 4])
def test_rounds_with_all_clusters_equal_diloco_in_plain_torch_to_the_last_bit(
    n_slaves: int, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Two clusters in step, each round merging both with equal tokens; the clip never acts."""
    server = fork_server if n_slaves > 1 else None  # the other run's processes start from nothing, as users start them
    together: dict[str, Any] = {"min_clusters": 2, "min_clusters_per_round": 2, "round_deadline_s": 20}
    with WholeRun(tmp_path, n_slaves, server=server, clip_norm=1e6, **together) as run:
        a, b = run.cluster("a", 1), run.cluster("b", 2)
        run.wait_for_version(ROUNDS)
        run.stop(a, b)
    theta, momentum = a.model.installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    pairs = zip(trained(a)[:ROUNDS], trained(b)[:ROUNDS], strict=True)
    for n, (one, other) in enumerate(pairs, start=1):
        theta, momentum = diloco(theta, momentum, [one, other])
        assert np.array_equal(theta, a.model.installed[n]), f"round {n}"
        assert np.array_equal(theta, b.model.installed[n]), f"round {n}"
    assert np.array_equal(a.model.theta, b.model.theta), "both end with the last version"


def test_each_round_waits_for_both_clusters_until_the_master_begins_again_with_a_short_deadline(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    minimum: dict[str, Any] = {"min_clusters_per_round": 2, "round_deadline_s": 60}
    run = WholeRun(tmp_path, 1, server=fork_server, grace_s=0.2, min_clusters=2, **minimum)
    with run:
        clusters = [run.cluster("a", 1), run.cluster("b", 2, step_s=0.5)]
        until(lambda: run.status().waiting_for.startswith("the round has 1 of 2 pushes"), "a round waits for b")
        run.wait_for_version(3)
        assert {one.accepted for one in run.status().recent_rounds if one.version and one.version.v} == {("a", "b")}
        version = run.version()
        run.kill("master")
        run.change_master(round_deadline_s=0.3)
        run.start_master()
        run.wait_for_version(version + 1)
        until(lambda: any(one.reason for one in run.status().recent_rounds), "a round goes on without b")
        small = next(one for one in run.status().recent_rounds if one.reason)
        run.stop(*clusters)
    assert small.accepted == ("a",)
    assert small.reason.startswith("went on with 1 of 2 pushes (min_clusters_per_round), ")
    assert verify_run(tmp_path).violations == []
    told = [
        line.fields["sentence"] for line in tell_story(tmp_path, str(small.round)).lines if line.kind == "few_pushes"
    ]
    assert told[-1] == f"the round {small.reason}"


def test_slave_and_master_that_are_killed_come_back_and_every_token_counts(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    optimizer: dict[str, Any] = {"outer_optimizer": "delayed-nesterov", "delay_rounds": 2, "outer_momentum": 0.5}
    run = WholeRun(tmp_path, plan=LEASED, server=fork_server, preset="steady", overlap="full", **optimizer)
    run.slave = {"record_pushes": True}
    with run:
        clusters = [run.cluster("a", 1, step_s=0.005), run.cluster("b", 2, step_s=0.008)]
        run.wait_for_version(3)
        run.kill("s1")
        until(lambda: "s1" in run.status().waiting_slaves, "the master misses s1")
        steps = clusters[0].steps_made
        until(lambda: clusters[0].steps_made > steps, "the clusters train on")
        run.start_slave("s1")
        run.wait_for_version(run.version() + 2)
        assert verify_run(tmp_path).violations == [], "while it runs"
        before = run.status()
        run.kill("master")
        run.start_master()
        assert before.published is not None
        run.wait_for_version(before.published.v + 3)
        run.stop(*clusters)
        status = run.status()
        assert status.stopped
        assert status.epoch == before.epoch + 1
        assert status.tokens == sum(c.tokens_applied for c in status.clusters) > 0
        assert before.slaves[1].incarnations == 2
        assert all(c.incarnations >= 2 for c in status.clusters)
        fetched = fetch_version(run.address, None, "check", INSECURE)
        assert fetched.tokens == status.tokens
        for cluster in clusters:
            assert np.array_equal(fetched.flat, cluster.model.theta)
    modes = {record["mode"] for name in "ab" for record in records(tmp_path / f"{name}.jsonl", "installed")}
    assert "REBASE_FROM_PUSH" in modes
    report = verify_run(tmp_path, replay=True)
    assert report.ok, report.violations
    assert report.problems == []
    assert [row.name for row in report.rows if row.records == 0] == []
    assert report.replayed is not None
    assert report.replayed.skipped == []
    held = Held()
    tracking = Tracking(tmp_path, TrackKnobs(to="tensorboard"), held.open)
    assert tracking.look(0.0)
    (points,) = held.points.values()
    assert [point.step for point in points] == list(range(fetched.version.v + 1)), "over both masters, each once"
    facts = {"tokens", "staleness", "norm", "push_bytes", "steps", "tokens_per_s", "push_bytes_per_s"}
    assert [key for name in "ab" for key in facts if not any(f"{name}/{key}" in point.values for point in points)] == []
    assert held.settings["outer_momentum"] == 0.5


def test_cluster_that_diverges_is_excluded_and_dropped_back_to_the_published_model(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    with WholeRun(tmp_path, server=fork_server, preset="steady", overlap="full") as run:
        good, bad = run.cluster("a", 1, step_s=0.01), run.cluster("b", 2, step_s=0.01)
        run.wait_for_version(2)
        bad.model.target[:] = np.nan
        until(lambda: any(v.kind is VerdictKind.EXCLUDED for v in bad.verdicts), "NaN is noticed")
        bad.model.target[:] = 0
        excluded = len(bad.verdicts)
        until(lambda: any(v.kind is VerdictKind.APPLIED for v in bad.verdicts[excluded:]), "it comes back")
        for cluster in (good, bad):
            cluster.driver.request_stop()
            cluster.join()
        assert bad.model.resets >= 1
        assert np.isfinite(fetch_version(run.address, None, "check", INSECURE).flat).all()
