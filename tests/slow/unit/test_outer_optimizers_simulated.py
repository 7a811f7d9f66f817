"""Whole simulated runs with each further outer optimizer, with faults: every promise holds, and every COMMIT made the
step that its version's number asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dips.master.state.penalty_types import PenaltyConfig
from dips.sim.run_plan import SimulatedRunPlan, make_plan
from dips.sim.seed_run import SeedRun
from dips.sim.world import MasterProcess

N, MU = 3, 0.8
SEEDS = 14

KNOBS: dict[str, dict[str, Any]] = {
    "heavy-ball": {"outer_momentum": MU},
    "averaging": {},
    "delayed-nesterov": {"outer_momentum": MU, "delay_rounds": N},
}


def expected(optimizer: str, v: int) -> tuple[float, float, float]:
    """(decay, look-ahead, gradient weight) of the step that starts from version v."""
    if optimizer == "heavy-ball":
        return MU, 1.0, 0.0
    if optimizer == "averaging":
        return 0.0, 0.0, 1.0
    return {0: (MU, 0.0, 1.0), N - 1: (1.0, MU, 1.0)}.get(v % N, (1.0, 0.0, 1.0))


def plan_with(optimizer: str, seed: int) -> SimulatedRunPlan:
    plan = make_plan(Random(seed))
    penalty = PenaltyConfig.of("safe", outer_optimizer=optimizer, **KNOBS[optimizer])
    settings = replace(plan.config.settings, outer_momentum=penalty.outer_momentum)
    return replace(plan, config=replace(plan.config, penalty=penalty, settings=settings))


class Watched(SeedRun):
    """Keeps the COMMIT records that became durable, in whatever life of the master."""

    def __init__(self, seed: int, plan: SimulatedRunPlan) -> None:
        self.commits: list[Mapping[str, Any]] = []
        super().__init__(seed, plan=plan)

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        super().journalled(master, record)
        if record["kind"] == "COMMIT":
            self.commits.append(record)


@pytest.mark.parametrize("optimizer", sorted(KNOBS))
def test_every_promise_holds_and_every_commit_made_its_step(optimizer: str) -> None:
    made, timelines = 0, set()
    for seed in range(SEEDS):
        world = Watched(seed, plan_with(optimizer, seed))
        assert world.run().violations == ()
        for record in world.commits:
            if record["judgement"] is None:
                continue
            step = {name: float(text) for name, text in record["judgement"]["outer_step"].items()}
            found = (step["momentum_decay"], step["momentum_lookahead"], step["gradient_weight"])
            assert found == expected(optimizer, record["from_version"][1])
            share = float(record["judgement"]["rho"]) * float(record["judgement"]["kappa"])
            assert step["scale"] == (share / N if optimizer == "delayed-nesterov" else share)
            made += 1
            timelines.add(record["from_version"][0])
    assert made >= 4 * SEEDS
    assert max(timelines) > 1, "some run went back to an older version and on from there"
