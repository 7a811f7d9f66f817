"""Differences in whole simulated runs: pushes and pulls have them, bases go, and what is wrong with them is noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from support.mutants import Mutant, planted

from dips.core.wire import Codec
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.seed_run import SeedRun

SEEDS = range(60)
"""Without the planted bugs these are clean (test_sim_seeds.py)."""


BUGS = (
    (
        Mutant(
            "what is dropped leaves a residual",
            "worker.state.pushing:Pushing.drop",
            "self._shared.clear_residual()",
            "pass",
        ),
        "outlives the steps",
    ),
    (
        Mutant(
            "what rounding lost is forgotten",
            "worker.state.pushing:Pushing.act",
            "shared.applied_as(self.open.wire)",
            "pass",
        ),
        "did not advance",
    ),
    (
        Mutant(
            "an aborted push clears the residual",
            "worker.state.pushing:Pushing._aborted",
            "was_seed = push.base is None",
            "was_seed = push.base is None\n    shared.clear_residual()",
        ),
        "which the table does not allow",
    ),
    (
        Mutant(
            "a residual of the codec that was wished",
            "worker.state.pushing:Pushing.act",
            "shared.applied_as(self.open.wire)",
            "shared.applied_as(shared.config.wire if self.open.base else None)",
        ),
        "is no longer what was sent",
    ),
    (
        Mutant(
            "read beside the newest version",
            "lab.sim.hosts.shard_memory:SimulatedShardMemory.decoded",
            "base = self.readable.get(slot.base) if slot.base is not None else None",
            "base = self.current",
        ),
        "with another content",
    ),
    (
        Mutant(
            "a slave that comes back has lost the residual",
            "slave.ring:Ring.load",
            "head = read_snapshot(file, where, (theta, momentum, residual))",
            "head = read_snapshot(file, where, (theta, momentum, NO_RESIDUAL))",
        ),
        "than what was merged",
    ),
)


class Watched(SeedRun):
    """Counts how pushes were granted, and what residuals did."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.granted: Counter[str] = Counter()
        self.installed: Counter[str] = Counter()
        self.watchers.append(self._told)

    def _told(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if role == "master" and kind == "ticket":
            self.granted[fields["wire"]] += 1
        if role == "worker" and kind == "installed":
            self.installed[fields["wire"]] += 1


def test_every_wire_type_is_granted_and_some_bases_go() -> None:
    granted: Counter[str] = Counter()
    installed: Counter[str] = Counter()
    gone = pulls_gone = 0
    for seed in SEEDS:
        world = Watched(seed)
        outcome = world.run()
        assert outcome.violations == ()
        granted += world.granted
        installed += world.installed
        gone += outcome.fired.get("base_gone", 0)
        pulls_gone += outcome.fired.get("differences_gone", 0)
    assert all(granted[wire.name] > 20 for wire in Codec if wire is not Codec.NONE), granted
    assert all(installed[wire.name] > 20 for wire in Codec if wire is not Codec.NONE), installed
    assert gone > 0, "no slave refused a chunk whose base it had not"
    assert pulls_gone > 0, "no slave lacked a difference"


@pytest.mark.parametrize(("mutant", "words"), BUGS, ids=[mutant.name.replace(" ", "-") for mutant, _ in BUGS])
def test_a_planted_bug_is_noticed(mutant: Mutant, words: str) -> None:
    with planted(mutant):
        found = next(filter(None, (SeedRun(seed).run().violations for seed in SEEDS)), ())
    assert found, f"{mutant.name} is not noticed"
    assert any(words in sentence for sentence in found), found
