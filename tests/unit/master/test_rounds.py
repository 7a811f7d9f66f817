"""The round, driven through the whole master state: what opens, closes, commits, voids and aborts it."""

from __future__ import annotations

import json

import pytest
from support.master_bench import LEASED, Bench, BenchSlave

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.master.page.snapshot import sentence
from dips.master.state.alarms import FRUITLESS_ROUNDS
from dips.master.state.effects import Pause, ReplicaNews
from dips.master.state.reasons import AlarmKind, WaitingCode


def sent(slave: BenchSlave, kind: type) -> list[object]:
    return [command for command in slave.commands if isinstance(command, kind)]


def test_pushes_weigh_by_their_tokens() -> None:
    bench = Bench().running("a", "b")
    bench.norms = dict.fromkeys("ab", 4.0)
    bench.push("a", 100)
    bench.push("b", 300)
    prepare = sent(bench.slaves[0], m.Prepare)[-1]
    assert isinstance(prepare, m.Prepare)
    assert prepare.weights == (0.25, 0.75)


def test_run_begins_with_min_clusters_and_never_waits_for_them_again() -> None:
    bench = Bench(min_clusters=2, grace_s=1.0).running("a")
    bench.push("a")
    bench.advance(20.0)
    assert bench.status().phase == "WINDOW"
    assert bench.status().waiting_for == "the run begins with 2 clusters: a is here, 1 missing, for 20 s"
    bench.join("b")
    assert bench.status().published == Version(1, 1)
    bench.silent.add("b")
    bench.advance(20.0)
    bench.pull("a")
    bench.push("a")
    assert bench.status().published == Version(1, 2)


def test_a_first_round_that_waits_names_who_is_here_and_who_was() -> None:
    bench = Bench(min_clusters=4, grace_s=1.0).running("a", "b", "c")
    bench.leave("b")
    bench.push("a")
    token = bench.await_verdict("a")
    bench.advance(60.0)
    words = "the run begins with 4 clusters: a, c are here, 2 missing (b was here before)"
    assert bench.status().waiting_for == f"{words}, for 1 min"
    assert [log.sentence for log in bench.logs if log.key == "first round"] == [words]
    assert bench.result(token).answer.sentence == words, "without the time: a cluster's terminal says it once"


def test_partial_round_is_scaled_by_its_share_of_tokens() -> None:
    bench = Bench(grace_s=1.0).running("a", "b")
    for _ in range(3):
        bench.advance(10.0)
        bench.push("a", 100)
        bench.push("b", 100)
        bench.pulls("a", "b")
    bench.advance(10.0)
    bench.push("a", 100)
    assert bench.status().window_closes_in_s == pytest.approx(1.0)
    bench.advance(1.0)
    assert bench.status().rounds_merged == 3
    last = bench.status().recent_rounds[-1]
    assert last.accepted == ("a",)
    rho = last.rho
    assert rho == pytest.approx(0.5, rel=0.05)
    prepare = sent(bench.slaves[0], m.Prepare)[-1]
    assert isinstance(prepare, m.Prepare)
    assert prepare.averaged_share == rho


@pytest.mark.parametrize("refused", [False, True], ids=["no push is accepted", "the update is not finite"])
def test_round_with_nothing_accepted_is_void(bench: Bench, refused: bool) -> None:
    if refused:
        bench.slaves[1].refuse["prepare"] = m.Refusal(RefusalCode.NONFINITE, "2 elements of the update are not finite")
    else:
        bench.nonfinite["a"] = 1
    bench.push("a")
    verdict = bench.verdict("a")
    assert (verdict.kind, verdict.version, verdict.reset_inner_optimizer) == (
        m.VerdictKind.EXCLUDED,
        Version(1, 0),
        True,
    )
    status = bench.status()
    assert (status.published, status.rounds_void, status.tokens) == (Version(1, 0), 1, 0)
    assert status.clusters[0].pushes_excluded == 1
    assert bench.pull("a").fence == 2, "VOID moves the fence although the version stays"
    assert json.loads(bench.journal[-1].record_json)["kind"] == "VOID"
    assert bool(sent(bench.slaves[0], m.AbortRound)) is refused


def test_void_rounds_count_for_quarantine_also_over_a_restart(bench: Bench) -> None:
    bench.nonfinite["a"] = 1
    for n in range(3):
        bench.rounds(1, "a")
        assert bench.status().clusters[0].quarantined is (n == 2)
    bench.restart()
    assert bench.status().clusters[0].quarantined


def test_excluded_cluster_resets_its_inner_optimizer_once_it_is_in_quarantine() -> None:
    bench = Bench().running("a", "b", "c")
    bench.norms["b"] = 30.0
    for n in range(3):
        bench.pushes(*"abc")
        verdict = bench.verdict("b")
        assert (verdict.kind, verdict.reset_inner_optimizer) == (m.VerdictKind.EXCLUDED, n == 2)
        bench.pulls(*"abc")


def test_seed_that_is_not_finite_is_aborted_and_can_come_again() -> None:
    bench = Bench().attach_all()
    bench.join("a")
    bench.slaves[0].refuse["prepare"] = m.Refusal(RefusalCode.NONFINITE, "NaN in the parameters")
    bench.seed("a")
    verdict = bench.verdict("a")
    assert verdict.kind is m.VerdictKind.ABORTED
    assert "NaN" in verdict.reason
    bench.slaves[0].refuse.clear()
    bench.seed("a")
    bench.advance(2.0)
    assert bench.verdict("a").kind is m.VerdictKind.APPLIED


def test_refused_prepare_aborts_and_the_complete_push_goes_into_the_next_round(bench: Bench) -> None:
    bench.slaves[0].refuse["prepare"] = m.Refusal(RefusalCode.DISK, "no space left on the snapshot disk")
    bench.push("a")
    status = bench.status()
    assert status.rounds_aborted == 1
    assert "no space left" in status.waiting_for
    token = bench.await_verdict("a")
    assert bench.is_open(token)
    bench.slaves[0].refuse.clear()
    bench.advance(5.0)
    assert bench.result(token).answer.kind is m.VerdictKind.APPLIED
    assert bench.status().published == Version(1, 1)


@pytest.mark.parametrize("command", ["measure", "prepare"])
def test_push_that_a_slave_does_not_hold_is_given_up_and_comes_again(bench: Bench, command: str) -> None:
    bench.slaves[0].refuse[command] = m.Refusal(RefusalCode.UNKNOWN_PUSH, "no complete staging of this push")
    bench.push("a")
    assert bench.verdict("a").kind is m.VerdictKind.ABORTED
    bench.slaves[0].refuse.clear()
    bench.push("a")
    bench.advance(2.0)
    assert bench.status().published == Version(1, 1)


def test_silent_slave_lets_the_round_run_out_of_time_and_the_next_one_waits_longer() -> None:
    bench = Bench(round_timeout_s=4.0).running("a")
    bench.slaves[0].hold.add(m.Measure)
    bench.push("a")
    bench.advance(3.5)
    assert (bench.status().phase, bench.status().rounds_aborted) == ("MEASURE", 0)
    bench.advance(0.5)
    assert (bench.status().phase, bench.status().rounds_aborted) == ("WINDOW", 1)
    old = sent(bench.slaves[0], m.Measure)[-1]
    bench.slaves[0].obey(old)
    assert bench.status().phase == "WINDOW", "a late answer changes nothing"
    bench.advance(1.0)
    assert bench.status().phase == "MEASURE"
    bench.advance(7.5)
    assert bench.status().rounds_aborted == 1, "the second try has twice the time"
    bench.advance(0.5)
    assert bench.status().rounds_aborted == 2
    bench.advance(2.0)
    bench.slaves[0].release(m.Measure)
    assert bench.status().published == Version(1, 1)


def test_commit_record_holds_what_made_the_version_and_where_it_comes_from() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", 100)
    bench.push("a", 100, ranges)
    commit = sent(bench.slaves[0], m.Commit)[-1]
    assert isinstance(commit, m.Commit)
    record = json.loads(commit.commit_record)
    assert record["version"] == [1, 1]
    assert record["participants"][0]["ranges"] == [[1, 0, 0, 0, 100]]
    assert record["participants"][0]["verdict"] == "APPLIED"
    assert record["ledger"]["tokens"] == 100
    assert (set(record["digests"]), record["wall_s"]) == ({"s0", "s1"}, bench.wall_s)
    seed, first = bench.entries("COMMIT")
    assert (seed["from_version"], seed["tokens"]) == (None, 0)
    assert (first["from_version"], first["tokens"], first["s_max"]) == ([1, 0], 100, 8)


def test_token_limit_reached_in_mid_round_aborts_the_pushes_that_come_too_late() -> None:
    bench = Bench(settings=m.Settings(tk_max_tokens=100), grace_s=1.0).running("a", "b")
    bench.push("a", 100)
    bench.begin_push("b", 50)
    bench.slaves[0].hold.add(m.Commit)
    bench.advance(1.0)
    assert bench.status().phase == "COMMIT"
    assert not bench.beat("a").stop, "the last version is not published yet"
    bench.slaves[0].release(m.Commit)
    assert bench.verdict("a").kind is m.VerdictKind.APPLIED
    verdict = bench.verdict("b")
    assert (verdict.kind, "tk_max" in verdict.reason) == (m.VerdictKind.ABORTED, True)
    assert bench.beat("a").stop
    assert bench.beat("b").stop


def test_pinned_version_is_retained_while_newer_ones_are_published() -> None:
    bench = Bench().running("a", "b")
    grant = bench.ask(m.BeginPullRequest(bench.caller("b"))).answer
    bench.rounds(3, "a", wait_s=1.5)
    retains = [c.versions for c in sent(bench.slaves[0], m.Retain) if isinstance(c, m.Retain)]
    assert retains[-1] == (grant.version,)
    assert retains[-3] == (), "the version before the newest needs no pin"


@pytest.mark.parametrize("pauses", [True, False])
def test_round_waits_for_the_journals_replica_only_where_the_settings_say_so(pauses: bool) -> None:
    bench = Bench(pause_without_replica=pauses, grace_s=1.0).running("a")
    before = bench.status().published
    bench.event(ReplicaNews("no standby follows"))
    bench.push("a")
    bench.advance(10.0)
    status = bench.status()
    (alarm,) = status.alarms
    assert alarm.kind == AlarmKind.NO_REPLICA
    assert (status.published == before) == pauses
    assert (status.waiting_code == WaitingCode.REPLICA) == pauses
    bench.event(ReplicaNews("the store is away", of_lease=True))
    bench.event(ReplicaNews(""))
    bench.advance(10.0)
    assert bench.status().published != before, "rounds do not depend on the lease"
    (alarm,) = bench.status().alarms
    assert "the store is away" in alarm.sentence
    bench.event(ReplicaNews("", of_lease=True))
    assert not bench.status().alarms


@pytest.mark.parametrize("why", ["paused", "a slave is away", "too few clusters"])
def test_window_that_waits_for_more_than_time_asks_for_no_tick(why: str) -> None:
    bench = Bench(min_clusters=2 if why == "too few clusters" else 1, grace_s=1.0).running("a", "b")
    if why == "too few clusters":
        bench = Bench(min_clusters=2, grace_s=1.0).running("a")
    if why == "paused":
        bench.operate(Pause(m.OperatorRequest("")))
    bench.push("a")
    if why == "a slave is away":
        bench.slaves[0].die()
    bench.advance(10.0)
    deadline_s = bench.state.next_deadline_s()
    assert deadline_s is None or deadline_s > bench.now_s


def told(bench: Bench) -> list[str]:
    return [str(record["sentence"]) for record in bench.recorded("alarm") if "nothing was merged" in str(record)]


def test_rounds_that_are_all_void_are_an_alarm_with_each_clusters_reason() -> None:
    bench = Bench().running("a", "b")
    bench.norms = {"a": 0.0}
    bench.nonfinite = {"b": 3}
    bench.rounds(FRUITLESS_ROUNDS - 1, "a", "b")
    assert (bench.status().alarms, told(bench)) == ((), [])
    bench.rounds(1, "a", "b")
    (alarm,) = bench.status().alarms
    assert (alarm.kind, alarm.clusters) == ("nothing_merged", ())
    assert "nothing was merged in the last 5 rounds (5 void)" in alarm.sentence
    assert "a: its parameters equal the current version's" in alarm.sentence
    assert "b: 3 elements are not finite" in alarm.sentence
    assert told(bench) == [alarm.sentence]
    assert [log.sentence for log in bench.logs if "nothing was merged" in log.sentence] == [alarm.sentence]
    first = sentence(bench.look(), {})
    assert first["level"] == "bad"
    assert first["text"].startswith("Nothing was merged in the last 5 rounds")
    bench.rounds(1, "a", "b")
    assert "last 6 rounds" in bench.status().alarms[0].sentence
    assert len(told(bench)) == 1, "told once"
    bench.norms, bench.nonfinite = {}, {}
    bench.rounds(1, "a", "b")
    assert not bench.status().alarms


def test_rounds_given_up_are_an_alarm_and_a_void_one_between_good_ones_is_none(bench: Bench) -> None:
    bench.slaves[0].refuse["prepare"] = m.Refusal(RefusalCode.DISK, "the disk is full", 0.0)
    bench.push("a")
    for _ in range(40):
        bench.advance(1.0)
    (alarm,) = bench.status().alarms
    assert "given up" in alarm.sentence
    assert "slave s0 cannot prepare: the disk is full" in alarm.sentence
    bench = Bench().running("a", "b")
    for _ in range(FRUITLESS_ROUNDS):
        bench.norms = {"a": 0.0, "b": 0.0}
        bench.rounds(1, "a", "b")
        bench.norms = {}
        bench.rounds(1, "a", "b")
    assert bench.status().rounds_void == FRUITLESS_ROUNDS
    assert not bench.status().alarms
