"""A cluster gives back the version it stands on, when the slaves have lost it."""

from __future__ import annotations

import pytest
from support.cluster_bench import DIGESTS, ClusterBench, LeasedClusterBench, phase_of

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, PushId, Version
from dips.worker.state.effects import Cancel, CopyBase, CopyParameters, InstallMode, Record, Stepped
from dips.worker.state.shared import SessionPhase

NEW = Version(3, 5)


@pytest.fixture
def life(life: LeasedClusterBench) -> LeasedClusterBench:
    life.effects.clear()
    return life


def taken(life: ClusterBench, push: PushId) -> None:
    """The donated version is the run's again, on a new timeline; the rollback raised every fence."""
    life.published = NEW
    life.fence += 1
    life.judged("await", messages.Verdict(push, messages.VerdictKind.APPLIED, NEW))


def fails(life: LeasedClusterBench, push: PushId, at: str) -> None:
    life.goes_on(at)
    life.judged(at, life.verdict(messages.VerdictKind.ABORTED, push))


each_stage = pytest.mark.parametrize("at", ["begin", "finish", "await"])


def test_the_base_is_pushed_unchanged_and_without_work(life: LeasedClusterBench) -> None:
    life.train(2)
    push = life.donate()
    assert life.take(CopyBase) == CopyBase()
    assert not life.has(CopyParameters)
    request = life.asked(messages.BeginPushRequest)
    assert (request.base, request.donates, request.fence) == (None, Version(1, 5), 0)
    assert (request.ranges, request.tokens, request.steps, request.seq) == ((), 0, 0, 1)
    assert life.session.shared.work.pending.steps == 2, "its own work waits for what becomes of the run"
    assert not life.waits, "training goes on meanwhile"
    start = life.ticket()
    assert start[1].push == push
    life.sent(start)
    assert life.admitted().digest_of_slave == DIGESTS
    donated = [e for e in life.every if isinstance(e, Record) and e.kind == "donated"]
    assert [record.fields for record in donated] == [{"version": "1:5", "push": str(push)}]


def test_once_taken_the_work_is_dropped_and_the_leases_are_settled_anew(life: LeasedClusterBench) -> None:
    life.train(2)
    push = life.donate()
    life.goes_on("await")
    taken(life, push)
    assert phase_of(life) is SessionPhase.PULLING
    assert life.waits
    assert life.session.shared.work.tokens == 0
    assert not life.asks(messages.ReturnDataRequest), "the rollback freed every lease"
    told = [e for e in life.every if isinstance(e, Record)][-1]
    assert (told.kind, told.fields["push"], told.fields["verdict"]) == ("verdict", str(push), "APPLIED")
    assert life.grant().at_least == NEW
    assert life.pull_ends().mode is InstallMode.REPLACE
    assert phase_of(life) is SessionPhase.JOINING, "what it held is not lent to it any more"
    assert life.join(kept=()).held_ranges == (life.span(200, 100_000),)
    assert phase_of(life) is SessionPhase.TRAINING
    assert life.session.held == ()
    assert life.session.shared.work.times_forgotten == 1
    life.effects.clear()
    life.say_lease(500)
    assert life.asks(messages.LeaseDataRequest)


def test_only_the_base_is_donated_and_once_at_a_time(life: LeasedClusterBench) -> None:
    life.beat(donate=Version(1, 4))
    assert life.phase is SessionPhase.TRAINING
    assert not life.has(CopyBase)
    first = life.donate()
    life.beat(donate=Version(1, 5))
    assert life.push_id == first


@pytest.mark.parametrize("how", ["begin", "finish", "await", "refused", "not wanted"])
def test_a_donation_that_is_not_taken_changes_nothing_and_is_tried_again_while_it_is_wanted(
    life: LeasedClusterBench, how: str
) -> None:
    life.train(2)
    push = life.donate()
    if how in ("refused", "not wanted"):
        code = RefusalCode.SEED_EXISTS if how == "refused" else RefusalCode.VERSION_GONE
        life.refuse(messages.BeginPushRequest, code)
    else:
        fails(life, push, how)
    assert life.phase is SessionPhase.TRAINING
    assert life.session.shared.work.pending.steps == 2
    assert life.session.pushing.last_verdict is None, "Join never names a donation as the last push"
    life.pass_s(4.99)
    assert not life.asks(messages.BeginPushRequest)
    life.pass_s(0.01)
    assert life.asks(messages.BeginPushRequest) == (how != "not wanted")
    assert how == "not wanted" or life.asked(messages.BeginPushRequest).seq == 2


@each_stage
def test_a_pull_of_what_is_lost_is_given_up_and_made_after_all_if_the_donation_fails(
    life: LeasedClusterBench, at: str
) -> None:
    life.awaiting()
    life.train(1)
    life.decide(messages.VerdictKind.APPLIED)
    life.grant()
    transfer = life.job(messages.PullGrant)[0]
    push = life.donate()
    assert life.take(Cancel).job == transfer
    life.answer(messages.FinishPullRequest, messages.FinishPullReply(4))
    fails(life, push, at)
    # theta_at_push is overwritten, so the later step cannot be kept.
    assert life.phase is SessionPhase.PULLING
    assert list(life.give_back_answered()) == [life.span(400, 500)]
    assert life.pulled().mode is InstallMode.REPLACE


def test_a_push_that_is_sealed_for_ever_is_set_aside(life: LeasedClusterBench) -> None:
    life.awaiting()
    sealed = life.push_id
    life.train(1)
    push = life.donate()
    assert push != sealed
    life.goes_on("await")
    taken(life, push)
    life.grant()
    assert life.pull_ends().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0


@each_stage
@pytest.mark.parametrize("kind", [messages.VerdictKind.APPLIED, messages.VerdictKind.ABORTED])
def test_a_sealed_push_is_awaited_again_when_the_donation_fails(
    life: LeasedClusterBench, kind: messages.VerdictKind, at: str
) -> None:
    life.awaiting()
    sealed = life.push_id
    life.train(1)
    fails(life, life.donate(), at)
    assert life.phase is SessionPhase.AWAITING
    assert life.push_id == sealed
    assert life.asked(messages.AwaitVerdictRequest).push == sealed
    life.judged("await", life.verdict(kind, sealed))
    # Without theta_at_push nothing of the later steps can be kept; the push's own ranges follow its verdict.
    returned = [life.span(400, 500)] if kind is messages.VerdictKind.APPLIED else [life.span(0, 500)]
    assert list(life.give_back_answered()) == returned
    assert life.pulled().mode is InstallMode.REPLACE


def test_a_new_join_ends_the_donation_and_the_sealed_push_is_open_again(life: LeasedClusterBench) -> None:
    life.awaiting()
    sealed = life.push_id
    life.donate()
    life.refuse(messages.BeginPushRequest, RefusalCode.FENCED)
    life.join(sealed)
    assert life.phase is SessionPhase.AWAITING
    assert life.push_id == sealed


def test_a_new_join_while_donating_keeps_the_work_if_the_base_stands(life: LeasedClusterBench) -> None:
    life.train(2)
    life.donate()
    life.refuse(messages.BeginPushRequest, RefusalCode.FENCED)
    assert life.join().held_ranges == (life.span(0, 200), life.span(200, 100_000))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.shared.work.pending.steps == 2
    assert life.session.pushing.open is None


def test_the_end_of_the_run_ends_a_donation(life: LeasedClusterBench) -> None:
    life.donate()
    life.run_ends()
    assert life.asks(messages.BeginPullRequest)


def test_a_rollback_noticed_at_a_pull_drops_what_a_rebase_would_have_kept(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    life.decide(messages.VerdictKind.APPLIED)
    life.refuse(messages.BeginPullRequest, RefusalCode.VERSION_GONE)
    life.pass_s(2)
    life.published, life.fence = NEW, life.fence + 1
    life.grant()
    assert life.pull_ends().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0
    assert life.asks(messages.JoinRequest)


def test_own_data_needs_no_second_join_after_a_rollback() -> None:
    life = ClusterBench()
    life.begin()
    life.say(Stepped(10))
    push = life.donate()
    life.goes_on("await")
    taken(life, push)
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.phase is SessionPhase.TRAINING


def test_another_push_that_must_be_decided_first_ends_the_donation(life: LeasedClusterBench) -> None:
    life.donate()
    other = PushId(life.session.config.cluster_id, Incarnation(1, 9), 3)
    life.answer(messages.BeginPushRequest, messages.BeginPushReply(other))
    assert life.session.pushing.open is None
    assert life.phase is SessionPhase.TRAINING
