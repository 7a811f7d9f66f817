"""A session that goes on in another process: every row of the verdict table, as the next life meets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.cluster_bench import LEASED, ClusterBench, LeasedClusterBench, session_config

from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Cancel, Delayed, Done, Failed, InstallMode, PushRecord, Run, Started
from dips.worker.state.shared import SessionConfig, SessionPhase


def test_there_is_nothing_to_save_before_the_first_version_and_after_the_end(life: LeasedClusterBench) -> None:
    fresh = ClusterBench()
    assert fresh.session.saved() is None
    fresh.say(Started())
    fresh.join()
    assert fresh.session.saved() is None
    life.leaves_at_once()
    assert life.session.saved() is None


def test_row_rolled_back_drops_everything(life: LeasedClusterBench) -> None:
    life.awaiting()
    verdict = replace(life.verdict(messages.VerdictKind.ROLLED_BACK), version=Version(4, 5))
    life.published = Version(4, 5)
    life.reborn()
    life.join(verdict, kept=())
    assert not life.asks(messages.ReturnDataRequest), "the rollback has freed all leases"
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.held == ()


def reborn_before_its_push(life: LeasedClusterBench) -> PushRecord:
    """With a checkpoint that was made two steps before the push which awaits its verdict."""
    life.train(2)
    old = life.session.saved()
    life.train(2)
    life.goes_on("await")
    push = life.session.pushing.open
    assert push is not None
    life.reborn(old, push.record)
    return push.record


def test_a_checkpoint_older_than_an_applied_push_is_dropped_by_its_fence(life: LeasedClusterBench) -> None:
    push = reborn_before_its_push(life)
    verdict = life.verdict(messages.VerdictKind.APPLIED, push.id)
    request = life.join(verdict, kept=())
    assert request.held_ranges == (life.span(0, 200), life.span(200, 100_000))
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0
    assert life.session.pushing.seq == 1, "the written number is not used again"


def test_a_checkpoint_older_than_an_undecided_push_never_trains_on_its_data_again(life: LeasedClusterBench) -> None:
    """Found by reading: Join names ranges of the sealed push as held, and they were trained on again once applied."""
    push = reborn_before_its_push(life)
    life.join(push.id)
    assert life.session.held == (life.span(200, 100_000),)
    life.judged("await", life.verdict(messages.VerdictKind.APPLIED, push.id))
    assert list(life.session.held) == []
    assert life.session.take_leased() == []
    assert list(life.give_back_answered()) == [life.span(400, 100_000)], "0 to 400 are applied"
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0


def test_a_checkpoint_older_than_an_aborted_push_keeps_its_own_work(life: LeasedClusterBench) -> None:
    life.train(2)
    old = life.session.saved()
    life.train(2)
    verdict = life.verdict(messages.VerdictKind.ABORTED)
    life.used = 200
    life.reborn(old)
    life.join(verdict)
    assert life.phase is SessionPhase.TRAINING
    life.train(2)
    assert life.asked(messages.BeginPushRequest).ranges == (life.span(0, 400),)


def test_trained_ranges_that_are_not_lent_any_more_count_as_stale(life: LeasedClusterBench) -> None:
    life.train(2)
    life.reborn()
    life.join(kept=(life.span(200, 100_000),))
    assert life.phase is SessionPhase.PULLING
    assert not life.asks(messages.ReturnDataRequest), "they are somebody else's"
    assert life.pulled().mode is InstallMode.REPLACE
    assert life.session.shared.work.tokens == 0
    assert not life.session.shared.work.lost
    assert life.session.held == (life.span(200, 100_000),)


def test_unused_ranges_that_are_not_lent_any_more_are_forgotten(life: LeasedClusterBench) -> None:
    life.train(2)
    life.reborn()
    life.join(kept=(life.span(0, 200),))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.held == ()
    assert life.session.take_leased() == []
    assert life.session.shared.work.pending.tokens == 200


def test_what_a_second_join_takes_back_is_not_handed_out(life: LeasedClusterBench) -> None:
    """Found by reading: a resumed loop that met a restarted master was handed ranges that it held no more."""
    life.reborn()
    life.join()
    life.epoch = 2
    life.beat()
    life.join(kept=())
    assert life.session.held == ()
    assert life.session.take_leased() == []


@pytest.mark.parametrize("kind", [messages.VerdictKind.APPLIED, messages.VerdictKind.ABORTED])
def test_later_steps_on_lost_ranges_are_dropped_whatever_the_push_became(
    life: LeasedClusterBench, kind: messages.VerdictKind
) -> None:
    life.awaiting()
    life.train(1)
    push = life.push_id
    life.reborn()
    life.join(push, kept=(life.span(0, 400), life.span(500, 100_000)))
    life.judged("await", life.verdict(kind, push))
    if kind is messages.VerdictKind.ABORTED:
        assert list(life.give_back_answered()) == [life.span(0, 400)]
    else:
        assert not life.asks(messages.ReturnDataRequest)
    assert life.pulled().mode is InstallMode.REPLACE


def test_a_later_life_that_left_no_checkpoint_does_not_lock_this_one_out(life: LeasedClusterBench) -> None:
    life.train(2)
    life.reborn()
    assert life.refuse(messages.JoinRequest, RefusalCode.FENCED).caller.incarnation == Incarnation(1, 1)
    request = life.join()
    assert request.caller.incarnation is None
    assert request.held_ranges == (life.span(0, 200), life.span(200, 100_000))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.take_leased() == [life.span(200, 100_000)]


def test_the_record_of_a_push_may_know_a_later_life_than_the_checkpoint(life: LeasedClusterBench) -> None:
    saved = life.session.saved()
    assert saved is not None
    push = PushId(ClusterId("a"), Incarnation(2, 4), 9)
    life.reborn(saved, PushRecord(push, Version(1, 7), 3, saved.pending))
    assert life.join().caller.incarnation == Incarnation(2, 4)
    life.train(4)
    assert life.asked(messages.BeginPushRequest).seq == 10


def test_another_run_is_refused_with_the_remedy(life: LeasedClusterBench) -> None:
    life.reborn()
    life.refuse(messages.JoinRequest, RefusalCode.RUN_ID)
    error = life.ended_with(ConfigError)
    assert "checkpoint is of run run" in str(error)
    assert "--checkpoint-dir" in str(error)


def test_a_new_run_of_the_same_name_is_not_seeded_from_a_checkpoint(life: LeasedClusterBench) -> None:
    life.reborn()
    life.published = None
    life.join(seed=True)
    life.left()
    assert "--rebuild" in str(life.ended_with(ConfigError))
    assert not life.asks(messages.BeginPushRequest)


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


@pytest.fixture
def durable() -> LeasedClusterBench:
    life = LeasedClusterBench(session_config(data_plan=LEASED, durable_pushes=True))
    life.begin()
    return life


def begun(life: LeasedClusterBench) -> tuple[int, PushRecord]:
    life.train(4)
    assert life.phase is SessionPhase.BEGINNING_PUSH
    assert not life.asks(messages.BeginPushRequest), "the number is not used before it is on disk"
    return life.job(PushRecord)


def test_a_push_begins_once_its_record_is_durable(durable: LeasedClusterBench) -> None:
    job, record = begun(durable)
    assert (record.base, record.fence, record.work.ranges) == (Version(1, 5), 0, (durable.span(0, 400),))
    durable.say(Done(job))
    assert durable.asked(messages.BeginPushRequest).seq == record.id.seq
    durable.say(Done(job))
    calls = [e.command for e in durable.effects if isinstance(e, Run)]
    assert sum(isinstance(call, messages.BeginPushRequest) for call in calls) == 1
    durable.say(Failed(durable.ticket()[0], "the slave is away"))
    assert durable.phase is SessionPhase.BEGINNING_PUSH, "it is sent again"


def test_a_disk_that_fails_is_said_and_training_goes_on(durable: LeasedClusterBench) -> None:
    job, _ = begun(durable)
    assert durable.waits
    durable.say(Delayed(job, "No space left on device"))
    assert not durable.waits
    assert "No space left on device" in durable.session.waiting_for()
    durable.train(2)
    assert not durable.asks(messages.BeginPushRequest)
    assert durable.session.shared.unrecorded_since_s == durable.now_s
    durable.pass_s(70)
    durable.say(Delayed(job, "No space left on device"))
    assert durable.session.shared.unrecorded_since_s == durable.now_s - 70
    durable.say(Done(job))
    assert durable.asked(messages.BeginPushRequest).tokens == 400
    assert durable.session.shared.unrecorded_since_s is None


def test_a_record_that_can_never_be_written_ends_the_cluster_with_the_place(durable: LeasedClusterBench) -> None:
    job, record = begun(durable)
    durable.say(Failed(job, "/kept cannot be written: No such file or directory"))
    durable.left()
    assert f"push {record.id} cannot be recorded: /kept cannot be written" in str(durable.ended_with(ConfigError))


@pytest.mark.parametrize("meanwhile", [lambda life: life.beat(epoch=2), lambda life: life.leaves_at_once()])
def test_a_record_that_comes_too_late_begins_nothing(
    durable: LeasedClusterBench, meanwhile: Callable[[LeasedClusterBench], None]
) -> None:
    job, _ = begun(durable)
    meanwhile(durable)
    assert not durable.has(Cancel), "a record is still written"
    durable.say(Done(job))
    assert not durable.asks(messages.BeginPushRequest)


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
    assert life.asked(messages.BeginPushRequest).base is None


def test_an_earlier_verdict_is_remembered_so_that_it_is_not_acted_on_twice(life: LeasedClusterBench) -> None:
    life.awaiting()
    applied = life.decide(messages.VerdictKind.APPLIED)
    life.pulled()
    life.train(1)
    life.reborn()
    life.join(messages.Verdict(applied.push, messages.VerdictKind.APPLIED, applied.version))
    assert life.phase is SessionPhase.TRAINING
    assert life.session.shared.work.pending.tokens == 100


def test_ranges_on_their_way_back_are_given_back_by_the_next_join_alone(life: LeasedClusterBench) -> None:
    for begin in (0, 100):
        life.session.shared.aside_ranges((life.span(begin, begin + 100),))
    life.pass_s(1.0)
    assert life.asks(messages.ReturnDataRequest), "the first one is under way"
    life.fenced()
    life.join()
    life.pass_s(100.0)
    assert not life.asks(messages.ReturnDataRequest)
    assert life.session.shared.asides_done()
