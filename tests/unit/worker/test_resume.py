"""A session that goes on in another process: every row of the verdict table, as the next life meets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.cluster_bench import LEASED, ClusterBench, LeasedClusterBench, session_config

from dips.core.errors import ConfigError, RefusalCode, RetryLater
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import (
    AwaitVerdictReply,
    AwaitVerdictRequest,
    BeginPullRequest,
    BeginPushRequest,
    JoinRequest,
    ReturnDataRequest,
    Verdict,
    VerdictKind,
)
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Delayed, Done, InstallMode, PushRecord, Run, Started
from dips.worker.state.saved import SavedSession
from dips.worker.state.shared import SessionConfig, SessionPhase


def next_life(
    life: LeasedClusterBench, saved: SavedSession | None = None, newest: PushRecord | None = None
) -> LeasedClusterBench:
    """The same master and cluster after the process was killed; it has sent its Join."""
    before = saved or life.session.saved()
    assert before is not None
    life.session = ClusterMachine(life.session.config)
    life.session.resume(SavedSession.from_json(before.to_json()), newest)
    life.effects.clear()
    life.say(Started())
    assert life.waits, "the settings of the run are not known yet"
    return life


@pytest.fixture
def life() -> LeasedClusterBench:
    life = LeasedClusterBench()
    life.begin()
    return life


def test_there_is_nothing_to_save_before_the_first_version_and_after_the_end(life: LeasedClusterBench) -> None:
    fresh = ClusterBench()
    assert fresh.session.saved() is None
    fresh.say(Started())
    fresh.join()
    assert fresh.session.saved() is None
    life.leaves_at_once()
    assert life.session.saved() is None


def test_the_next_life_joins_as_the_old_one_and_goes_on_in_mid_round(life: LeasedClusterBench) -> None:
    life.train(3)
    next_life(life)
    request = life.join()
    assert request.caller.incarnation == Incarnation(1, 1)
    assert request.caller.run_id == "run"
    assert request.held_ranges == (life.span(0, 300), life.span(300, 100_000))
    assert life.phase is SessionPhase.TRAINING
    assert not life.waits
    assert life.session.take_leased() == [life.span(300, 100_000)], "what is unused is handed out again"
    assert life.session.take_leased() == []
    life.train(1)
    push = life.asked(BeginPushRequest)
    assert (push.seq, push.steps, push.tokens, push.base) == (1, 4, 400, Version(1, 5))
    assert push.caller.incarnation == Incarnation(1, 2)


def test_row_none_and_row_aborted_keep_everything(life: LeasedClusterBench) -> None:
    for known in (False, True):
        life = LeasedClusterBench()
        life.begin()
        life.awaiting()
        life.train(1)
        verdict = life.verdict(VerdictKind.ABORTED)
        next_life(life).join(verdict if known else None)
        assert life.asked(BeginPushRequest).ranges == (life.span(0, 500),)
        assert life.asked(BeginPushRequest).seq == 2


def test_row_undecided_waits_and_then_acts(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    push = life.push_id
    next_life(life).join(push)
    assert life.phase is SessionPhase.AWAITING
    life.answer(AwaitVerdictRequest, AwaitVerdictReply(life.verdict(VerdictKind.APPLIED, push)))
    assert life.pulled().mode is InstallMode.REBASE_FROM_PUSH
    assert life.session.shared.work.pending.ranges == (life.span(400, 500),)


def test_row_applied_rebases_from_the_saved_push(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(2)
    verdict = life.verdict(VerdictKind.APPLIED)
    next_life(life).join(verdict, kept=(life.span(400, 100_000),))
    assert life.pulled().mode is InstallMode.REBASE_FROM_PUSH
    assert not life.asks(ReturnDataRequest)
    life.train(2)
    assert life.asked(BeginPushRequest).ranges == (life.span(400, 800),)


def test_row_excluded_drops_and_may_reset_the_optimizer(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    verdict = life.verdict(VerdictKind.EXCLUDED, reset_inner_optimizer=True)
    next_life(life).join(verdict)
    assert list(life.give_back_answered()) == [life.span(400, 500)]
    assert life.pulled().reset_inner


def test_row_rolled_back_drops_everything(life: LeasedClusterBench) -> None:
    life.awaiting()
    verdict = replace(life.verdict(VerdictKind.ROLLED_BACK), version=Version(4, 5))
    life.published = Version(4, 5)
    next_life(life).join(verdict, kept=())
    assert not life.asks(ReturnDataRequest), "the rollback has freed all leases"
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.held == ()


@pytest.mark.parametrize("what", ["fence", "timeline"])
def test_a_fence_or_timeline_that_moved_on_drops_the_work(life: LeasedClusterBench, what: str) -> None:
    life.train(2)
    if what == "fence":
        life.fence += 1
    else:
        life.published = Version(7, 2)
    next_life(life).join()
    assert list(life.give_back_answered()) == [life.span(0, 200)]
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.held == (life.span(200, 100_000),)


def test_a_checkpoint_older_than_an_applied_push_is_dropped_by_its_fence(life: LeasedClusterBench) -> None:
    life.train(2)
    old = life.session.saved()
    life.train(2)
    life.sent(life.ticket())
    life.admitted()
    record = life.session.pushing.open
    assert record is not None
    verdict = life.verdict(VerdictKind.APPLIED)
    next_life(life, old, record.record)
    request = life.join(verdict, kept=())
    assert request.held_ranges == (life.span(0, 200), life.span(200, 100_000))
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0
    assert life.session.pushing.seq == 1, "the written number is not used again"


def test_a_checkpoint_older_than_an_undecided_push_never_trains_on_its_data_again(life: LeasedClusterBench) -> None:
    """Found by reading: Join names ranges of the sealed push as held, and they were trained on again once applied."""
    life.train(2)
    old = life.session.saved()
    life.train(2)
    life.sent(life.ticket())
    life.admitted()
    push = life.session.pushing.open
    assert push is not None
    next_life(life, old, push.record).join(push.id)
    assert life.session.held == (life.span(200, 100_000),)
    life.answer(AwaitVerdictRequest, AwaitVerdictReply(life.verdict(VerdictKind.APPLIED, push.id)))
    assert list(life.session.held) == []
    assert life.session.take_leased() == []
    assert list(life.give_back_answered()) == [life.span(400, 100_000)], "0 to 400 are applied"
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0


def test_a_checkpoint_older_than_an_aborted_push_keeps_its_own_work(life: LeasedClusterBench) -> None:
    life.train(2)
    old = life.session.saved()
    life.train(2)
    verdict = life.verdict(VerdictKind.ABORTED)
    life.used = 200
    next_life(life, old).join(verdict)
    assert life.phase is SessionPhase.TRAINING
    life.train(2)
    assert life.asked(BeginPushRequest).ranges == (life.span(0, 400),)


def test_trained_ranges_that_are_not_lent_any_more_count_as_stale(life: LeasedClusterBench) -> None:
    life.train(2)
    next_life(life).join(kept=(life.span(200, 100_000),))
    assert life.phase is SessionPhase.PULLING
    assert not life.asks(ReturnDataRequest), "they are somebody else's"
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0
    assert not life.session.shared.work.lost
    assert life.session.held == (life.span(200, 100_000),)


def test_unused_ranges_that_are_not_lent_any_more_are_forgotten(life: LeasedClusterBench) -> None:
    life.train(2)
    next_life(life).join(kept=(life.span(0, 200),))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.held == ()
    assert life.session.take_leased() == []
    assert life.session.shared.work.pending.tokens == 200


def test_what_a_second_join_takes_back_is_not_handed_out(life: LeasedClusterBench) -> None:
    """Found by reading: a resumed loop that met a restarted master was handed ranges that it held no more."""
    next_life(life).join()
    life.epoch = 2
    life.beat()
    life.join(kept=())
    assert life.session.held == ()
    assert life.session.take_leased() == []


@pytest.mark.parametrize("kind", [VerdictKind.APPLIED, VerdictKind.ABORTED])
def test_later_steps_on_lost_ranges_are_dropped_whatever_the_push_became(
    life: LeasedClusterBench, kind: VerdictKind
) -> None:
    life.awaiting()
    life.train(1)
    push = life.push_id
    next_life(life).join(push, kept=(life.span(0, 400), life.span(500, 100_000)))
    verdict = life.verdict(kind, push)
    life.answer(AwaitVerdictRequest, AwaitVerdictReply(verdict))
    if kind is VerdictKind.ABORTED:
        assert list(life.give_back_answered()) == [life.span(0, 400)]
    else:
        assert not life.asks(ReturnDataRequest)
    assert life.pulled().mode is InstallMode.REPLACE


def test_an_open_pull_goes_on_with_the_saved_push_buffer(life: LeasedClusterBench) -> None:
    life.awaiting()
    life.train(1)
    verdict = life.decide(VerdictKind.APPLIED)
    next_life(life).join(verdict, kept=(life.span(400, 100_000),))
    assert life.phase is SessionPhase.PULLING
    assert life.asked(BeginPullRequest).at_least == verdict.version
    assert life.pulled().mode is InstallMode.REBASE_FROM_PUSH


def test_a_later_life_that_left_no_checkpoint_does_not_lock_this_one_out(life: LeasedClusterBench) -> None:
    life.train(2)
    next_life(life)
    assert life.refuse(JoinRequest, RefusalCode.FENCED).caller.incarnation == Incarnation(1, 1)
    request = life.join()
    assert request.caller.incarnation is None
    assert request.held_ranges == (life.span(0, 200), life.span(200, 100_000))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.take_leased() == [life.span(200, 100_000)]


def test_the_record_of_a_push_may_know_a_later_life_than_the_checkpoint(life: LeasedClusterBench) -> None:
    saved = life.session.saved()
    assert saved is not None
    push = PushId(ClusterId("a"), Incarnation(2, 4), 9)
    next_life(life, saved, PushRecord(push, Version(1, 7), 3, saved.pending))
    assert life.join().caller.incarnation == Incarnation(2, 4)
    life.train(4)
    assert life.asked(BeginPushRequest).seq == 10


def test_no_master_is_given_up_on_as_at_any_start(life: LeasedClusterBench) -> None:
    next_life(life)
    life.now_s += 1000
    life.fail(JoinRequest)
    assert life.finished is not None
    assert isinstance(life.finished.error, RetryLater)


# ---- checkpoints of something else ----


def test_another_run_is_refused_with_the_remedy(life: LeasedClusterBench) -> None:
    next_life(life)
    life.refuse(JoinRequest, RefusalCode.RUN_ID)
    assert life.finished is not None
    assert isinstance(life.finished.error, ConfigError)
    assert "checkpoint is of run run" in str(life.finished.error)
    assert "--checkpoint-dir" in str(life.finished.error)


def test_a_new_run_of_the_same_name_is_not_seeded_from_a_checkpoint(life: LeasedClusterBench) -> None:
    next_life(life)
    life.published = None
    life.join(seed=True)
    life.left()
    assert life.finished is not None
    assert isinstance(life.finished.error, ConfigError)
    assert "--rebuild" in str(life.finished.error)
    assert not life.asks(BeginPushRequest)


OTHER_LAYOUT = Layout((Parameter("w", (3,), "float32", "w"),))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cluster_id": ClusterId("b")}, "of cluster a, this is cluster b"),
        ({"run_id": "other"}, "of run run, this is run other"),
        ({"layout": OTHER_LAYOUT}, "another model than this one of 1 parameters and 3 elements"),
        ({"data_plan": replace(LEASED, corpus_digest=b"x")}, "other data"),
    ],
)
def test_what_is_not_this_clusters_is_refused(
    life: LeasedClusterBench, change: dict[str, object], sentence: str
) -> None:
    saved = life.session.saved()
    assert saved is not None
    config: SessionConfig = replace(session_config(data_plan=LEASED), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=sentence) as refused:
        ClusterMachine(config).resume(saved, None)
    assert "--checkpoint-dir" in str(refused.value)


# ---- a number is written down before it is used ----


@pytest.fixture
def durable() -> LeasedClusterBench:
    life = LeasedClusterBench(session_config(data_plan=LEASED, durable_pushes=True))
    life.begin()
    return life


def begun(life: LeasedClusterBench) -> tuple[int, PushRecord]:
    life.train(4)
    assert life.phase is SessionPhase.BEGINNING_PUSH
    assert not life.asks(BeginPushRequest), "the number is not used before it is on disk"
    return life.job(PushRecord)


def test_a_push_begins_once_its_record_is_durable(durable: LeasedClusterBench) -> None:
    life = durable
    job, record = begun(life)
    assert (record.base, record.fence, record.work.ranges) == (Version(1, 5), 0, (life.span(0, 400),))
    life.say(Done(job))
    assert life.asked(BeginPushRequest).seq == record.id.seq
    life.say(Done(job))
    assert sum(1 for e in life.effects if isinstance(e, Run) and isinstance(e.command, BeginPushRequest)) == 1


def test_a_disk_that_fails_is_said_and_training_goes_on(durable: LeasedClusterBench) -> None:
    life = durable
    job, _ = begun(life)
    assert life.waits
    life.say(Delayed(job, "No space left on device"))
    assert not life.waits
    assert "No space left on device" in life.session.waiting_for()
    life.train(2)
    assert not life.asks(BeginPushRequest)
    life.say(Done(job))
    assert life.asked(BeginPushRequest).tokens == 400


def _fenced(life: LeasedClusterBench) -> None:
    life.beat(epoch=2)


def _stopped(life: LeasedClusterBench) -> None:
    life.leaves_at_once()


@pytest.mark.parametrize("meanwhile", [_fenced, _stopped])
def test_a_record_that_comes_too_late_begins_nothing(
    durable: LeasedClusterBench, meanwhile: Callable[[LeasedClusterBench], None]
) -> None:
    life = durable
    job, _ = begun(life)
    meanwhile(life)
    life.say(Done(job))
    assert not life.asks(BeginPushRequest)


def test_a_donation_is_written_down_too(durable: LeasedClusterBench) -> None:
    push = durable.donate()
    record = durable.job(PushRecord)[1]
    assert (record.id, record.donates, record.base) == (push, Version(1, 5), None)


def test_a_seed_is_written_down_too() -> None:
    life = ClusterBench(session_config(durable_pushes=True))
    life.published = None
    life.say(Started())
    life.join(seed=True)
    job, record = life.job(PushRecord)
    assert (record.base, record.donates) == (None, None)
    life.say(Done(job))
    assert life.asked(BeginPushRequest).base is None


def test_an_earlier_verdict_is_remembered_so_that_it_is_not_acted_on_twice(life: LeasedClusterBench) -> None:
    life.awaiting()
    applied = life.decide(VerdictKind.APPLIED)
    life.pulled()
    life.train(1)
    next_life(life).join(Verdict(applied.push, VerdictKind.APPLIED, applied.version))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.shared.work.pending.tokens == 100
