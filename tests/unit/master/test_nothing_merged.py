"""A run whose rounds make no version says so, with the reason, until one does."""

from __future__ import annotations

from support.master_bench import Bench

from dips.core.errors import RefusalCode
from dips.core.messages import Alarm, Refusal
from dips.master.page.snapshot import sentence
from dips.master.state.alarms import FRUITLESS_ROUNDS


def standing(bench: Bench) -> tuple[Alarm, ...]:
    return bench.status().alarms


def told(bench: Bench) -> list[str]:
    return [str(record["sentence"]) for record in bench.recorded("alarm") if "nothing was merged" in str(record)]


def test_rounds_that_are_all_void_are_an_alarm_with_each_clusters_reason() -> None:
    bench = Bench().running("a", "b")
    bench.norms = {"a": 0.0}
    bench.nonfinite = {"b": 3}
    bench.rounds(FRUITLESS_ROUNDS - 1, "a", "b")
    assert (standing(bench), told(bench)) == ((), [])
    bench.rounds(1, "a", "b")
    (alarm,) = standing(bench)
    assert (alarm.kind, alarm.clusters) == ("nothing_merged", ())
    assert "nothing was merged in the last 5 rounds (5 void)" in alarm.sentence
    assert "a: its parameters equal the current version's" in alarm.sentence
    assert "b: 3 elements are not finite" in alarm.sentence
    assert told(bench) == [alarm.sentence]
    assert [log.sentence for log in bench.logs if "nothing was merged" in log.sentence] == [alarm.sentence]
    first = sentence(bench.state.look(), 0.0, {})
    assert first["level"] == "bad"
    assert first["text"].startswith("Nothing was merged in the last 5 rounds")
    bench.rounds(1, "a", "b")
    assert "last 6 rounds" in standing(bench)[0].sentence
    assert len(told(bench)) == 1, "told once"
    bench.norms, bench.nonfinite = {}, {}
    bench.rounds(1, "a", "b")
    assert not standing(bench)


def test_rounds_given_up_are_an_alarm_and_a_void_one_between_good_ones_is_none(bench: Bench) -> None:
    bench.slaves[0].refuse["prepare"] = Refusal(RefusalCode.DISK, "the disk is full", 0.0)
    bench.push("a")
    for _ in range(40):
        bench.advance(1.0)
    (alarm,) = standing(bench)
    assert "given up" in alarm.sentence
    assert "slave s0 cannot prepare: the disk is full" in alarm.sentence
    bench = Bench().running("a", "b")
    for _ in range(FRUITLESS_ROUNDS):
        bench.norms = {"a": 0.0, "b": 0.0}
        bench.rounds(1, "a", "b")
        bench.norms = {}
        bench.rounds(1, "a", "b")
    assert bench.status().rounds_void == FRUITLESS_ROUNDS
    assert not standing(bench)
