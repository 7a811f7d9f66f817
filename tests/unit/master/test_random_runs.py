"""Random interleavings of everything that can happen to a master: what must always hold, and that a healed run goes on.

DIPS_TEST_WALKS chooses how many walks are made (40); a failure names its seed, which always walks the same way.
"""

from __future__ import annotations

import os

import pytest
from support.walk import Walk

from dips.core.seen import Seen, arrows_of, report
from dips.master.state.effects import Halt
from dips.master.state.tables import PUSH_TABLE, RECOVERY_TABLE, RESHARD_TABLE, ROUND_TABLE, SLAVE_TABLE

N_WALKS = int(os.environ.get("DIPS_TEST_WALKS", "40"))
STEPS = 1000
ENTRIES = 14
MASTER_TABLES = (PUSH_TABLE, SLAVE_TABLE, ROUND_TABLE, RECOVERY_TABLE, RESHARD_TABLE)
SELDOM = {
    ("push", "SEALED", "aborted", "DECIDED"),
    ("push", "SEALED", "rolled back", "DECIDED"),
    ("push", "STAGED", "new attempt", "TICKETED"),
    ("round", "COMMIT", "recovery", "IDLE"),
    ("round", "MEASURE", "abort", "IDLE"),
    ("round", "PREPARE", "void", "IDLE"),
    ("round", "SEALED", "nobody left", "IDLE"),
    ("slave", "ATTACHED", "lost", "ABSENT"),
    ("slave", "PROMISED", "lost", "ABSENT"),
    ("slave", "READY", "configure", "CONFIGURING"),
}
"""Transitions of the master that five walks may miss: tests of their own take them, and simulated seeds."""


def assert_publishes_again(walk: Walk) -> None:
    walk.heal()
    committed, rounds = walk.committed + 1, walk.sealed_rounds()
    assert walk.live_on(lambda: walk.published(committed), 90.0), "a healed run is stuck"
    assert walk.sealed_rounds() - rounds <= 2


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_nothing_is_lost_or_counted_twice_and_a_healed_run_publishes_again_and_ends(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    assert_publishes_again(walk)
    walk.stop()
    assert walk.live_on(lambda: walk.bench.halted is not None, 60.0), "the run does not end"
    assert walk.bench.halted == Halt(0, "the run has ended: enough")


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("entry", range(ENTRIES))
def test_master_may_die_at_any_entry_of_its_journal(entry: int, written: int) -> None:
    """written: entries that are durable although the master did not live to learn it."""
    walk = Walk(0)
    walk.disk_full_at = entry
    assert walk.live_on(lambda: bool(walk.pending()), 60.0)
    walk.live_on(lambda: False, 3.0)
    walk.restart_master(written)
    walk.disk_full_at = None
    assert_publishes_again(walk)


def test_walks_go_everywhere() -> None:
    """A walk that never gets anywhere would prove nothing."""
    kinds: set[str] = set()
    seen = Seen()
    for seed in range(5):
        walk = Walk(seed)
        for _ in range(STEPS):
            walk.step()
        kinds |= {f"{r.fields['phase']} upon {r.fields['input']}" for r in walk.bench.records if r.kind == "round"}
        kinds |= {str(r.fields["verdict"]) for r in walk.bench.records if r.kind == "verdict"}
        kinds |= {r.kind for r in walk.bench.records}
        seen.add(walk.seen)
        assert walk.newest_v >= 1
    assert {"APPLIED", "EXCLUDED", "ABORTED", "evict", "leave", "slave_lost", "stood_still", "refused"} <= kinds
    assert {"IDLE upon abort", "IDLE upon void", "PUBLISH upon all flipped", "MEASURE upon checks passed"} <= kinds
    print("\n".join(report(seen, MASTER_TABLES)))
    assert set(arrows_of([PUSH_TABLE, SLAVE_TABLE, ROUND_TABLE])) - set(seen.arrows) <= SELDOM
    assert set(seen.refusals) >= {"BUSY", "FENCED", "STALE_EPOCH", "UNKNOWN_PUSH"}
