"""What each verdict or answer means for a cluster: the table of docs/protocol.md, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cluster_bench import SETTINGS, TICKET, TOKENS, ClusterBench, LeasedClusterBench, phase_of

from dips.core.errors import RefusalCode, RemoteProtocolError
from dips.core.ids import Incarnation, PushId, Version
from dips.core.messages import (
    AwaitVerdictReply,
    AwaitVerdictRequest,
    BeginPullRequest,
    BeginPushReply,
    BeginPushRequest,
    Busy,
    FinishPushReply,
    FinishPushRequest,
    ReturnDataRequest,
    Stale,
    StaleKind,
    Verdict,
    VerdictKind,
)
from dips.worker.state.effects import CopyParameters, InstallMode, Started
from dips.worker.state.shared import SessionPhase


@pytest.fixture
def life() -> LeasedClusterBench:
    life = LeasedClusterBench()
    life.begin()
    return life


def test_applied_rebases_later_steps_and_forgets_the_ranges(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(2)
    verdict = life.decide(VerdictKind.APPLIED)
    assert life.asked(BeginPullRequest).at_least == verdict.version
    assert life.pulled().mode is InstallMode.REBASE_FROM_PUSH
    work = life.session.shared.work
    assert work.in_push is None
    assert (work.pending.ranges, work.pending.steps) == ((life.span(400, 600),), 2)
    assert not life.asks(ReturnDataRequest)
    life.train(2)  # H = 4 counts from the push: two later steps and these two
    request = life.job(BeginPushRequest)[1]
    assert (request.seq, request.tokens, request.steps) == (2, 4 * TOKENS, 4)
    assert request.ranges == (life.span(400, 800),)
    assert (request.base, request.fence) == (verdict.version, 1)


def test_applied_without_later_steps_installs_the_pulled_bits(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.decide(VerdictKind.APPLIED)
    install = life.pulled()
    assert install.mode is InstallMode.REPLACE
    assert not install.reset_inner


@pytest.mark.parametrize("reset", [False, True])
def test_excluded_drops_later_steps_and_returns_only_later_ranges(life: LeasedClusterBench, reset: bool) -> None:
    life.awaiting()
    life.train(3)
    verdict = life.decide(VerdictKind.EXCLUDED, reset_inner_optimizer=reset)
    assert life.waits, "steps made now would be dropped"
    assert list(life.give_back_answered()) == [life.span(400, 700)]
    assert life.asked(BeginPullRequest).at_least == verdict.version
    install = life.pulled()
    assert (install.mode, install.reset_inner) == (InstallMode.REPLACE, reset)
    assert life.session.shared.work.tokens == 0
    assert life.phase is SessionPhase.TRAINING


def test_aborted_keeps_everything_and_the_next_push_carries_both(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(4)
    life.decide(VerdictKind.ABORTED)
    assert not life.asks(BeginPullRequest)
    request = life.job(BeginPushRequest)[1]  # at once: the work has waited long enough
    assert (request.seq, request.tokens, request.steps) == (2, 8 * TOKENS, 8)
    assert request.ranges == (life.span(0, 800),)
    assert request.mean_loss == pytest.approx(2.0)


def test_what_is_aborted_again_and_again_is_pushed_at_once_only_the_first_time(life: LeasedClusterBench) -> None:
    life.awaiting()
    for aborts in (1, 2, 3):
        life.decide(VerdictKind.ABORTED)
        if aborts > 1:
            assert life.phase is SessionPhase.TRAINING, "it may fail for ever, and costs a transfer each time"
            life.train(4)
        life.sent(life.ticket())
        life.admitted()
    life.decide(VerdictKind.APPLIED)
    life.pulled()
    life.train(4)
    life.sent(life.ticket())
    life.admitted()
    life.decide(VerdictKind.ABORTED)
    assert life.asks(BeginPushRequest), "a push that was decided ends the row"


def test_stale_versions_rebases_from_base_and_keeps_all_ranges(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.answer(BeginPushRequest, BeginPushReply(Stale(StaleKind.VERSIONS, "too old")))
    assert life.phase is SessionPhase.PULLING
    life.published = Version(1, 30)
    assert life.pulled().mode is InstallMode.REBASE_FROM_BASE
    request = life.job(BeginPushRequest)[1]  # at once: the work has waited long enough
    assert (request.seq, request.base, request.ranges) == (2, Version(1, 30), (life.span(0, 400),))


@pytest.mark.parametrize("kind", [StaleKind.FENCE, StaleKind.TIMELINE])
def test_stale_fence_and_timeline_drop_and_return_everything(life: LeasedClusterBench, kind: StaleKind) -> None:
    life.push_begun()
    life.train(1)
    life.answer(BeginPushRequest, BeginPushReply(Stale(kind, "not your base")))
    assert life.waits
    assert list(life.give_back_answered()) == [life.span(0, 500)]
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0


def test_rolled_back_drops_and_returns_everything(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    life.decide(VerdictKind.ROLLED_BACK)
    assert list(life.give_back_answered()) == [life.span(0, 500)]
    assert life.pulled().mode is InstallMode.REPLACE


def test_a_verdict_may_answer_begin_push_and_finish_push(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.answer(BeginPushRequest, BeginPushReply(life.verdict(VerdictKind.ABORTED)))
    assert life.asked(BeginPushRequest).seq == 2
    life.sent(life.ticket())
    life.answer(FinishPushRequest, FinishPushReply(life.verdict(VerdictKind.APPLIED)))
    assert life.phase is SessionPhase.PULLING


# ---- FENCED: join again ----


def fenced(life: LeasedClusterBench) -> None:
    life.refuse(AwaitVerdictRequest, RefusalCode.FENCED)
    assert life.phase is SessionPhase.JOINING
    assert not life.waits, "training goes on while joining again"


def test_fenced_join_names_the_old_life_and_every_range(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    fenced(life)
    request = life.join()
    assert request.caller.incarnation == Incarnation(1, 1)
    assert request.held_ranges == (life.span(0, 400), life.span(400, 500), life.span(500, 100_000)), "each by its fate"
    assert life.session.shared.terms.incarnation == Incarnation(1, 2)


@pytest.mark.parametrize("known", [False, True])
def test_fenced_with_verdict_aborted_or_none_keeps_everything(life: LeasedClusterBench, known: bool) -> None:
    life.awaiting()
    fenced(life)
    life.train(1)
    life.join(life.verdict(VerdictKind.ABORTED) if known else None)
    request = life.job(BeginPushRequest)[1]
    assert (request.seq, request.steps, request.ranges) == (2, 5, (life.span(0, 500),))
    assert request.caller.incarnation == Incarnation(1, 2)


@pytest.mark.parametrize("what", ["fence", "timeline"])
def test_fenced_with_another_fence_or_timeline_is_as_stale_fence(life: LeasedClusterBench, what: str) -> None:
    life.awaiting()
    fenced(life)
    aborted = life.verdict(VerdictKind.ABORTED)
    if what == "fence":
        life.fence += 1
    else:
        life.published = Version(9, 0)
    life.join(aborted)
    assert life.phase is SessionPhase.PULLING
    assert list(life.give_back_answered()) == [life.span(0, 400)]
    assert life.pulled().mode is InstallMode.REPLACE


def test_fenced_with_verdict_applied_acts_on_that_row(life: LeasedClusterBench) -> None:
    life.awaiting()
    fenced(life)
    life.train(2)
    life.join(life.verdict(VerdictKind.APPLIED))
    assert life.pulled().mode is InstallMode.REBASE_FROM_PUSH
    assert life.session.shared.work.pending.ranges == (life.span(400, 600),)
    assert not life.asks(ReturnDataRequest)


def test_fenced_with_verdict_excluded_acts_on_that_row(life: LeasedClusterBench) -> None:
    life.awaiting()
    fenced(life)
    life.train(2)
    life.join(life.verdict(VerdictKind.EXCLUDED, reset_inner_optimizer=True))
    assert list(life.give_back_answered()) == [life.span(400, 600)]
    assert life.pulled().reset_inner


def test_fenced_and_undecided_waits_then_acts(life: LeasedClusterBench) -> None:
    life.awaiting()
    push = life.push_id
    fenced(life)
    life.join(push)
    assert life.phase is SessionPhase.AWAITING
    assert life.asked(AwaitVerdictRequest).push == push
    life.answer(AwaitVerdictRequest, AwaitVerdictReply(life.verdict(VerdictKind.APPLIED)))
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0


def test_fenced_between_verdict_and_pull_goes_on_with_the_pull(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    verdict = life.decide(VerdictKind.APPLIED)
    life.refuse(BeginPullRequest, RefusalCode.STALE_EPOCH)
    life.join(verdict)
    assert life.phase is SessionPhase.PULLING
    assert life.pulled().mode is InstallMode.REBASE_FROM_PUSH
    assert life.session.shared.work.pending.steps == 1


def test_fenced_while_idle_keeps_training(life: LeasedClusterBench) -> None:
    life.train(2)
    life.beat(epoch=2)
    life.epoch = 2
    assert phase_of(life) is SessionPhase.JOINING
    life.train(1)
    life.join()
    assert phase_of(life) is SessionPhase.TRAINING
    life.train(1)
    assert life.job(BeginPushRequest)[1].caller.epoch == 2


@pytest.mark.parametrize(("tokens", "fence_moved", "kept"), [(10_000, 0, True), (10_000, 1, False), (0, 0, False)])
def test_a_master_that_has_not_published_again_yet_leaves_it_to_the_fence(
    life: LeasedClusterBench, tokens: int, fence_moved: int, kept: bool
) -> None:
    """A master that knows no token is of another run, whatever its name and fence."""
    life.train(2)
    life.beat(epoch=2)
    life.epoch, life.published, life.tokens = 2, None, tokens
    life.fence += fence_moved
    life.join()
    assert life.phase is (SessionPhase.TRAINING if kept else SessionPhase.PULLING)


def test_rolled_back_after_applied_is_learnt_at_join(life: LeasedClusterBench) -> None:
    life.awaiting()
    applied = life.decide(VerdictKind.APPLIED)
    life.pulled()
    life.train(1)
    life.beat(epoch=2)
    life.epoch, life.published = 2, Version(2, 3)
    life.fence += 1
    life.join(Verdict(applied.push, VerdictKind.ROLLED_BACK, Version(2, 3)))
    assert list(life.give_back_answered()) == [life.span(400, 500)]
    assert life.pulled().mode is InstallMode.REPLACE


# ---- other answers ----


def test_busy_repeats_the_very_same_push(life: LeasedClusterBench) -> None:
    first = life.push_begun()
    life.answer(BeginPushRequest, BeginPushReply(Busy(2.0, "slaves are away")))
    assert life.session.waiting_for() == "slaves are away"
    life.train(1)
    assert not life.asks(BeginPushRequest)
    life.pass_s(2.0)
    again = life.job(BeginPushRequest)[1]
    assert again == first
    assert sum(isinstance(effect, CopyParameters) for effect in life.every) == 1


def test_undecided_push_of_an_earlier_life_is_awaited_first() -> None:
    life = ClusterBench()
    life.say(Started())
    earlier = PushId(life.session.config.cluster_id, Incarnation(1, 9), 4)
    life.join(earlier)
    assert life.phase is SessionPhase.AWAITING
    verdict = life.verdict(VerdictKind.APPLIED, earlier)
    life.answer(AwaitVerdictRequest, AwaitVerdictReply(verdict))
    request = life.grant()
    assert request.at_least == verdict.version


def test_undecided_answer_for_our_own_push_awaits_it(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.answer(BeginPushRequest, BeginPushReply(life.push_id))  # the admission's answer was lost
    assert phase_of(life) is SessionPhase.AWAITING
    life.decide(VerdictKind.APPLIED)
    assert phase_of(life) is SessionPhase.PULLING


def test_undecided_answer_for_another_push_keeps_the_work(life: LeasedClusterBench) -> None:
    life.push_begun()
    other = PushId(life.session.config.cluster_id, Incarnation(1, 1), 99)
    life.answer(BeginPushRequest, BeginPushReply(other))
    assert life.asked(AwaitVerdictRequest).push == other
    life.answer(AwaitVerdictRequest, AwaitVerdictReply(life.verdict(VerdictKind.ABORTED, other)))
    assert life.job(BeginPushRequest)[1].ranges == (life.span(0, 400),)


def test_ranges_that_are_not_ours_are_dropped_and_not_returned(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.train(1)
    life.refuse(BeginPushRequest, RefusalCode.RANGES)
    assert list(life.give_back_answered()) == [life.span(400, 500)]
    assert life.pulled().mode is InstallMode.REPLACE


def test_a_used_number_is_replaced_by_the_next(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.refuse(BeginPushRequest, RefusalCode.SEQ)
    request = life.job(BeginPushRequest)[1]
    assert (request.seq, request.ranges) == (2, (life.span(0, 400),))


@pytest.mark.parametrize("code", [RefusalCode.DIGEST, RefusalCode.UNKNOWN_PUSH])
def test_a_lost_attempt_is_begun_again(life: LeasedClusterBench, code: RefusalCode) -> None:
    first = life.push_begun()
    life.sent(life.ticket())
    life.refuse(FinishPushRequest, code)
    assert life.phase is SessionPhase.BEGINNING_PUSH
    life.pass_s(1.0)
    assert life.job(BeginPushRequest)[1] == first


def test_tickets_that_do_not_fit_the_layout_end_the_session(life: LeasedClusterBench) -> None:
    life.push_begun()
    broken = replace(TICKET, placement=replace(TICKET.placement, slave_of_block=(0, 1)))
    life.answer(BeginPushRequest, BeginPushReply(broken))
    life.left()
    assert life.finished is not None
    assert isinstance(life.finished.error, RemoteProtocolError)
    assert "layout" in str(life.finished.error)


def test_fixed_h_counts_from_the_push_and_dynamic_h_from_the_pull() -> None:
    for dynamic, more in ((False, 2), (True, 4)):
        life = ClusterBench(settings=replace(SETTINGS, dynamic_local_steps=dynamic))
        life.begin()
        life.awaiting()
        life.train(2)
        life.decide(VerdictKind.APPLIED)
        life.pulled()
        life.train(more - 1)
        assert phase_of(life) is SessionPhase.TRAINING
        life.train(1)
        assert phase_of(life) is SessionPhase.BEGINNING_PUSH
