"""The host of a run's master is lost, and a standby with another address takes over: real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.judged_run import JudgedRun
from support.ports import own_port
from support.waiting import until
from support.whole_run import NumpyCluster, option_words

from dips.core.errors import RetryLater
from dips.core.observe.failpoints import CRASH_EXIT_CODE, SPEC_VARIABLE
from dips.master.directory import read_address
from dips.master.journal import TAKE_OVER_EPOCHS
from dips.master.state.slaves import NEWER_EPOCH_EXIT


class WithStandby(JudgedRun):
    """Clusters and slaves know both addresses."""

    def __init__(self, directory: Path) -> None:
        addresses = [f"127.0.0.1:{own_port()}" for _ in range(2)]
        super().__init__(directory, journal_replicas=1, failpoints=True, listen=addresses[0])
        self.listens = addresses[1]

    def start_master(self) -> None:
        super().start_master()
        self.first = self.address
        self.address = f"{self.first},{self.listens}"

    def standby_options(self) -> dict[str, object]:
        where = {"run_id": "test", "directory": self.directory / "standby", "slaves": self.n_slaves}
        return {**where, **self.of("standby"), **self._master, "listen": self.listens}

    def start_standby(self, failpoints: str = "") -> None:
        self.environment = {SPEC_VARIABLE: failpoints} if failpoints else {}
        self._spawn("standby", ["master", *option_words({**self.standby_options(), "standby": self.first})])
        self.environment = {}

    def is_followed(self) -> bool:
        with contextlib.suppress(RetryLater):  # a master that has just come back
            return not self.status().alarms
        return False

    def take_over(self) -> None:
        words = ["master", "--take-over", *option_words(self.standby_options())]
        done = subprocess.run([sys.executable, "-m", "dips.cli", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        here = read_address(self.directory / "standby")
        assert here is not None
        assert here.address == self.listens

    def finish(self, *clusters: NumpyCluster) -> None:
        """Stops the run of the standby, and judges it by the journal that is left."""
        self.stop(*clusters)
        self.processes["standby"].wait()
        (self.directory / "master").rename(self.directory / "lost")
        (self.directory / "standby").rename(self.directory / "master")
        self.judge()


def test_run_goes_on_at_the_standby_after_the_loss_of_the_masters_host(tmp_path: Path) -> None:
    with WithStandby(tmp_path) as run:
        clusters = [run.cluster(name, seed, step_s=0.02) for seed, name in enumerate("ab", 1)]
        run.wait_for_version(2)
        run.start_standby()
        until(run.is_followed, "a standby that has all decisions", lambda: run.log("standby"))
        run.wait_for_version(run.version() + 3)
        known = run.version()
        run.kill("master")
        run.take_over()
        run.wait_for_version(known + 3)
        assert run.status().epoch == 1 + TAKE_OVER_EPOCHS
        run.finish(*clusters)


def test_master_that_was_only_out_of_reach_ends_once_it_hears_of_the_take_over(tmp_path: Path) -> None:
    with WithStandby(tmp_path) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.start_standby()
        until(run.is_followed, "a standby that has all decisions", lambda: run.log("standby"))
        run.wait_for_version(3)
        run.processes["master"].send_signal(signal.SIGSTOP)
        run.take_over()
        run.processes["master"].send_signal(signal.SIGCONT)
        assert run.processes["master"].wait() == NEWER_EPOCH_EXIT, run.log("master")
        run.wait_for_version(run.version() + 3)
        run.finish(cluster)


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
        until(run.is_followed, "a standby that has all decisions", lambda: run.log("standby"))
        run.kill("master")
        run.take_over()
        run.wait_for_version(run.version() + 2)
        run.finish(cluster)


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
        until(run.is_followed, "a standby that has all decisions", lambda: run.log("standby"))
        run.wait_for_version(run.version() + 2)
        run.kill("master")
        run.take_over()
        run.wait_for_version(run.version() + 2)
        run.finish(cluster)


@pytest.mark.long
def test_standby_outlives_the_master_that_dies_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    with WithStandby(tmp_path) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.start_standby("master.replica.before_receive=sleep(0.5)")
        until(run.is_followed, "a standby that has all decisions", lambda: run.log("standby"))
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
        until(run.is_followed, "a standby that has all decisions", lambda: run.log("standby"))
        run.wait_for_version(2)
        run.kill("master")
        run.processes["standby"].send_signal(signal.SIGUSR1)
        assert run.processes["standby"].wait() == CRASH_EXIT_CODE
        run.start_standby()  # as a unit would: it goes on as the run's master
        run.wait_for_version(4)
        assert run.status().epoch == 2 + TAKE_OVER_EPOCHS
        run.finish(cluster)
