"""Whole runs with a standby that takes over, under a virtual clock: nothing that counted is lost, and one history goes
on. `make sim` plays more."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from search.bounds import Bounds
from support.mutants import Mutant, planted

from dips.lab.sim.faults.standby import TAKE_OVERS
from dips.lab.sim.hosts import master
from dips.lab.sim.run_plan import make_plan
from dips.lab.sim.seed_run import SeedOutcome, SeedRun


def played(seed: int, *faults: str, standby: str = "waits") -> SeedOutcome:
    return SeedRun(seed, plan=replace(make_plan(Random(seed)), standby=standby), planned=faults).run()


@pytest.mark.parametrize("take_over", TAKE_OVERS)
def test_a_run_goes_on_at_its_standby(take_over: str) -> None:
    for seed, standby in ((1, "waits"), (2, "waits"), (3, "follows")):
        outcome = played(seed, take_over, "standby_crashes", "crash_slave", standby=standby)
        assert outcome.violations == ()
        assert outcome.fired[take_over] == 1
        assert outcome.published >= 2


def test_decisions_that_no_standby_had_are_left_behind_where_nothing_waits_for_it() -> None:
    outcomes = [played(seed, "cut_standby_from_master", "take_over_from_dead", standby="follows") for seed in range(8)]
    assert {violation for outcome in outcomes for violation in outcome.violations} == set()
    assert sum(outcome.fired.get("decisions_left_behind", 0) for outcome in outcomes) > 1


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("master.state.replication:Replication.left_s", "self._acknowledged >= number", "self.written >= number"),
        (
            "lab.sim.hosts.standby:StandbyHost._hear",
            "self._waiting.append(batch)",
            "self._waiting.append(batch); self._stream[0].send(self._stream[1], len(self.disk.entries + batch[2]))",
        ),
    ],
    ids=["a decision counts once it is sent", "acknowledged before it is durable"],
)
def test_a_decision_that_counts_too_early_is_noticed(target: str, old: str, new: str) -> None:
    with planted(Mutant("too early", target, old, new, (), Bounds(clusters=1, slaves=1))):
        (violation,) = played(3, "take_over_from_dead", "standby_crashes", "slow_standby_disk").violations
    assert "decisions that counted are not in the standby's directory" in violation


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_take_over_with_an_epoch_that_the_older_master_may_have_is_noticed(
    epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master, "TAKE_OVER_EPOCHS", epochs)
    (violation,) = played(2, *TAKE_OVERS[epochs == 0 :][:1], "standby_crashes", "slow_standby_disk").violations
    assert violation.startswith("I8")
