"""Second processes under a name, simulated: the rule holds, and without it the simulator says so."""

from __future__ import annotations

import pytest

from dips.lab.sim.seed_run import SeedRun
from dips.master.state.membership import Membership
from dips.master.state.slaves import SlaveRegistry

SEEDS = range(9100, 9110)


@pytest.mark.parametrize(
    ("owner", "rule", "fault"),
    [
        (SlaveRegistry, "_check_directory", "same_slave_twice"),
        (Membership, "_check_process", "same_cluster_twice"),
    ],
)
def test_without_the_rule_the_simulator_names_who_was_displaced(
    monkeypatch: pytest.MonkeyPatch, owner: type, rule: str, fault: str
) -> None:
    monkeypatch.setattr(owner, rule, lambda *_: None)
    violations = [sentence for seed in SEEDS for sentence in SeedRun(seed, planned=(fault,)).run().violations]
    assert any(
        "was taken over" in sentence and "from a process that sends beats" in sentence for sentence in violations
    )
