"""Slaves are added and removed in whole runs under a virtual clock, while other faults strike: nothing breaks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from dips.lab.sim.content import key_of
from dips.lab.sim.faults import operations as fault_operations
from dips.lab.sim.hosts.slave import SimulatedMove
from dips.lab.sim.seed_run import SeedOutcome, SeedRun
from dips.master.state.reshard import Reshard

FAULTS = sorted(name for name in fault_operations.FAULTS if name.startswith("reshard_"))
"""Seeds in which a RESHARD is done, and what else strikes there."""


def resharded(seed: int, *faults: str) -> tuple[SeedOutcome, SeedRun]:
    """One run with two wishes of an operator."""
    world = SeedRun(seed, planned=(FAULTS[seed % 4], FAULTS[(seed + 1) % 4], *faults))
    return world.run(), world


def records(world: SeedRun) -> list[dict[str, Any]]:
    return [json.loads(entry.record_json) for entry in world.disk.entries if entry.kind == "RESHARD"]


def test_a_run_takes_every_arrow_of_the_table_and_records_say_where_blocks_were() -> None:
    table = {("NONE", "asked", "WAITING"), ("MOVING", "journaled", "NONE"), ("WAITING", "nothing asked", "NONE")}
    taken: set[tuple[str, ...]] = set()
    kinds: Counter[str] = Counter()
    for seed in range(705, 735):
        if table <= taken and kinds["RESHARD"] >= 3:
            break
        outcome, world = resharded(seed, "crash_slave", "reshard_taken_back")
        assert outcome.violations == ()
        taken |= {arrow[1:] for arrow in outcome.arrows if arrow[0] == "reshard"}
        kinds += Counter(entry.kind for entry in world.disk.entries)
        for record, after in itertools.pairwise(records(world)):
            assert record["placement"] == after["placement_before"]
    assert table <= taken
    assert kinds["RESHARD"] >= 3


def violations_of(*seeds: int) -> list[str]:
    return [sentence for seed in seeds for sentence in resharded(seed)[0].violations[:1]]


def test_a_slave_that_trusts_what_it_has_put_together_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the parameters for the momentum and does not compare: the next version has another content."""
    take = SimulatedMove._take

    def take_wrongly(self: SimulatedMove, chunks: list[Any], memory: Any) -> None:
        take(self, chunks, memory)
        self._values |= {(key, True): self._values[key, False] for key in map(key_of, chunks)}

    monkeypatch.setattr(SimulatedMove, "_take", take_wrongly)
    monkeypatch.setattr("dips.lab.sim.hosts.slave.shard_digest", lambda sums: Anything())
    assert any("holds something else" in sentence for sentence in violations_of(709, 717))


class Anything:
    """Equal to every digest."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_a_master_that_journals_before_all_have_prepared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Reshard.prepared

    def hastily(self: Reshard, slave: Any, body: Any) -> bool:
        state = self._shared.reshard
        state.prepared |= set(state.digests)
        return prepared(self, slave, body)

    monkeypatch.setattr(Reshard, "prepared", hastily)
    assert any("before slaves" in sentence for sentence in violations_of(705, 708))
