"""Two clusters that train on the same data: an alarm that names both, and none for clusters with data of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from support.master_bench import Bench

from dips.master.page.snapshot import snapshot
from dips.master.state.alarms import ALIKE_ROUNDS, EQUAL_ROUNDS

A = [1.0, 0.5, 0.0]
NEARLY = [1.0, 0.49, 0.01]
APART = [1.0, 0.0, 0.5]
"""cosine 0.8 with A"""


def running(**ways: Sequence[float]) -> Bench:
    bench = Bench().running(*ways)
    bench.ways = ways
    return bench


def test_equal_pushes_are_named_after_one_round_and_for_a_while_after_the_clusters_drift_apart() -> None:
    """As with one seed under dynamic steps: only the first pushes are equal."""
    bench = running(a=A, b=APART, c=A)
    bench.rounds(1, *bench.ways)
    (alarm,) = bench.status().alarms
    assert (alarm.kind, alarm.clusters) == ("same_data", ("a", "c"))
    assert "the cosine of their updates is 1.00" in alarm.sentence
    assert "in a round. They train on the same data in the same order" in alarm.sentence
    bench.ways = {**bench.ways, "c": [1.0, -0.2, 0.3]}
    bench.rounds(EQUAL_ROUNDS - 1, *bench.ways)
    assert bench.status().alarms == (alarm,)
    bench.rounds(1, *bench.ways)
    assert bench.status().alarms == ()
    assert told(bench) == [alarm.sentence]


def told(bench: Bench) -> list[str]:
    return [str(record["sentence"]) for record in bench.recorded("alarm")]


def test_two_clusters_that_push_the_same_are_named_both() -> None:
    bench = running(a=A, b=APART, c=NEARLY)
    bench.rounds(ALIKE_ROUNDS - 1, *bench.ways)
    assert (bench.status().alarms, told(bench)) == ((), [])
    bench.rounds(1, *bench.ways)
    (alarm,) = bench.status().alarms
    assert (alarm.kind, alarm.clusters) == ("same_data", ("a", "c"))
    assert alarm.sentence.startswith("clusters a and c push the same: the cosine of their updates is 1.00, the norms")
    assert told(bench) == [alarm.sentence]
    bench.rounds(3, *bench.ways)
    assert len(told(bench)) == 1, "told once"
    signs = {cluster["id"]: cluster["sign"] for cluster in snapshot(bench.look(), 0.0, 0.0, {})["clusters"]}
    assert (signs["a"], signs["c"]) == ("alarm: same data", "alarm: same data")
    assert signs["b"] == "joined"
    assert bench.entries("COMMIT")[-1]["judgement"]["accepted"] == ["a", "b", "c"], "it tells, and decides nothing"
    bench.ways = {**bench.ways, "c": [1.0, -0.2, 0.3]}
    bench.rounds(ALIKE_ROUNDS - 1, *bench.ways)
    assert bench.status().alarms
    bench.rounds(1, *bench.ways)
    assert not bench.status().alarms


@pytest.mark.parametrize(
    "ways",
    [
        {"a": A, "b": [0.9 * value for value in A]},  # another length
        {"a": [1.0, 0.0, 0.0], "b": [math.cos(0.2), math.sin(0.2), 0.0]},  # cosine 0.98
        None,  # a round now and then
    ],
)
def test_clusters_that_agree_well_are_not_the_same(ways: dict[str, Sequence[float]] | None) -> None:
    bench = running(a=A, b=NEARLY)
    for turn in range(2 * ALIKE_ROUNDS + 2):
        bench.ways = ways or {"a": A, "b": APART if turn % 2 else NEARLY}
        bench.rounds(1, *bench.ways)
    assert not told(bench)


def test_a_cluster_that_left_takes_its_alarm_with_it() -> None:
    bench = running(a=A, b=NEARLY, c=APART)
    bench.rounds(ALIKE_ROUNDS, *bench.ways)
    assert bench.status().alarms
    bench.result(bench.leave("b"))
    assert not bench.status().alarms, "also where no further round comes"
    bench.rounds(1, "a", "c")
    bench.back("b")
    bench.rounds(ALIKE_ROUNDS - 1, *bench.ways)
    assert not bench.status().alarms, "its rounds count from the beginning"
    bench.rounds(1, *bench.ways)
    assert bench.status().alarms


@pytest.mark.parametrize("leavers", ["c", "ac"])
def test_a_cluster_that_is_started_again_with_another_seed_has_no_alarm(leavers: str) -> None:
    """Also where no round came while it was away."""
    bench = running(a=A, b=APART, c=A)
    bench.rounds(1, *bench.ways)
    assert bench.status().alarms
    for name in leavers:
        bench.result(bench.leave(name))
    for name in leavers:
        bench.back(name)
    bench.ways = {**bench.ways, "c": [1.0, -0.2, 0.3]}
    assert not bench.status().alarms
    bench.rounds(1, *bench.ways)
    assert not bench.status().alarms


def test_a_cluster_that_is_started_again_is_compared_from_the_beginning_with_all_others() -> None:
    bench = running(a=A, b=A, c=A)
    bench.rounds(1, *bench.ways)
    assert {alarm.clusters for alarm in bench.status().alarms} == {("a", "b"), ("a", "c"), ("b", "c")}
    bench.result(bench.leave("c"))
    bench.back("c")
    assert {alarm.clusters for alarm in bench.status().alarms} == {("a", "b")}


def test_pushes_that_cannot_be_compared_say_nothing() -> None:
    bench = running(a=A, b=A, c=[0.0, 0.0, 0.0])
    bench.nonfinite = {"b": 1}
    bench.rounds(ALIKE_ROUNDS, *bench.ways)
    assert not [sentence for sentence in told(bench) if "push the same" in sentence]
    bench.nonfinite, bench.ways = {}, {}
    bench.rounds(ALIKE_ROUNDS, "a", "b", "c")
    assert not [sentence for sentence in told(bench) if "push the same" in sentence]


def test_clusters_that_begin_with_the_same_batches_are_named_before_a_push_and_until_they_differ() -> None:
    bench = Bench().running("a", "b", "c")
    bench.beat("a", first_batches=b"one")
    assert bench.status().alarms == ()
    for name, digest in (("b", b"one"), ("c", b"two"), ("a", b"one")):
        bench.beat(name, first_batches=digest)
    (alarm,) = bench.status().alarms
    assert (alarm.kind, alarm.clusters) == ("same_data", ("a", "b"))
    assert told(bench) == [alarm.sentence]
    bench.beat("c")
    bench.beat("a")
    assert bench.status().alarms == (), "unknown batches are equal to none"
    bench.beat("a", first_batches=b"one")
    assert len(bench.status().alarms) == 1
    bench.leave("b")
    assert bench.status().alarms == ()


def test_a_cluster_that_cannot_record_its_pushes_for_a_minute_is_an_alarm() -> None:
    bench = Bench().running("a", "b")
    bench.beat("a", unrecorded_s=59.0)
    assert bench.status().alarms == ()
    bench.beat("a", unrecorded_s=60.0, note="/kept cannot be written: No space left on device")
    (alarm,) = bench.status().alarms
    assert (alarm.kind, alarm.clusters) == ("not_recorded", ("a",))
    assert "/kept cannot be written" in alarm.sentence
    bench.beat("a", unrecorded_s=62.0)
    assert len(told(bench)) == 1, "told once"
    bench.beat("a")
    assert bench.status().alarms == ()
