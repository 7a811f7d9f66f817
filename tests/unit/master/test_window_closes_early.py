"""When a grace window closes: once no cluster that is not in it can push before its end, or its time is over."""

from __future__ import annotations

import pytest
from support.master_bench import Bench

from dips.core.messages import BeginPullRequest, EvictRequest, Settings, VerdictKind
from dips.master.state.pacing import SLIDES

H = 80
GRACE_S = 10.0


def round_over(ago_s: float, *names: str, **settings: object) -> Bench:
    """Clusters that make one step a second; their first pushes are merged and all have pulled since."""
    terms = Settings(**({"sync_every_steps": H, "heartbeat_s": 5.0} | settings))  # type: ignore[arg-type]
    bench = Bench(settings=terms, grace_s=GRACE_S).running(*names)
    bench.pushes(*names)
    for name in names:
        bench.pull(name)
        bench.beat(name, steps_per_s=1.0)
    later(bench, ago_s)
    return bench


def later(bench: Bench, seconds: float) -> None:
    """Time passes; each cluster beats with its speed."""
    for _ in range(round(seconds)):
        bench.now_s += 1.0
        for name in bench.clusters:
            if bench.alive(name):
                bench.beat(name, steps_per_s=1.0)


def open_window(bench: Bench) -> bool:
    return bench.state.shared.round.phase.now.value == "WINDOW"


def newest(bench: Bench) -> tuple[str, ...]:
    return bench.status().recent_rounds[-1].accepted


def why_closed(bench: Bench) -> str:
    return next(str(line["why"]) for line in reversed(bench.recorded("round")) if line["input"] == "window closed")


def test_a_push_does_not_wait_for_a_cluster_that_is_far_from_its_own() -> None:
    bench = round_over(20, "a", "b")
    bench.push("a")
    assert newest(bench) == ("a",)
    assert why_closed(bench) == "b cannot push in the 10.0 s that are left"
    bench.pull("a")
    bench.push("b")
    assert newest(bench) == ("b",)  # the estimate was wrong, and the push is in the next round


def test_it_waits_for_one_that_may_come_in_time() -> None:
    """95 % of 80 steps are made after 76 s: a window from 65 s to 75 s is too early for that, one from 67 s is not."""
    for seconds, waits in ((65, False), (67, True)):
        bench = round_over(seconds, "a", "b")
        bench.push("a")
        assert open_window(bench) is waits
    later(bench, 4)
    bench.push("b")
    assert newest(bench) == ("a", "b")
    assert why_closed(bench) == "every cluster is in"


def test_it_closes_with_the_last_one_that_could_come() -> None:
    bench = round_over(68, "a", "b", "c")
    bench.beat("c", steps_per_s=0.5)
    bench.push("a")
    assert open_window(bench)
    bench.push("b")
    assert newest(bench) == ("a", "b")
    assert why_closed(bench).startswith("c cannot push")


def test_a_cluster_whose_speed_is_not_known_is_waited_for() -> None:
    bench = round_over(20, "a", "b")
    bench.beat("b")
    bench.push("a")
    assert open_window(bench)
    bench.beat("b", steps_per_s=1.0)
    assert newest(bench) == ("a",)


def test_one_that_pushes_is_not_if_its_last_push_took_longer_than_the_window_is_open() -> None:
    bench = round_over(20, "a", "b")
    bench.begin_push("b")
    bench.push("a")
    assert open_window(bench), "it is not known how long it takes"
    bench = round_over(20, "a", "b")
    bench.beat("b", steps_per_s=1.0, push_s=12.0)
    bench.begin_push("b")
    bench.push("a")
    assert why_closed(bench) == "b cannot push in the 10.0 s that are left"
    bench.pull("a")
    bench.beat("b", steps_per_s=1.0, push_s=12.0)
    bench.now_s += 2.0
    bench.begin_push("a")
    bench.stage("a")
    bench.finish_push("a")
    assert open_window(bench)  # 95 % of 12 s since its beginning are within the 10 s from now


@pytest.mark.parametrize("what", ["all is staged", "a new attempt", "aborted"])
def test_one_that_sends_what_was_missing_is_waited_for(what: str) -> None:
    """It may be in at any time; what was aborted, of the same steps, is pushed again at once."""
    bench = round_over(20, "a", "b")
    bench.beat("b", steps_per_s=1.0, push_s=12.0)
    bench.begin_push("b")
    if what == "a new attempt":
        bench.clusters["b"].seq -= 1
        bench.begin_push("b")
    else:
        bench.stage("b")
    if what == "aborted":
        bench.finish_push("b", digests={slave.name: b"damaged" for slave in bench.slaves})
        assert bench.verdict("b").kind is VerdictKind.ABORTED
    bench.push("a")
    assert open_window(bench)


@pytest.mark.parametrize("held", [False, True])
def test_a_new_incarnation_is_waited_for(held: bool) -> None:
    """It may bring steps of the one before."""
    bench = round_over(20, "a", "b")
    bench.back("b", previous=bench.clusters["b"].join.incarnation if held else None)
    bench.beat("b", steps_per_s=1.0)
    bench.push("a")
    assert open_window(bench)


@pytest.mark.parametrize(("overlap", "dynamic"), [("none", False), ("push", False), ("full", False), ("full", True)])
def test_before_its_pull_is_over_a_cluster_makes_an_eighth_of_h_at_least(overlap: str, dynamic: bool) -> None:
    """Steps count from the pull where H_j is dynamic or nothing overlaps, else from the beginning of the push."""
    bench = round_over(70, "a", "b", overlap=overlap, dynamic_local_steps=dynamic)
    bench.begin_push("b")
    later(bench, 5)
    bench.stage("b")
    bench.push("a")
    bench.finish_push("b")
    assert newest(bench) == ("a", "b")
    bench.ask(BeginPullRequest(bench.caller("b")))
    bench.pull("a")
    bench.push("a")
    from_pull = dynamic or overlap == "none"
    assert open_window(bench)  # 9.5 s from the verdict, or from 5 s before it, are within the window of 10 s
    bench = round_over(70, "a", "b", overlap=overlap, dynamic_local_steps=dynamic)
    bench.begin_push("b")
    later(bench, 2)
    bench.stage("b")
    bench.push("a")
    bench.finish_push("b")
    bench.pull("a")
    bench.beat("b", steps_per_s=0.9)
    bench.push("a")
    assert open_window(bench) is not from_pull


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
        bench.pulls(*"abc")
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
        bench.back("b")
    assert waited_s == pytest.approx(SLIDES * GRACE_S)
    assert merged(bench) == [("a", "b")]


def test_a_master_that_stood_still_gives_the_time_back_to_both_ends() -> None:
    bench = running("a", "b", "c")
    bench.push("a")
    bench.advance(8.0)
    bench.jump(100.0)
    assert merged(bench) == []
    bench.push("b")
    bench.advance(9.0)
    assert merged(bench) == []
    bench.advance(1.5)
    assert merged(bench) == [("a", "b")]
