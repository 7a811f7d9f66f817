"""Whole runs under a virtual clock: nothing that was promised breaks, whatever the seed lets happen.

DIPS_TEST_SEEDS chooses how many seeds are simulated (300). A failing seed always fails the same way; its story:
python -m dips.sim.run_seeds --seed N --trace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from dips.sim import faults, run_seeds
from dips.sim.run_seeds import Totals
from dips.sim.world import Outcome, World

N_SEEDS = int(os.environ.get("DIPS_TEST_SEEDS", "300"))
IN_ONE_TEST = 10

HASH_OF_SEED = "from dips.sim.world import World; print(World({seed}).run().trace_hash)"


def hash_in_another_process(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", HASH_OF_SEED.format(seed=seed)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=110)
    return ran.stdout.strip()


@pytest.mark.parametrize("first", range(0, N_SEEDS, IN_ONE_TEST))
def test_every_invariant_holds_after_every_step(first: int) -> None:
    outcomes = [run_seeds.run_one(seed)[0] for seed in range(first, min(first + IN_ONE_TEST, N_SEEDS))]
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert sum(outcome.published for outcome in outcomes) >= len(outcomes)


def test_a_seed_is_one_run_bit_for_bit() -> None:
    assert len({World(3).run().trace_hash for _ in range(2)}) == 1
    assert World(3).run().trace_hash != World(4).run().trace_hash


def test_the_order_of_sets_and_dictionaries_of_objects_does_not_matter() -> None:
    assert hash_in_another_process(3, "1") == hash_in_another_process(3, "2") == World(3).run().trace_hash


def test_telling_the_story_changes_nothing() -> None:
    told, quiet = World(5, tell=True).run(), World(5).run()
    assert told.trace_hash == quiet.trace_hash
    assert not quiet.story
    assert any("journal COMMIT" in line for line in told.story)


@pytest.mark.parametrize("kind", sorted(faults.FAULTS))
def test_every_kind_of_fault_strikes(kind: str) -> None:
    """Planned five times over, in a few seeds: it is counted, and nothing breaks."""
    fired: Counter[str] = Counter()
    for seed in range(7000, 7012):
        outcome = World(seed, planned=(kind,) * 5).run()
        assert outcome.violations == ()
        fired.update(outcome.fired)
        if fired[kind]:
            return
    raise AssertionError(f"{kind} never fired: {dict(fired)}")


def outcome_with(violations: tuple[str, ...] = (), fired: Counter[str] | None = None) -> Outcome:
    return replace(World(1).run(), violations=violations, fired=fired or Counter())


class TestReport:
    def totals(self, n: int, outcome: Outcome) -> Totals:
        totals = Totals()
        for _ in range(n):
            totals.add(outcome, 0.1)
        return totals

    def test_a_violation_is_named_with_its_seed_and_how_to_see_its_story(self) -> None:
        said = run_seeds.complaints(self.totals(1, outcome_with(("I7: a push is lost",))))
        assert said == ["seed 1: I7: a push is lost\n    its story: python -m dips.sim.run_seeds --seed 1 --trace"]

    def test_few_seeds_need_not_show_everything(self) -> None:
        assert run_seeds.complaints(self.totals(1, outcome_with())) == []

    def test_a_fault_that_never_fired_is_a_failure(self) -> None:
        fired = Counter({name: 1 for name in faults.names() if name != "crash_master"})
        said = run_seeds.complaints(self.totals(run_seeds.SEEDS_FOR_FAULTS, outcome_with(fired=fired)))
        assert said == ["fault crash_master never fired"]

    def test_a_transition_that_was_never_taken_is_a_failure(self) -> None:
        fired = Counter(dict.fromkeys(faults.names(), 1))
        said = run_seeds.complaints(self.totals(run_seeds.SEEDS_FOR_ARROWS, outcome_with(fired=fired)))
        assert any(line.startswith("never taken: ") for line in said)
        assert not any("push: SEALED -> DECIDED upon aborted" in line for line in said)

    def test_what_is_out_of_reach_is_an_arrow_of_a_table(self) -> None:
        every = {
            (table.name, start.value, name, end.value)
            for table in run_seeds.simulated_tables()
            for start, name, end in table.arrows()
        }
        assert set(run_seeds.UNREACHED) <= every
        assert all(len(reason) > 20 for reason in run_seeds.UNREACHED.values())


def test_the_command_tells_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_seeds.main(["--seeds", "2", "--jobs", "1"]) == 0
    assert "2 seeds: 0 failed" in capsys.readouterr().out
    assert run_seeds.main(["--seed", "2", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "journal COMMIT" in told
    assert "seed 2: " in told
