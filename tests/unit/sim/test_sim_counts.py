"""What a run counts of itself: only what really happened, and a reason for every planned fault that did not strike."""

from __future__ import annotations

from collections import Counter

import pytest

from dips.lab.sim.counts import NO_MOMENT
from dips.lab.sim.seed_run import SeedRun


@pytest.mark.parametrize("seed", range(24, 28))
def test_every_planned_fault_struck_or_has_a_reason(seed: int) -> None:
    counts = SeedRun(seed).run().counts
    idle: Counter[str] = Counter()
    for (kind, why), n in counts.idle.items():
        if why != NO_MOMENT:  # these were begun
            idle[kind] += n
    assert all(n == counts.begun[kind] + idle[kind] for kind, n in counts.planned.items()), "some may not have struck"
    struck = {kind for kind in counts.begun if counts.fired[kind]}
    armed = {kind for kind, why in counts.idle if why == NO_MOMENT}
    assert set(counts.begun) - struck == armed


def test_a_slave_that_refuses_a_round_for_its_disk_is_counted() -> None:
    fired = [SeedRun(seed, planned=("slave_disk_error",) * 3).run().counts.fired for seed in range(7000, 7004)]
    assert sum(counts["slave_disk_error"] > 0 for counts in fired) >= 3


def test_a_kill_within_a_step_falls_into_phases_that_no_time_passes_in() -> None:
    phases: set[str] = set()
    for seed in range(9, 60):
        outcome = SeedRun(seed, planned=("crash_master_in_step",) * 8).run()
        assert outcome.violations == (), seed
        phases |= {phase for (kind, phase) in outcome.counts.fired_in if kind == "crash_master_in_step"}
        if {"SEALED", "JUDGE"} <= phases:
            return
    raise AssertionError(f"only {sorted(phases)}")
