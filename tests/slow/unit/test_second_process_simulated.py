"""Second processes under a name, simulated: the rule holds, and without it the simulator says so."""

from __future__ import annotations

import pytest
from search.explore import Search
from search.searches import by_name

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


@pytest.mark.parametrize(
    ("owner", "rule", "who"),
    [(SlaveRegistry, "_check_directory", "slave s"), (Membership, "_check_process", "cluster a")],
)
def test_without_the_rule_the_search_finds_who_was_displaced(
    monkeypatch: pytest.MonkeyPatch, owner: type, rule: str, who: str
) -> None:
    monkeypatch.setattr(owner, rule, lambda *_: None)
    found = Search(by_name("second-processes").bounds).run().violation
    assert found is not None
    assert f"took over {who}" in str(found)
