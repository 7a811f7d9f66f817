"""Delayed Nesterov holds no state: after every fault a round's place in the cycle is the number of its version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from dips.sim.run_plan import SimulatedRunPlan, make_plan
from dips.sim.seed_run import SeedRun
from dips.sim.world import MasterProcess

N = 3
STEPS = (("0.8", "0.0"), ("1.0", "0.0"), ("1.0", "0.8"))
"""(decay, lookahead) of the rounds of a cycle."""

SEEDS = range(2, 10)
PLANNED = ("lost_slave_disk", "lost_master_disk", "old_master_disk", *(("nan_push",) * 6))
"""In each of them: between them lost journals, rollbacks and void rounds."""


class Listening(SeedRun):
    """Keeps what the journal is told."""

    def __init__(self, seed: int, plan: SimulatedRunPlan) -> None:
        super().__init__(seed, plan=plan, planned=PLANNED)
        self.records: list[Mapping[str, Any]] = []

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        super().journalled(master, record)
        self.records.append(record)


def delayed(seed: int) -> SimulatedRunPlan:
    plan = make_plan(Random(seed))
    settings = replace(plan.config.settings, outer_momentum=0.8)
    penalty = replace(
        plan.config.penalty,
        outer_optimizer="delayed-nesterov",
        delay_rounds=N,
        outer_momentum=0.8,
        momentum_scaling="off",
    )
    return replace(plan, config=replace(plan.config, settings=settings, penalty=penalty))


def test_the_place_in_the_cycle_survives_every_fault() -> None:
    kinds: Counter[str] = Counter()
    places: Counter[int] = Counter()
    for seed in SEEDS:
        world = Listening(seed, delayed(seed))
        world.run()
        assert world.violations == []
        for record in world.records:
            kinds[record["kind"]] += 1
            if record["kind"] != "COMMIT" or record["judgement"] is None:
                continue
            place, step = (record["version"][1] - 1) % N, record["judgement"]["outer_step"]
            assert (step["momentum_decay"], step["momentum_lookahead"]) == STEPS[place]
            assert float(step["scale"]) == float(record["judgement"]["kappa"]) * float(record["judgement"]["rho"]) / N
            places[place] += 1
    assert {"ROLLBACK", "ADOPT", "VOID"} <= set(kinds)
    assert set(places) == {0, 1, 2}
