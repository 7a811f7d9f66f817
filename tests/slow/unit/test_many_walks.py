"""More random interleavings of everything that can happen to a master, as in tests/slow/unit/test_random_runs.py."""

from __future__ import annotations

import pytest
from support.master_walk import walk_to_the_end


@pytest.mark.parametrize("seed", range(12, 40))
def test_nothing_is_lost_or_counted_twice_and_a_healed_run_publishes_again_and_ends(seed: int) -> None:
    walk_to_the_end(seed, 1500)
