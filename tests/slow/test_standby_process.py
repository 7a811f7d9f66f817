"""The host of a run's master is lost, and a standby with another address takes over: real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.standby_run import WithStandby
from support.waiting import until

from dips.core.observe.failpoints import CRASH_EXIT_CODE, SPEC_VARIABLE
from dips.master.state.replication import TAKE_OVER_EPOCHS


def test_run_goes_on_at_the_standby_after_the_loss_of_the_masters_host(tmp_path: Path) -> None:
    with WithStandby(tmp_path) as run:
        clusters = [run.cluster(name, seed, step_s=0.02) for seed, name in enumerate("ab", 1)]
        run.wait_for_version(2)
        run.start_standby()
        run.until_followed()
        run.wait_for_version(run.version() + 3)
        known = run.version()
        run.kill("master")
        run.take_over()
        run.wait_for_version(known + 3)
        assert run.status().epoch == 1 + TAKE_OVER_EPOCHS
        run.finish(*clusters)


@pytest.mark.long
@pytest.mark.parametrize("point", ["before_connect", "before_receive", "before_acknowledge"])
def test_standby_that_is_killed_anywhere_takes_up_where_it_was(tmp_path: Path, point: str) -> None:
    with WithStandby(tmp_path) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.wait_for_version(1)
        run.start_standby(f"master.replica.{point}=crash")
        assert run.processes["standby"].wait() == CRASH_EXIT_CODE
        run.start_standby("master.journal.before_commit=3*off->crash")
        assert run.processes["standby"].wait() == CRASH_EXIT_CODE
        run.start_standby()
        run.until_followed()
        run.ends_at_the_standby(cluster)


@pytest.mark.long
@pytest.mark.parametrize("point", ["before_send", "before_hear"])
def test_master_that_is_killed_beside_its_standby_comes_back_and_is_followed(tmp_path: Path, point: str) -> None:
    with WithStandby(tmp_path) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.wait_for_version(1)
        run.kill("master")
        run.environment = {SPEC_VARIABLE: f"master.replica.{point}=crash"}
        run.start_master()
        run.environment = {}
        run.start_standby()
        assert run.processes["master"].wait() == CRASH_EXIT_CODE
        run.start_master()
        run.until_followed()
        run.wait_for_version(run.version() + 2)
        run.ends_at_the_standby(cluster)


@pytest.mark.long
def test_standby_outlives_the_master_that_dies_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    with WithStandby(tmp_path) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.start_standby("master.replica.before_receive=sleep(0.5)")
        run.until_followed()
        run.wait_for_version(2)
        run.kill("master")
        until(lambda: "does not follow" in run.log("standby"), "a standby that knows it")
        run.take_over()
        run.wait_for_version(run.version() + 2)
        run.finish(cluster)


@pytest.mark.long
def test_standby_that_is_killed_while_it_takes_over_is_started_again(tmp_path: Path) -> None:
    with WithStandby(tmp_path) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.start_standby("master.replica.before_tell=crash")
        run.until_followed()
        run.wait_for_version(2)
        run.kill("master")
        run.processes["standby"].send_signal(signal.SIGUSR1)
        assert run.processes["standby"].wait() == CRASH_EXIT_CODE
        run.start_standby()  # as a unit would: it goes on as the run's master
        run.wait_for_version(4)
        assert run.status().epoch == 2 + TAKE_OVER_EPOCHS
        run.finish(cluster)
