"""Whole simulated runs with each further outer optimizer, with faults: every promise holds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dips.master.state.penalty_types import PenaltyConfig
from dips.sim.run_plan import SimulatedRunPlan, make_plan
from dips.sim.seed_run import SeedRun

N, MU = 3, 0.8
SEEDS = 14

KNOBS: dict[str, dict[str, Any]] = {
    "heavy-ball": {"outer_momentum": MU},
    "averaging": {},
    "delayed-nesterov": {"outer_momentum": MU, "delay_rounds": N},
}


def plan_with(optimizer: str, seed: int) -> SimulatedRunPlan:
    plan = make_plan(Random(seed))
    penalty = PenaltyConfig.of("safe", outer_optimizer=optimizer, **KNOBS[optimizer])
    settings = replace(plan.config.settings, outer_momentum=penalty.outer_momentum)
    return replace(plan, config=replace(plan.config, penalty=penalty, settings=settings))


@pytest.mark.parametrize("optimizer", sorted(KNOBS))
def test_every_promise_holds_after_rollbacks_too(optimizer: str) -> None:
    """I18 computes the step of each COMMIT again, from the number of its version."""
    outcomes = [SeedRun(seed, plan=plan_with(optimizer, seed)).run() for seed in range(SEEDS)]
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert any(("recovery", "GATHERING", "rolled back", "NONE") in outcome.arrows for outcome in outcomes)
