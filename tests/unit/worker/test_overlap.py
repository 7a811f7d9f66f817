"""Training through exchanges (the run's setting `overlap`): who waits when, and what becomes of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.cluster_bench import DIGESTS, SETTINGS, TICKET, ClusterBench, LeasedClusterBench, leased, session_config

from dips.core import messages
from dips.core.errors import RefusalCode, Refused, RemoteProtocolError
from dips.core.ids import RoundId, Version
from dips.worker.state import effects
from dips.worker.state.effects import Failed, Install, InstallMode, Run
from dips.worker.state.shared import SessionPhase
from dips.worker.state.waiting import BRIEF_MOST_S, BRIEF_SHARE, BRIEF_SHARE_IN_STEPS, RULES, ExchangeStage, WaitPolicy

OVERLAPS = tuple(RULES)
ROUND_S = 20.0
BRIEF_S = BRIEF_SHARE * ROUND_S
SHORT_S, LONG_S = 0.9 * BRIEF_S, 1.1 * BRIEF_S


def living(overlap: str, dynamic: bool = False, published: Version | None = None) -> LeasedClusterBench:
    life = LeasedClusterBench()
    if published is not None:
        life.published, life.tokens = published, 1000 * published.v
    life.settings = replace(SETTINGS, overlap=overlap, dynamic_local_steps=dynamic)
    life.begin()
    return life


def ripe(overlap: str, transfer_s: float = LONG_S) -> LeasedClusterBench:
    """The same after a round that took ROUND_S, so that there is something to take a share of; each of its transfers
    took transfer_s."""
    life = living(overlap)
    life.transfer_s = transfer_s
    life.whole_round()
    life.now_s += ROUND_S
    return life


def reach(life: LeasedClusterBench, stage: ExchangeStage) -> None:
    calls = {ExchangeStage.BEGIN: "begin", ExchangeStage.SEND: "send", ExchangeStage.FINISH: "finish"}
    life.push_begun()
    life.goes_on(calls.get(stage, "await"))
    if stage in (ExchangeStage.PULL, ExchangeStage.FETCH):
        life.decide(messages.VerdictKind.APPLIED)
    if stage is ExchangeStage.FETCH:
        life.grant()


FULL_WAIT_S = SETTINGS.verdict_wait_s
WAITS_S = {
    "none": [FULL_WAIT_S] * 6,
    "push": [BRIEF_S, 0.0, BRIEF_S, FULL_WAIT_S, FULL_WAIT_S, FULL_WAIT_S],
    "full": [BRIEF_S, 0.0, BRIEF_S, 0.0, BRIEF_S, 0.0],
}
"""Of each stage."""

each_overlap = pytest.mark.parametrize("overlap", OVERLAPS)
each_stage = pytest.mark.parametrize("stage", ExchangeStage, ids=lambda stage: stage.name)
that_overlap = pytest.mark.parametrize("overlap", ["push", "full"])


@each_overlap
@each_stage
def test_every_stage_waits_as_long_as_the_setting_says(overlap: str, stage: ExchangeStage) -> None:
    life = ripe(overlap)
    reach(life, stage)
    waits_s = WAITS_S[overlap][list(ExchangeStage).index(stage)]
    assert life.waits == (waits_s > 0)
    if waits_s:
        assert life.session.next_deadline_s() == pytest.approx(life.now_s + waits_s)
        life.now_s += waits_s - 1e-6
        assert life.waits
        life.pass_s(1e-5)
    assert not life.waits, "every wait has an end"


@each_overlap
def test_until_the_run_has_merged_once_a_cluster_is_a_round_ahead_of_its_push_and_no_more(overlap: str) -> None:
    """The run's other clusters may be started a minute later."""
    life = living(overlap, published=Version(1, 0))
    life.awaiting()
    life.pass_s(FULL_WAIT_S + 1.0)
    life.train(life.local_steps - 1)
    assert not life.waits
    life.train(1)
    for _ in range(3):
        life.pass_s(3600.0)
        assert life.waits
    assert "the clusters that it begins with" in life.session.waiting_for()
    life.decide(messages.VerdictKind.APPLIED)
    life.pulled()
    life.pass_s(FULL_WAIT_S)
    life.awaiting()
    life.pass_s(FULL_WAIT_S + 1.0)
    life.train(3 * life.local_steps)
    assert not life.waits


def test_a_run_that_has_merged_is_not_at_its_beginning_while_its_new_master_has_not_published_yet() -> None:
    """Also for a cluster whose own version is the first one."""
    for base in (Version(1, 0), Version(1, 5)):
        life = living("full", published=base)
        life.awaiting()
        assert life.session.pushing.open is not None
        life.epoch, life.published, life.tokens = 2, None, 5000
        life.beat()
        life.join(life.session.pushing.open.id)
        life.pass_s(FULL_WAIT_S + 1.0)
        life.train(3 * life.local_steps)
        assert (life.phase, life.waits) == (SessionPhase.AWAITING, False)
        assert "first merge" not in life.session.waiting_for()


@pytest.mark.parametrize(
    ("overlap", "stage"), [("push", ExchangeStage.SEND), ("full", ExchangeStage.SEND), ("full", ExchangeStage.FETCH)]
)
def test_a_transfer_that_is_usually_short_is_waited_for_and_no_longer(overlap: str, stage: ExchangeStage) -> None:
    life = ripe(overlap, SHORT_S)
    reach(life, stage)
    assert life.waits
    life.now_s += BRIEF_S - 1e-6
    assert life.waits
    life.pass_s(1e-5)
    assert not life.waits


def test_transfers_that_became_long_are_trained_through_from_the_next_round_on() -> None:
    life = ripe("full", SHORT_S)
    life.transfer_s = LONG_S
    life.whole_round()
    life.now_s += ROUND_S
    reach(life, ExchangeStage.SEND)
    assert not life.waits


@each_overlap
@each_stage
def test_no_stage_waits_while_nobody_can_be_reached(overlap: str, stage: ExchangeStage) -> None:
    life = ripe(overlap)
    reach(life, stage)
    match stage:
        case ExchangeStage.SEND:
            transfer = life.session.pushing.open
            assert transfer is not None
            assert transfer.job is not None
            life.say(Failed(transfer.job, "the slave is away"))
        case ExchangeStage.FETCH:
            life.say(Failed(life.job(messages.PullGrant)[0], "the slave is away"))
        case _:
            life.say(Failed(life.take(Run).job, "the master is away"))
    assert not life.waits


@that_overlap
def test_a_brief_wait_has_a_most(overlap: str) -> None:
    life = living(overlap)
    life.whole_round()
    life.now_s += 100 * BRIEF_MOST_S / BRIEF_SHARE
    life.push_begun()
    assert life.session.next_deadline_s() == pytest.approx(life.now_s + BRIEF_MOST_S)


@that_overlap
def test_a_master_that_is_busy_is_not_waited_for_longer_than_for_an_answer(overlap: str) -> None:
    life = ripe(overlap)
    begun = life.push_begun()
    life.puts_off("the run is paused", 5.0)
    life.pass_s(BRIEF_S)
    assert (life.waits, life.session.waiting_for()) == (False, "the run is paused")
    life.pass_s(4.99 - BRIEF_S)
    assert not life.asks(messages.BeginPushRequest)
    life.pass_s(0.01)
    assert life.asked(messages.BeginPushRequest) == begun, "the very same push"
    assert not life.waits, "asked again later, not waited for"


@each_overlap
def test_a_donation_is_never_waited_for(overlap: str) -> None:
    life = ripe(overlap)
    life.now_s += 2 * FULL_WAIT_S
    life.donate()
    life.goes_on("await")
    life.pass_s(BRIEF_MOST_S)
    assert life.phase is SessionPhase.AWAITING
    assert not life.waits


@pytest.mark.parametrize(
    "setting", [{"overlap": "half"}, *({"overlap_share": share} for share in (-0.1, 1.5, float("nan")))]
)
def test_a_setting_that_this_release_does_not_know_is_an_error_with_a_remedy(setting: dict[str, Any]) -> None:
    life = ClusterBench(settings=replace(SETTINGS, **setting)).started()
    life.join()
    life.left()
    assert "install the same release" in str(life.ended_with(RemoteProtocolError))


def test_the_share_of_the_run_is_kept_of_steps_made_during_the_exchange_alone() -> None:
    """Steps that were in no push yet, and are rebased for another reason, are kept whole."""
    life = leased(overlap="full", overlap_share=0.25)
    life.awaiting()
    life.train(1)
    life.decide(messages.VerdictKind.APPLIED)
    assert life.pulled() == Install(InstallMode.REBASE_FROM_PUSH, reset_inner=False, share=0.25)
    life.push_begun()
    life.judged("begin", messages.Stale(messages.StaleKind.VERSIONS, "too old"))
    assert life.pulled() == Install(InstallMode.REBASE_FROM_BASE, reset_inner=False, share=1.0)


@pytest.mark.parametrize(("overlap", "trains"), [("none", False), ("push", False), ("full", True)])
def test_a_busy_pull_is_trained_through_by_full_alone(overlap: str, trains: bool) -> None:
    life = ripe(overlap)
    life.exchanged()
    life.answer(messages.BeginPullRequest, messages.BeginPullReply(messages.Busy(1.0, "slaves are away")))
    life.pass_s(BRIEF_MOST_S)
    assert life.waits == (not trains)


@each_overlap
@pytest.mark.parametrize("heard", ["before the verdict", "after it"])
def test_at_the_run_s_end_everybody_leaves_with_its_last_version_to_the_bit(overlap: str, heard: str) -> None:
    """The master says so once this cluster's push is decided; its verdict, or the pull for it, may be on its way."""
    life = living(overlap)
    life.awaiting()
    life.train(2)
    if heard == "before the verdict":
        life.run_ends()
        assert life.phase is SessionPhase.AWAITING
    life.decide(messages.VerdictKind.APPLIED)
    if heard == "after it":
        life.train(1)
        life.run_ends()
    life.grant()
    assert life.waits
    assert life.pull_ends().mode is InstallMode.REPLACE
    steps = 2 if heard == "before the verdict" else 3
    assert list(life.give_back_answered()) == [life.span(400, 400 + 100 * steps)]
    assert life.phase is SessionPhase.LEAVING


@each_stage
def test_leaving_in_the_middle_ends_everything(stage: ExchangeStage) -> None:
    life = living("full")
    reach(life, stage)
    life.train(1)
    life.effects.clear()
    life.leaves_at_once()
    assert life.phase is SessionPhase.LEAVING
    assert life.waits
    life.pass_s(10.0)
    assert not life.asks(messages.BeginPullRequest)
    assert not life.asks(messages.BeginPushRequest)
    life.left()
    assert life.finished is not None
    assert life.finished.error is None


@that_overlap
def test_a_master_that_comes_back_with_another_overlap_is_obeyed(overlap: str) -> None:
    life = living(overlap)
    life.epoch, life.settings = 2, replace(life.settings, overlap="none")
    life.beat(epoch=2)
    assert life.asks(messages.JoinRequest)
    life.join(None)
    life.push_begun()
    assert life.waits


FULL = replace(SETTINGS, overlap="full")


@pytest.fixture
def life() -> ClusterBench:
    life = ClusterBench(session_config(answers_in_steps=True), FULL)
    life.begin()
    life.push_begun()
    return life


def in_step(life: ClusterBench, event: effects.Event) -> None:
    assert life.session.may_take_in_step(event)
    told = life.say(event)
    assert not [
        effect for effect in told if isinstance(effect, effects.CopyParameters | effects.Install | effects.CopyBase)
    ]


def to_admitted(life: ClusterBench) -> None:
    in_step(life, effects.Done(life.job(messages.BeginPushRequest)[0], messages.BeginPushReply(TICKET)))
    sending = life.job(effects.SendPush)[0]
    assert not life.session.may_take_in_step(effects.Done(sending + 1, DIGESTS, 0.2)), "a transfer that was given up"
    in_step(life, effects.Done(sending, DIGESTS, 0.2))
    in_step(
        life,
        effects.Done(
            life.job(messages.FinishPushRequest)[0], messages.FinishPushReply(messages.Admitted(RoundId(1, 1), 1.0))
        ),
    )


def test_a_whole_exchange_goes_on_during_one_step_and_the_install_waits_for_its_end(life: ClusterBench) -> None:
    to_admitted(life)
    verdict, job = life.verdict(messages.VerdictKind.APPLIED), life.job(messages.AwaitVerdictRequest)[0]
    other = replace(verdict, push=replace(verdict.push, seq=9))
    assert not life.session.may_take_in_step(effects.Done(job, messages.AwaitVerdictReply(other)))
    in_step(life, effects.Done(job, messages.AwaitVerdictReply(verdict)))
    in_step(life, effects.Done(life.job(messages.BeginPullRequest)[0], life.granted()))
    there = effects.Done(life.job(messages.PullGrant)[0], None, 0.2)
    assert not life.session.may_take_in_step(there)
    life.say(effects.Stepped(100, (), 2.0))
    pending = life.session.shared.work.pending
    assert (pending.steps, pending.tokens) == (1, 100), "the step that was made meanwhile counts for the next push"
    life.say(there)
    assert life.take(effects.Install).mode is effects.InstallMode.REBASE_FROM_PUSH
    assert life.phase is SessionPhase.TRAINING


@pytest.mark.parametrize("kind", [kind for kind in messages.VerdictKind if kind is not messages.VerdictKind.APPLIED])
def test_a_verdict_that_drops_or_repeats_steps_waits_for_the_end_of_the_step(
    life: ClusterBench, kind: messages.VerdictKind
) -> None:
    to_admitted(life)
    verdict = life.verdict(kind)
    assert not life.session.may_take_in_step(
        effects.Done(life.job(messages.AwaitVerdictRequest)[0], messages.AwaitVerdictReply(verdict))
    )


@pytest.mark.parametrize(
    "event",
    [
        lambda job: effects.Failed(job, "no answer"),
        lambda job: effects.Done(job, Refused(RefusalCode.BUSY, "later", 1.0)),
        lambda job: effects.Done(job, messages.BeginPushReply(messages.Busy(1.0, "later"))),
        lambda job: effects.Done(job + 7, messages.BeginPushReply(TICKET)),
        lambda job: effects.Tick(),
        lambda job: effects.StopWanted("enough"),
    ],
    ids=["failed", "refused", "busy", "late", "tick", "stop"],
)
def test_all_else_waits_for_the_end_of_the_step(life: ClusterBench, event: Callable[[int], effects.Event]) -> None:
    assert not life.session.may_take_in_step(event(life.job(messages.BeginPushRequest)[0]))


@pytest.mark.parametrize(
    "happens",
    [
        lambda life: life.beat(donate=Version(1, 4)),
        lambda life: life.beat(stop=True),
        lambda life: life.say(effects.StopWanted("enough")),
    ],
    ids=["asked to donate", "drained", "leaves"],
)
def test_a_heartbeat_waits_and_so_does_an_answer_once_more_is_under_way(
    life: ClusterBench, happens: Callable[[ClusterBench], object]
) -> None:
    incarnation = life.session.shared.terms.incarnation
    assert incarnation is not None
    assert not life.session.may_take_in_step(effects.Beat(incarnation, Refused(RefusalCode.FENCED, "evicted")))
    ticket = effects.Done(life.job(messages.BeginPushRequest)[0], messages.BeginPushReply(TICKET))
    assert life.session.may_take_in_step(ticket)
    happens(life)
    assert not life.session.may_take_in_step(ticket)


def test_a_call_is_waited_for_only_if_the_last_one_was_short() -> None:
    round_s, wait = 100.0, WaitPolicy(answers_in_steps=True)
    brief_s = BRIEF_SHARE_IN_STEPS * round_s
    wait.round_begins(0.0)
    wait.round_begins(round_s)
    now_s = round_s

    def waits(answered_s: float) -> bool:
        nonlocal now_s
        wait.enter(ExchangeStage.BEGIN, FULL, now_s)
        found = wait.until_s > now_s
        now_s += answered_s
        wait.enter(ExchangeStage.SEND, FULL, now_s)
        return found

    assert not waits(0.9 * brief_s), "of the first one nothing is known"
    assert waits(1.1 * brief_s)
    assert not waits(0.9 * brief_s)
    assert waits(0.9 * brief_s)
