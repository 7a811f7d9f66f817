"""Token counts of clusters with own data: what cannot be is refused, what may be is told, an end is taken back."""

from __future__ import annotations

from typing import Any

import pytest
from support.master_bench import Bench, refused_with

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version
from dips.core.messages import ExtendRequest, OperatorRequest, Settings, TokenLimit, VerdictKind
from dips.master.state.effects import Stop

V1 = Version(1, 1)


def alarms(bench: Bench) -> list[str]:
    return [str(record["sentence"]) for record in bench.recorded("alarm")]


def rounds(bench: Bench, n: int, **tokens: int) -> None:
    for _ in range(n):
        bench.pulls(*tokens)
        for name, count in tokens.items():
            bench.push(name, count)


def told(bench: Bench, **rates: float) -> None:
    """Each cluster's beat says so many tokens a second, at a step a second."""
    for name, tokens_per_s in rates.items():
        bench.beat(name, steps=8, tokens_per_s=tokens_per_s, steps_per_s=1.0)


def test_far_more_than_the_cluster_itself_counted_is_refused_and_named() -> None:
    bench = Bench(settings=Settings(tk_max_tokens=1_000_000)).running("a")
    rounds(bench, 8, a=1600)
    bench.pull("a")
    with pytest.raises(Refused, match=r"16001600 tokens in 16 steps, 1000100 a step, are 10001 times what its acc"):
        bench.begin_push("a", 16_001_600)
    status = bench.status()
    assert (status.tokens, status.stopping) == (8 * 1600, False)
    (alarm,) = status.alarms
    assert (alarm.kind, alarm.clusters) == ("token_counts", ("a",))
    assert "tokens_per_step" in alarm.sentence
    assert "token_ratio_max" in alarm.sentence
    assert alarms(bench) == [alarm.sentence]
    bench.push("a", 1600)
    assert not bench.status().alarms, "a count that can be ends the alarm"


def test_far_more_than_the_others_count_or_than_the_whole_run_is_refused_before_anything_was_accepted() -> None:
    bench = Bench(settings=Settings(tk_max_tokens=1_000_000)).running("a")
    with pytest.raises(Refused, match="more than the whole run is to train on"):
        bench.begin_push("a", 8_000_000_000)
    assert not bench.status().stopping
    bench.push("a", 1600)
    bench = Bench().running("a", "b")
    told(bench, a=100.0, b=100.0)
    with refused_with(RefusalCode.TOKENS):
        bench.begin_push("a", 16 * 100 * 1024)
    bench.push("b", 1600)
    with refused_with(RefusalCode.TOKENS):
        bench.begin_push("a", 16 * 100 * 1024)
    bench = Bench(token_ratio_max=float("inf")).running("a", "b")
    rounds(bench, 1, b=16)
    bench.push("a", 16 * 1024)
    assert bench.status().alarms[0].clusters == ("a",), "a larger ratio may be meant; a person is told all the same"


def test_a_count_that_others_belie_in_the_same_window_is_aborted_before_it_counts() -> None:
    bench = Bench().running("a", "b")
    bench.push("a", 16 * 100 * 1024)
    bench.push("b", 1600)
    verdict = bench.verdict("a")
    assert (verdict.kind, "times what cluster b counts" in verdict.reason) == (VerdictKind.ABORTED, True)
    assert bench.status().tokens == 1600


def test_what_others_count_is_the_median_so_one_wrong_cluster_accuses_nobody_else() -> None:
    bench = Bench().running("a", "b", "c", "d")
    told(bench, b=100.0, c=100.0, d=1.0)
    bench.push("a", 16 * 100)
    assert not bench.status().alarms


def test_a_push_of_many_rounds_steps_after_an_outage_is_no_wrong_count() -> None:
    """A restarted master may know too little to compare with, while the clusters trained on for longer than a run."""
    bench = Bench(settings=Settings(tk_max_tokens=60_000)).running("a")
    bench.push("a", 120 * 800, steps=120)  # 64 steps are a round here: 51,200 tokens
    assert bench.status().tokens == 120 * 800
    assert not bench.status().alarms


def test_tokens_beside_samples_are_told_and_count() -> None:
    bench = Bench(grace_s=0.0).running("a", "b")
    rounds(bench, 1, a=1600, b=1600 * 32)
    (alarm,) = bench.status().alarms
    assert alarm.clusters == ("b",)
    assert "32 times what cluster a counts, 100" in alarm.sentence
    rounds(bench, 2, b=1600 * 32)
    assert len(alarms(bench)) == 1, "told once"
    bench.pull("a")
    bench.push("a", 1600)
    assert [alarm.clusters for alarm in bench.status().alarms] == [("a",), ("b",)]
    assert "1/32 of what cluster b counts" in bench.status().alarms[0].sentence


def test_batches_within_a_factor_of_ten_and_longer_pushes_are_nothing_unusual() -> None:
    bench = Bench().running("a", "b")
    for steps in (16, 2, 256):
        for name, per_step in (("a", 100), ("b", 900)):
            bench.pull(name)
            bench.push(name, per_step * steps, steps=steps)
    assert not alarms(bench)


def test_small_counts_are_told_once_a_cluster_has_counted_too_little_on_the_whole() -> None:
    bench = Bench(grace_s=0.0).running("a", "b")
    told(bench, b=100.0)
    for tokens, alarmed in ((320, False), (64, False), (64, True)):  # 20, 12 and 9.3 a step on the whole
        rounds(bench, 1, a=tokens)
        assert bool(bench.status().alarms) is alarmed


def test_one_short_batch_of_another_cluster_says_nothing(bench: Bench) -> None:
    """Found by simulation: a push of a single step, an epoch's last one."""
    rounds(bench, 1, a=16)
    bench.pull("a")
    bench.push("a", 16 * 512)
    bench = Bench().running("a", "b")
    bench.push("b", 1, steps=1)
    bench.push("a", 16 * 320)
    assert bench.status().tokens == 1 + 16 * 320
    assert not bench.status().alarms


def test_an_alarm_of_a_cluster_that_is_gone_ends_after_an_hour() -> None:
    bench = Bench().running("a", "b")
    rounds(bench, 1, b=1600)
    with refused_with(RefusalCode.TOKENS):
        bench.begin_push("a", 16 * 100 * 1024)
    bench.now_s += 2 * 3600.0
    assert bench.status().alarms, "not while it is here"
    with refused_with(RefusalCode.TOKENS):
        bench.begin_push("a", 16 * 100 * 1024)
    bench.result(bench.leave("a"))
    del bench.clusters["a"]
    bench.now_s += 3599.0
    assert bench.status().alarms
    bench.now_s += 1.0
    assert not bench.status().alarms


def at_the_end(**config: Any) -> Bench:
    """At 200 of 150 tokens."""
    bench = Bench(settings=Settings(tk_max_tokens=150), **config).running("a", "b")
    rounds(bench, 1, a=100, b=100)
    assert bench.status().stopping
    return bench


def test_the_operator_takes_the_end_of_a_run_back_and_a_restart_keeps_that() -> None:
    bench = at_the_end(linger_s=5.0)
    assert bench.beat("a").stop
    for name in "ab":
        bench.result(bench.leave(name))
    assert bench.status().stopped
    bench.advance(2.0)
    reply = bench.operate(ExtendRequest("", 1000, False, "the count was wrong"))
    assert "until 1000 tokens are applied" in reply.sentence
    assert bench.entries("EXTEND") == [
        {"kind": "EXTEND", "epoch": 1, "tk_max_tokens": 1000, "reason": "the count was wrong"}
    ]
    bench.advance(20.0)
    assert bench.halted is None
    for restart in (False, True):
        if restart:
            bench.restart()
        status = bench.status()
        assert (status.stopping, status.stopped, status.tk_max_tokens) == (False, False, 1000)
        assert bench.join("a").settings.tk_max_tokens == 1000
        bench.pull("a")
        bench.push("a")
    bench.pull("a")
    bench.push("a", 700)
    assert bench.status().stopping


def test_a_run_that_ended_goes_on_when_it_is_started_with_a_larger_limit() -> None:
    bench = at_the_end()
    bench.restart()
    assert bench.status().stopping
    with refused_with(RefusalCode.STOPPING):
        bench.join("a")
    bench.config = Bench(settings=Settings(tk_max_tokens=500)).config
    bench.restart()
    assert not bench.status().stopping
    assert bench.entries("EXTEND")[0]["tk_max_tokens"] == 500
    bench.join("a")
    bench.operate(ExtendRequest("", 1000))
    bench.config = Bench(settings=Settings(tk_max_tokens=400)).config
    bench.restart()
    assert bench.status().tk_max_tokens == 400, "what was changed in the settings counts for more than what was moved"


def test_a_stop_is_taken_back_before_and_after_it_took_effect() -> None:
    bench = Bench().running("a", "b")
    bench.push("a")
    bench.operate(Stop(OperatorRequest("", "by mistake")))
    bench.operate(ExtendRequest("", reason="it was one"))
    bench.push("b")
    assert bench.status().published == V1
    bench.operate(Stop(OperatorRequest("", "again")))
    assert bench.status().stopping
    reply = bench.operate(ExtendRequest(""))
    assert "until it is stopped" in reply.sentence
    assert "again" in reply.sentence
    bench.restart()
    assert not bench.status().stopping


def test_a_stop_holds_after_a_restart_and_with_a_larger_limit_until_it_is_taken_back() -> None:
    bench = Bench(settings=Settings(tk_max_tokens=1000)).running("a")
    bench.push("a")
    bench.operate(Stop(OperatorRequest("", "enough for now")))
    bench.config = Bench(settings=Settings(tk_max_tokens=5000)).config
    bench.restart()
    assert bench.status().stopping
    bench.operate(ExtendRequest(""))
    bench.restart()
    assert not bench.status().stopping
    bench.back("a")
    bench.push("a")


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (ExtendRequest(""), RefusalCode.CONFIG, "200 tokens are applied"),
        (ExtendRequest("", 200), RefusalCode.CONFIG, "give --tokens with more"),
        (ExtendRequest("", (1 << 60) + 1), RefusalCode.TOKENS, "is too large"),
        (ExtendRequest("", 5000, True), RefusalCode.CONFIG, "give --tokens N or --no-limit"),
        (ExtendRequest("another", 5000), RefusalCode.RUN_ID, "another"),
    ],
)
def test_what_takes_nothing_back_is_refused(request_: ExtendRequest, code: RefusalCode, words: str) -> None:
    bench = at_the_end()
    with refused_with(code, words):
        bench.operate(request_)
    assert bench.status().stopping
    beat = bench.beat("a")
    assert (beat.limit, beat.no_more_pushes) == (TokenLimit(150), True)
    bench.operate(ExtendRequest("", 201))
    beat = bench.beat("a")
    assert (beat.limit, beat.no_more_pushes) == (TokenLimit(201), False)
    bench.operate(ExtendRequest("", 0, True))
    assert (bench.status().tk_max_tokens, bench.status().stopping) == (0, False)
    with refused_with(RefusalCode.CONFIG):
        bench.operate(ExtendRequest(""))


def test_going_back_to_a_version_that_ended_the_run_does_not_end_an_extended_one() -> None:
    bench = Bench(settings=Settings(tk_max_tokens=200)).running("a")
    rounds(bench, 2, a=100)
    assert bench.status().stopping
    bench.operate(ExtendRequest("", 1000))
    rounds(bench, 1, a=100)
    bench.slaves[0].come_back_without(Version(1, 3))
    assert bench.status().tokens == 200
    assert not bench.status().stopping
