"""A slave in its master's recovery: going back, beginning empty, handing out records, and what breaks meanwhile."""

from __future__ import annotations

from dataclasses import replace

from support.slave_bench import (
    BASE,
    FULL,
    FULL_NOW,
    NEXT,
    R2,
    R3,
    SHADOW,
    V0,
    V1,
    V2,
    A,
    B,
    SlaveBench,
    commit,
    configure,
    measure,
    only,
    prepare,
    runs,
    said,
    snapshot,
)
from support.slave_wire import open_staging

from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, RoundId, Version
from dips.core.messages import (
    CommitRecord,
    Configure,
    ConfigureRefused,
    Prepare,
    Ready,
    Refusal,
    RoundRefused,
    SendCommitRecord,
)
from dips.slave.state import effects, events
from dips.slave.state.shard import ShardPhase

BACK = snapshot(Version(4, 0), RoundId(4, 1), digest=BASE.digest)


def go_back() -> Configure:
    return replace(configure(BACK), origin=V0, origin_round=BASE.round)


def recovering(*snapshots: object) -> SlaveBench:
    bench = SlaveBench(snapshots)  # type: ignore[arg-type]
    bench.attach()
    return bench


def test_the_origin_is_loaded_when_the_version_itself_is_not_there() -> None:
    bench = recovering(NEXT, BASE)
    (load,) = runs(bench.command(go_back()), Configure)
    assert (load.source, load.command) == (BASE, go_back())
    bench.disk = (BACK,)
    out = bench.loaded(BACK)
    assert said(out) == [Ready(BACK.version, BACK.digest)]
    rolled_back, configured = only(out, effects.Record)
    assert (rolled_back.kind, rolled_back.fields["origin"], rolled_back.fields["version"]) == (
        "rolled_back",
        "1:0",
        "4:0",
    )
    assert rolled_back.fields["digest"] == BASE.digest.hex()
    assert (configured.kind, configured.fields["round"]) == ("configured", "r4.1")


def test_once_it_is_there_the_same_command_is_ready_at_once() -> None:
    bench = recovering(BASE)
    bench.command(go_back())
    bench.loaded(BACK)
    out = bench.command(go_back())
    assert said(out) == [Ready(BACK.version, BACK.digest)]
    assert not runs(out, Configure)


def test_an_origin_with_other_bytes_or_another_round_is_refused() -> None:
    for here in (replace(BASE, digest=b"other"), replace(BASE, round=R3)):
        (refused,) = said(recovering(here).command(go_back()))
        assert isinstance(refused, ConfigureRefused)
        assert refused.refusal.code is RefusalCode.VERSION_GONE


def test_going_back_ends_an_open_round_and_the_version_in_memory(prepared_bench: SlaveBench) -> None:
    (load,) = runs(prepared_bench.command(go_back()), Configure)
    assert load.source == BASE
    assert prepared_bench.state.shard.shadow is None
    prepared_bench.loaded(BACK)
    (refused,) = said(prepared_bench.command(commit()))
    assert isinstance(refused, RoundRefused)


def test_a_version_in_memory_is_given_up_for_empty(bench: SlaveBench) -> None:
    (load,) = runs(bench.command(configure(empty=True)), Configure)
    assert load.source is None
    assert said(bench.loaded()) == [Ready(None)]
    assert said(bench.command(configure(empty=True))) == [Ready(None)]


def test_donated_parameters_never_stand_on_a_timeline_that_is_on_disk() -> None:
    bench = recovering(NEXT)
    bench.command(configure(empty=True))
    bench.loaded()
    bench.stage(A, 0)
    for to in (V0, V1, V2):
        (refused,) = said(bench.command(prepare(R2, to, None)))
        assert isinstance(refused, RoundRefused)
        assert refused.refusal.code is RefusalCode.SEED_EXISTS


def test_a_round_that_comes_again_with_another_content_is_computed_again(prepared_bench: SlaveBench) -> None:
    """A master without its journal may use a round's number twice: the first time's shadow must not pass for it."""
    other = prepare(scale=0.25)
    out = prepared_bench.command(other)
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    (run,) = runs(out, Prepare)
    assert run.command == other


# ---- records ----


def test_a_record_is_read_for_the_incarnation_that_asked_also_before_configure_and_during_a_job() -> None:
    bench = recovering(BASE)
    asked = SendCommitRecord(V0, BASE.round)
    assert bench.command(asked) == [effects.ReadRecord(bench.incarnation, asked)]
    answer = CommitRecord(V0, BASE.round, b"{}")
    assert said(bench.give(events.RecordRead(bench.incarnation, answer))) == [answer]
    bench.command(configure(BASE))
    assert bench.command(asked) == [effects.ReadRecord(bench.incarnation, asked)]


def test_a_record_for_an_earlier_incarnation_is_not_sent() -> None:
    bench = recovering(BASE)
    answer = CommitRecord(V0, BASE.round, refusal=Refusal(RefusalCode.VERSION_GONE, "gone"))
    assert said(bench.give(events.RecordRead(Incarnation(1, 7), answer))) == []
    bench.give(events.Unlinked("reset"))
    assert said(bench.give(events.RecordRead(bench.incarnation, answer))) == []


# ---- what breaks ----


def test_a_snapshot_that_broke_since_hello_is_told_and_the_next_hello_lacks_it() -> None:
    bench = recovering(NEXT, BASE)
    bench.command(configure(NEXT))
    out = bench.give(events.Failed(bench.job(), FULL, (BASE,)))
    assert said(out) == [ConfigureRefused(FULL)]
    (closed,) = only(out, effects.CloseLink)
    assert "version 1:1 broke" in closed.sentence
    assert bench.phase is ShardPhase.EMPTY
    bench.give(events.Unlinked("closed"))
    (hello,) = said(bench.link())
    assert hello.snapshots == (BASE,)  # type: ignore[union-attr]


def test_a_load_that_failed_for_another_reason_keeps_the_stream() -> None:
    bench = recovering(BASE)
    bench.command(configure(BASE))
    assert not only(bench.give(events.Failed(bench.job(), FULL, (BASE,))), effects.CloseLink)


def test_work_of_an_earlier_incarnation_stays_mute_when_it_is_tried_again() -> None:
    """Found by reading: the second try had another number, and its end was told to the master that never asked."""
    bench = recovering(BASE)
    bench.command(configure(BASE))
    bench.welcome(2, 1)
    for _ in range(2):
        out = bench.failed(FULL_NOW)
        assert runs(out, Configure), "it is tried again"
        assert not said(out)
    assert not said(bench.loaded(BASE))
    assert said(bench.command(configure(BASE))) == [Ready(V0, BASE.digest)]


def test_a_refused_round_still_drops_the_shadow_of_the_one_before(prepared_bench: SlaveBench) -> None:
    """Found by reading: the refusal was sent and the effect was lost, so that the next round met a second shadow."""
    for body in (measure(R3, V2), prepare(RoundId(1, 9), from_version=V2, to=Version(1, 3))):
        bench = SlaveBench()
        bench.ready(BASE)
        bench.stage(A, 0)
        bench.prepare()
        bench.prepared(SHADOW)
        out = bench.command(body)
        assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
        assert isinstance(said(out)[0], RoundRefused)
    assert prepared_bench.phase is ShardPhase.PREPARED


def test_commands_behind_a_question_keep_their_order() -> None:
    bench = recovering(BASE)
    bench.command(configure(BASE))
    assert bench.command(open_staging(B, 1)) == []
    assert bench.command(SendCommitRecord(V0, BASE.round)) == []
    out = bench.loaded(BASE)
    opened, asked = only(out, effects.OpenSlot), only(out, effects.ReadRecord)
    assert out.index(opened[0]) < out.index(asked[0])
