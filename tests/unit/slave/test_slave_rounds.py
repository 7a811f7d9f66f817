"""The slave's decisions in a round and in its master's recovery; what is repeated, what must wait, what breaks,
and what is on disk with durability "async"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slave_bench import SlaveBench, answer, commit, configure, measure, only, prepare, runs, said, slot_of
from support.slave_values import ASYNC, BASE, FULL, FULL_NOW, NEXT, R1, R2, R3, SHADOW, V0, V1, V2, A, B, snapshot
from support.slave_wire import open_staging

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, RoundId, Version
from dips.slave.state import effects
from dips.slave.state.effects import Effect
from dips.slave.state.shard import ShardPhase
from dips.slave.state.slave import MAX_WAITING


def test_a_measure_knows_the_bases_of_its_pushes_and_says_their_directions(bench: SlaveBench) -> None:
    opened = slot_of(bench.command(open_staging(B, 1, base=V0)), B)
    bench.give(effects.PushStaged(opened, b"digest"))
    (run,) = runs(bench.command(measure(R2, V0, A, B)), messages.Measure)
    assert [(slot.number, slot.base) for slot in run.slots] == [(0, None), (1, V0)]
    measured = messages.Measured(R2, (messages.BlockGram(0, (1.0, 0.5, 1.0), (0, 0)),), (1.0, 2.0, 3.0))
    assert said(bench.give(effects.Done(bench.job(), measured))) == [measured]


def test_every_command_of_a_round_is_answered_again_and_not_done_again(bench: SlaveBench) -> None:
    bench.command(measure())
    first = said(bench.measured())
    again = bench.command(measure())
    assert said(again) == first
    bench.prepare()
    first = said(bench.prepared(SHADOW))
    out = bench.prepare()
    assert said(out) == first
    assert not runs(out, messages.Prepare)
    bench.command(commit())
    first = said(bench.committed(NEXT))
    out = bench.command(commit())
    assert said(out) == first
    assert not runs(out, messages.Commit)


def test_abort_drops_the_shadow_of_its_own_round_which_never_comes_back(prepared_bench: SlaveBench) -> None:
    assert not only(prepared_bench.command(messages.AbortRound(R1, "old news")), effects.DropShadow)
    assert prepared_bench.phase is ShardPhase.PREPARED
    out = prepared_bench.command(messages.AbortRound(R2, "a slave was lost"))
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    assert SHADOW not in prepared_bench.state.shard.snapshots
    refused = answer(prepared_bench.command(commit()), messages.RoundRefused)
    assert (refused.command, refused.refusal.code) == ("commit", RefusalCode.VERSION_GONE)


@pytest.mark.parametrize("body", [measure(R3), prepare(R3)])
def test_a_later_round_drops_a_shadow_whose_abort_was_lost(prepared_bench: SlaveBench, body: Any) -> None:
    out = prepared_bench.command(body)
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    measuring, preparing = runs(out, messages.Measure), runs(out, messages.Prepare)
    assert measuring or preparing


def test_a_round_that_is_over_is_refused(bench: SlaveBench) -> None:
    bench.command(messages.AbortRound(R3, "late"))
    for body in (measure(), prepare()):
        assert bench.refused(body).code is RefusalCode.STALE_EPOCH
    bench.command(measure(RoundId(1, 9)))
    bench.measured()
    assert bench.refused(measure(RoundId(1, 8))).code is RefusalCode.STALE_EPOCH, "one before one that was begun"


@pytest.mark.parametrize(("body", "code"), [
    (measure(R2, V1), RefusalCode.VERSION_GONE), (measure(R2, V0, B), RefusalCode.UNKNOWN_PUSH),
    (measure(R2, V0, A, B), RefusalCode.UNKNOWN_PUSH), (prepare(from_version=V1, to=V2), RefusalCode.VERSION_GONE),
    (prepare(from_version=None), RefusalCode.SEED_EXISTS), (prepare(to=V0), RefusalCode.MALFORMED),
    (prepare(to=Version(0, 9)), RefusalCode.MALFORMED), (prepare(weights=(0.5, 0.5)), RefusalCode.MALFORMED),
    (prepare(weights=(float("nan"),)), RefusalCode.NONFINITE), (prepare(scale=float("inf")), RefusalCode.NONFINITE),
    (prepare(gradient_weight=float("nan")), RefusalCode.NONFINITE),
])  # fmt: skip
def test_an_impossible_round_is_refused_and_changes_nothing(bench: SlaveBench, body: Any, code: RefusalCode) -> None:
    out = bench.command(body)
    refused = answer(out, messages.RoundRefused)
    assert refused.refusal.code is code
    assert refused.command == type(body).__name__.lower()
    assert bench.phase is ShardPhase.READY


def test_the_seed_takes_exactly_one_push() -> None:
    bench = SlaveBench().ready()
    bench.stage(A, 0)
    bench.refused(prepare(R1, V0, None, accepted=prepare().accepted * 2, weights=(0.5, 0.5)))
    (run,) = runs(bench.command(prepare(R1, V0, None)), messages.Prepare)
    assert run.command == prepare(R1, V0, None)
    bench.prepared(snapshot(V0, R1, committed=False))
    bench.command(commit(R1, V0))
    assert said(bench.committed(BASE)) == [messages.Flipped(R1, V0)]


def test_a_commit_goes_only_forward_until_the_disk_takes_it(prepared_bench: SlaveBench) -> None:
    (first,) = runs(prepared_bench.command(commit()), messages.Commit)
    for _ in range(3):
        out = prepared_bench.failed(FULL_NOW)
        assert said(out) == [messages.RoundRefused(R2, "commit", FULL_NOW)]
        (again,) = runs(out, messages.Commit)
        assert (again.shadow, again.command, again.delay_s) == (SHADOW, first.command, 1.5)
        assert prepared_bench.phase is ShardPhase.COMMITTING
    assert said(prepared_bench.committed(NEXT)) == [messages.Flipped(R2, V1)]


def test_a_commit_that_ends_without_a_stream_still_flips(prepared_bench: SlaveBench) -> None:
    prepared_bench.command(commit())
    prepared_bench.give(effects.Unlinked("reset"))
    assert said(prepared_bench.committed(NEXT)) == []
    assert prepared_bench.state.shard.current == NEXT
    prepared_bench.attach(2)
    assert said(prepared_bench.command(configure(NEXT))) == [messages.Ready(V1, NEXT.digest)]


def test_the_end_of_a_job_that_is_over_changes_nothing(bench: SlaveBench) -> None:
    bench.command(measure())
    job = bench.job()
    bench.measured()
    out = bench.give(effects.Failed(job, FULL))
    assert said(out) == []
    assert bench.phase is ShardPhase.READY


def test_too_many_waiting_commands_close_the_stream(bench: SlaveBench) -> None:
    bench.command(measure())
    for _ in range(MAX_WAITING):
        assert bench.command(measure()) == []
    assert only(bench.command(measure()), effects.CloseLink)


BACK = snapshot(Version(4, 0), RoundId(4, 1), digest=BASE.digest)


def go_back() -> messages.Configure:
    return replace(configure(BACK), origin=V0, origin_round=BASE.round)


def recovering(*snapshots: object) -> SlaveBench:
    return SlaveBench(snapshots).attach()  # type: ignore[arg-type]


def test_the_origin_is_loaded_when_the_version_itself_is_not_there() -> None:
    bench = recovering(NEXT, BASE)
    (load,) = runs(bench.command(go_back()), messages.Configure)
    assert (load.source, load.command) == (BASE, go_back())
    bench.disk = (BACK,)
    out = bench.done(BACK)
    assert said(out) == [messages.Ready(BACK.version, BACK.digest)]
    rolled_back, configured = only(out, effects.Record)
    expected = {"origin": "1:0", "version": "4:0", "digest": BASE.digest.hex()}
    assert rolled_back.kind == "rolled_back"
    assert expected.items() <= rolled_back.fields.items()
    assert (configured.kind, configured.fields["round"]) == ("configured", "r4.1")
    out = bench.command(go_back())
    assert said(out) == [messages.Ready(BACK.version, BACK.digest)], "at once: it is there"
    assert not runs(out, messages.Configure)


def test_an_origin_with_other_bytes_or_another_round_is_refused() -> None:
    for here in (replace(BASE, digest=b"other"), replace(BASE, round=R3)):
        assert recovering(here).refused(go_back()).code is RefusalCode.VERSION_GONE


def test_going_back_ends_an_open_round_and_the_version_in_memory(prepared_bench: SlaveBench) -> None:
    (load,) = runs(prepared_bench.command(go_back()), messages.Configure)
    assert load.source == BASE
    assert prepared_bench.state.shard.shadow is None
    prepared_bench.done(BACK)
    answer(prepared_bench.command(commit()), messages.RoundRefused)


def test_a_version_in_memory_is_given_up_for_empty(bench: SlaveBench) -> None:
    (load,) = runs(bench.command(configure(empty=True)), messages.Configure)
    assert load.source is None
    assert said(bench.done()) == [messages.Ready(None)]
    assert said(bench.command(configure(empty=True))) == [messages.Ready(None)]


def test_donated_parameters_never_stand_on_a_timeline_that_is_on_disk() -> None:
    bench = recovering(NEXT)
    bench.command(configure(empty=True))
    bench.done()
    bench.stage(A, 0)
    for to in (V0, V1, V2):
        assert bench.refused(prepare(R2, to, None)).code is RefusalCode.SEED_EXISTS


def test_a_round_that_comes_again_with_another_content_is_computed_again(prepared_bench: SlaveBench) -> None:
    """A master without its journal may use a round's number twice: the first time's shadow must not pass for it."""
    other = prepare(scale=0.25)
    out = prepared_bench.command(other)
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    (run,) = runs(out, messages.Prepare)
    assert run.command == other


def test_a_record_is_read_and_sent_for_the_incarnation_that_asked_alone() -> None:
    bench = recovering(BASE)
    asked = messages.SendCommitRecord(V0, BASE.round)
    (read,) = only(bench.command(asked), messages.SlaveCommand)
    assert (read.incarnation, read.body) == (bench.incarnation, asked)
    answer = messages.CommitRecord(V0, BASE.round, b"{}")
    assert said(bench.give(effects.RecordRead(bench.incarnation, answer))) == [answer]
    bench.command(configure(BASE))
    assert bench.command(asked) == [read]
    bench = recovering(BASE)
    answer = messages.CommitRecord(V0, BASE.round, refusal=messages.Refusal(RefusalCode.VERSION_GONE, "gone"))
    assert said(bench.give(effects.RecordRead(Incarnation(1, 7), answer))) == []
    bench.give(effects.Unlinked("reset"))
    assert said(bench.give(effects.RecordRead(bench.incarnation, answer))) == []


def test_a_snapshot_that_broke_since_hello_is_told_and_the_next_hello_lacks_it_and_else_the_stream_is_kept() -> None:
    bench = recovering(BASE)
    bench.command(configure(BASE))
    assert not only(bench.give(effects.Failed(bench.job(), FULL, (BASE,))), effects.CloseLink)
    bench = recovering(NEXT, BASE)
    bench.command(configure(NEXT))
    out = bench.give(effects.Failed(bench.job(), FULL, (BASE,)))
    assert said(out) == [messages.ConfigureRefused(FULL)]
    (closed,) = only(out, effects.CloseLink)
    assert "version 1:1 broke" in closed.sentence
    assert bench.phase is ShardPhase.EMPTY
    bench.give(effects.Unlinked("closed"))
    (hello,) = said(bench.link())
    assert hello.snapshots == (BASE,)  # type: ignore[union-attr]


def test_work_of_an_earlier_incarnation_stays_mute_when_it_is_tried_again() -> None:
    """Found by reading: the second try had another number, and its end was told to the master that never asked."""
    bench = recovering(BASE)
    bench.command(configure(BASE))
    bench.welcome(2, 1)
    for _ in range(2):
        out = bench.failed(FULL_NOW)
        assert runs(out, messages.Configure), "it is tried again"
        assert not said(out)
    assert not said(bench.done(BASE))
    assert said(bench.command(configure(BASE))) == [messages.Ready(V0, BASE.digest)]


def test_a_commit_that_is_tried_again_behind_a_waiting_hello_stays_mute(bench: SlaveBench) -> None:
    bench.prepare()
    bench.prepared(SHADOW)
    bench.command(commit())
    bench.welcome(2, 1)
    bench.give(effects.Unlinked("the master ended"))
    bench.link()
    assert [type(body) for body in said(bench.failed(FULL_NOW))] == [messages.SlaveHello]
    bench.welcome(2, 1)
    assert said(bench.committed(NEXT)) == []


def test_a_refused_round_still_drops_the_shadow_of_the_one_before(prepared_bench: SlaveBench) -> None:
    """Found by reading: the refusal was sent and the effect was lost, so that the next round met a second shadow."""
    for body in (measure(R3, V2), prepare(RoundId(1, 9), from_version=V2, to=Version(1, 3))):
        bench = SlaveBench().at_v0()
        bench.prepare()
        bench.prepared(SHADOW)
        out = bench.command(body)
        assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
        assert isinstance(said(out)[0], messages.RoundRefused)
    assert prepared_bench.phase is ShardPhase.PREPARED


def test_commands_behind_a_question_keep_their_order() -> None:
    bench = recovering(BASE)
    bench.command(configure(BASE))
    assert bench.command(open_staging(B, 1)) == []
    assert bench.command(messages.SendCommitRecord(V0, BASE.round)) == []
    out = bench.done(BASE)
    opened, asked = only(out, effects.HoldSlots), only(out, messages.SlaveCommand)
    assert out.index(opened[0]) < out.index(asked[0])


@pytest.fixture
def late() -> SlaveBench:
    return SlaveBench(settings=ASYNC).at_v0()


def version(v: int, committed: bool = True) -> messages.SnapshotInfo:
    return snapshot(Version(1, v), RoundId(1, v + 1), committed)


def one_round(bench: SlaveBench, v: int) -> list[Effect]:
    round_id = RoundId(1, v + 1)
    bench.command(prepare(round_id, Version(1, v), Version(1, v - 1)))
    bench.done(version(v, committed=False))
    bench.command(commit(round_id, Version(1, v)))
    return bench.done(version(v))


def saved(bench: SlaveBench, number: int, v: int) -> list[Effect]:
    bench.disk = (version(v), *bench.disk)
    return bench.give(effects.Saved(number, version(v), bench.disk))


def durable(bench: SlaveBench) -> int | None:
    found = bench.state.shard.saving.durable
    return found.v if found is not None else None


@pytest.mark.parametrize("durability", ["sync", "async"])
@pytest.mark.parametrize("lag", [2, 3])
def test_a_ring_that_would_overwrite_what_the_run_goes_back_to_is_refused(durability: str, lag: int) -> None:
    """Three snapshots kept: of a disk that is three versions behind, this slave would overwrite the newest."""
    settings = messages.Settings(durability=durability, async_lag_versions=lag)
    bench = SlaveBench(settings=settings, snapshots_kept=3).attach()
    if (durability, lag) == ("async", 3):
        refusal = bench.refused(configure())
        assert refusal.code is RefusalCode.CONFIG
        assert "raise its snapshots_kept to 4, or lower the master's async_lag_versions to 2" in refusal.sentence
    else:
        assert runs(bench.command(configure()), messages.Configure)


def test_a_round_answers_without_the_disk_and_the_save_begins_with_the_commit(late: SlaveBench) -> None:
    (run,) = runs(late.command(prepare()), messages.Prepare)
    assert not run.durable
    out = late.done(version(1, committed=False))
    assert said(out) == [messages.Prepared(RoundId(1, 2), version(1).digest)]
    assert only(out, effects.Record)[0].fields["durable"] is False
    (run_commit,) = runs(late.command(commit()), messages.Commit)
    assert not run_commit.durable
    out = late.done(version(1))
    assert said(out) == [messages.Flipped(RoundId(1, 2), Version(1, 1))]
    assert only(out, effects.SaveVersion) == [effects.SaveVersion(1, version(1), b"{}")]
    record, answer, _ = out
    assert isinstance(record, effects.Record), "the tape comes before the answer that it proves"
    assert isinstance(answer, effects.SendUp)
    assert durable(late) == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_hello_waits_for_the_commit_under_way_and_offers_its_version(bench: SlaveBench, again: bool) -> None:
    """The next master may have another journal, in which that commit is not."""
    bench.prepare()
    bench.prepared(SHADOW)
    bench.command(commit())
    for _ in range(1 + again):
        bench.give(effects.Unlinked("the master ended"))
        assert said(bench.link()) == []
    (hello,) = said(bench.committed(NEXT))
    assert isinstance(hello, messages.SlaveHello)
    assert hello.snapshots[0] == NEXT
    assert said(bench.welcome(2, 1)) == [messages.Promised(2)]


def test_no_hello_is_said_where_the_stream_ended_before_the_commit(bench: SlaveBench) -> None:
    bench.prepare()
    bench.prepared(SHADOW)
    bench.command(commit())
    bench.give(effects.Unlinked("the master ended"))
    bench.link()
    bench.give(effects.Unlinked("the next one too"))
    assert said(bench.committed(NEXT)) == []
    assert answer(bench.link(), messages.SlaveHello).snapshots[0] == NEXT


def test_hello_offers_what_only_memory_holds_beside_what_is_on_disk(late: SlaveBench) -> None:
    one_round(late, 1)
    late.command(prepare(RoundId(1, 3), Version(1, 2), Version(1, 1)))
    late.done(version(2, committed=False))
    late.give(effects.Unlinked("reset"))
    hello = answer(late.link(), messages.SlaveHello)
    assert hello.snapshots == (version(2, committed=False), version(1), BASE)
    late.welcome(2, 1)
    assert said(late.command(configure(version(1)))) == [messages.Ready(Version(1, 1), version(1).digest)]


def test_memory_is_made_anew_only_after_its_version_is_on_disk(late: SlaveBench) -> None:
    one_round(late, 1)
    assert not runs(late.command(configure(version(1), slots=2)), messages.Configure)
    (load,) = runs(saved(late, 1, 1), messages.Configure)
    assert load.source == version(1)
    late.done(version(1))
    assert durable(late) == 1


def test_a_master_that_comes_back_with_sync_hears_ready_once_the_version_is_on_disk(late: SlaveBench) -> None:
    """Found by reading: to a master with "sync" Ready means durable, and this version stood in memory alone."""
    one_round(late, 1)
    late.welcome(2, 1, messages.Settings(durability="sync"))
    assert not said(late.command(configure(version(1))))
    assert said(saved(late, 1, 1)) == [messages.Ready(Version(1, 1), version(1).digest)]
    assert durable(late) == 1


def test_a_save_of_a_history_that_was_given_up_says_nothing_of_the_new_one(late: SlaveBench) -> None:
    one_round(late, 1)
    late.command(configure(BASE))
    assert durable(late) is None
    assert not only(saved(late, 1, 1), effects.SaveVersion)
    assert durable(late) is None
    late.done(BASE)
    assert durable(late) == 0


@given(st.lists(st.sampled_from(["round", "saved", "failed", "again"]), max_size=40))
def test_whatever_happens_durable_is_on_disk_and_never_ahead_and_one_save_runs(script: list[str]) -> None:
    bench = SlaveBench(settings=ASYNC).at_v0()
    v, running, waiting = 0, None, False
    for what in script:
        out: list[Effect] = []
        if what == "round":
            v += 1
            out = one_round(bench, v)
        elif what == "saved" and running is not None:
            done, running = running, None
            out = saved(bench, done.number, done.info.version.v)
        elif what == "failed" and running is not None:
            running, waiting = None, True
            out = bench.give(effects.SaveFailed(0, FULL_NOW))
            assert only(out, effects.SaveLater) == [effects.SaveLater(1.5)]
            assert only(out, effects.Log)
        elif what == "again" and waiting:
            waiting = False
            out = bench.give(effects.SaveAgain())
        for save in only(out, effects.SaveVersion):
            assert running is None
            assert not waiting
            assert save.info == version(v)
            running = save
        on_disk = max(info.version.v for info in bench.disk)
        assert durable(bench) == on_disk
        assert running is not None or waiting or on_disk == v
