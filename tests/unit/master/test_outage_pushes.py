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


def with_single_steps() -> Bench:
    """H is 1, and two clusters are well known."""
    bench = Bench(settings=Settings(sync_every_steps=1), grace_s=0.1).running("a", "b")
    bench.norms = {"a": 0.1, "b": 0.1}
    for _ in range(WARM_UP):
        bench.pulls(*"ab")
        for name in "ab":
            bench.push(name, TOKENS, steps=1)
    return bench


def late(bench: Bench, steps: int, norm: float) -> VerdictKind:
    """The verdict of a push of a cluster that came later."""
    bench.pull("c")
    bench.norms["c"] = norm
    bench.push("c", steps * TOKENS, steps=steps)
    bench.advance(1.0)
    return bench.verdict("c").kind


def test_a_late_clusters_first_push_is_an_outlier_only_for_going_too_far_with_each_step() -> None:
    """With H = 1 it trains on while its first exchanges go slowly, and has no usual number of tokens yet."""
    bench = with_single_steps()
    bench.join("c")
    assert late(bench, 20, 20 * 0.1) is VerdictKind.APPLIED
    statistics = bench.state.shared.ledger.detector.of("c")
    assert statistics.mean == pytest.approx(0.1), "for its usual number of steps"
    assert (statistics.mean_tokens, statistics.steps) == (TOKENS, 1)
    assert late(bench, 1, 0.1) is VerdictKind.APPLIED
    assert late(bench, 12, 12 * 0.1) is VerdictKind.APPLIED
    bench.join("c")
    assert late(bench, 20, 20 * 11 * 0.1) is VerdictKind.EXCLUDED
    assert late(bench, 1, 11 * 0.1) is VerdictKind.EXCLUDED
