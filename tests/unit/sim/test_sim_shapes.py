"""Kinds of simulated runs: how many of everything, who is beset, how long they last."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from dips.lab.sim import run_plan
from dips.lab.sim.faults import register
from dips.lab.sim.run_plan import make_plan
from dips.lab.sim.seed_run import SeedRun


def test_the_seed_alone_chooses_and_every_shape_has_its_share() -> None:
    chosen = Counter(run_plan.of_seed(seed).name for seed in range(5000))
    assert chosen == Counter(run_plan.of_seed(seed).name for seed in range(5000))
    for shape in run_plan.SHAPES:
        assert 0.5 * 5000 * shape.share < chosen[shape.name] < 1.5 * 5000 * shape.share, shape.name
    assert sum(shape.share for shape in run_plan.SHAPES) == pytest.approx(1.0)


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

    def test_faults_of_others_are_no_sabotage(self) -> None:
        seed = next(seed for seed in range(400) if run_plan.of_seed(seed) is run_plan.SABOTAGE)
        assert SeedRun(seed).waits.judging
        assert not SeedRun(seed, planned=("crash_master",)).waits.judging
