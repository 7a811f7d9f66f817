"""Push tickets: what BeginPush and FinishPush check, what they answer, and that nothing is counted twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.master_bench import LEASED, OWN, Bench, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import PushId, Version
from dips.core.protocol import FINISH_HOLD_S
from dips.master.state.effects import CallGone
from dips.master.state.pushes import AWAY_RETRY_S


def test_ticket_opens_staging_in_a_slot_of_the_cluster_on_every_slave_and_names_the_order_of_blocks() -> None:
    bench = Bench().running("a", "b")
    ticket = bench.ticket("a")
    assert sorted(ticket.block_order) == [0, 1, 2, 3]
    assert all(address.data_endpoint.startswith("tcp://127.0.0.1:") for address in ticket.placement.slaves)
    bench.begin_push("b")
    for slave in bench.slaves:
        opened = slave.staging[bench.clusters["a"].push_id]
        assert (opened.attempt, opened.tokens, opened.base, opened.fence) == (1, 100, Version(1, 0), 1)
        assert len({opened.slot for opened in slave.staging.values()}) == 2


def test_admitted_only_when_all_slaves_have_staged_it_and_told_which_lacks_it_until_then() -> None:
    bench = Bench(grace_s=9.0).running("a", "b", "c")
    bench.begin_push("a")
    bench.slaves[0].stage(bench.clusters["a"].push_id)
    token = bench.finish_push("a")
    assert bench.state.next_deadline_s() == bench.now_s + FINISH_HOLD_S
    assert bench.is_open(token)
    bench.advance(6.0)
    answer = bench.result(token).answer
    assert isinstance(answer, m.Busy)
    assert "slave s1 has not all" in answer.sentence
    assert bench.status().phase == "IDLE"
    bench.slaves[1].stage(bench.clusters["a"].push_id)
    rounds = set()
    for name in ("a", "b"):
        if name == "b":
            bench.begin_push("b")
            bench.stage("b")
        answer = bench.result(bench.finish_push(name)).answer
        assert isinstance(answer, m.Admitted)
        assert answer.window_closes_in_s == pytest.approx(9.0)
        rounds.add(answer.round)
    assert rounds == {bench.status().round}


@pytest.mark.parametrize("sent", [{"s0": b"other", "s1": b"other"}, {"s0": b"s0:right"}], ids=["differs", "is missing"])
def test_digest_that_differs_or_is_missing_aborts_the_push(bench: Bench, sent: dict[str, bytes]) -> None:
    bench.begin_push("a")
    bench.stage("a")
    right = {name: bench.slaves[0].digest(bench.clusters["a"].push_id) for name in sent if sent[name] == b"s0:right"}
    with refused_with(RefusalCode.DIGEST):
        bench.result(bench.finish_push("a", digests=sent | right))
    assert bench.verdict("a").kind is m.VerdictKind.ABORTED
    assert not bench.slaves[0].staging


def test_same_push_again_is_a_new_attempt_and_the_old_attempt_is_over(bench: Bench) -> None:
    bench.begin_push("a")
    bench.slaves[0].stage(bench.clusters["a"].push_id)
    bench.clusters["a"].seq -= 1
    ticket = bench.ticket("a")
    assert ticket.attempt == 2
    assert bench.slaves[0].staging[bench.clusters["a"].push_id].attempt == 2
    with refused_with(RefusalCode.UNKNOWN_PUSH):
        bench.result(bench.finish_push("a", attempt=1))
    bench.stage("a")
    assert isinstance(bench.result(bench.finish_push("a", attempt=2)).answer, m.Admitted)


def test_staged_of_an_older_attempt_is_ignored(bench: Bench) -> None:
    bench.begin_push("a")
    push = bench.clusters["a"].push_id
    bench.clusters["a"].seq -= 1
    bench.begin_push("a")
    for slave in bench.slaves:
        slave.staging[push] = replace(slave.staging[push], attempt=1)
        slave.stage(push)
    token = bench.finish_push("a", attempt=2)
    assert bench.is_open(token)


def test_one_push_is_undecided_and_a_decided_one_gets_its_verdict_again_and_never_counts_twice() -> None:
    bench = Bench(grace_s=1.0).running("a", "b")
    push = bench.push("a")
    assert bench.begin_push("a") == push
    bench.clusters["a"].seq -= 1
    bench.advance(1.0)
    assert bench.slaves[0].staging == {}, "free again"
    assert [c.push for c in bench.slaves[0].commands if isinstance(c, m.CloseStaging)][-1] == push
    bench.clusters["a"].seq -= 1
    answer = bench.begin_push("a")
    assert isinstance(answer, m.Verdict)
    assert answer.kind is m.VerdictKind.APPLIED
    assert bench.result(bench.finish_push("a")).answer == answer
    bench.pull("a")
    bench.rounds(1, "a", wait_s=1.0)
    bench.clusters["a"].seq -= 2
    with refused_with(RefusalCode.SEQ):
        bench.begin_push("a")
    assert bench.status().tokens == 200


def test_push_too_many_versions_behind_is_stale_also_while_it_travels_and_can_be_rebased() -> None:
    bench = Bench(settings=m.Settings(max_staleness_versions=2), grace_s=0.5).running("a", "b", "c")
    for n in range(3):
        if n == 2:  # two versions behind are not too many
            assert isinstance(bench.begin_push("b"), m.Ticket)
        bench.rounds(1, "a", wait_s=1.0)
    bench.stage("b")
    answer = bench.result(bench.finish_push("b")).answer
    assert isinstance(answer, m.Verdict)
    assert (answer.kind, "behind" in answer.reason) == (m.VerdictKind.ABORTED, True)
    answer = bench.begin_push("c")
    assert isinstance(answer, m.Stale)
    assert answer.kind is m.StaleKind.VERSIONS
    bench.pull("c")
    assert isinstance(bench.begin_push("c"), m.Ticket)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"base": Version(1, 1)}, RefusalCode.MALFORMED),
        ({"steps": (1 << 32) + 1}, RefusalCode.MALFORMED),
        ({"ranges": (m.DataRange(1, 0, 0, 0, 100),)}, RefusalCode.RANGES),
        ({"base": None, "tokens": 0}, RefusalCode.SEED_EXISTS),
        *(({"tokens": tokens}, RefusalCode.TOKENS) for tokens in (0, -1, (1 << 50) + 1)),
    ],
)
def test_push_that_cannot_be_is_refused_and_the_run_goes_on(fields: dict[str, Any], code: RefusalCode) -> None:
    bench = Bench(plan=OWN).running("a")
    with refused_with(code):
        bench.begin_push("a", **fields)
    bench.push("a")
    assert bench.status().tokens == 100


def declared(rate: float, *names: str) -> Bench:
    bench = Bench(plan=OWN, grace_s=30.0).attach_all()
    for name in names:
        bench.join(name, declared_tokens_per_s=rate)
    bench.seed(names[0])
    bench.pulls(*names)
    return bench


def test_own_data_is_bounded_by_the_declared_rate() -> None:
    bench = declared(10.0, "a")
    bench.push("a", 100)
    bench.pull("a")
    bench.advance(10.0)
    with refused_with(RefusalCode.TOKENS, "declared"):
        bench.begin_push("a", 201)
    bench.push("a", 200)
    assert bench.status().tokens == 300


def test_only_the_cluster_that_was_asked_seeds_and_without_training() -> None:
    bench = Bench().attach_all()
    assert bench.join("b").seed
    assert not bench.join("a").seed
    for name, tokens, code in (("a", 0, RefusalCode.SEED_EXISTS), ("b", 5, RefusalCode.TOKENS)):
        with refused_with(code):
            bench.begin_push(name, tokens, base=None)


def test_seed_passes_on_when_its_cluster_is_gone() -> None:
    bench = Bench().attach_all()
    bench.join("a")
    bench.join("b")
    bench.silent.add("a")
    bench.advance(11.0)
    with refused_with(RefusalCode.FENCED):
        bench.pull("b")
    assert bench.join("b", previous=bench.clusters["b"].join.incarnation).seed
    bench.seed("b")
    assert bench.status().published == Version(1, 0)


@pytest.mark.parametrize(
    "item",
    [
        *(m.DataRange(1, 0, 0, *tokens) for tokens in ((0, 101), (50, 50), (60, 50))),
        *(m.DataRange(*of, 0, 100) for of in ((99, 0, 0), (1, 0, 1), (1, 5, 0), (1, 0, 1 << 40))),
    ],
)
def test_range_that_is_not_leased_is_refused(item: m.DataRange) -> None:
    bench = Bench(plan=LEASED).running("a")
    bench.lease("a", 100)
    with refused_with(RefusalCode.RANGES):
        bench.begin_push("a", max(1, item.tokens), (item,))


def test_ranges_must_be_the_clusters_own_do_not_overlap_and_hold_as_many_tokens_as_are_counted() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    (lease,) = ranges = bench.lease("a", 100)
    twice = (replace(lease, end_tokens=60), replace(lease, begin_tokens=50))
    for name, tokens, sent, code in (
        ("b", 100, ranges, RefusalCode.RANGES),
        ("a", 110, twice, RefusalCode.RANGES),
        ("a", 99, ranges, RefusalCode.TOKENS),
        ("a", 101, ranges, RefusalCode.TOKENS),
    ):
        with refused_with(code):
            bench.begin_push(name, tokens, sent)
    assert isinstance(bench.begin_push("a", 100, ranges), m.Ticket)


def test_applied_and_excluded_ranges_are_never_lent_again() -> None:
    bench = Bench(plan=LEASED).running("a")
    bench.push("a", 100, bench.lease("a", 100))
    bench.pull("a")
    bench.nonfinite["a"] = 1
    bench.push("a", 100, bench.lease("a", 100))
    bench.pull("a")
    taken = bench.lease("a", 800)
    assert {(r.chunk, r.begin_tokens) for r in taken} == {(chunk, 0) for chunk in range(2, 10)}
    assert bench.lease("a", 100)[0].pass_index == 1
    status = bench.status()
    assert status.excluded_tokens == 100


def test_ticket_lives_while_bytes_arrive_also_at_a_slave_that_restarted_and_runs_out_without() -> None:
    bench = Bench(ticket_ttl_s=10.0).running("a")
    bench.begin_push("a")
    push = bench.clusters["a"].push_id
    bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 1, 1000),)))
    bench.slaves[0].die()
    bench.slaves[0].attach()
    for landed in range(1, 5):
        bench.advance(8.0)
        bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 1, landed),)))
    assert bench.state.shared.members["a"].push is not None
    bench.advance(1.0)
    bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 1, 4),)))
    bench.advance(9.0)
    assert bench.state.shared.members["a"].push is not None
    bench.advance(1.0)
    verdict = bench.verdict("a")
    assert (verdict.kind, "ticket" in verdict.reason) == (m.VerdictKind.ABORTED, True)
    assert not bench.slaves[0].staging


@pytest.mark.parametrize("wait_s", [0.5, math.nan, math.inf, -math.inf, -1.0])
def test_await_verdict_is_bounded_and_says_why(wait_s: float) -> None:
    bench = Bench(grace_s=60.0).running("a", "b")
    bench.push("a")
    token = bench.await_verdict("a", wait_s=wait_s)
    bound_s = 0.5 if wait_s == 0.5 else 30.0 if wait_s == math.inf else 0.0
    assert bench.state.next_deadline_s() == bench.now_s + bound_s
    bench.advance(max(0.5, bound_s))
    answer = bench.result(token).answer
    assert isinstance(answer, m.Busy)
    assert answer.sentence
    bench.advance(60.0)
    assert bench.verdict("a").kind is m.VerdictKind.APPLIED
    assert bench.result(token).answer == answer, "a call is answered once"


def test_nobody_asks_for_another_cluster_s_verdict() -> None:
    bench = Bench().running("a", "b")
    push = bench.push("a")
    with refused_with(RefusalCode.UNKNOWN_PUSH):
        bench.result(bench.await_verdict("b", push))


def test_older_incarnation_and_older_epoch_join_again_and_a_newer_epoch_names_another_master(bench: Bench) -> None:
    caller = bench.caller("a")
    newer = replace(caller, epoch=2)
    for bad, code, words in ((newer, RefusalCode.STALE_EPOCH, "a newer master serves"), (caller, None, "")):
        if code is None:
            bench.join("a")
            code, words = RefusalCode.FENCED, "join again"
        with refused_with(code, words):
            bench.ask(m.BeginPushRequest(bad, 9, Version(1, 0), 1, (), 10, 1))
    bench.start_master()
    with refused_with(RefusalCode.STALE_EPOCH, "the master was restarted"):
        bench.ask(m.BeginPushRequest(caller, 9, Version(1, 0), 1, (), 10, 1))


def seeding(*names: str) -> Bench:
    """The first cluster's seed stands in PREPARE, where slave s0 has yet to answer; then its cluster is evicted."""
    bench = Bench().attach_all()
    for name in names:
        bench.join(name)
    bench.slaves[0].hold.add(m.Prepare)
    bench.seed(names[0])
    bench.operate(m.EvictRequest("", names[0]))
    return bench


def test_seed_that_was_begun_before_another_one_was_published_is_never_applied() -> None:
    bench = seeding("a", "b")
    assert isinstance(bench.begin_push("b", 0, base=None), m.Ticket)
    bench.slaves[0].release(m.Prepare)
    assert bench.status().published == Version(1, 0)
    bench.stage("b")
    answer = bench.result(bench.finish_push("b")).answer
    assert isinstance(answer, m.Verdict)
    assert answer.kind is m.VerdictKind.ABORTED
    assert "exists" in answer.reason
    bench.advance(3.0)
    assert bench.status().published == Version(1, 0)


def test_of_two_seeds_only_that_of_the_cluster_that_was_asked_last_is_taken() -> None:
    bench = seeding("a", "b")
    bench.begin_push("b", 0, base=None)
    bench.stage("b")
    token = bench.finish_push("b")
    assert isinstance(bench.result(token).answer, m.Admitted)
    old = bench.clusters["a"].push_id
    bench.join("a")
    slave = bench.slaves[0]
    round_id = bench.status().round
    assert round_id is not None
    slave.hold.clear()
    slave.say(m.RoundRefused(round_id, "prepare", m.Refusal(RefusalCode.DISK, "the disk is full")))
    bench.advance(3.0)
    assert bench.verdict("a", old).kind is m.VerdictKind.ABORTED
    assert bench.verdict("b").kind is m.VerdictKind.APPLIED
    assert bench.status().published == Version(1, 0)


def test_slave_that_is_lost_takes_its_part_of_a_push_with_it(bench: Bench) -> None:
    bench.begin_push("a")
    push = bench.clusters["a"].push_id
    bench.slaves[1].stage(push)
    bench.slaves[1].die()
    bench.slaves[0].stage(push)
    token = bench.finish_push("a")
    assert bench.is_open(token)
    bench.slaves[1].attach()
    bench.slaves[1].stage(push)
    assert isinstance(bench.result(token).answer, m.Admitted)
    assert bench.status().published == Version(1, 1)


def test_call_whose_caller_hung_up_is_not_answered_and_its_push_is_admitted_by_the_next_one() -> None:
    bench = Bench(grace_s=5.0).running("a", "b")
    bench.begin_push("a")
    gone, waits = bench.finish_push("a"), bench.await_verdict("a")
    other = bench.await_verdict("a", wait_s=20.0)
    for token in (gone, waits):
        bench.event(CallGone(token))
    bench.stage("a")
    assert bench.status().phase == "IDLE", "no cluster has asked for its admission"
    assert isinstance(bench.result(bench.finish_push("a")).answer, m.Admitted)
    bench.advance(5.0)
    assert bench.result(other).answer.kind is m.VerdictKind.APPLIED
    for token in (gone, waits):
        assert bench.is_open(token)


def test_held_finish_push_is_answered_when_it_is_repeated_and_when_its_attempt_is_over(bench: Bench) -> None:
    bench.begin_push("a")
    first, second = bench.finish_push("a"), bench.finish_push("a")
    assert isinstance(bench.result(first).answer, m.Busy)
    bench.clusters["a"].seq -= 1
    bench.begin_push("a")
    with refused_with(RefusalCode.UNKNOWN_PUSH):
        bench.result(second)
    bench.stage("a")
    assert bench.status().published == Version(1, 0), "no cluster has finished attempt 2"
    assert isinstance(bench.result(bench.finish_push("a", attempt=2)).answer, m.Admitted)


def test_no_ticket_and_no_new_attempt_while_a_slave_is_away_because_its_address_may_change() -> None:
    bench = Bench().running("a", "b")
    bench.begin_push("a")
    bench.slaves[1].die()
    bench.clusters["a"].seq -= 1
    for name in ("a", "b"):
        answer = bench.begin_push(name)
        assert isinstance(answer, m.Busy)
        assert (answer.retry_after_s, "s1 is away" in answer.sentence) == (AWAY_RETRY_S, True)
    bench.slaves[1].attach()
    bench.clusters["a"].seq -= 1
    ticket = bench.ticket("a")
    assert f":{5000 + bench.slaves[1].link}" in ticket.placement.slaves[1].data_endpoint


def test_verdict_of_a_push_before_the_last_one_is_never_told_wrong(bench: Bench) -> None:
    first = bench.push("a")
    bench.pull("a")
    bench.push("a")
    with refused_with(RefusalCode.UNKNOWN_PUSH, "sent before"):
        bench.verdict("a", first)
    bench.clusters["a"].seq = first.seq
    with refused_with(RefusalCode.UNKNOWN_PUSH):
        bench.result(bench.finish_push("a"))


def test_push_that_was_called_aborted_can_not_begin_after_all(bench: Bench) -> None:
    late = PushId("a", bench.clusters["a"].join.incarnation, 5)  # type: ignore[arg-type]
    assert bench.verdict("a", late).kind is m.VerdictKind.ABORTED
    bench.clusters["a"].seq = 4
    with refused_with(RefusalCode.SEQ):
        bench.begin_push("a")
    assert isinstance(bench.begin_push("a"), m.Ticket)


def test_declared_rate_counts_from_the_last_push_that_was_not_aborted() -> None:
    bench = declared(10.0, "a", "b")
    bench.advance(50.0)
    bench.push("a", 500)
    bench.slaves[0].die()
    assert bench.verdict("a").kind is m.VerdictKind.ABORTED
    bench.slaves[0].attach()
    bench.advance(10.0)
    assert isinstance(bench.begin_push("a", 600), m.Ticket), "the work of the aborted push comes with the next one"


def test_declared_rate_counts_the_time_that_a_cluster_was_cut_off() -> None:
    bench = declared(10.0, "a", "b")
    base, fence = bench.clusters["a"].base, bench.clusters["a"].fence
    bench.silent.add("a")
    bench.advance(200.0)
    assert not bench.alive("a")
    bench.join("a", previous=bench.clusters["a"].join.incarnation, declared_tokens_per_s=10.0)
    assert isinstance(bench.begin_push("a", 2000, base=base, fence=fence), m.Ticket)


def test_a_finish_that_comes_again_is_answered_again_and_one_that_waits_gets_the_verdict() -> None:
    bench = Bench().running("a", "b")
    bench.push("a")
    again = bench.result(bench.finish_push("a")).answer
    assert isinstance(again, m.Admitted)
    bench.begin_push("b")
    held = bench.finish_push("b")
    assert bench.is_open(held)
    bench.join("b")
    assert bench.result(held).answer.kind is m.VerdictKind.ABORTED
