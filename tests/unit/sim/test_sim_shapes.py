"""Kinds of simulated runs: how many of everything, who is beset, how long they last."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from dips.sim import run_plan
from dips.sim.faults import register
from dips.sim.run_plan import SimulatedRunPlan, make_plan
from dips.sim.seed_run import SeedRun


def plans_of(shape: run_plan.Shape, n: int) -> list[SimulatedRunPlan]:
    return [make_plan(Random(number), shape=shape) for number in range(n)]


def test_the_seed_alone_chooses_and_every_shape_has_its_share() -> None:
    chosen = Counter(run_plan.of_seed(seed).name for seed in range(5000))
    assert chosen == Counter(run_plan.of_seed(seed).name for seed in range(5000))
    for shape in run_plan.SHAPES:
        assert 0.5 * 5000 * shape.share < chosen[shape.name] < 1.5 * 5000 * shape.share, shape.name
    assert sum(shape.share for shape in run_plan.SHAPES) == pytest.approx(1.0)


def test_wide_runs_have_2_to_16_clusters_and_1_to_8_slaves() -> None:
    plans = plans_of(run_plan.WIDE, 300)
    assert {len(plan.clusters) for plan in plans} == set(range(2, 17))
    assert {len(plan.slaves) for plan in plans} == set(range(1, 9))
    assert {len(set(plan.clusters + plan.spares)) - len(plan.clusters) for plan in plans} == {3}


def test_there_may_be_one_cluster_more_than_slots_and_no_more() -> None:
    over = {len(plan.clusters + plan.spares) - plan.config.max_clusters for plan in plans_of(run_plan.WIDE, 200)}
    assert max(over) == 1


def test_a_small_run_is_chosen_as_if_there_were_no_other_shapes() -> None:
    assert make_plan(Random(5)) == make_plan(Random(5), shape=run_plan.SMALL)


def test_a_long_run_lasts_for_its_rounds_and_faults_never_cease() -> None:
    """A tenth of the shortest long run; whole ones run with thousands of seeds."""
    seed = 3
    plan = replace(make_plan(Random(seed), shape=run_plan.LONG), rounds=100, fault_every_s=8.0)
    outcome = SeedRun(seed, plan=plan).run()
    assert outcome.violations == ()
    assert outcome.rounds >= 100
    assert sum(outcome.counts.planned.values()) > 8


class TestSabotage:
    def test_all_faults_are_of_one_cluster_and_the_others_are_judged(self) -> None:
        seeds = [seed for seed in range(400) if run_plan.of_seed(seed) is run_plan.SABOTAGE][:3]
        judged = 0
        for seed in seeds:
            world = SeedRun(seed)
            outcome = world.run()
            assert outcome.violations == (), seed
            assert set(outcome.counts.planned) <= set(register.OF_ONE_CLUSTER)
            judged += world.waits.judged
        assert judged > 10

    def test_every_kind_that_one_cluster_may_do_exists(self) -> None:
        assert set(register.OF_ONE_CLUSTER) <= set(register.FAULTS)

    def test_faults_of_others_are_no_sabotage(self) -> None:
        seed = next(seed for seed in range(400) if run_plan.of_seed(seed) is run_plan.SABOTAGE)
        assert SeedRun(seed).waits.judging
        assert not SeedRun(seed, planned=("crash_master",)).waits.judging
