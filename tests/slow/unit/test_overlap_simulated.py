"""Whole simulated runs with each `overlap`, with faults: every promise holds, and training goes on where it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dips.sim.hosts.cluster import ClusterHost
from dips.sim.kernel import SimulatedProcess
from dips.sim.run_plan import SimulatedRunPlan, make_plan
from dips.sim.seed_run import SeedRun
from dips.worker.state.shared import SessionPhase

SEEDS = range(6200, 6212)


def plan_with(overlap: str, seed: int) -> SimulatedRunPlan:
    """The seed's own plan, with bounded waits that outlast an exchange that goes well."""
    plan = make_plan(Random(seed))
    settings = replace(plan.config.settings, overlap=overlap, verdict_wait_s=4.0)
    return replace(plan, config=replace(plan.config, settings=settings))


class Watched(SeedRun):
    """Counts steps by the phase in which they began, and installations by mode."""

    def __init__(self, seed: int, plan: SimulatedRunPlan) -> None:
        self.steps: Counter[SessionPhase] = Counter()
        self.installs: Counter[str] = Counter()
        super().__init__(seed, plan=plan)
        self.watchers.append(self._watch)

    def _watch(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if (role, kind) == ("worker", "installed"):
            self.installs[fields["mode"]] += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a cluster is counted with the phase in which it began."""
    begin = ClusterHost._step

    def step(self: ClusterHost) -> None:
        assert isinstance(self.world, Watched)
        assert self.session is not None
        self.world.steps[self.session.phase] += 1
        begin(self)

    monkeypatch.setattr(ClusterHost, "_step", step)


def run_all(overlap: str) -> tuple[Counter[SessionPhase], Counter[str]]:
    steps: Counter[SessionPhase] = Counter()
    installs: Counter[str] = Counter()
    for seed in SEEDS:
        world = Watched(seed, plan_with(overlap, seed))
        assert world.run().violations == (), f"seed {seed}"
        steps += world.steps
        installs += world.installs
    return steps, installs


PUSHING = (SessionPhase.BEGINNING_PUSH, SessionPhase.TRANSFERRING, SessionPhase.FINISHING_PUSH)
PULLING = (SessionPhase.AWAITING, SessionPhase.PULLING)


@pytest.mark.usefixtures("counted")
def test_every_promise_holds_and_steps_are_made_where_the_setting_says() -> None:
    """Without overlap too, some are made in an exchange: one that a fault holds up."""
    shares: dict[str, tuple[float, float, float]] = {}  # of all steps, pushing and pulling; of installs, rebased ones
    for overlap in ("none", "push", "full"):
        steps, installs = run_all(overlap)
        pushing, pulling = (sum(steps[phase] for phase in phases) / steps.total() for phases in (PUSHING, PULLING))
        shares[overlap] = (pushing, pulling, installs["REBASE_FROM_PUSH"] / installs.total())
    none, push, full = shares["none"], shares["push"], shares["full"]
    assert none[0] < min(push[0], full[0])
    assert 2 * max(none[1], push[1]) < full[1]
    assert 5 * none[2] < min(push[2], full[2])
