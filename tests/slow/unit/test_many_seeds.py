"""Simulated runs of clusters of several ranks, and every kind of fault: nothing that was promised breaks.

Runs of one-process clusters: `make sim`. DIPS_TEST_SEEDS chooses how many seeds are simulated (100). A failing seed
always fails the same way.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from dips.lab.sim import run_plan
from dips.lab.sim import seeds as run_seeds
from dips.lab.sim.faults import register
from dips.lab.sim.seed_run import SeedRun

N_SEEDS = int(os.environ.get("DIPS_TEST_SEEDS", "100"))
IN_ONE_TEST = 10

SMALL_ONES = [seed for seed in range(7000, 7040) if run_plan.of_seed(seed) is run_plan.SMALL][:12]


@pytest.mark.parametrize("first", range(8000, 8000 + N_SEEDS, IN_ONE_TEST))
def test_every_invariant_holds_where_clusters_have_several_ranks(first: int) -> None:
    outcomes = [
        run_seeds.run_one(seed, run_seeds.Wish((2, 3, 1), (3, 2)))[0] for seed in range(first, first + IN_ONE_TEST)
    ]
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert sum(outcome.published for outcome in outcomes) >= len(outcomes)


@pytest.mark.parametrize("kind", sorted(register.FAULTS))
def test_every_kind_of_fault_strikes(kind: str) -> None:
    """Planned five times over, in a few seeds: it is counted, and nothing breaks."""
    fired: Counter[str] = Counter()
    for seed in SMALL_ONES:
        outcome = SeedRun(seed, planned=(kind,) * 5, pushers=(2,) if kind in register.OF_RANKS else ()).run()
        assert outcome.violations == ()
        fired.update(outcome.fired)
        if fired[kind]:
            return
    raise AssertionError(f"{kind} never fired: {dict(fired)}")
