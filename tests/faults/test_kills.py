"""kill -9 of every role at any moment: the run goes on to its end, and nothing is lost or counted twice.

Real processes on loopback, clusters without torch. Half of the kills come at random moments, half at a failpoint. The
smoke form runs always; the long tier (`pytest --long`) plays KILL_SEEDS seeds, 8 unless set.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from support.kill_run import ROUND_FAILPOINTS, Kill, KillRun, judge, planned, verified

from dips.master.state.records import RoundPhase

SEEDS = int(os.environ.get("KILL_SEEDS", "8"))

_fell_in: Counter[str] = Counter()
"""Phases in which the kills of all seeds fell; the last test looks at it."""


def play(directory: Path, kills: list[Kill]) -> KillRun:
    with KillRun(directory, kills) as run:
        run.play()
    judge(run, verified)
    return run


@pytest.mark.timeout(600)
def test_smoke_one_run_in_which_every_role_is_killed(tmp_path: Path) -> None:
    kills = [
        Kill("s0", 2, "slave_shard.PREPARING.done"),
        Kill("a", 3, share=0.1),
        Kill("master", 5, "round.COMMIT.all_flipped"),
    ]
    run = play(tmp_path / "run", kills)
    assert sorted(death.victim for death in run.deaths) == ["a", "master", "s0"]
    master = next(death for death in run.deaths if death.victim == "master")
    assert run.phase_of(master) == "COMMIT"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_survives_its_kills(seed: int, tmp_path: Path) -> None:
    kills = planned(seed)
    run = play(tmp_path / "run", kills)
    _fell_in.update(run.phase_of(death) for death in run.deaths)
    happened = Counter(death.victim for death in run.deaths)
    missed = Counter(kill.victim for kill in kills) - happened
    assert not missed, f"planned kills that never came: {missed}; deaths: {run.deaths}"


@pytest.mark.long
def test_kills_fell_in_every_phase_of_the_round(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\nkills by the phase of the round in which they fell:")
        for phase in RoundPhase:
            print(f"  {phase.value:<8} {_fell_in[phase.value]:4d}")
    if len(ROUND_FAILPOINTS) <= SEEDS:
        assert {phase.value for phase in RoundPhase} <= set(_fell_in), "a phase was never hit"
