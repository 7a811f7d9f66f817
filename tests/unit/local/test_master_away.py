"""What the launcher makes of a master that cannot be asked just now."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from dips.core.clock import ManualClock
from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.local.local_run import LocalRun
from dips.local.operator_client import OperatorClient
from dips.local.processes import RunPlan
from dips.local.run_directory import UP, Mark, claim
from dips.master.config import MasterConfig


class Master:
    """Answers every question with this error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def status(self) -> None:
        raise self.error

    def stop(self, reason: str) -> None:
        raise self.error

    def close(self) -> None:
        """Nothing is open."""


def run_of(tmp_path: Path, error: Exception) -> LocalRun:
    plan = RunPlan("r", MasterConfig(run_id="r", directory=tmp_path / "master", insecure=True), (), insecure=True)
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
        assert local.stop_run("enough") is None


def test_any_other_refusal_is_told(tmp_path: Path) -> None:
    with run_of(tmp_path, Refused(RefusalCode.RUN_ID, "another run")) as local:
        with pytest.raises(Refused, match="another run"):
            local.tick()
