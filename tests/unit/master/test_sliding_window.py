"""grace = "sliding": a round's window starts again with each push that arrives, within a bound."""

from __future__ import annotations

import pytest
from support.master_bench import Bench

from dips.core.messages import EvictRequest
from dips.master.state.pacing import SLIDES

GRACE_S = 10.0


def running(*names: str, sliding: bool = True) -> Bench:
    """The last one never pushes, so that no window closes early."""
    return Bench(grace_s=GRACE_S, grace_sliding=sliding, round_timeout_s=60.0).running(*names, "z")


def merged(bench: Bench) -> list[tuple[str, ...]]:
    return [entry.accepted for entry in bench.status().recent_rounds][1:]


@pytest.mark.parametrize("sliding", [True, False])
def test_the_window_starts_again_with_each_arrival_where_it_slides(sliding: bool) -> None:
    bench = running("a", "b", "c", sliding=sliding)
    for turn in range(2):
        bench.push("a")
        bench.advance(8.0)
        bench.begin_push("b")
        bench.stage("b")
        left_s = bench.result(bench.finish_push("b")).answer.window_closes_in_s
        assert left_s == bench.status().window_closes_in_s == pytest.approx(GRACE_S if sliding else 2.0)
        bench.advance(8.0)
        bench.push("c")
        bench.advance(9.5)
        assert len(merged(bench)) == (turn if sliding else 2 * turn + 1)
        bench.advance(1.0)
        for name in "abc":
            bench.pull(name)
    assert merged(bench) == [("a", "b", "c")] * 2 if sliding else [("a", "b"), ("c",)] * 2


def test_arrivals_without_end_do_not_keep_it_open() -> None:
    """I15: a hostile cluster is evicted, or joins again by itself, and pushes again, as often as it likes."""
    bench = running("a", "b")
    bench.push("a")
    waited_s = 0.0
    while not merged(bench):
        bench.push("b")
        bench.advance(5.0)
        waited_s += 5.0
        if merged(bench):
            break
        assert waited_s < SLIDES * GRACE_S
        bench.operate(EvictRequest("", "b"))
        bench.join("b")
        bench.pull("b")
    assert waited_s == pytest.approx(SLIDES * GRACE_S)
    assert merged(bench) == [("a", "b")]


def test_a_master_that_stood_still_gives_the_time_back_to_both_ends() -> None:
    bench = running("a", "b", "c")
    bench.push("a")
    bench.jump(100.0)
    assert merged(bench) == []
    bench.push("b")
    bench.advance(9.0)
    assert merged(bench) == []
    bench.advance(1.5)
    assert merged(bench) == [("a", "b")]
