"""Whole runs under a virtual clock: nothing that was promised breaks, whatever the seed lets happen.

Some seeds; tests/slow/unit/test_many_seeds.py and `make sim` play more. A failing seed always fails the same way; its
story: python -m dips.lab.sim.seeds --seed N --trace.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dips.lab.sim import run_plan
from dips.lab.sim import seeds as run_seeds
from dips.lab.sim.seed_run import SeedRun

N_SEEDS = 10
IN_ONE_TEST = 5

OF_EACH_SHAPE = [
    next(seed for seed in range(3, 500) if run_plan.of_seed(seed) is shape)
    for shape in (run_plan.SMALL, run_plan.WIDE, run_plan.SABOTAGE)
]

HASHES = "from dips.lab.sim.seed_run import SeedRun; print(*(SeedRun(seed).run().trace_hash for seed in {seeds}))"


def hashes_in_another_process(seeds: list[int], hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", HASHES.format(seeds=seeds)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=110)
    return ran.stdout.split()


@pytest.mark.parametrize("first", range(0, N_SEEDS, IN_ONE_TEST))
def test_every_invariant_holds_after_every_step(first: int) -> None:
    outcomes = [run_seeds.run_one(seed)[0] for seed in range(first, first + IN_ONE_TEST)]
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert sum(outcome.published for outcome in outcomes) >= len(outcomes)


def test_the_order_of_sets_and_dictionaries_of_objects_does_not_matter() -> None:
    here = [SeedRun(seed).run() for seed in OF_EACH_SHAPE]
    assert {outcome.seed: outcome.violations for outcome in here if outcome.violations} == {}
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    assert hashes_in_another_process(OF_EACH_SHAPE, other) == [outcome.trace_hash for outcome in here]


def test_a_seed_is_one_run_bit_for_bit_and_telling_its_story_changes_nothing() -> None:
    told, quiet = SeedRun(5, tell=True).run(), SeedRun(5).run()
    assert told.trace_hash == quiet.trace_hash != SeedRun(6).run().trace_hash
    assert not quiet.story
    assert any("journal COMMIT" in line for line in told.story)


def test_the_command_tells_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_seeds.main(["--seeds", "2", "--first", "1", "--jobs", "1"]) == 0
    assert "2 seeds (2 small): 0 failed" in capsys.readouterr().out
    assert run_seeds.main(["--seed", "2", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "journal COMMIT" in told
    assert "seed 2 (small): " in told
