"""A master between two epochs: a signal is not lost, and an epoch that cannot begin ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from support.scripted_master_state import ScriptedMachine
from support.waiting import until
from support.whole_run import WholeRun

from dips.core.errors import TERMINATED, FatalError
from dips.core.observe.failpoints import armed
from dips.master.config import MasterConfig
from dips.master.directory import MasterAddress, read_address
from dips.master.journal import Journal
from dips.master.process import serve
from dips.master.state.effects import BeginAgain, Halt
from dips.master.state.shared import RunConfig


def config_in(directory: Path, **knobs: object) -> MasterConfig:
    return MasterConfig.model_validate({"run_id": "demo", "directory": directory, "insecure": True, **knobs})


async def test_a_signal_between_two_epochs_is_not_lost(tmp_path: Path) -> None:
    def make(run: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> ScriptedMachine:
        machine = ScriptedMachine()
        machine.first = [BeginAgain(epoch + 1, "and again")]
        return machine

    def started(here: MasterAddress, _: object) -> None:
        if here.epoch == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    assert await serve(config_in(tmp_path), make, started=started) == Halt(TERMINATED, "stopped by SIGTERM")
    assert read_address(tmp_path) is None


async def test_an_epoch_that_cannot_begin_ends_the_master_with_the_remedy(tmp_path: Path) -> None:
    def make(run: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> ScriptedMachine:
        machine = ScriptedMachine()
        machine.first = [BeginAgain(9, "a slave promised epoch 8")]
        return machine

    # The first two transactions are the port's and the first epoch's.
    with armed("master.journal.before_commit=2*off->error(no space left)"):
        with pytest.raises(FatalError, match=r"no space left.*check that the disk has room"):
            await serve(config_in(tmp_path), make)
    assert read_address(tmp_path) is None
    with contextlib.closing(Journal.open(tmp_path, "demo")) as journal:
        assert journal.begin_epoch() == 2


def test_master_that_lost_its_directory_takes_the_run_from_the_slave_that_holds_it(tmp_path: Path) -> None:
    """An empty slave, such as a removed one on a new disk, is there first."""
    with WholeRun(tmp_path, n_slaves=1, evict_after_beats=8) as run:
        cluster = run.cluster("a", seed=1, step_s=0.02)
        run.wait_for_version(3)
        run.kill("master")
        run.processes["s0"].send_signal(signal.SIGSTOP)
        shutil.rmtree(tmp_path / "master")
        run.change_master(rebuild=True, listen=run.address)
        run.start_master()
        run.start_slave("s9")
        until(lambda: "no slave that is here holds a version" in run.log("master"), "a master that waits for the run's")
        run.processes["s0"].send_signal(signal.SIGCONT)
        run.wait_for_version(4)
        assert run.processes["s9"].wait() == 0, run.log("s9")
        assert "the master took over version" in run.log("master")
        run.stop(cluster)
