"""What a cluster trained through an outage is merged, not taken for an outlier (docs/algorithm.md: more tokens excuse a
longer way)."""

from __future__ import annotations

import pytest
from support.master_bench import Bench

from dips.core.messages import Settings, VerdictKind

STEPS, TOKENS = 16, 100
WARM_UP = 10
"""More than the 8 pushes after which a cluster is scored."""

SETTINGS = Settings(sync_every_steps=STEPS)


def warmed_up() -> Bench:
    bench = Bench(settings=SETTINGS).running("a")
    for _ in range(WARM_UP):
        bench.push("a", TOKENS, steps=STEPS)
        assert bench.verdict("a").kind is VerdictKind.APPLIED
        bench.pull("a")
    return bench


def pushed_after_an_outage(bench: Bench, rounds: int) -> VerdictKind:
    """So many rounds' steps in one push, which has gone as many times as far."""
    bench.norms["a"] = 0.5 * rounds
    bench.push("a", rounds * TOKENS, steps=rounds * STEPS)
    return bench.verdict("a").kind


@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_a_push_that_carries_what_an_outage_held_back_is_no_outlier(rounds: int) -> None:
    bench = warmed_up()
    assert pushed_after_an_outage(bench, rounds) is VerdictKind.APPLIED


def test_nor_is_it_after_a_restart_of_the_master() -> None:
    bench = warmed_up().restart()
    bench.join("a")
    bench.pull("a")
    assert pushed_after_an_outage(bench, 3) is VerdictKind.APPLIED


def test_the_same_way_with_the_usual_steps_is_one() -> None:
    bench = warmed_up()
    bench.norms["a"] = 1.5
    bench.push("a", TOKENS, steps=STEPS)
    assert bench.verdict("a").kind is VerdictKind.EXCLUDED
