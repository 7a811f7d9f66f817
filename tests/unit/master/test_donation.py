"""No version is on every slave any more: a cluster gives its copy back, checked against the committed digests."""

from __future__ import annotations

import pytest
from support.master_bench import LEASED, Bench, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.master.state.effects import Pause, Stop
from dips.master.state.records import RoundPhase

V0, V1 = Version(1, 0), Version(1, 1)


def lost(*names: str, **config: object) -> Bench:
    """Clusters stand on 1:1, one slave's disk is empty: no version is on both."""
    bench = Bench(**config).running(*names)  # type: ignore[arg-type]
    for name in names:
        bench.push(name, 100, bench.lease(name, 100) if bench.plan is LEASED else ())
    bench.advance(2.0)
    for name in names:
        bench.pull(name)
        bench.beat(name)
    bench.slaves[0].come_back_without()
    return bench


@pytest.mark.parametrize("then", ["flips", "the master dies", "the disk is lost again"])
def test_donation_that_is_journaled_is_driven_forward_and_pulled_once_it_is_committed(then: str) -> None:
    bench = lost("a", "b")
    last = bench.clusters["b"].push_id
    bench.all_hold(m.Commit)
    bench.donate("a", V1)
    assert bench.state.shared.round.phase.now is RoundPhase.COMMIT
    assert len(bench.entries("ROLLBACK")) == 1
    assert isinstance(bench.ask(m.BeginPullRequest(bench.caller("b"))).answer, m.Busy)
    assert bench.beat("b").published is None
    bench.all_hold()
    if then == "the master dies":
        bench.restart()
        assert (bench.status().published, len(bench.entries("ROLLBACK"))) == (Version(2, 1), 1)
        return
    if then == "the disk is lost again":
        bench.slaves[0].come_back_without()
        assert bench.beat("a").donate == V1
        bench.donate("a", V1)
        assert bench.status().published == Version(3, 1)
        return
    for slave in bench.slaves:
        slave.release(m.Commit)
    assert bench.verdict("b", last).kind is m.VerdictKind.APPLIED, "its version is part of the history still"
    for name in ("a", "b"):
        bench.pull(name)
        bench.push(name)
    assert (bench.status().published, bench.status().tokens) == (Version(2, 2), 400)
    bench.restart()
    assert bench.status().published == Version(2, 2)


def test_donor_gives_its_copy_before_it_pushes_anything_else() -> None:
    bench = lost("a", plan=LEASED)
    ranges = bench.lease("a", 100)
    answer = bench.begin_push("a", 100, ranges)
    assert isinstance(answer, m.Verdict)
    assert (answer.kind, answer.push) == (m.VerdictKind.ABORTED, bench.clusters["a"].push_id)
    assert bench.verdict("a", answer.push).kind is m.VerdictKind.ABORTED, "whoever asks"
    bench.donate("a", V1)
    assert bench.status().published == Version(2, 1)


def test_slaves_hold_nothing_while_they_wait_for_a_copy() -> None:
    bench = lost("a", "b")
    for slave in bench.slaves:
        configure = [c for c in slave.commands if isinstance(c, m.Configure)][-1]
        assert (configure.load, configure.empty) == (None, True)
    assert isinstance(bench.begin_push("b"), m.Busy)
    with pytest.raises(AssertionError):
        bench.pull("a")
    assert bench.status().published == V1, "what was published last"


def test_older_version_comes_back_when_nobody_stands_on_the_newest() -> None:
    bench = Bench().running("a", "b")
    bench.push("a")
    bench.advance(2.0)
    push = bench.clusters["a"].push_id
    bench.slaves[0].come_back_without()
    assert bench.beat("a").donate == V0
    bench.donate("a", V0)
    status = bench.status()
    assert (status.published, status.tokens) == (Version(2, 0), 0)
    assert bench.verdict("a", push).kind is m.VerdictKind.ROLLED_BACK
    assert bench.entries("ROLLBACK")[0]["lost_tokens"] == 100


def test_newest_copy_is_asked_for_first() -> None:
    bench = Bench().running("a", "b")
    bench.rounds(1, "b", wait_s=2.0)
    bench.beat("b")
    bench.slaves[0].come_back_without()
    assert (bench.beat("a").donate, bench.beat("b").donate) == (None, V1)


@pytest.mark.parametrize("how", ["leaves", "is evicted", "comes back as another process"])
def test_donor_that_is_gone_makes_room_for_the_next(how: str) -> None:
    bench = lost("a", "b")
    if how == "leaves":
        bench.call(m.LeaveRequest(bench.caller("a"), ""))
    elif how == "is evicted":
        bench.silent.add("a")
        bench.advance(12.0)
    else:
        bench.join("a")
    assert bench.beat("b").donate == V1
    bench.donate("b", V1)
    assert bench.status().published == Version(2, 1)


def test_copy_that_is_not_what_was_committed_is_refused_and_the_next_cluster_is_asked() -> None:
    bench = lost("a", "b")
    push = bench.donate("a", V1, {"s1": b"other"})
    verdict = bench.verdict("a", push)
    assert (verdict.kind, "s1 is not version 1:1" in verdict.reason) == (m.VerdictKind.ABORTED, True)
    assert (bench.beat("a").donate, bench.beat("b").donate) == (None, V1)
    bench.result(bench.leave("b"))
    assert "1:1, 1:0" in bench.status().recovery, "no cluster that is here holds one"
    bench.join("b")
    bench.clusters["b"].base = V1
    bench.beat("b")
    bench.donate("b", V1)
    assert bench.status().published == Version(2, 1)


def test_what_slaves_make_of_a_copy_must_be_what_was_committed() -> None:
    bench = lost("a", "b")
    bench.slaves[0].digests[Version(2, 1)] = b"other"
    push = bench.donate("a", V1)
    assert bench.verdict("a", push).kind is m.VerdictKind.ABORTED
    assert bench.entries("ROLLBACK") == []
    del bench.slaves[0].digests[Version(2, 1)]
    assert bench.beat("b").donate == V1
    bench.donate("b", V1)
    bench.advance(3.0)
    assert bench.status().published == Version(2, 1)


def test_donor_that_sends_nothing_makes_room_and_is_asked_again_when_nobody_else_can() -> None:
    bench = lost("a", "b", ticket_ttl_s=10.0)
    bench.jump(100.0)
    assert bench.beat("a").donate == V1, "the master itself stood still"
    bench.advance(9.5)
    assert bench.beat("a").donate == V1
    bench.advance(1.5)
    assert (bench.beat("a").donate, bench.beat("b").donate) == (None, V1)
    bench.advance(11.0)
    assert (bench.beat("a").donate, bench.beat("b").donate) == (V1, None)


def test_copy_of_a_version_that_a_rollback_gave_up_is_not_asked_for() -> None:
    """Its data is trained again since: with it, the same text would be applied twice."""
    bench = Bench().running("a", "b")
    bench.rounds(2, "a", wait_s=2.0)
    bench.beat("a")
    bench.slaves[0].come_back_without(Version(1, 2))
    assert bench.status().published == Version(2, 1)
    bench.slaves[0].come_back_without()
    assert bench.beat("a").donate is None
    assert bench.beat("b").donate == V0, "the base of b is part of the history"


def test_donation_that_nobody_asks_for_is_refused() -> None:
    bench = lost("a", "b")
    with refused_with(RefusalCode.VERSION_GONE):
        bench.begin_push("b", 0, base=None, donates=V1, steps=0)
    with refused_with(RefusalCode.VERSION_GONE):
        bench.begin_push("a", 0, base=None, donates=V0, steps=0)
    with refused_with(RefusalCode.MALFORMED):
        bench.begin_push("a", 100, base=None, donates=V1)
    healthy = Bench().running("a")
    with refused_with(RefusalCode.VERSION_GONE):
        healthy.begin_push("a", 0, base=None, donates=V0, steps=0)


def test_slave_whose_disk_is_back_ends_the_donation_without_loss(bench: Bench) -> None:
    bench.rounds(1, "a")
    bench.beat("a")
    slave = bench.slaves[0]
    disk, records = dict(slave.snapshots), dict(slave.records)
    slave.come_back_without()
    assert isinstance(bench.begin_push("a", 0, base=None, donates=V1, steps=0), m.Ticket)
    push = bench.clusters["a"].push_id
    slave.die()
    slave.snapshots, slave.records = disk, records
    slave.attach()
    assert bench.status().published == V1
    assert bench.entries("ROLLBACK") == []
    assert bench.verdict("a", push).kind is m.VerdictKind.ABORTED
    bench.push("a")
    assert bench.status().published == Version(1, 2)


def test_restarted_master_still_knows_the_newest_version_and_asks_who_joins() -> None:
    bench = lost("a")
    bench.restart()
    assert "no cluster that is here holds one" in bench.status().recovery
    bench.join("a")
    bench.clusters["a"].base = V1
    bench.beat("a")
    assert bench.beat("a").donate == V1
    bench.donate("a", V1)
    assert bench.status().published == Version(2, 1)


def test_verdict_of_a_donation_hides_no_other(bench: Bench) -> None:
    push = bench.push("a")
    bench.beat("a")
    bench.slaves[0].come_back_without()
    donation = bench.donate("a", V0)
    assert bench.verdict("a", push).kind is m.VerdictKind.ROLLED_BACK
    assert bench.verdict("a", donation).kind is m.VerdictKind.APPLIED
    reply = bench.join("a", previous=bench.clusters["a"].join.incarnation)
    assert isinstance(reply.last_push, m.Verdict)
    assert reply.last_push.push == push
    again = m.FinishPushRequest(bench.caller("a"), donation.seq, 1, ())
    assert bench.ask(again).answer.kind is m.VerdictKind.ABORTED, "another incarnation's number"


def test_run_that_is_paused_or_ends_still_takes_its_last_version_back_and_a_try_that_fails_is_made_again() -> None:
    bench = lost("a")
    bench.operate(Pause(m.OperatorRequest("", "maintenance")))
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    assert not bench.beat("a").stop, "no cluster leaves with the only copy"
    bench.slaves[0].refuse["prepare"] = m.Refusal(RefusalCode.NONFINITE, "not finite")
    push = bench.donate("a", V1)
    assert bench.verdict("a", push).kind is m.VerdictKind.ABORTED
    bench.slaves[0].refuse.clear()
    assert bench.beat("a").donate == V1
    bench.donate("a", V1)
    bench.advance(3.0)
    assert bench.status().published == Version(2, 1)
    assert bench.beat("a").stop
