"""What may be handled while a step is made: only what moves an exchange on, and touches no live parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.cluster_bench import DIGESTS, SETTINGS, TICKET, ClusterBench, session_config

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.worker.state import effects
from dips.worker.state.shared import SessionPhase
from dips.worker.state.waiting import BRIEF_SHARE_IN_STEPS, ExchangeStage, WaitPolicy

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
