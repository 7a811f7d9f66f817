"""I15 and I16 in the simulator: a bound that is broken is noticed, and nothing breaks it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.mutants import Mutant, planted

from dips.lab.sim import run_plan
from dips.lab.sim.seed_run import SeedRun

SABOTAGED = [seed for seed in range(600) if run_plan.of_seed(seed) is run_plan.SABOTAGE][:30]

SMALL = next(seed for seed in range(7, 100) if run_plan.of_seed(seed) is run_plan.SMALL)

WAITS_FOR_ALL = Mutant(
    "the window waits for every live cluster, however long",
    "master.state.rounds:Rounds._may_close",
    "if left_s > 0 and any(",
    "if any(",
)


WAITS_FOR_ITS_MINIMUM = Mutant(
    "a round waits for its minimum far beyond its deadline",
    "master.state.rounds:Rounds._may_close",
    "shared.now_s + (shared.config.round_deadline_s or math.inf)",
    "shared.now_s + 50 * (shared.config.round_deadline_s or math.inf)",
)


def test_others_that_wait_for_one_bad_cluster_are_noticed() -> None:
    with planted(WAITS_FOR_ALL):
        found = next(violations[0] for seed in SABOTAGED if (violations := SeedRun(seed).run().violations))
    assert found.endswith("(I15)"), found


def test_rounds_that_wait_for_one_bad_cluster_beyond_their_deadline_are_noticed() -> None:
    def violations(seed: int) -> tuple[str, ...]:
        plan = run_plan.make_plan(Random(seed), shape=run_plan.SABOTAGE)
        every: dict[str, Any] = {"min_clusters_per_round": len(plan.clusters), "round_deadline_s": 0.5, "grace_s": 0.0}
        return SeedRun(seed, plan=replace(plan, config=replace(plan.config, **every))).run().violations

    with planted(WAITS_FOR_ITS_MINIMUM):
        seed, said = next((seed, found[0]) for seed in range(3, 20) if (found := violations(seed)))
    assert said.endswith("(I15)"), said
    assert violations(seed) == ()


@pytest.mark.parametrize("what", ["members", "pins"])
def test_memory_that_grows_past_its_formula_is_noticed(what: str) -> None:
    world = SeedRun(4)
    world.budgets._compare("master", iter([(what, 11, 10)]))
    assert world.violations == [f"master: 11 {what}, at most 10 may be (I16)"]


def test_every_budget_is_looked_at_and_kept() -> None:
    fills = SeedRun(8).run().counts.fills
    assert len(fills) >= 14
    assert all(size <= most for size, most in fills.values())
    assert fills["members"][0] > 1


def test_the_wall_clock_decides_nothing() -> None:
    """Whatever the clock says at the start, the same happens at the same time."""
    courses = []
    for wall_s in (0.0, 1.7e9, -1e9):
        world = SeedRun(SMALL)
        world.wall_offset_s = wall_s
        outcome = world.run()
        courses.append((outcome.events, outcome.published, outcome.rounds, outcome.virtual_s, outcome.fired))
    assert courses[0] == courses[1] == courses[2]


def test_a_process_that_dies_while_all_are_suspended_is_started_when_they_go_on() -> None:
    world = SeedRun(SMALL)
    slave = world.slaves["s0"]
    world.suspended_until_s = 600.0
    world.restart(slave, 1.0)
    while world.kernel.next_s < 600.5:
        world.kernel.step()
    assert not slave.alive
    while world.kernel.next_s < 602.0:
        world.kernel.step()
    assert slave.alive


@pytest.mark.parametrize("lost", ["lost_slave_disk", "all_slave_disks_lost"])
def test_the_operator_restores_what_was_lost_since_the_last_publish_and_nothing_older(lost: str) -> None:
    world = SeedRun(8309, planned=(lost, "crash_all_clusters"))  # no cluster can give the model back
    world.attic["s1"] = {}  # as it was before an earlier loss
    assert world.run().violations == ()
    assert "enough" in world.ended, "it ended by the operator's stop, with all that it had published"
