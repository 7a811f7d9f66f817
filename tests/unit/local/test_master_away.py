"""What the launcher makes of a master that cannot be asked just now."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from support.manual_clock import ManualClock
from support.run_status import run_status

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.messages import SlaveStatus
from dips.local.local_run import LocalRun, _take_back_end
from dips.local.operator_client import OperatorClient
from dips.local.processes import MASTER, RunKnobs, RunPlan
from dips.local.run_directory import UP, Mark, claim
from dips.master.config import MasterConfig
from dips.master.directory import ADDRESS_NAME, MasterAddress
from dips.slave.config import SlaveConfig


class Master:
    """Answers every question with this error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def status(self) -> None:
        raise self.error

    def stop(self, reason: str) -> None:
        raise self.error

    pause = resume = stop

    def extend(self, tk_max_tokens: int, no_limit: bool, reason: str) -> str:
        assert (tk_max_tokens, no_limit) == (0, False)
        raise self.error

    def close(self) -> None:
        """Nothing is open."""


def run_of(tmp_path: Path, error: Exception) -> LocalRun:
    run = RunKnobs(id="r", directory=tmp_path / "run", insecure=True)
    plan = RunPlan(run, MasterConfig(run_id="r", directory=tmp_path / "master", insecure=True), ())
    with claim(tmp_path / "run", Mark("r", UP, "test")) as directory:
        local = LocalRun(plan, directory, ManualClock(), lambda sentence: None)
    local._operator = cast(OperatorClient, Master(error))
    return local


@pytest.mark.parametrize(
    "error", [RetryLater("nobody answers"), Refused(RefusalCode.BUSY, "the master is ending: connect again", 1.0)]
)
def test_a_master_that_is_away_or_just_ending_is_asked_again_later(tmp_path: Path, error: Exception) -> None:
    with run_of(tmp_path, error) as local:
        assert local.tick() is None
        assert local.answer(lambda master: master.pause("wait")) is None


def test_the_end_of_a_run_is_taken_back_once_the_master_answers(tmp_path: Path) -> None:
    with run_of(tmp_path, RetryLater("no answer")) as local:
        assert local.answer(_take_back_end) is None
    with run_of(tmp_path, Refused(RefusalCode.CONFIG, "the run has not ended")) as local:
        assert local.answer(_take_back_end) == "the run has not ended, so there is nothing to take back"
    with run_of(tmp_path, Refused(RefusalCode.RUN_ID, "another run")) as local:
        for ask in (partial(local.answer, _take_back_end), local.tick):
            with pytest.raises(Refused, match="another run"):
                ask()


def test_a_master_that_starts_slowly_is_waited_for_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of(tmp_path, RetryLater("nobody answers")) as local:
        clock, said = ManualClock(), list[str]()
        monkeypatch.setattr(local, "_clock", clock)
        monkeypatch.setattr(local, "_tell", said.append)
        monkeypatch.setattr("dips.local.local_run.time.sleep", clock.advance)
        found = local._once_there("the start of the master", lambda: "here" if clock.monotonic_s() > 25.0 else None)
        assert found == "here"
        assert said == [f"still waiting for the start of the master ({seconds} s)" for seconds in (10, 20)]
        with pytest.raises(RetryLater, match=r"10 min for the master's first answer, in vain: see .*master\.log"):
            local._once_there("the master's first answer", local._ask)


def test_a_master_that_was_started_again_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of(tmp_path, RetryLater("nobody answers")) as local:
        pid = 7
        monkeypatch.setattr(local.supervisor, "pid", lambda name: pid)
        local.directory.master.mkdir(parents=True)
        written = asdict(MasterAddress("127.0.0.1:5", "r", 8, 1))
        (local.directory.master / ADDRESS_NAME).write_text(json.dumps(written))
        assert local._masters_address() is None, "it is that of an earlier process"
        pid = 8
        assert local._masters_address() == "127.0.0.1:5"


def test_a_master_is_told_to_end_until_it_has_heard_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of(tmp_path, RetryLater("nobody answers")) as local:
        clock, asked = ManualClock(), list[float]()
        monkeypatch.setattr(local, "_clock", clock)
        monkeypatch.setattr("dips.local.local_run.time.sleep", clock.advance)
        monkeypatch.setattr(local, "answer", lambda request: asked.append(clock.monotonic_s()))
        monkeypatch.setattr(local.supervisor, "ended", lambda names: clock.monotonic_s() > 3.0)
        local.finish()
        assert len(asked) == 3


@pytest.mark.parametrize(("attached", "wait_s"), [(False, 5.0), (True, 60.0)])
def test_a_slave_that_had_not_attached_is_waited_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: bool, wait_s: float
) -> None:
    """One that was attached may be writing its last snapshot."""
    with run_of(tmp_path, RetryLater("no answer")) as local:
        clock = ManualClock()
        monkeypatch.setattr(local, "_clock", clock)
        monkeypatch.setattr("dips.local.local_run.time.sleep", clock.advance)
        monkeypatch.setattr(local.supervisor, "ended", lambda names: list(names) == [MASTER])
        slave = SlaveConfig(run_id="r", slave_id="s0", directory=tmp_path / "s0", memory_bytes=1 << 26, insecure=True)
        local.plan = replace(local.plan, slaves=(slave,))
        local.status = run_status(slaves=(SlaveStatus("s0", alive=attached),))
        local.finish()
        assert clock.monotonic_s() == pytest.approx(wait_s, abs=1.0)
