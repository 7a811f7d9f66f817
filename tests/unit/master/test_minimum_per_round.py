"""A minimum for each round: a window with fewer pushes stays open past its grace, until its deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.master_bench import Bench

from dips.core import messages as m
from dips.master.page.history import sentence_of
from dips.master.state.effects import Pause, Resume, Stop

GRACE_S, DEADLINE_S, MINIMUM = 2.0, 60.0, 3


def running(*names: str, **config: Any) -> Bench:
    terms = {"grace_s": GRACE_S, "round_deadline_s": DEADLINE_S, "min_clusters_per_round": MINIMUM}
    return Bench(**(terms | config)).running(*names)


def merged(bench: Bench) -> list[tuple[str, ...]]:
    return [entry.accepted for entry in bench.status().recent_rounds][1:]


def told(bench: Bench) -> list[str]:
    """The log's sentences; the tape's lines of this kind say the same."""
    said = [log.sentence for log in bench.logs if log.key == "few pushes"]
    assert [line["sentence"] for line in bench.recorded("few_pushes")] == said
    return said


def test_a_round_waits_for_enough_pushes_and_then_goes_on_at_once() -> None:
    bench = running("a", "b", "c", "d")
    bench.begin_push("a")
    bench.stage("a")
    assert bench.result(bench.finish_push("a")).answer.window_closes_in_s == DEADLINE_S
    token = bench.await_verdict("a")
    assert bench.status().waiting_for == "", "its grace is not over"
    bench.advance(10.0)
    words = "the round has 1 of 3 pushes (min_clusters_per_round) and waits for b, c, d"
    assert bench.status().waiting_for == f"{words}, for at most 50 s"
    assert bench.status().waiting_code == "few_pushes"
    assert bench.status().window_closes_in_s == pytest.approx(50.0)
    bench.push("b")
    bench.advance(21.0)
    assert "2 of 3 pushes (min_clusters_per_round) and waits for c, d" in bench.status().waiting_for
    assert bench.result(token).answer.sentence.startswith("the round has "), "what a cluster is told while it waits"
    bench.push("c")
    assert merged(bench) == [("a", "b", "c")], "the fourth is not waited for: the grace is over"
    assert told(bench) == [f"{words}, for at most 58 s"]
    assert bench.status().recent_rounds[-1].reason == ""
    assert bench.status().waiting_for == ""


def test_at_its_deadline_it_goes_on_with_fewer_and_says_so() -> None:
    bench = running("a", "b", "c")
    bench.pushes("a", "b")
    bench.advance(DEADLINE_S - 1.0)
    assert merged(bench) == []
    assert bench.state.next_deadline_s() == pytest.approx(bench.now_s + 1.0)
    bench.advance(1.0)
    assert merged(bench) == [("a", "b")]
    words = "went on with 2 of 3 pushes (min_clusters_per_round), without c"
    assert bench.status().recent_rounds[-1].reason == words
    assert told(bench)[1:] == [f"the round {words}"]
    events = [sentence_of("few_pushes", line) for line in bench.recorded("few_pushes")]
    assert events == [("info", "run", told(bench)[0]), ("warn", "run", told(bench)[1])]
    bench.pull("a")
    bench.pushes("c", "a")
    bench.advance(GRACE_S + 1.0)
    assert merged(bench) == [("a", "b")], "the next round waits again"
    bench.advance(DEADLINE_S)
    assert merged(bench)[1:] == [("a", "c")]
    for name in "abc":
        bench.pull(name)
        bench.push(name)
    assert bench.status().recent_rounds[-1].accepted == ("a", "b", "c")
    assert bench.status().recent_rounds[-1].reason == ""


def falls_silent(bench: Bench) -> None:
    bench.silent.add("b")
    bench.advance(bench.config.evict_after_s + 1.0)


CANNOT_COME: dict[str, Callable[[Bench], object]] = {
    "it leaves": lambda bench: bench.leave("b"),
    "it is evicted": lambda bench: bench.operate(m.EvictRequest("", "b")),
    "it falls silent": falls_silent,
    "it drains": lambda bench: bench.operate(m.DrainRequest("", "b")),
    "the run ends": lambda bench: bench.operate(Stop(m.OperatorRequest(""))),
}


@pytest.mark.parametrize("what", CANNOT_COME)
@pytest.mark.parametrize("before", [True, False])
def test_whoever_cannot_come_is_not_waited_for(what: str, before: bool) -> None:
    bench = running("a", "b")
    if before and what != "the run ends":
        CANNOT_COME[what](bench)
    bench.push("a")
    bench.advance(GRACE_S + 0.5)
    if not before or what == "the run ends":
        assert merged(bench) == []
        CANNOT_COME[what](bench)
    assert merged(bench) == [("a",)]
    if what != "the run ends":
        words = "went on with 1 of 3 pushes (min_clusters_per_round), no other cluster can come in time"
        assert bench.status().recent_rounds[-1].reason == words
        assert sentence_of("few_pushes", bench.recorded("few_pushes")[-1]) is None, (
            "each round of a small run is like it"
        )


def test_a_cluster_that_cannot_push_before_the_deadline_is_not_waited_for() -> None:
    for deadline_s, waits in ((60.0, False), (100.0, True)):
        settings = m.Settings(sync_every_steps=80, heartbeat_s=100.0)
        bench = running("a", "b", settings=settings, round_deadline_s=deadline_s, min_clusters_per_round=2)
        bench.pushes(*"ab")
        for name in "ab":
            bench.pull(name)
            bench.beat(name, steps_per_s=1.0)
        bench.push("a")
        assert merged(bench)[1:] == ([] if waits else [("a",)]), "80 steps take 76 s at least"


def test_a_push_that_is_on_its_way_is_waited_for_however_long_the_last_one_took() -> None:
    """The first push of a run may have waited for the slaves."""
    bench = running("a", "b", min_clusters_per_round=2)
    bench.rounds(1, *"ab")
    bench.push("a")
    bench.state.shared.members["b"].beat = m.HeartbeatRequest(bench.caller("b"), push_s=90.0)
    bench.silent.add("b")
    bench.begin_push("b")
    bench.advance(GRACE_S + 1.0)
    assert "waits for b" in bench.status().waiting_for
    bench.stage("b")
    bench.finish_push("b")
    assert merged(bench) == [("a", "b"), ("a", "b")]


def test_a_push_that_is_refused_as_the_window_closes_is_missed_by_name() -> None:
    bench = running("a", "b", min_clusters_per_round=2)
    bench.push("b", tokens=100_000)
    bench.push("a")
    assert merged(bench) == [("a",)], "b counts too many tokens, as is known now"
    words = "went on with 1 of 2 pushes (min_clusters_per_round), without b"
    assert bench.status().recent_rounds[-1].reason == words


def test_a_cluster_in_quarantine_neither_counts_nor_is_waited_for() -> None:
    bench = running("a", "b", "q", min_clusters_per_round=2)
    bench.nonfinite["q"] = 1
    for _ in range(3):
        bench.pushes("q", "a", "b")
        bench.pulls(*"abq")
    assert bench.state.shared.ledger.detector.quarantined == {"q"}
    n = len(merged(bench))
    bench.pushes("q", "a")
    bench.advance(GRACE_S + 1.0)
    assert bench.status().waiting_for.startswith(
        "the round has 1 of 2 pushes (min_clusters_per_round) and waits for b,"
    )
    bench.push("b")
    assert merged(bench)[n:] == [("a", "b")]
    bench.pulls(*"abq")
    bench.pushes(*"ab")
    bench.advance(GRACE_S + 0.5)
    assert merged(bench)[n + 1 :] == [("a", "b")]
    for name in "aq":
        bench.pull(name)
        bench.push(name)
    bench.advance(DEADLINE_S)
    assert bench.recorded("few_pushes")[-1]["pushes"] == 1
    assert bench.status().recent_rounds[-1].reason.startswith("went on with 1 of 2 pushes")
    bench.pull("a")
    bench.push("a")
    bench.advance(GRACE_S + 1.0)
    assert "and waits for b, for at most" in bench.status().waiting_for


@pytest.mark.parametrize("what", ["min_clusters", "paused", "a slave is away"])
def test_its_time_begins_when_nothing_else_holds_the_round(what: str) -> None:
    names = "ab" if what == "min_clusters" else "abc"
    bench = running(*names, min_clusters=3 if what == "min_clusters" else 1)
    if what == "paused":
        bench.operate(Pause(m.OperatorRequest("")))
    bench.push("a")
    if what == "a slave is away":
        bench.push("b")
        bench.slaves[0].die()
        for name in "ab":
            bench.clusters[name].seq += 1
    bench.advance(2 * DEADLINE_S)
    assert told(bench) == []
    if what == "min_clusters":
        bench.join("c")
    elif what == "paused":
        bench.operate(Resume(m.OperatorRequest("")))
    else:
        bench.slaves[0].attach()
        bench.push("a")
    bench.advance(DEADLINE_S - 1.0)
    assert merged(bench) == []
    bench.advance(1.5)
    assert merged(bench) == [("a",)]


@pytest.mark.parametrize("what", ["paused", "a slave is away"])
def test_what_interrupts_a_waiting_round_gives_it_its_whole_time_again(what: str) -> None:
    bench = running("a", "b")
    bench.push("a")
    bench.advance(DEADLINE_S - 5.0)
    if what == "paused":
        bench.operate(Pause(m.OperatorRequest("")))
        assert bench.status().window_closes_in_s == DEADLINE_S
        bench.advance(DEADLINE_S)
        bench.operate(Resume(m.OperatorRequest("")))
    else:
        bench.slaves[0].die()
        bench.advance(DEADLINE_S)
        bench.slaves[0].attach()
        bench.push("a")
    bench.advance(DEADLINE_S - 1.0)
    assert merged(bench) == []
    assert len(told(bench)) == 2, "it says again for whom it waits"
    bench.advance(1.5)
    assert merged(bench) == [("a",)]


def test_after_a_restart_clusters_that_had_no_time_to_join_are_waited_for_until_they_are_evicted() -> None:
    bench = running("a", "b", "c")
    bench.leave("c")
    bench.restart()
    bench.silent.add("b")
    bench.back("a", previous=bench.clusters["a"].join.incarnation)
    bench.push("a")
    bench.advance(GRACE_S + 1.0)
    assert "1 of 3 pushes (min_clusters_per_round) and waits for b, for" in bench.status().waiting_for
    bench.advance(bench.config.evict_after_s)
    assert bench.status().recent_rounds[-1].accepted == ("a",)


def test_whoever_joins_again_and_again_holds_no_round_beyond_its_deadline() -> None:
    """I15, where a minimum is set."""
    bench = running("a", "b")
    bench.push("a")
    waited_s = 0.0
    while not merged(bench):
        if "z" in bench.state.shared.members:
            bench.operate(m.EvictRequest("", "z"))
        bench.join("z")
        bench.advance(5.0)
        waited_s += 5.0
    assert waited_s == pytest.approx(DEADLINE_S)


def test_a_master_that_stood_still_gives_the_time_back() -> None:
    bench = running("a", "b")
    bench.push("a")
    bench.advance(DEADLINE_S - 5.0)
    bench.jump(100.0)
    bench.advance(4.0)
    assert merged(bench) == []
    bench.advance(1.5)
    assert merged(bench) == [("a",)]


def test_a_sliding_window_that_has_enough_closes_with_its_own_time() -> None:
    bench = running("a", "b", "c", "d", grace_sliding=True, grace_s=20.0)
    bench.push("a")
    bench.advance(25.0)
    assert bench.status().waiting_code == "few_pushes"
    bench.pushes("b", "c")
    assert bench.status().window_closes_in_s == pytest.approx(20.0)
    bench.advance(19.0)
    assert merged(bench) == []
    bench.advance(1.5)
    assert merged(bench) == [("a", "b", "c")]


def test_a_cluster_that_leaves_with_its_verdict_is_not_waited_for() -> None:
    bench = running("a", "b", "c", min_clusters_per_round=2, grace_s=0.0)
    bench.slaves[0].hold.add(m.Measure)
    bench.pushes(*"ab")
    bench.leave("a")
    bench.push("c")
    bench.slaves[0].hold.clear()
    bench.slaves[0].release(m.Measure)
    assert merged(bench) == [("a", "b")]
    assert "a" not in bench.state.shared.members
    assert "and waits for b, for at most" in told(bench)[-1]


def test_the_answer_to_an_admission_names_the_latest_end() -> None:
    """A cluster that leaves waits so long for its verdict."""
    bench = running("a", "b", "c", min_clusters_per_round=2)
    bench.slaves[0].hold.add(m.Measure)
    for name, left_s in (("a", DEADLINE_S), ("b", GRACE_S)):
        bench.begin_push(name)
        bench.stage(name)
        assert bench.result(bench.finish_push(name)).answer.window_closes_in_s == pytest.approx(left_s)
    bench.advance(GRACE_S)
    assert bench.status().phase == "MEASURE"
    assert bench.result(bench.finish_push("a")).answer.window_closes_in_s == 0.0
    bench.begin_push("c")
    bench.stage("c")
    assert bench.result(bench.finish_push("c")).answer.window_closes_in_s == DEADLINE_S, "of the round after this one"
