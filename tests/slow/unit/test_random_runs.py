"""Random interleavings of everything that can happen to a master: what must always hold, and that a healed run goes on.

DIPS_TEST_WALKS chooses how many walks are made (40); a failure names its seed, which always
walks the same way.
"""

from __future__ import annotations

import os

import pytest
from support.master_walk import Walk, walk_to_the_end

N_WALKS = int(os.environ.get("DIPS_TEST_WALKS", "40"))
EVENTS = 1500
"""Of the master, in each walk."""

ENTRIES = 14


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
