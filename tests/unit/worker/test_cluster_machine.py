"""How a session starts, holds the training loop, meets an absent master, and ends."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from support.cluster_bench import LEASED, SETTINGS, TK_MAX, ClusterBench, leased, phase_of, session_config

from dips.core import messages
from dips.core.errors import NAME_TAKEN_EXIT, ConfigError, LocalProtocolError, RefusalCode, Refused
from dips.core.ids import Incarnation, RoundId, Version
from dips.core.protocol import MAX_LEASED_CHUNKS, PROTOCOL_VERSION, RANKS
from dips.worker.state import effects
from dips.worker.state.shared import SessionPhase


def begun(settings: messages.Settings = SETTINGS, **config: Any) -> ClusterBench:
    life = ClusterBench(session_config(**config), settings)
    life.begin()
    return life


@pytest.fixture
def life() -> ClusterBench:
    return begun()


def unseeded() -> ClusterBench:
    life = ClusterBench()
    life.published = None
    return life.started()


def seeding() -> ClusterBench:
    """A cluster that was told to seed the run."""
    life = unseeded()
    life.join(seed=True)
    return life


def test_a_new_cluster_joins_pulls_and_may_train() -> None:
    life = ClusterBench().started()
    assert life.waits
    request = life.join()
    assert (request.caller.run_id, request.caller.name, request.caller.incarnation) == ("run", "a", None)
    assert request.hello.protocol_max == PROTOCOL_VERSION
    assert request.layout_hash == request.layout.layout_hash
    assert life.waits, "there is nothing to train on yet"
    assert life.pulled() == effects.Install(effects.InstallMode.REPLACE, False)
    assert not life.waits
    assert life.session.shared.base == Version(1, 5)


def test_the_first_cluster_seeds_with_no_work_and_pulls_what_became_of_it() -> None:
    life = seeding()
    life.take(effects.CopyParameters)
    request = life.asked(messages.BeginPushRequest)
    assert (request.base, request.ranges, request.tokens, request.steps, request.fence) == (None, (), 0, 0, 0)
    life.goes_on("await")
    life.pass_s(1000)
    assert life.waits, "no cluster trains on parameters that are not published"
    life.published = Version(1, 0)
    verdict = replace(life.verdict(messages.VerdictKind.APPLIED), version=Version(1, 0))
    life.answer(messages.AwaitVerdictRequest, messages.AwaitVerdictReply(verdict))
    assert life.pulled().mode is effects.InstallMode.REPLACE
    assert life.phase is SessionPhase.TRAINING


@pytest.mark.parametrize("stage", ["begin", "finish", "await"])
def test_an_aborted_seed_is_pushed_again_under_a_new_number(stage: str) -> None:
    life = seeding()
    life.goes_on(stage)
    life.judged(stage, life.verdict(messages.VerdictKind.ABORTED))
    request = life.asked(messages.BeginPushRequest)
    assert (request.seq, request.base) == (2, None)


def test_busy_pull_is_repeated_until_a_version_is_there() -> None:
    life = ClusterBench().started()
    life.join()
    life.answer(messages.BeginPullRequest, messages.BeginPullReply(messages.Busy(0.5, "no version is published yet")))
    assert life.session.waiting_for() == "no version is published yet"
    assert life.session.next_deadline_s() == pytest.approx(0.5)
    life.pass_s(0.5)
    life.pulled()


def test_a_cluster_that_waits_may_be_told_to_join_again_as_seed() -> None:
    life = unseeded()
    life.join()
    life.refuse(messages.BeginPullRequest, RefusalCode.FENCED)
    life.join(seed=True)
    assert life.asked(messages.BeginPushRequest).base is None


@pytest.mark.parametrize(
    "code",
    [RefusalCode.LAYOUT, RefusalCode.RUN_ID, RefusalCode.PROTOCOL_VERSION, RefusalCode.DATA_PLAN, RefusalCode.FENCED],
)
def test_a_refused_join_ends_with_the_masters_sentence(code: RefusalCode) -> None:
    life = ClusterBench().started()
    life.refuse(messages.JoinRequest, code)
    assert life.ended_with(Refused).code is code


def test_without_a_master_training_goes_on_for_the_hours_that_were_set_and_says_what_is_not_pushed() -> None:
    life = begun(cut_off_limit_s=7200.0)
    life.train(4)
    said = list[str]()
    for _ in range(12):
        life.fail(messages.BeginPushRequest)
        life.pass_s(590)
        assert not life.waits
        life.train(1)
        said += life.logged("cut off")
        life.every.clear()
    assert said[0] == "5 steps with 500 tokens are not pushed yet, for 10 min"
    assert len(said) == 4, "at twice the time"
    life.fail(messages.BeginPushRequest)
    life.pass_s(600)
    assert life.waits
    assert "16 steps with 1600 tokens are not pushed, and none were for 2 h" in life.session.waiting_for()
    life.sent(life.ticket())
    assert not life.waits, "the run takes its work again"


def test_a_cluster_that_cannot_join_says_why_and_not_what_it_has_not_pushed() -> None:
    life = ClusterBench(session_config(cut_off_limit_s=1.0, connect_wait_s=1e9)).started()
    for _ in range(3):
        life.fail(messages.JoinRequest)
        life.pass_s(5.0)
    assert life.session.waiting_for().startswith("the master does not answer")


def test_a_slave_that_is_away_is_no_less_cut_off_where_the_master_answers() -> None:
    life = begun(cut_off_limit_s=100.0)
    life.train(4)
    for waits in (False, False, True):
        job, _ = life.ticket()
        life.say(effects.Failed(job, "slave s0 does not answer"))
        life.pass_s(20)
        life.puts_off("only 0 of 1 slaves have attached")
        life.pass_s(20)
        assert life.waits is waits


def test_joining_a_run_that_has_ended_is_no_failure() -> None:
    life = ClusterBench().started()
    life.refuse(messages.JoinRequest, RefusalCode.STOPPING)
    assert life.finished is not None
    assert life.finished.error is None
    said_so = effects.Log(logging.WARNING, "join", "this cluster cannot join: refused: STOPPING", "a/join")
    assert life.take(effects.Log) == said_so


def test_a_master_of_another_protocol_is_left() -> None:
    life = ClusterBench().started()
    life.answer(messages.JoinRequest, replace(life.join_reply(), hello=messages.Hello(90, 91)))
    life.left()
    assert life.ended_with(Refused).code is RefusalCode.PROTOCOL_VERSION


def test_join_names_the_other_ranks_and_their_keys() -> None:
    keys = (b"1" * 32, b"2" * 32)
    life = ClusterBench(session_config(curve_key=b"0" * 32, rank_keys=keys, pushers=3)).started()
    request = life.answer(messages.JoinRequest, replace(life.join_reply(), hello=messages.Hello(1, 1, (RANKS,))))
    assert isinstance(request, messages.JoinRequest)
    assert (request.curve_key, request.rank_keys, request.pushers) == (b"0" * 32, keys, 3)
    assert life.finished is None


def test_a_cluster_of_several_ranks_leaves_a_master_that_does_not_know_them() -> None:
    life = ClusterBench(session_config(pushers=2)).started()
    life.answer(messages.JoinRequest, replace(life.join_reply(), hello=messages.Hello(1, 1, ("codec-f32",))))
    life.left()
    assert "this cluster has 2 ranks" in str(life.ended_with(ConfigError))


def test_an_absent_master_ends_the_wait_and_is_asked_again_with_growing_pauses(life: ClusterBench) -> None:
    first = life.push_begun()
    pauses = []
    for _ in range(8):
        assert life.fail(messages.BeginPushRequest) == first
        assert not life.waits, "training goes on"
        life.train(1)
        pause_s = life.session.next_deadline_s() - life.now_s
        pauses.append(round(pause_s, 6))
        life.pass_s(pause_s)
    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0], "half a heartbeat at most: a new master is found soon"
    life.ticket()
    assert life.phase is SessionPhase.TRANSFERRING


@pytest.mark.parametrize("kind", [messages.FinishPushRequest, messages.AwaitVerdictRequest])
def test_an_unanswered_call_is_repeated_as_it_was(life: ClusterBench, kind: type) -> None:
    life.push_begun()
    life.sent(life.ticket())
    if kind is messages.AwaitVerdictRequest:
        life.admitted()
    request = life.fail(kind)
    life.pass_s(0.2)
    assert life.asked(kind) == request


def test_a_late_answer_of_an_old_call_is_ignored(life: ClusterBench) -> None:
    life.awaiting()
    job, _ = life.job(messages.AwaitVerdictRequest)
    life.beat(epoch=2)
    life.epoch = 2
    life.say(effects.Done(job, messages.AwaitVerdictReply(life.verdict(messages.VerdictKind.APPLIED))))
    assert life.phase is SessionPhase.JOINING


def test_an_incomplete_push_is_completed_with_the_same_ticket(life: ClusterBench) -> None:
    life.push_begun()
    start = life.ticket()
    life.sent(start)
    life.answer(messages.FinishPushRequest, messages.FinishPushReply(messages.Busy(0.2, "slave s1 has not all")))
    again = life.job(effects.SendPush)
    assert again[1].ticket == start[1].ticket
    assert again[0] != start[0]
    life.sent(start)  # the old transfer's end counts no more
    assert life.phase is SessionPhase.TRANSFERRING
    life.sent(again)
    assert not life.asks(messages.FinishPushRequest)
    life.pass_s(0.2)
    life.admitted()


def test_a_pull_that_fails_gives_its_version_back_and_is_asked_for_again_and_the_newest_of_one_that_is_gone(
    life: ClusterBench,
) -> None:
    life.exchanged()
    life.grant()
    life.fail(messages.PullGrant)
    assert life.asked(messages.FinishPullRequest).pin_id == 7
    life.pass_s(1.0)
    life.refuse(messages.BeginPullRequest, RefusalCode.VERSION_GONE)
    life.pass_s(1.0)
    assert life.asked(messages.BeginPullRequest).at_least is None


def test_a_fence_counts_for_its_own_incarnation_and_cancels_the_transfer(life: ClusterBench) -> None:
    life.say(effects.Beat(Incarnation(1, 0), Refused(RefusalCode.FENCED, "evicted")))
    assert life.phase is SessionPhase.TRAINING
    life.say(effects.Beat(Incarnation(1, 1), Refused(RefusalCode.MALFORMED, "strange")))
    assert phase_of(life) is SessionPhase.TRAINING
    assert any("strange" in sentence for sentence in life.logged())
    life.push_begun()
    start = life.ticket()
    life.say(effects.Beat(Incarnation(1, 1), Refused(RefusalCode.FENCED, "evicted")))
    assert life.take(effects.Cancel).job == start[0]
    life.say(effects.Done(start[0], (), 0.1))
    assert phase_of(life) is SessionPhase.JOINING


def test_a_revoked_cluster_ends_with_the_masters_sentence_and_trains_no_further(life: ClusterBench) -> None:
    life.say(effects.Beat(Incarnation(1, 1), Refused(RefusalCode.IDENTITY, "your certificate was revoked")))
    assert phase_of(life) is SessionPhase.LEAVING
    life.refuse(messages.LeaveRequest, RefusalCode.IDENTITY)
    assert phase_of(life) is SessionPhase.LEFT
    assert "revoked" in life.ended_with(Refused).sentence


def test_a_second_process_of_a_name_waits_while_it_is_told_to_and_then_ends() -> None:
    life = ClusterBench(session_config(process_id=b"mine", host="process 7 on here")).started()
    request = life.refuse(messages.JoinRequest, RefusalCode.NAME_TAKEN, retry_after_s=0.5)
    assert (request.process_id, request.host) == (b"mine", "process 7 on here")
    assert life.finished is None
    life.pass_s(0.4)
    assert not life.asks(messages.JoinRequest)
    life.pass_s(0.1)
    assert life.refuse(messages.JoinRequest, RefusalCode.NAME_TAKEN).process_id == b"mine"
    assert life.ended_with(Refused).exit_code == NAME_TAKEN_EXIT


def test_leases_are_handed_out_once_and_survive_an_absent_master() -> None:
    life = begun(data_plan=LEASED)
    life.say(effects.LeaseWanted(500))
    life.fail(messages.LeaseDataRequest)
    life.pass_s(0.2)
    assert life.asked(messages.LeaseDataRequest).want_tokens == 500
    assert life.asked(messages.LeaseDataRequest).request == 1, "the same request: its answer may have been lost"
    lent = (messages.DataRange(3, 0, 1, 0, 1024),)
    life.answer(messages.LeaseDataRequest, messages.LeaseDataReply(lent))
    assert life.session.take_leased() == list(lent)
    assert life.session.take_leased() == []
    life.pass_s(100)
    assert not life.asks(messages.LeaseDataRequest)


def test_what_is_used_up_is_not_kept_for_a_loop_that_goes_by_what_it_holds() -> None:
    life = begun(replace(SETTINGS, sync_every_steps=1000), data_plan=LEASED)
    for chunk in range(50):
        lent = messages.DataRange(chunk, 0, chunk, 0, 100)
        life.say(effects.LeaseWanted(100))
        life.answer(messages.LeaseDataRequest, messages.LeaseDataReply((lent,)))
        assert life.session.lease_pending
        life.say(effects.Stepped(100, (lent,), 1.0))
        assert not life.session.lease_pending
    assert life.session.take_leased() == []


def test_no_more_is_asked_for_at_once_than_is_lent() -> None:
    """H 64 with steps of 32 Ki tokens is two million, more than one call may have of chunks of a thousand."""
    life = begun(data_plan=LEASED)
    life.say(effects.LeaseWanted(1 << 21))
    assert life.asked(messages.LeaseDataRequest).want_tokens == MAX_LEASED_CHUNKS * LEASED.chunk_tokens < 1 << 21


def test_a_lease_that_is_not_there_yet_is_asked_for_again() -> None:
    life = begun(data_plan=LEASED)
    life.say(effects.LeaseWanted(500))
    life.answer(messages.LeaseDataRequest, messages.LeaseDataReply(()))
    assert (life.asks(messages.LeaseDataRequest), life.session.waiting_for()) == (False, "all data is leased")
    life.pass_s(0.5)
    life.answer(messages.LeaseDataRequest, messages.LeaseDataReply((messages.DataRange(3, 0, 1, 0, 1024),)))
    assert len(life.session.take_leased()) == 1


def test_a_lease_asked_for_while_joining_again_is_asked_after_it() -> None:
    life = begun(data_plan=LEASED)
    life.say(effects.LeaseWanted(500))
    life.refuse(messages.LeaseDataRequest, RefusalCode.STALE_EPOCH)
    assert not life.asks(messages.LeaseDataRequest)
    life.join()
    assert life.asked(messages.LeaseDataRequest).caller.incarnation == Incarnation(1, 2)


def test_a_step_must_account_for_its_tokens() -> None:
    life = begun(data_plan=LEASED)
    with pytest.raises(LocalProtocolError, match="hold 0"):
        life.say(effects.Stepped(100))
    with pytest.raises(LocalProtocolError, match="does not hold"):
        life.say(effects.Stepped(10, (messages.DataRange(9, 0, 0, 0, 10),)))
    assert life.session.shared.work.tokens == 0


def test_what_a_heartbeat_says(life: ClusterBench) -> None:
    life.beat(tokens=12_000)
    life.beat(tokens=11_000)
    assert life.session.shared.terms.tokens == 12_000
    life.beat(tokens=500, published=Version(2, 0))
    assert life.session.shared.terms.tokens == 500
    for limit in (2 * TK_MAX, 0):
        life.beat(limit=messages.TokenLimit(limit))
        life.beat()
        assert life.session.shared.terms.settings.tk_max_tokens == limit
    life.beat(local_steps=2)
    life.train(2)
    assert life.phase is SessionPhase.BEGINNING_PUSH


def test_a_version_that_came_out_during_the_last_pull_is_pulled_too(life: ClusterBench) -> None:
    life.run_ends()
    life.grant()
    life.published = Version(1, 6)
    life.run_ends()
    life.say(effects.Done(life.job(messages.PullGrant)[0], None, 0.1))
    assert life.asked(messages.BeginPullRequest).at_least == Version(1, 6)
    life.pulled()
    assert life.asks(messages.LeaveRequest) or life.asks(messages.FinishPullRequest)


@pytest.mark.parametrize("stretch", ["training", "pulling"])
def test_a_stop_from_outside_leaves_at_once_where_nothing_is_undecided(life: ClusterBench, stretch: str) -> None:
    if stretch == "pulling":
        life.exchanged()
        life.grant()
    life.say(effects.StopWanted("SIGTERM"))
    assert life.left().reason == "SIGTERM"
    assert life.finished is not None
    assert "lost" not in said(life)


def test_leaving_comes_after_the_small_calls(life: ClusterBench) -> None:
    life.exchanged()
    life.grant()
    life.say(effects.Done(life.job(messages.PullGrant)[0], None, 0.1))
    life.say(effects.StopWanted("enough"))
    assert not life.asks(messages.LeaveRequest)
    life.answer(messages.FinishPullRequest, messages.FinishPullReply(4))
    life.left()


def test_a_push_that_can_never_be_accepted_ends_the_session_with_the_sentence(life: ClusterBench) -> None:
    life.push_begun()
    life.refuse(messages.BeginPushRequest, RefusalCode.TOKENS)
    life.left()
    life.ended_with(Refused)


def test_every_record_names_its_cause(life: ClusterBench) -> None:
    life.whole_round()
    records = [effect for effect in life.every if isinstance(effect, effects.Record)]
    kinds = [record.kind for record in records]
    assert kinds == ["joined", "installed", "push_begun", "push_sent", "admitted", "verdict", "installed"]
    assert {record.cause for record in records[2:]} == {"a/1.1#1"}


def said(life: ClusterBench) -> dict[str, str]:
    """The last of each matter."""
    return {effect.key: effect.sentence for effect in life.every if isinstance(effect, effects.Log)}


@pytest.mark.parametrize("stage", ["begun", "sending", "sent", "admitted"])
def test_leaving_finishes_the_open_push_and_pushes_what_came_after_it(life: ClusterBench, stage: str) -> None:
    life.push_begun()
    life.train(2)
    if stage == "begun":
        life.say(effects.StopWanted("enough"))
    start = life.ticket()
    if stage == "sending":
        life.say(effects.StopWanted("enough"))
    life.sent(start)
    if stage == "sent":
        life.say(effects.StopWanted("enough"))
    life.admitted()
    life.say(effects.StopWanted("enough"))
    life.decide(messages.VerdictKind.APPLIED)
    assert life.pulled().mode is effects.InstallMode.REBASE_FROM_PUSH
    assert life.asked(messages.BeginPushRequest).steps == 2
    life.merged()
    life.left()
    assert "lost" not in said(life)


@pytest.mark.parametrize("stage", ["sending", "sent"])
def test_a_second_request_to_stop_does_not_wait_for_the_open_push(life: ClusterBench, stage: str) -> None:
    life.push_begun()
    start = life.ticket()
    if stage == "sent":
        life.sent(start)
    life.say(effects.StopWanted("enough", push_pending=False))
    assert not life.asks(messages.LeaveRequest)
    life.say(effects.StopWanted("enough", push_pending=False))
    assert life.left().reason == "enough"


def test_after_an_error_the_open_push_is_decided_and_later_steps_are_said_to_be_lost(life: ClusterBench) -> None:
    life.awaiting()
    life.train(2)
    life.say(effects.StopWanted("ValueError: no", push_pending=False))
    assert not life.asks(messages.LeaveRequest)
    life.decide(messages.VerdictKind.APPLIED)
    life.left()
    assert said(life)["lost"] == (
        "leaving (ValueError) without 2 steps with 200 tokens: they were made since the last push, and the "
        "parameters may be in the middle of a step"
    )


def test_what_cannot_be_pushed_in_time_is_said_with_the_reason(life: ClusterBench) -> None:
    life.train(3)
    life.say(effects.StopWanted("enough"))
    life.puts_off("slave s0 is away")
    life.pass_s(29.9)
    assert not life.asks(messages.LeaveRequest)
    life.pass_s(0.2)
    life.left()
    assert said(life)["lost"] == "leaving (enough) without 3 steps with 300 tokens: slave s0 is away"


def test_an_excluded_push_is_warned_of_with_the_reason(life: ClusterBench) -> None:
    life.exchanged(messages.VerdictKind.EXCLUDED)
    assert ["because EXCLUDED" in sentence for sentence in life.logged("verdict", logging.WARNING)] == [True]


@pytest.mark.parametrize("since", [0, 2])
def test_an_undecided_last_push_is_said_to_be_one(life: ClusterBench, since: int) -> None:
    """Also in the last line: the run may count it when the cluster has left."""
    life.awaiting()
    life.train(since)
    life.say(effects.StopWanted("enough", push_pending=False))
    life.pass_s(31.1)
    life.left()
    assert f"leaving (enough) without {4 + since} steps with {4 + since}00 tokens" in said(life)["lost"]
    assert "no verdict of push a/1.1#1 came in time; it may come yet, and count 4 steps with" in said(life)["lost"]
    assert "of 4 steps with 400 tokens it is not known" in said(life)["left"]
    assert ("2 steps with 200 tokens were not" in said(life)["left"]) == (since > 0)


def test_leaving_waits_for_the_window_that_the_master_named() -> None:
    """Unless a bound was set by hand."""
    for knobs, waits_s in ((dict[str, Any](), 130.0), ({"leave_wait_s": 5.0}, 5.0)):
        life = begun(**knobs)
        life.train(1)
        life.say(effects.StopWanted("enough"))
        life.sent(life.ticket())
        life.answer(messages.FinishPushRequest, messages.FinishPushReply(messages.Admitted(RoundId(1, 1), 100.0)))
        life.pass_s(waits_s - 0.1)
        assert phase_of(life) is SessionPhase.AWAITING
        life.pass_s(0.2)
        assert phase_of(life) is SessionPhase.LEAVING


def test_a_stale_last_push_is_rebased_and_pushed(life: ClusterBench) -> None:
    life.train(2)
    life.say(effects.StopWanted("enough"))
    life.judged("begin", messages.Stale(messages.StaleKind.VERSIONS, "too old"))
    assert life.pulled().mode is effects.InstallMode.REBASE_FROM_BASE
    assert life.asked(messages.BeginPushRequest).steps == 2


def test_a_push_that_is_aborted_again_and_again_is_not_begun_in_a_loop(life: ClusterBench) -> None:
    life.train(2)
    life.say(effects.StopWanted("enough"))
    for _ in range(2):
        life.answer(messages.BeginPushRequest, messages.BeginPushReply(life.verdict(messages.VerdictKind.ABORTED)))
    assert phase_of(life) is SessionPhase.TRAINING
    assert not life.asks(messages.BeginPushRequest)
    life.pass_s(1.1)
    assert life.asks(messages.BeginPushRequest)


def test_a_run_that_was_stopped_takes_no_last_push_and_its_last_version_is_pulled(life: ClusterBench) -> None:
    """Its master said so in the same way as to a cluster that is drained."""
    life.train(3)
    life.beat(stop=True)
    life.refuse(messages.BeginPushRequest, RefusalCode.STOPPING)
    assert phase_of(life) is SessionPhase.PULLING
    life.pulled()
    assert life.left().reason == "the run has ended"
    assert said(life)["lost"] == "leaving (the run has ended) without 3 steps with 300 tokens: the run has ended"


@pytest.mark.parametrize("who", ["the process", "the master"])
def test_the_last_steps_after_the_operator_moved_the_limit_are_pushed(life: ClusterBench, who: str) -> None:
    """Also where the master does not say the new limit in its heartbeats."""
    life.tokens = TK_MAX + 5_000
    life.beat()
    life.train(3)
    if who == "the process":
        life.say(effects.StopWanted("the training loop has ended"))
    else:
        life.beat(stop=True)
    assert life.asked(messages.BeginPushRequest).steps == 3


def test_an_end_that_is_taken_back_is_one_no_longer(life: ClusterBench) -> None:
    life.push_begun()
    life.refuse(messages.BeginPushRequest, RefusalCode.STOPPING)
    life.beat()
    life.pass_s(1.0)
    life.merged()
    life.pulled()
    life.train(3)
    life.say(effects.StopWanted("the training loop has ended"))
    assert life.asked(messages.BeginPushRequest).steps == 3


def test_a_last_push_of_a_drained_cluster_that_takes_too_long_leaves_time_for_the_last_version(
    life: ClusterBench,
) -> None:
    life.train(3)
    life.beat(stop=True)
    start = life.ticket()
    life.pass_s(15.1)
    assert life.take(effects.Cancel).job == start[0]
    assert phase_of(life) is SessionPhase.PULLING


def long_transfers(life: ClusterBench) -> None:
    """One round whose push and whose pull take 60 s each."""
    life.push_begun()
    sending = life.ticket()
    life.pass_s(60.0)
    life.sent(sending)
    life.admitted()
    life.decide(messages.VerdictKind.APPLIED)
    life.grant()
    life.pass_s(60.0)
    life.pull_ends()
    life.pull_finished()
    assert phase_of(life) is SessionPhase.TRAINING


@pytest.mark.parametrize(("knobs", "lasts_s"), [({}, 100.0), ({"leave_wait_s": 8.0}, 7.9)])
def test_the_last_pull_of_a_run_may_take_as_long_as_the_one_before_or_the_bound_that_was_set(
    knobs: dict[str, Any], lasts_s: float
) -> None:
    life = begun(**knobs)
    long_transfers(life)
    life.run_ends()
    life.grant()
    life.pass_s(lasts_s)
    assert phase_of(life) is SessionPhase.PULLING
    if knobs:
        life.pass_s(0.2)
        assert phase_of(life) is SessionPhase.LEAVING
        return
    assert life.pull_ends().mode is effects.InstallMode.REPLACE
    life.pull_finished()
    assert life.left().reason == "the run has ended"


@pytest.mark.parametrize("window_s", [1.0, 300.0])
def test_a_drained_clusters_last_push_and_pull_may_take_as_long_as_those_before(
    life: ClusterBench, window_s: float
) -> None:
    """Also where the window stays open for longer than all of it."""
    long_transfers(life)
    life.train(3)
    life.beat(stop=True)
    sending = life.ticket()
    life.pass_s(100.0)
    life.sent(sending)
    life.answer(messages.FinishPushRequest, messages.FinishPushReply(messages.Admitted(RoundId(1, 1), window_s)))
    life.pass_s(window_s)
    life.decide(messages.VerdictKind.APPLIED)
    life.grant()
    life.pass_s(100.0)
    assert life.pull_ends().mode is effects.InstallMode.REPLACE
    life.pull_finished()
    life.left()
    assert "lost" not in said(life)


@pytest.mark.parametrize(
    ("no_more_pushes", "who"), [(True, "the run has ended"), (False, "the master ends this cluster's part")]
)
def test_a_cluster_that_leaves_without_the_last_version_warns_of_it_in_time(
    life: ClusterBench, no_more_pushes: bool, who: str
) -> None:
    life.beat(stop=True, no_more_pushes=no_more_pushes)
    assert said(life)["stop"] == f"{who}: pulling the last version, then leaving"
    life.answer(messages.BeginPullRequest, messages.BeginPullReply(messages.Busy(0.5, "slave s0 is away")))
    life.pass_s(29.9)
    assert phase_of(life) is SessionPhase.PULLING
    life.pass_s(0.1)
    assert "could not be pulled" in life.left().reason
    (warning,) = life.logged(level=logging.WARNING)
    assert (warning.startswith(who), "(slave s0 is away)" in warning) == (True, True)
    assert "lost" not in said(life)


# ---- a loop that ends by itself before the run's first merge ----


OWN_END = effects.StopWanted("the training loop has ended", patient=True)


def before_first_merge(**config: Any) -> ClusterBench:
    life = ClusterBench(session_config(**config))
    life.published, life.tokens = Version(1, 0), 0
    life.begin()
    return life


def ended_before_first_merge(steps: int, **config: Any) -> ClusterBench:
    """By the loop itself."""
    life = before_first_merge(**config)
    life.train(steps)
    life.say(OWN_END)
    life.goes_on("await")
    return life


@pytest.mark.parametrize("steps", [3, 6])
def test_a_short_loop_waits_for_the_first_merge_with_all_that_it_has(steps: int) -> None:
    life = ended_before_first_merge(steps)
    life.judged("await", messages.Busy(0.0, "the run begins with 2 clusters, and only a is here"))
    for _ in range(3600):
        life.pass_s(10.0)
    assert phase_of(life) is SessionPhase.AWAITING
    said_so = life.logged("patient")
    assert f"{steps} steps with {steps}00 tokens are not merged yet" in said_so[0]
    assert "only a is here" in said_so[0]
    assert len(said_so) < 25, "each at twice the time, then every hour"
    life.decide(messages.VerdictKind.APPLIED)
    if steps > 4:
        life.pulled()
        assert life.asked(messages.BeginPushRequest).steps == steps - 4
        life.merged()
    life.left()
    assert "lost" not in said(life)
    assert f"{steps} steps with {steps}00 tokens were counted" in said(life)["left"]


def test_after_the_first_merge_leaving_takes_as_long_as_always() -> None:
    life = ended_before_first_merge(6)
    life.pass_s(3600.0)
    life.decide(messages.VerdictKind.APPLIED)
    life.pulled()
    life.puts_off("slave s0 is away")
    life.pass_s(29.9)
    assert phase_of(life) is SessionPhase.BEGINNING_PUSH
    life.pass_s(0.2)
    life.left()
    assert "without 2 steps with 200 tokens: slave s0 is away" in said(life)["lost"]
    assert said(life)["left"] == (
        "left the run with version 1:1 (the training loop has ended): since the start 4 steps with 400 tokens were "
        "counted, and 2 steps with 200 tokens were not"
    )


@pytest.mark.parametrize("knobs", [{"cut_off_limit_s": 7200.0}, {"leave_wait_s": 5.0}])
def test_the_wait_for_the_first_merge_is_bounded_also_by_hand(knobs: dict[str, float]) -> None:
    life = ended_before_first_merge(3, **knobs)
    (bound_s,) = knobs.values()
    life.pass_s(bound_s - 0.1)
    assert phase_of(life) is SessionPhase.AWAITING
    life.pass_s(0.2)
    assert phase_of(life) is SessionPhase.LEAVING


@pytest.mark.parametrize("what", ["a signal", "an error"])
def test_only_a_loops_own_end_waits_for_the_first_merge(what: str) -> None:
    life = before_first_merge()
    life.awaiting()
    life.say(effects.StopWanted(what, push_pending=what == "a signal"))
    life.pass_s(31.1)
    assert phase_of(life) is SessionPhase.LEAVING


def test_a_master_that_restarts_before_the_first_merge_is_waited_for_too() -> None:
    life = ended_before_first_merge(3)
    life.pass_s(3600.0)
    life.effects.clear()
    life.beat(epoch=2)
    life.epoch = 2
    life.join()
    life.merged()
    life.left()
    assert "lost" not in said(life)


def test_data_that_is_leased_again_ends_the_time_in_which_a_cluster_was_cut_off() -> None:
    for answers in (False, True):
        life = leased()
        life.say_lease(1000)
        life.fail(messages.LeaseDataRequest)
        life.pass_s(life.session.config.cut_off_limit_s)
        if answers:
            life.answer(messages.LeaseDataRequest, messages.LeaseDataReply((messages.DataRange(2, 0, 1, 0, 1000),)))
        life.push_begun()
        life.goes_on("send")
        life.pass_s(SETTINGS.verdict_wait_s)
        assert life.waits is not answers


@pytest.mark.parametrize("pulls", [False, True])
def test_leaving_at_once_ends_the_transfer_that_is_under_way(life: ClusterBench, pulls: bool) -> None:
    life.push_begun()
    life.goes_on("await" if pulls else "begin")
    if pulls:
        life.decide(messages.VerdictKind.APPLIED)
        life.grant()
    job = life.job(messages.PullGrant)[0] if pulls else life.ticket()[0]
    life.leaves_at_once()
    assert life.take(effects.Cancel).job == job
