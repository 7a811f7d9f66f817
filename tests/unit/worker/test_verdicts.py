"""What each verdict or answer means for a cluster: the table of docs/protocol.md, row by row, however it is heard."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.cluster_bench import SETTINGS, TICKET, TOKENS, ClusterBench, LeasedClusterBench, leased, phase_of

from dips.core import messages
from dips.core.errors import RefusalCode, RemoteProtocolError
from dips.core.ids import Incarnation, PushId, Version
from dips.worker.state.effects import CopyParameters, InstallMode, Started
from dips.worker.state.shared import SessionPhase

OVERLAPS = ("none", "push", "full")


STAGES = ("begin", "send", "finish", "await")
WAYS = [
    *((stage, "answer") for stage in STAGES if stage != "send"),
    *((stage, how) for stage in STAGES for how in ("join", "resume", "join, undecided", "resume, undecided")),
]


def joins_anew(life: ClusterBench, how: str) -> None:
    if how.startswith("join"):
        life.fenced()
    else:
        life.reborn()


def hear(life: ClusterBench, stage: str, how: str, kind: messages.VerdictKind | None, **changes: Any) -> None:
    """kind None: no verdict, the master knows no such push."""
    push = life.push_id
    verdict = None if kind is None else life.verdict(kind, **changes)
    if how == "answer":
        life.judged(stage, verdict)
        return
    joins_anew(life, how)
    if how.endswith("undecided"):
        life.join(push)
        assert life.phase is SessionPhase.AWAITING
        assert life.asked(messages.AwaitVerdictRequest).push == push
        life.judged("await", verdict)
    else:
        life.join(verdict)


@dataclass(frozen=True)
class Fate:
    """What a cluster gives back, installs, and pushes next."""

    returned: tuple[int, int] | None
    install: tuple[InstallMode, bool, Version | None] | None
    """How, whether the inner optimizer is reset, and the version that was asked for at least."""
    base: Version
    fence: int
    steps: int
    pushed: tuple[int, int]
    incarnation: int
    seq: int = 2


def fate(life: LeasedClusterBench) -> Fate:
    returned, install = None, None
    if life.asks(messages.ReturnDataRequest):
        (gone,) = life.give_back_answered()
        returned = gone.begin_tokens, gone.end_tokens
    if life.asks(messages.BeginPullRequest):
        at_least, done = life.asked(messages.BeginPullRequest).at_least, life.pulled()
        install = done.mode, done.reset_inner, at_least
    while not life.asks(messages.BeginPushRequest):
        life.train(1)
    push = life.asked(messages.BeginPushRequest)
    ((pushed,), incarnation) = push.ranges, push.caller.incarnation
    assert push.tokens == push.steps * TOKENS
    assert push.mean_loss == pytest.approx(2.0)
    assert push.base is not None
    assert incarnation is not None
    return Fate(
        returned, install, push.base, push.fence, push.steps, (pushed.begin_tokens, pushed.end_tokens), incarnation.n,
        push.seq,
    )  # fmt: skip


OLD, NEW = Version(1, 5), Version(1, 6)
FATES = {
    # H = 4 counts from the push: two later steps, and two more.
    messages.VerdictKind.APPLIED: Fate(None, (InstallMode.REBASE_FROM_PUSH, False, NEW), NEW, 1, 4, (400, 800), 1),
    messages.VerdictKind.EXCLUDED: Fate((400, 600), (InstallMode.REPLACE, True, OLD), OLD, 1, 4, (600, 1000), 1),
    # At once: the work has waited long enough.
    messages.VerdictKind.ABORTED: Fate(None, None, OLD, 0, 6, (0, 600), 1),
    messages.VerdictKind.ROLLED_BACK: Fate((0, 600), (InstallMode.REPLACE, False, OLD), OLD, 1, 4, (600, 1000), 1),
    None: Fate(None, None, OLD, 0, 6, (0, 600), 1),
}
CASES = [
    (stage, how, kind)
    for stage, how in WAYS
    for kind in FATES
    if kind is not None or not ("undecided" in how or how == "answer")
]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("stage", "how", "kind"), CASES)
def test_a_push_of_four_steps_and_two_later_ones_fare_as_the_table_says(
    stage: str, how: str, kind: messages.VerdictKind | None, overlap: str
) -> None:
    life = leased(overlap=overlap)
    life.push_begun()
    life.goes_on(stage)
    life.train(2)
    hear(life, stage, how, kind, **({"reset_inner_optimizer": True} if kind is messages.VerdictKind.EXCLUDED else {}))
    drops = kind in (messages.VerdictKind.EXCLUDED, messages.VerdictKind.ROLLED_BACK)
    life.pass_s(100.0)
    assert life.waits == drops, "steps made now would be dropped"
    assert fate(life) == replace(FATES[kind], incarnation=1 if how == "answer" else 2)
    assert sum(isinstance(effect, CopyParameters) for effect in life.every) == 2, "theta_at_push is of its beginning"


def test_applied_without_later_steps_installs_the_pulled_bits(life: LeasedClusterBench) -> None:
    life.exchanged()
    install = life.pulled()
    assert (install.mode, install.reset_inner) == (InstallMode.REPLACE, False)


def test_what_is_aborted_again_and_again_is_pushed_at_once_only_the_first_time(life: LeasedClusterBench) -> None:
    life.awaiting()
    for aborts in (1, 2, 3):
        life.decide(messages.VerdictKind.ABORTED)
        if aborts > 1:
            assert life.phase is SessionPhase.TRAINING, "it may fail for ever, and costs a transfer each time"
            life.train(4)
        life.goes_on("await")
    life.decide(messages.VerdictKind.APPLIED)
    life.pulled()
    life.train(4)
    life.merged(messages.VerdictKind.ABORTED)
    assert life.asks(messages.BeginPushRequest), "a push that was decided ends the row"


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", messages.StaleKind)
def test_a_stale_push_is_rebased_with_all_its_steps_or_dropped(kind: messages.StaleKind, overlap: str) -> None:
    life = leased(overlap=overlap)
    life.push_begun()
    life.train(1)
    life.judged("begin", messages.Stale(kind, "not your base"))
    life.published = Version(1, 30)
    assert life.phase is SessionPhase.PULLING
    if kind is messages.StaleKind.VERSIONS:
        life.train(2)
    life.pass_s(100.0)
    rebased = Fate(None, (InstallMode.REBASE_FROM_BASE, False, None), Version(1, 30), 0, 7, (0, 700), 1)
    dropped = Fate((0, 500), (InstallMode.REPLACE, False, None), Version(1, 30), 0, 4, (500, 900), 1)
    assert life.waits == (kind is not messages.StaleKind.VERSIONS)
    assert fate(life) == (rebased if kind is messages.StaleKind.VERSIONS else dropped)


@pytest.mark.parametrize("kind", [messages.VerdictKind.EXCLUDED, messages.VerdictKind.ROLLED_BACK])
def test_a_step_begun_before_the_loop_heard_is_dropped_with_the_others(
    life: LeasedClusterBench, kind: messages.VerdictKind
) -> None:
    life.awaiting()
    life.decide(kind)
    returned = len(life.give_back_answered()) if life.asks(messages.ReturnDataRequest) else 0
    assert returned == (kind is messages.VerdictKind.ROLLED_BACK)
    life.grant()
    life.train(1)
    assert life.pull_ends().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0


each_way = pytest.mark.parametrize("how", ["join", "resume"])


@each_way
@pytest.mark.parametrize("pushed", [False, True])
def test_join_names_the_old_life_and_every_range_by_its_fate(life: LeasedClusterBench, pushed: bool, how: str) -> None:
    if pushed:
        life.awaiting()
    life.train(2)
    joins_anew(life, how)
    request = life.join()
    ends = [0, 400, 600, 100_000] if pushed else [0, 200, 100_000]
    assert request.held_ranges == tuple(itertools.starmap(life.span, itertools.pairwise(ends)))
    assert (request.caller.run_id, request.caller.incarnation) == ("run", Incarnation(1, 1))
    assert life.session.shared.terms.incarnation == Incarnation(1, 2)
    assert life.session.take_leased() == ([] if how == "join" else [life.span(ends[-2], ends[-1])]), "handed out again"
    assert life.session.take_leased() == []


@each_way
@pytest.mark.parametrize("what", ["fence", "timeline"])
@pytest.mark.parametrize("pushed", [False, True])
def test_another_fence_or_timeline_drops_all_work(life: LeasedClusterBench, how: str, what: str, pushed: bool) -> None:
    life.train(2)
    if pushed:
        life.train(2)
        life.goes_on("await")
    aborted = life.verdict(messages.VerdictKind.ABORTED) if pushed else None
    joins_anew(life, how)
    if what == "fence":
        life.fence += 1
    else:
        life.published = Version(9, 0)
    life.join(aborted)
    assert life.phase is SessionPhase.PULLING
    assert life.waits
    done = 400 if pushed else 200
    base, fence = (Version(1, 5), 1) if what == "fence" else (Version(9, 0), 0)
    replaced = (InstallMode.REPLACE, False, None)
    assert fate(life) == Fate((0, done), replaced, base, fence, 4, (done, done + 400), 2, 1 + pushed)


@each_way
@pytest.mark.parametrize("fetches", [False, True])
def test_a_pull_that_a_verdict_asked_for_goes_on(life: LeasedClusterBench, how: str, fetches: bool) -> None:
    life.awaiting()
    life.train(2)
    verdict = life.decide(messages.VerdictKind.APPLIED)
    if fetches:
        life.grant()
    joins_anew(life, how)
    life.join(verdict)
    assert life.phase is SessionPhase.PULLING
    assert fate(life) == replace(FATES[messages.VerdictKind.APPLIED], incarnation=2)


@each_way
def test_a_cluster_without_a_push_goes_on_in_mid_round(life: LeasedClusterBench, how: str) -> None:
    life.train(3)
    joins_anew(life, how)
    life.join()
    assert life.phase is SessionPhase.TRAINING
    assert not life.waits
    assert fate(life) == Fate(None, None, OLD, 0, 4, (0, 400), 2, seq=1)


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
    applied = life.decide(messages.VerdictKind.APPLIED)
    life.pulled()
    life.train(1)
    life.beat(epoch=2)
    life.epoch, life.published = 2, Version(2, 3)
    life.fence += 1
    life.join(messages.Verdict(applied.push, messages.VerdictKind.ROLLED_BACK, Version(2, 3)))
    assert list(life.give_back_answered()) == [life.span(400, 500)]
    assert life.pulled().mode is InstallMode.REPLACE


@pytest.mark.parametrize("kind", messages.VerdictKind)
def test_a_verdict_of_another_process_says_nothing_about_this_ones_parameters(kind: messages.VerdictKind) -> None:
    life = LeasedClusterBench()
    life.published = Version(1, 8)
    life.say(Started())
    life.join(life.verdict(kind, PushId(life.session.config.cluster_id, Incarnation(1, 7), 3)))
    assert life.waits
    life.pulled()
    assert life.phase is SessionPhase.TRAINING


def test_undecided_answer_for_our_own_push_awaits_it(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.answer(messages.BeginPushRequest, messages.BeginPushReply(life.push_id))  # the admission's answer was lost
    assert phase_of(life) is SessionPhase.AWAITING
    life.decide(messages.VerdictKind.APPLIED)
    assert phase_of(life) is SessionPhase.PULLING


def test_undecided_answer_for_another_push_keeps_the_work(life: LeasedClusterBench) -> None:
    life.push_begun()
    other = PushId(life.session.config.cluster_id, Incarnation(1, 1), 99)
    life.answer(messages.BeginPushRequest, messages.BeginPushReply(other))
    assert life.asked(messages.AwaitVerdictRequest).push == other
    life.judged("await", life.verdict(messages.VerdictKind.ABORTED, other))
    assert life.job(messages.BeginPushRequest)[1].ranges == (life.span(0, 400),)


each_call = pytest.mark.parametrize("stage", ["begin", "finish"])


def refuse(life: LeasedClusterBench, stage: str, code: RefusalCode) -> None:
    life.refuse(messages.BeginPushRequest if stage == "begin" else messages.FinishPushRequest, code)


@each_call
def test_ranges_that_are_not_ours_are_dropped_and_not_returned(life: LeasedClusterBench, stage: str) -> None:
    life.push_begun()
    life.goes_on(stage)
    life.train(1)
    refuse(life, stage, RefusalCode.RANGES)
    assert list(life.give_back_answered()) == [life.span(400, 500)]
    assert life.pulled().mode is InstallMode.REPLACE


@each_call
def test_a_used_number_is_replaced_by_the_next(life: LeasedClusterBench, stage: str) -> None:
    life.push_begun()
    life.goes_on(stage)
    refuse(life, stage, RefusalCode.SEQ)
    request = life.job(messages.BeginPushRequest)[1]
    assert (request.seq, request.ranges) == (2, (life.span(0, 400),))


@pytest.mark.parametrize("code", [RefusalCode.DIGEST, RefusalCode.UNKNOWN_PUSH])
def test_a_lost_attempt_is_begun_again(life: LeasedClusterBench, code: RefusalCode) -> None:
    first = life.push_begun()
    life.sent(life.ticket())
    life.refuse(messages.FinishPushRequest, code)
    assert life.phase is SessionPhase.BEGINNING_PUSH
    life.pass_s(1.0)
    assert life.job(messages.BeginPushRequest)[1] == first


def test_tickets_that_do_not_fit_the_layout_end_the_session(life: LeasedClusterBench) -> None:
    life.push_begun()
    broken = replace(TICKET, placement=replace(TICKET.placement, slave_of_block=(0, 1)))
    life.answer(messages.BeginPushRequest, messages.BeginPushReply(broken))
    life.left()
    assert "layout" in str(life.ended_with(RemoteProtocolError))


def test_fixed_h_counts_from_the_push_and_dynamic_h_from_the_pull() -> None:
    for dynamic, more in ((False, 2), (True, 4)):
        life = ClusterBench(settings=replace(SETTINGS, dynamic_local_steps=dynamic))
        life.begin()
        life.awaiting()
        life.train(2)
        life.decide(messages.VerdictKind.APPLIED)
        life.pulled()
        life.train(more - 1)
        assert phase_of(life) is SessionPhase.TRAINING
        life.train(1)
        assert phase_of(life) is SessionPhase.BEGINNING_PUSH


def test_an_undecided_push_of_another_life_is_awaited_and_the_work_of_ours_is_pushed_after_it(
    life: LeasedClusterBench,
) -> None:
    tokens = life.push_begun().tokens
    life.fenced()
    other = PushId(life.session.config.cluster_id, Incarnation(1, 9), 3)
    life.join(other)
    assert life.asked(messages.AwaitVerdictRequest).push == other
    life.judged("await", life.verdict(messages.VerdictKind.ABORTED, other))
    life.pass_s(30.0)
    assert life.asked(messages.BeginPushRequest).tokens == tokens


def test_a_push_whose_verdict_the_master_forgot_is_pulled_for_no_more(life: LeasedClusterBench) -> None:
    """It asked for a pull that keeps later steps; the master's disk was restored, and its fence decides."""
    life.awaiting()
    life.train(1)
    life.decide(messages.VerdictKind.APPLIED)
    assert life.asks(messages.BeginPullRequest)
    life.fenced()
    life.fence -= 1
    life.join(None)
    assert life.phase is SessionPhase.TRAINING
    assert not life.asks(messages.BeginPullRequest)


def test_a_pull_for_a_stale_push_is_asked_for_again_after_a_join(life: LeasedClusterBench) -> None:
    life.push_begun()
    life.judged("begin", messages.Stale(messages.StaleKind.VERSIONS, "not your base"))
    life.fenced()
    life.join(None)
    assert (life.phase, life.asks(messages.BeginPullRequest)) == (SessionPhase.PULLING, True)
