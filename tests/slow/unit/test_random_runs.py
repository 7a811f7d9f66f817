"""Random interleavings of everything that can happen to a master: what must always hold, and that a healed run goes on.

DIPS_TEST_WALKS chooses how many walks are made (12; tests/slow/unit/test_many_walks.py makes more); a failure names its
seed, which always walks the same way.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from support.master_walk import KINDS, Walk, walk_to_the_end

from dips.master.state.records import PUSH_TABLE, RECOVERY_TABLE, RESHARD_TABLE, ROUND_TABLE, SLAVE_TABLE
from dips.sim.seen import Seen, arrows_of, report

N_WALKS = int(os.environ.get("DIPS_TEST_WALKS", "12"))
EVENTS = 1500
"""Of the master, in each walk."""

ENTRIES = 14
MASTER_TABLES = (PUSH_TABLE, SLAVE_TABLE, ROUND_TABLE, RECOVERY_TABLE, RESHARD_TABLE)
SELDOM = {
    ("push", "SEALED", "aborted", "DECIDED"),
    ("push", "SEALED", "rolled back", "DECIDED"),
    ("push", "STAGED", "new attempt", "TICKETED"),
    ("round", "COMMIT", "recovery", "IDLE"),
    ("round", "MEASURE", "abort", "IDLE"),
    ("round", "PREPARE", "void", "IDLE"),
    ("round", "SEALED", "no push is left", "IDLE"),
    ("slave", "ATTACHED", "lost", "ABSENT"),
    ("slave", "PROMISED", "lost", "ABSENT"),
    ("slave", "READY", "configure", "CONFIGURING"),
}
"""Transitions of the master that ten walks may miss: tests of their own take them, and simulated seeds."""


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_nothing_is_lost_or_counted_twice_and_a_healed_run_publishes_again_and_ends(seed: int) -> None:
    walk_to_the_end(seed, EVENTS)


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("entry", range(ENTRIES))
def test_master_may_die_at_any_entry_of_its_journal(entry: int, written: int) -> None:
    """written: entries that are durable although the master did not live to learn it."""
    walk = Walk(0)
    walk.fall_at_entry(entry, written)
    walk.publishes_again()
    assert walk.violations == []


def test_walks_go_everywhere() -> None:
    """A walk that never gets anywhere would prove nothing."""
    kinds: set[str] = set()
    struck: Counter[str] = Counter()
    seen = Seen()
    for seed in range(10):
        walk = Walk(seed)
        walk.walk(EVENTS)
        kinds |= {f"{fields['phase']} upon {fields['input']}" for kind, fields in walk.records if kind == "round"}
        kinds |= {str(fields["verdict"]) for kind, fields in walk.records if kind == "verdict"}
        kinds |= {kind for kind, _ in walk.records}
        struck += walk.struck_kinds
        seen.add(walk.seen)
        assert walk.publishes >= 2
    assert {"APPLIED", "EXCLUDED", "ABORTED", "evict", "leave", "slave_lost", "stood_still", "refused"} <= kinds
    assert {"IDLE upon abort", "IDLE upon void", "PUBLISH upon all flipped", "MEASURE upon checks passed"} <= kinds
    print("\n".join(report(seen, MASTER_TABLES)))
    assert set(arrows_of([PUSH_TABLE, SLAVE_TABLE, ROUND_TABLE])) - set(seen.arrows) <= SELDOM
    assert set(seen.refusals) >= {"BUSY", "FENCED", "STALE_EPOCH", "UNKNOWN_PUSH"}
    assert len(struck) >= 0.8 * len(KINDS), "most kinds of fault struck these walks"
