"""Simulated runs whose data flow has keys: every fault, and no process of the run stays locked out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dips.core.net.data_header import DataHeader
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.run_plan import make_plan
from dips.lab.sim.seed_run import SeedRun
from dips.lab.sim.world import Away

SEEDS = 12


def test_runs_with_keys_and_faults_keep_their_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real = Counter[str](), SlaveHost._admits

    def counted(
        slave: SlaveHost, key: bytes, header: DataHeader, answer: Callable[[DataHeader, Any], None], away: Away
    ) -> bool:
        may = real(slave, key, header, answer, away)
        answers["served" if may else "refused" if slave.admission.listed(key.hex()) else "turned away"] += 1
        return may

    monkeypatch.setattr(SlaveHost, "_admits", counted)
    for seed in range(SEEDS):
        plan = make_plan(Random(seed))
        outcome = SeedRun(seed, plan=replace(plan, config=replace(plan.config, encrypted=True))).run()
        assert outcome.violations == (), f"seed {seed}"
        assert outcome.published > 1
    assert answers["served"] > 0
    assert answers["turned away"] > 0, "else no process was ever too early, evicted or of another life"
    assert answers["refused"] == 0, "no honest cluster touches another one's push"
